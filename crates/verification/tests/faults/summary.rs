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
    pub fenced: Verdict,
    pub unfenced: Verdict,
    /// The workloads that did not write again after the last fault.
    pub stuck: Vec<&'static str>,
    /// The number of failovers of the database that may have lost writes.
    pub failovers: usize,
}

impl Phase {
    fn is_good(&self) -> bool {
        self.fenced.is_good() && self.fenced.lost == 0 && self.stuck.is_empty()
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            store,
            seed,
            fenced,
            unfenced,
            ..
        } = self;
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

/// A figure: its name, and its value in a verdict.
type Figure = (&'static str, fn(&Verdict) -> usize);

/// The minimum length of a run that must lose updates without the fence, and must contain at least
/// one instance of everything that the checker checks.
const LONG: Duration = Duration::from_secs(60);

/// The figures that must not be zero. If one is zero, a checked operation or event did not occur.
const NEEDED: [Figure; 6] = [
    ("writes acknowledged", |verdict| verdict.acknowledged),
    ("writes without an answer", |verdict| verdict.unknown),
    ("refusals explained by a known operation alone", |verdict| {
        verdict.founded
    }),
    ("leases granted", |verdict| verdict.grants),
    ("reads with a token", |verdict| verdict.reads),
    ("windows searched for an order of effects", |verdict| {
        verdict.windows
    }),
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
            if self.sum(|phase| phase.unfenced.lost) == 0 {
                failures.push(nothing("nothing was lost without the fence"));
            }
            if self.sum(|phase| phase.faults.values().sum()) == 0 {
                failures.push(nothing("no fault happened"));
            }
            for (name, of) in NEEDED {
                if self.sum(|phase| of(&phase.fenced)) == 0 {
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

    fn sum(&self, of: impl Fn(&Phase) -> usize) -> usize {
        self.phases.iter().map(of).sum()
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Options { length, seed, .. } = &self.options;
        writeln!(f, "\n{length:?} under faults, seed {seed}")?;
        let mut violations = BTreeMap::<Kinds, usize>::new();
        for (kind, count) in self
            .phases
            .iter()
            .flat_map(|phase| &phase.unfenced.violations)
        {
            *violations.entry(*kind).or_default() += count;
        }
        writeln!(f, "\n| | with the fence | without |\n|---|---|---|")?;
        let figures: [Figure; 12] = [
            ("writes acknowledged", |verdict| verdict.acknowledged),
            ("writes without an answer", |verdict| verdict.unknown),
            ("writes refused as stale", |verdict| verdict.refused),
            (
                "refusals explained only by a failover, a lost answer or a kept position",
                |verdict| verdict.excused,
            ),
            ("writes rolled back", |verdict| verdict.undone),
            ("leases granted", |verdict| verdict.grants),
            ("reads with a token", |verdict| verdict.reads),
            ("reads superseded while they ran", |verdict| {
                verdict.overtaken
            }),
            (
                "reads of data that an asynchronous failover may have lost",
                |verdict| verdict.unchecked,
            ),
            ("writes that an asynchronous failover lost", |verdict| {
                verdict.failed_over
            }),
            ("windows searched for an order of effects", |verdict| {
                verdict.windows
            }),
            ("**acknowledged writes lost**", |verdict| verdict.lost),
        ];
        for (name, of) in figures {
            let (fenced, unfenced) = (
                self.sum(|phase| of(&phase.fenced)),
                self.sum(|phase| of(&phase.unfenced)),
            );
            writeln!(f, "| {name} | {fenced} | {unfenced} |")?;
        }
        writeln!(f, "\n| fault | times |\n|---|---|")?;
        for (fault, count) in self.faults() {
            writeln!(f, "| {fault:?} | {count} |")?;
        }
        let failovers = self.sum(|phase| phase.failovers);
        writeln!(
            f,
            "\nfailovers that may lose writes: {failovers}; violations without the fence: {violations:?}"
        )?;
        let [fenced, written] = [
            self.sum(|phase| phase.fenced.lost),
            self.sum(|phase| phase.fenced.acknowledged),
        ];
        let [unfenced, others] = [
            self.sum(|phase| phase.unfenced.lost),
            self.sum(|phase| phase.unfenced.acknowledged),
        ];
        write!(
            f,
            "fence {fenced} of {written}, without {unfenced} of {others}"
        )
    }
}
