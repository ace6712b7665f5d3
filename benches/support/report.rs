//! The report: tables and JSON.

use std::{fmt::Write, fs, path::PathBuf};

use serde_json::{Value, json};

use super::{
    figures::{self, Figures, short},
    options::Options,
    rounds::Outcome,
};

/// The results of one bench.
pub struct Report {
    name: &'static str,
    machine: Value,
    options: Value,
    parts: Vec<Value>,
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

    /// Adds a comparison of contenders, with the ratio to `baseline` in each round.
    pub fn contenders(&mut self, title: &str, baseline: &str, outcomes: &[Outcome]) {
        let lines = figures::of_all(baseline, outcomes);
        println!("{}", table(title, baseline, &lines));
        let rows: Vec<Value> = lines.iter().zip(outcomes).map(row).collect();
        self.parts.push(json!({
            "title": title,
            "baseline": baseline,
            "contenders": rows,
        }));
        self.save();
    }

    /// Adds any other table. Its first row contains the names of the columns.
    pub fn table(&mut self, title: &str, rows: &[Vec<String>]) {
        println!("{}", text_table(title, rows));
        self.parts.push(json!({ "title": title, "table": rows }));
        self.save();
    }

    /// Prints the folder of the files. If no title contains the text of `--table`, exits with
    /// status 2.
    pub fn finish(&self) {
        if self.parts.is_empty() {
            eprintln!(
                "no table of {} has the text of --table in its title",
                self.name
            );
            std::process::exit(2);
        }
        println!("{}", self.folder().display());
    }

    /// Returns the folder of the files: `target/tower-fence-bench/NAME`.
    fn folder(&self) -> PathBuf {
        let bench = std::env::current_exe().expect("the path of this program");
        // `target/release/deps/NAME-…`
        let target = bench.ancestors().nth(3);
        let target = target.expect("it is in the target folder");
        let folder = target.join("tower-fence-bench").join(self.name);
        fs::create_dir_all(&folder).expect("a folder for the results");
        folder
    }

    /// Saves the results. This happens after each table, so that an interrupted bench leaves the
    /// results of the finished tables.
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

fn table(title: &str, baseline: &str, lines: &[Figures]) -> String {
    let mut rows = vec![
        [
            "contender",
            "CPU µs",
            "p50 ms",
            "p99 ms",
            "per second",
            baseline,
            "rounds",
            "refused",
        ]
        .map(str::to_owned)
        .to_vec(),
    ];
    for line in lines {
        let [lowest, ratio, highest] = line.ratio;
        rows.push(vec![
            line.name.clone(),
            line.cpu_us.map_or_else(String::new, |shares| {
                shares.map(|share| format!("{share:.0}")).join(" + ")
            }),
            format!("{:.2}", line.p50_ms),
            format!("{:.2}", line.p99_ms),
            format!("{:.0}", line.per_second),
            format!("× {}", short(ratio)),
            format!("{}–{}", short(lowest), short(highest)),
            line.refused.to_string(),
        ]);
    }
    text_table(title, &rows)
}

fn row((line, outcome): (&Figures, &Outcome)) -> Value {
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

/// Formats a table, with the first column aligned to the left and all others to the right.
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
