//! The figures of a run.

use std::{collections::BTreeMap, fmt, time::Duration};

use crate::{
    checker::{Kinds, Verdict},
    faults::Counts,
    run::Options,
};

/// The results of a phase with one lease store.
pub struct Phase {
    pub store: &'static str,
    pub seed: u64,
    pub faults: Counts,
    /// The verdicts on the writes with the fence, and on those without it.
    pub verdicts: [Verdict; 2],
    /// The workloads that did not write again after the last fault.
    pub stuck: Vec<&'static str>,
    /// The number of failovers of the database that may have lost writes.
    pub failovers: usize,
}

impl Phase {
    fn is_good(&self) -> bool {
        let fenced = &self.verdicts[0];
        fenced.is_good() && fenced.lost == 0 && self.stuck.is_empty()
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self { store, seed, .. }, [fenced, unfenced]) = (self, &self.verdicts);
        let faults: usize = self.faults.values().sum();
        write!(
            f,
            "{store} (seed {seed}): {faults} faults; fence {} of {}, without {} of {}",
            fenced.lost, fenced.acknowledged, unfenced.lost, unfenced.acknowledged
        )?;
        if !self.stuck.is_empty() {
            write!(f, "\n  stuck: {:?}", self.stuck)?;
        }
        for example in &fenced.examples {
            write!(f, "\n  {example}")?;
        }
        Ok(())
    }
}

/// The results of all phases of a run.
pub struct Summary {
    options: Options,
    phases: Vec<Phase>,
}

/// The minimum length of a run in which each planned kind of fault must happen.
const VERY_LONG: Duration = Duration::from_secs(600);

/// The minimum length of a run that must lose updates without the fence, and must contain at least
/// one instance of everything that the checker checks.
const LONG: Duration = Duration::from_secs(60);

/// A figure: its name, whether it must not be zero with the fence, and its value in a verdict. If a
/// figure that must not be zero is zero, a checked operation or event did not occur.
type Figure = (&'static str, bool, fn(&Verdict) -> usize);

/// A figure that the table does not show.
const FOUNDED: Figure = (
    "refusals explained by a known operation alone",
    true,
    |verdict| verdict.founded,
);

const FIGURES: [Figure; 12] = [
    ("writes acknowledged", true, |of| of.acknowledged),
    ("writes without an answer", true, |of| of.unknown),
    ("writes refused as stale", false, |of| of.refused),
    (
        "refusals explained only by a failover, a lost answer or a kept position",
        false,
        |of| of.excused,
    ),
    ("writes rolled back", false, |of| of.undone),
    ("leases granted", true, |of| of.grants),
    ("reads with a token", true, |of| of.reads),
    ("reads superseded while they ran", false, |of| of.overtaken),
    (
        "reads of data that an asynchronous failover may have lost",
        false,
        |of| of.unchecked,
    ),
    ("writes that an asynchronous failover lost", false, |of| {
        of.failed_over
    }),
    ("windows searched for an order of effects", true, |of| {
        of.windows
    }),
    ("**acknowledged writes lost**", false, |of| of.lost),
];

impl Summary {
    pub fn new(options: &Options) -> Self {
        Self {
            options: options.clone(),
            phases: vec![],
        }
    }

    pub fn add(&mut self, phase: Phase) {
        self.phases.push(phase);
    }

    /// Returns the reasons for which the run has failed.
    pub fn failures(&self) -> Vec<String> {
        let bad = self.phases.iter().filter(|phase| !phase.is_good());
        let mut failures: Vec<_> = bad.map(|phase| format!("{phase}")).collect();
        if self.options.length >= LONG && !self.options.calm {
            let nothing = |what: &str| format!("{what}: the run proves nothing");
            if self.sums(|verdict| verdict.lost)[1] == 0 {
                failures.push(nothing("nothing was lost without the fence"));
            }
            if self.faults().values().sum::<usize>() == 0 {
                failures.push(nothing("no fault happened"));
            }
            for (name, is_needed, of) in FIGURES.into_iter().chain([FOUNDED]) {
                if is_needed && self.sums(of)[0] == 0 {
                    failures.push(nothing(&format!("{name}: 0")));
                }
            }
            if self.options.length >= VERY_LONG {
                let missing = self.faults().into_iter().filter(|(_, count)| *count == 0);
                failures.extend(missing.map(|(fault, _)| nothing(&format!("{fault:?}: 0"))));
            }
        }
        failures
    }

    fn faults(&self) -> Counts {
        let mut faults = Counts::new();
        for (fault, count) in self.phases.iter().flat_map(|phase| &phase.faults) {
            *faults.entry(*fault).or_default() += count;
        }
        faults
    }

    /// Returns the sums of a figure with the fence and without it.
    fn sums(&self, of: fn(&Verdict) -> usize) -> [usize; 2] {
        [0, 1].map(|side| self.phases.iter().map(|one| of(&one.verdicts[side])).sum())
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Options { length, seed, .. } = &self.options;
        writeln!(f, "\n{length:?} under faults, seed {seed}")?;
        let mut violations = BTreeMap::<Kinds, usize>::new();
        let unfenced = self.phases.iter().map(|phase| &phase.verdicts[1]);
        for (kind, count) in unfenced.flat_map(|verdict| &verdict.violations) {
            *violations.entry(*kind).or_default() += count;
        }
        writeln!(f, "\n| | with the fence | without |\n|---|---|---|")?;
        for (name, _, of) in FIGURES {
            let [fenced, unfenced] = self.sums(of);
            writeln!(f, "| {name} | {fenced} | {unfenced} |")?;
        }
        writeln!(f, "\n| fault | times |\n|---|---|")?;
        for (fault, count) in self.faults() {
            writeln!(f, "| {fault:?} | {count} |")?;
        }
        let failovers: usize = self.phases.iter().map(|phase| phase.failovers).sum();
        writeln!(
            f,
            "\nfailovers that may lose writes: {failovers}; violations without the fence: {violations:?}"
        )?;
        let [fenced, unfenced] = self.sums(|verdict| verdict.lost);
        let [written, others] = self.sums(|verdict| verdict.acknowledged);
        write!(
            f,
            "fence {fenced} of {written}, without {unfenced} of {others}"
        )
    }
}
