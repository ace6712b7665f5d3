//! What is told in the end: a table, JSON and plots.

use std::{
    fmt::Write,
    fs,
    path::{Path, PathBuf},
};

use hdrhistogram::Histogram;
use serde_json::{Value, json};

use super::{
    options::Options,
    plot,
    rounds::{Outcome, latencies, median},
};

/// All that one bench has found out.
pub struct Report {
    name: &'static str,
    machine: Value,
    options: Value,
    parts: Vec<Value>,
}

/// A line of a table: the sum of all rounds of one contender.
pub struct Line {
    pub name: String,
    pub per_second: f64,
    pub p50_ms: f64,
    pub p99_ms: f64,
    /// To the baseline of the same round: the lowest, the median and the highest.
    pub ratio: [f64; 3],
    pub refused: u64,
    /// Of the load, of the service and of the servers, for each operation, where that is known.
    pub cpu_us: Option<[f64; 3]>,
}

impl Report {
    pub fn new(name: &'static str, options: &Options, machine: Value) -> Self {
        println!("{name}: {machine}");
        println!("{options:?}");
        Self {
            name,
            machine,
            options: json!(format!("{options:?}")),
            parts: vec![],
        }
    }

    /// Tells of contenders side by side. The ratios are to `baseline`, round by round.
    pub fn contenders(&mut self, title: &str, baseline: &str, outcomes: &[Outcome]) {
        let lines = lines(baseline, outcomes);
        println!("{}", table(title, baseline, &lines));
        let file = self.folder().join(format!("{}.svg", file_name(title)));
        plot::bars(&file, title, &lines).expect("the plot was written");
        let rows: Vec<Value> = lines.iter().zip(outcomes).map(row).collect();
        self.parts.push(json!({
            "title": title,
            "baseline": baseline,
            "contenders": rows,
        }));
        self.save();
    }

    /// Tells of something else: a table whose first line says what its columns are.
    pub fn table(&mut self, title: &str, rows: &[Vec<String>]) {
        println!("{}", text_table(title, rows));
        self.parts.push(json!({ "title": title, "table": rows }));
        self.save();
    }

    /// Where the files go: `target/tower-fence-bench/NAME`.
    pub fn folder(&self) -> PathBuf {
        let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent();
        let target = target.expect("it is in the target folder");
        let folder = target.join("tower-fence-bench").join(self.name);
        fs::create_dir_all(&folder).expect("a folder for the results");
        folder
    }

    /// After each part, so that what was interrupted leaves what it had.
    fn save(&self) {
        let whole = json!({
            "bench": self.name,
            "machine": self.machine,
            "options": self.options,
            "parts": self.parts,
        });
        let text = serde_json::to_string_pretty(&whole).expect("it is JSON");
        fs::write(self.folder().join("results.json"), text).expect("the results were written");
    }
}

fn lines(baseline: &str, outcomes: &[Outcome]) -> Vec<Line> {
    let base = outcomes.iter().find(|outcome| outcome.name == baseline);
    let base = base.expect("the baseline is one of them");
    let line = |outcome: &Outcome| {
        let rounds = outcome.samples.iter().zip(&base.samples);
        let mut ratios: Vec<f64> = rounds
            .map(|(sample, base)| sample.per_second() / base.per_second())
            .collect();
        ratios.sort_by(f64::total_cmp);
        let all = all_latencies(outcome);
        let per_round = outcome.samples.iter().map(|sample| sample.per_second());
        Line {
            name: outcome.name.clone(),
            per_second: median(per_round.collect()),
            p50_ms: quantile_ms(&all, 0.5),
            p99_ms: quantile_ms(&all, 0.99),
            ratio: [ratios[0], median(ratios.clone()), ratios[ratios.len() - 1]],
            refused: outcome.samples.iter().map(|sample| sample.refused).sum(),
            cpu_us: cpu_us(outcome),
        }
    };
    outcomes.iter().map(line).collect()
}

fn all_latencies(outcome: &Outcome) -> Histogram<u64> {
    let mut all = latencies();
    for sample in &outcome.samples {
        all.add(&sample.latencies).expect("the same bounds");
    }
    all
}

/// The processor's time for each operation, in microseconds.
fn cpu_us(outcome: &Outcome) -> Option<[f64; 3]> {
    let (mut sums, mut operations) = ([0.0; 3], 0);
    for sample in &outcome.samples {
        let cpu = sample.cpu?;
        for (sum, used) in sums.iter_mut().zip([cpu.load, cpu.service, cpu.servers]) {
            *sum += used.as_secs_f64() * 1e6;
        }
        operations += sample.latencies.len() + sample.refused;
    }
    Some(sums.map(|sum| sum / operations as f64))
}

pub fn quantile_ms(latencies: &Histogram<u64>, quantile: f64) -> f64 {
    latencies.value_at_quantile(quantile) as f64 / 1e6
}

fn table(title: &str, baseline: &str, lines: &[Line]) -> String {
    let mut rows = vec![
        [
            "contender",
            "per second",
            "p50 ms",
            "p99 ms",
            baseline,
            "rounds",
            "refused",
            "CPU µs",
        ]
        .map(str::to_owned)
        .to_vec(),
    ];
    for line in lines {
        let [lowest, ratio, highest] = line.ratio;
        rows.push(vec![
            line.name.clone(),
            format!("{:.0}", line.per_second),
            format!("{:.2}", line.p50_ms),
            format!("{:.2}", line.p99_ms),
            format!("× {}", short(ratio)),
            format!("{}–{}", short(lowest), short(highest)),
            line.refused.to_string(),
            line.cpu_us.map_or_else(String::new, |shares| {
                shares.map(|share| format!("{share:.0}")).join(" + ")
            }),
        ]);
    }
    text_table(title, &rows)
}

/// Three digits, as long as there is anything to see.
pub fn short(ratio: f64) -> String {
    let decimals = match ratio {
        ..0.1 => 3,
        0.1..10.0 => 2,
        _ => 1,
    };
    format!("{ratio:.decimals$}")
}

fn row((line, outcome): (&Line, &Outcome)) -> Value {
    let per_round: Vec<f64> = outcome.samples.iter().map(|s| s.per_second()).collect();
    json!({
        "name": line.name,
        "per_second": line.per_second,
        "p50_ms": line.p50_ms,
        "p99_ms": line.p99_ms,
        "ratio": line.ratio[1],
        "ratio_lowest": line.ratio[0],
        "ratio_highest": line.ratio[2],
        "refused": line.refused,
        "cpu_us": line.cpu_us,
        "per_second_by_round": per_round,
    })
}

/// The first column to the left, all others to the right.
fn text_table(title: &str, rows: &[Vec<String>]) -> String {
    let columns = rows[0].len();
    let width = |column: usize| {
        let lengths = rows.iter().map(|row| row[column].chars().count());
        lengths.max().unwrap_or_default()
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = format!("\n== {title}\n");
    for row in rows {
        let _ = write!(text, "{:<1$}", row[0], widths[0]);
        for (cell, width) in row.iter().zip(&widths).skip(1) {
            let _ = write!(text, "  {cell:>width$}");
        }
        text.push('\n');
    }
    text
}

pub fn file_name(title: &str) -> String {
    let words = title.split(|c: char| !c.is_ascii_alphanumeric());
    let words: Vec<&str> = words.filter(|word| !word.is_empty()).collect();
    words.join("-").to_lowercase()
}
