//! Comparisons of contenders. Each contender has a turn in each round. Each round begins with a
//! different contender, so that a disturbance of the machine affects all contenders.

use std::time::Duration;

use hdrhistogram::Histogram;

use super::{
    cpu::Cpu,
    options::{Options, Window},
};

/// Measurements of one turn.
pub struct Sample {
    pub measured: Duration,
    /// The latency of each operation that ended within the window, in nanoseconds.
    pub latencies: Histogram<u64>,
    /// The number of operations within the window that were refused, as expected.
    pub refused: u64,
    /// The number of all completed operations, including those before and after the window.
    ///
    /// The data must contain the effects of all these operations.
    pub done: u64,
    /// The CPU times within the window, if they are known.
    pub cpu: Option<Cpu>,
}

impl Sample {
    pub fn new(measured: Duration) -> Self {
        Self {
            measured,
            latencies: latencies(),
            refused: 0,
            done: 0,
            cpu: None,
        }
    }

    pub fn per_second(&self) -> f64 {
        self.latencies.len() as f64 / self.measured.as_secs_f64()
    }
}

pub fn latencies() -> Histogram<u64> {
    Histogram::new_with_bounds(1_000, 120_000_000_000, 3).expect("these bounds are valid")
}

pub struct Contender<'a> {
    pub name: String,
    run: Box<dyn FnMut(Window) -> Sample + 'a>,
}

impl<'a> Contender<'a> {
    pub fn new(name: impl Into<String>, run: impl FnMut(Window) -> Sample + 'a) -> Self {
        Self {
            name: name.into(),
            run: Box::new(run),
        }
    }
}

/// The results of a contender in each round.
pub struct Outcome {
    pub name: String,
    pub samples: Vec<Sample>,
}

impl Outcome {
    /// Returns the number of completed operations.
    pub fn done(&self) -> u64 {
        self.samples.iter().map(|sample| sample.done).sum()
    }
}

/// Runs all rounds of the selected contenders and of the baseline.
pub fn run(
    title: &str,
    baseline: &str,
    mut contenders: Vec<Contender<'_>>,
    options: &Options,
) -> Vec<Outcome> {
    let wanted = options.only.as_deref().unwrap_or_default();
    contenders.retain(|Contender { name, .. }| name.contains(wanted) || name == baseline);
    let mut outcomes: Vec<Outcome> = contenders
        .iter()
        .map(|contender| Outcome {
            name: contender.name.clone(),
            samples: vec![],
        })
        .collect();
    for round in 0..options.rounds {
        eprintln!("{title}: round {} of {}", round + 1, options.rounds);
        for turn in 0..contenders.len() {
            let next = (turn + round) % contenders.len();
            let sample = (contenders[next].run)(options.window);
            outcomes[next].samples.push(sample);
        }
    }
    for Outcome { name, samples } in &outcomes {
        let nothing = samples.iter().all(|sample| sample.latencies.is_empty());
        assert!(!nothing, "{name} did nothing in time");
    }
    outcomes
}

pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 {
        values[middle]
    } else {
        f64::midpoint(values[middle - 1], values[middle])
    }
}
