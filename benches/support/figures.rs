//! Figures of contenders, computed from the samples of all rounds.

use hdrhistogram::Histogram;

use super::rounds::{Outcome, latencies, median};

/// Figures of one contender over all rounds.
pub struct Figures {
    pub name: String,
    pub per_second: f64,
    pub p50_ms: f64,
    pub p99_ms: f64,
    /// The lowest, median and highest ratio to the baseline of the same round.
    pub ratio: [f64; 3],
    pub refused: u64,
    /// The CPU time per operation of the load, the service and the servers, or `None` if it is
    /// unknown.
    pub cpu_us: Option<[f64; 3]>,
}

/// Returns the figures of each contender, with the ratio to `baseline` in each round.
pub fn of_all(baseline: &str, outcomes: &[Outcome]) -> Vec<Figures> {
    let base = outcomes.iter().find(|outcome| outcome.name == baseline);
    let base = base.expect("the baseline is one of them");
    let figures = |outcome: &Outcome| {
        let rounds = outcome.samples.iter().zip(&base.samples);
        let mut ratios: Vec<f64> = rounds
            .map(|(sample, base)| sample.per_second() / base.per_second())
            .collect();
        ratios.sort_by(f64::total_cmp);
        let all = all_latencies(outcome);
        let per_round = outcome.samples.iter().map(|sample| sample.per_second());
        Figures {
            name: outcome.name.clone(),
            per_second: median(per_round.collect()),
            p50_ms: quantile_ms(&all, 0.5),
            p99_ms: quantile_ms(&all, 0.99),
            ratio: [ratios[0], median(ratios.clone()), ratios[ratios.len() - 1]],
            refused: outcome.samples.iter().map(|sample| sample.refused).sum(),
            cpu_us: cpu_us(outcome),
        }
    };
    outcomes.iter().map(figures).collect()
}

fn all_latencies(outcome: &Outcome) -> Histogram<u64> {
    let mut all = latencies();
    for sample in &outcome.samples {
        all.add(&sample.latencies).expect("the same bounds");
    }
    all
}

/// Returns the CPU time per operation, in microseconds.
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

fn quantile_ms(latencies: &Histogram<u64>, quantile: f64) -> f64 {
    latencies.value_at_quantile(quantile) as f64 / 1e6
}

/// Formats a ratio with three significant digits.
pub fn short(ratio: f64) -> String {
    let decimals = match ratio {
        ..0.1 => 3,
        0.1..10.0 => 2,
        _ => 1,
    };
    format!("{ratio:.decimals$}")
}
