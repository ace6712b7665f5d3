//! Plots in SVG.

use std::{error::Error, path::Path};

use plotters::prelude::*;

use super::figures::{Figures, short};

const BAR: i32 = 26;
const NAMES: i32 = 260;
const FIGURES: i32 = 320;
const WIDTH: i32 = 1_080;

/// The maximum ratio to the baseline. A longer bar is cut off, because it would leave no space for
/// the other bars.
const CUT_OFF: f64 = 4.0;

/// Draws one bar per contender, proportional to its throughput.
pub fn bars(file: &Path, title: &str, lines: &[Figures]) -> Result<(), Box<dyn Error>> {
    let height = 60 + BAR * i32::try_from(lines.len())?;
    let area = SVGBackend::new(file, (WIDTH.unsigned_abs(), height.unsigned_abs()));
    let area = area.into_drawing_area();
    area.fill(&WHITE)?;
    let font = |size: i32| ("sans-serif", size).into_font();
    area.draw(&Text::new(title.to_owned(), (12, 14), font(20)))?;
    let shown = lines.iter().filter(|line| line.ratio[1] < CUT_OFF);
    let longest = shown.map(|line| line.per_second).fold(1.0, f64::max);
    let room = f64::from(WIDTH - NAMES - FIGURES);
    for (place, line) in (0..).zip(lines) {
        let top = 46 + place * BAR;
        let cut_off = line.per_second > longest;
        let length = (room * (line.per_second / longest).min(1.0)) as i32;
        area.draw(&Text::new(line.name.clone(), (12, top + 3), font(15)))?;
        let bar = [(NAMES, top), (NAMES + length.max(1), top + BAR - 8)];
        let blue = RGBColor(60, 110, 180).mix(if cut_off { 0.4 } else { 1.0 });
        area.draw(&Rectangle::new(bar, blue.filled()))?;
        let mark = if cut_off { "… " } else { "" };
        let figures = format!(
            "{mark}{:.0}/s, × {}, p50 {:.2} ms, p99 {:.2} ms",
            line.per_second,
            short(line.ratio[1]),
            line.p50_ms,
            line.p99_ms
        );
        let end = (NAMES + length + 8, top + 3);
        area.draw(&Text::new(figures, end, font(14)))?;
    }
    area.present()?;
    Ok(())
}

/// Draws one line for each series of points. The horizontal axis is a time or a size.
pub fn curves(
    file: &Path,
    title: &str,
    [x_name, y_name]: [&str; 2],
    series: &[(String, Vec<(f64, f64)>)],
) -> Result<(), Box<dyn Error>> {
    let area = SVGBackend::new(file, (900, 480)).into_drawing_area();
    area.fill(&WHITE)?;
    let points = || series.iter().flat_map(|(_, points)| points);
    let most = |of: fn(&(f64, f64)) -> f64| points().map(of).fold(1e-9, f64::max);
    let (right, top) = (most(|point| point.0), most(|point| point.1) * 1.1);
    let mut chart = ChartBuilder::on(&area)
        .caption(title, ("sans-serif", 18))
        .margin(14)
        .x_label_area_size(40)
        .y_label_area_size(70)
        .build_cartesian_2d(0.0..right, 0.0..top)?;
    chart
        .configure_mesh()
        .x_desc(x_name)
        .y_desc(y_name)
        .draw()?;
    for (n, (name, points)) in series.iter().enumerate() {
        let color = Palette99::pick(n).to_rgba();
        chart
            .draw_series(LineSeries::new(
                points.iter().copied(),
                color.stroke_width(2),
            ))?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], color));
    }
    chart
        .configure_series_labels()
        .border_style(BLACK)
        .background_style(WHITE.mix(0.8))
        .draw()?;
    area.present()?;
    Ok(())
}
