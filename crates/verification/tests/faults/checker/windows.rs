//! A search for an order of effects in short windows of a history. Windows with concurrent
//! operations come first.
//!
//! A window contains the operations between two writes of a log. In any order of all effects, these
//! operations are contiguous, and start from the state that results from the log. The search uses
//! only the operations in the window, and not the order of the tokens. A window omits reads beyond
//! a maximum number, and earlier reads with a higher token. The search can therefore miss a
//! violation, but it cannot report a false one.

use rand::{RngExt, SeedableRng, rngs::StdRng, seq::SliceRandom};

use super::{
    Kinds, Resource, Verdict, by_resource,
    folds::Folds,
    samples::{good, settle},
    search::Window,
};
use crate::history::{Answer, History, Kind, Operation};

/// The maximum number of windows that are searched.
const WINDOWS: usize = 1_000;
/// The number of writes in a window.
const WRITES: usize = 6;
/// The maximum number of reads in a window.
const READS: usize = 12;

impl Verdict {
    /// Searches windows of the history of this verdict.
    pub fn search(&mut self, history: &History, seed: u64) {
        let resources = by_resource(history);
        let resources = resources.iter().map(|one| Windows::of(history, one));
        let resources: Vec<_> = resources.collect();
        let mut random = StdRng::seed_from_u64(seed);
        let starts = resources.iter().flat_map(|resource| {
            let starts = (0..resource.folds.log.len()).step_by(WRITES / 2);
            starts.map(move |first| (resource, first))
        });
        let mut starts: Vec<_> = starts.collect();
        starts.shuffle(&mut random);
        // Windows with concurrent operations come first, because without them only one order is
        // possible.
        for overlapping in [true, false] {
            for (resource, first) in &starts {
                if self.windows == WINDOWS {
                    return;
                }
                let window = resource.window(*first, &mut random);
                let Some(window) = window.filter(|one| overlap(&one.operations) == overlapping)
                else {
                    continue;
                };
                self.windows += 1;
                if !window.has_an_order() {
                    self.violated(Kinds::Unordered, || format!("{:?}", window.operations));
                }
            }
        }
    }
}

/// The log and the reads of one resource.
struct Windows<'a> {
    folds: &'a Folds<'a>,
    /// The reads, each with the count of the state that it returned, ordered by this count.
    reads: Vec<(usize, &'a Operation)>,
}

impl<'a> Windows<'a> {
    fn of(history: &History, resource: &'a Resource<'_>) -> Self {
        let folds = &resource.folds;
        let mut reads = vec![];
        for (read, seen) in &resource.reads {
            let is_lost = || history.failovers.iter().any(|one| one.concerns(read));
            let count = usize::try_from(seen.count).unwrap_or(usize::MAX);
            // Excludes reads that returned a newer write, because the specification checks the
            // token and reads in one step, but the fence does so in two steps.
            if count <= folds.log.len() && !folds.overtake(read, count) && !is_lost() {
                reads.push((count, *read));
            }
        }
        reads.sort_by_key(|(count, _)| *count);
        Self { folds, reads }
    }

    /// Returns the window that starts at this line of the log, or `None` if the operation of one of
    /// its writes is unknown.
    fn window(&self, first: usize, random: &mut StdRng) -> Option<Window<'a>> {
        let Folds { log, writes, .. } = self.folds;
        let last = (first + WRITES).min(log.len());
        let mut operations: Vec<_> = writes[first..last].iter().copied().collect::<Option<_>>()?;
        let from = self.reads.partition_point(|(count, _)| *count < first);
        let to = self.reads.partition_point(|(count, _)| *count <= last);
        let mut reads: Vec<_> = self.reads[from..to].iter().map(|(_, read)| *read).collect();
        while reads.len() > READS {
            reads.swap_remove(random.random_range(0..reads.len()));
        }
        operations.extend(reads);
        let highest_stale = match first.checked_sub(1) {
            None => 0,
            Some(before) => {
                let is_reusable = matches!(writes[before]?.kind, Kind::Rewrite { .. });
                log[before].token - i64::from(is_reusable)
            }
        };
        Some(Window {
            highest_stale,
            state: self.folds.states[first],
            entries: log[first..last].iter().map(|line| line.entry).collect(),
            operations,
        })
    }
}

/// Whether any two operations were concurrent.
fn overlap(operations: &[&Operation]) -> bool {
    let mut spans: Vec<_> = operations
        .iter()
        .map(|one| (one.invoked, one.done()))
        .collect();
    spans.sort_unstable();
    spans.windows(2).any(|pair| pair[1].0 <= pair[0].1)
}

/// A name, and a function that makes a history invalid in one place.
type Fault = (&'static str, fn(&mut History));

const FAULTS: [Fault; 3] = [
    ("two writes are exchanged", |history| {
        let is_pair = |n: &usize| {
            let (one, next) = (history.log[*n], history.log[*n + 1]);
            one.resource == next.resource && one.token < next.token
        };
        let from = history.log.len() / 2;
        let place = (from..history.log.len() - 1).find(is_pair).unwrap();
        history.log.swap(place, place + 1);
        settle(history);
    }),
    ("a write has a stale token", |history| {
        let is_late = |one: &&mut Operation| {
            one.written().is_some() && one.answer == Answer::Done && one.token > 20
        };
        let write = history.operations.iter_mut().find(is_late).unwrap();
        write.token -= 10;
        let entry = write.written().unwrap().0;
        let of_it = |line: &&mut crate::history::Line| {
            line.entry == entry && line.resource == write.resource
        };
        if let Some(line) = history.log.iter_mut().find(of_it) {
            line.token -= 10;
        }
    }),
    ("reads return later writes", |history| {
        let is_read = |one: &Operation| matches!(one.kind, Kind::Read(_)) && one.resource == 5;
        let reads = history.operations.iter().filter(|one| is_read(one));
        let reads: Vec<_> = reads.map(|one| one.kind).collect();
        let later = reads[reads.len() / 2];
        let reads = history.operations.iter_mut();
        for read in reads
            .filter(|one| is_read(one) && one.kind != later)
            .take(4)
        {
            // The token is high enough that the read is not excluded.
            (read.kind, read.token) = (later, read.token + 1_000);
        }
    }),
];

pub fn a_window_that_has_no_order_is_found(seed: u64) {
    let found = |history: &History| {
        let mut verdict = Verdict::default();
        verdict.search(history, seed);
        assert!(verdict.windows > 100, "{}", verdict.windows);
        verdict.violations.contains_key(&Kinds::Unordered)
    };
    for round in 0..8 {
        let whole = good(seed.wrapping_add(round), 6, 1_500);
        assert!(!found(&whole), "a valid history");
        for (name, spoil) in FAULTS {
            let mut history = whole.clone();
            spoil(&mut history);
            assert!(found(&history), "{name}");
        }
    }
}
