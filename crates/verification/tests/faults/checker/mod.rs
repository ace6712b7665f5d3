//! Judges a history. No order is searched for, since the tokens give it:
//!
//! 1. Every acknowledged write is there exactly once, an unknown one at most once, a refused one not at all
//!    ([`writes`]).
//! 2. What was answered before another was asked for has the lower token; the same one only where it may be used
//!    again ([`order`]).
//! 3. The log of a resource is in the order of its tokens, and its state is the fold of its log; a read with a token
//!    is the fold of the writes at or below it, or, where it was outranked while it was made, of some more ([`folds`]).
//!    Those are counted.
//! 4. A write or a read is refused only where something newer was asked for ([`refusals`]).
//!
//! Beside that, for short windows of a run an order of effects is searched for, as for any object ([`windows`]).

pub mod bad_failovers;
pub mod bad_histories;
mod folds;
pub mod linearizable;
mod order;
mod refusals;
mod samples;
mod search;
pub mod windows;
mod writes;

use std::{
    collections::{HashMap, HashSet},
    ops::Range,
};

use crate::history::{Answer, History, Kind, Line, Operation};

/// What is wrong with a history.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kinds {
    /// An acknowledged write is not there.
    Lost,
    /// A write is there more than once.
    Doubled,
    /// A write is there that was refused.
    Refused,
    /// A write is there that nobody asked for, or not as it was asked for.
    Foreign,
    /// A write of several resources is there on some of them.
    Torn,
    /// A failover has lost a write, and kept a newer one.
    LostAlone,
    /// Something was admitted, or granted, after something newer was answered.
    Order,
    /// Two grants have one token, or two writes one that is for one.
    Repeated,
    /// The log is not in the order of the tokens, or not in the order of time.
    Disorder,
    /// The state is not the fold of the log: an update was written over.
    Overwritten,
    /// A read has missed a write that came before it.
    Missed,
    /// A read has seen a write that came after it.
    Future,
    /// A read has seen what never was.
    Invented,
    /// The balances do not have their sum.
    Sum,
    /// A write or a read was refused, and nothing outranks it.
    Unfounded,
    /// No order of effects explains what was answered within a window.
    Unordered,
}

/// What became of a history.
#[derive(Debug, Default)]
pub struct Verdict {
    /// How often each thing is wrong.
    pub violations: HashMap<Kinds, usize>,
    /// The first few of them, for whoever looks for the cause.
    pub examples: Vec<String>,
    pub acknowledged: usize,
    pub unknown: usize,
    pub refused: usize,
    pub undone: usize,
    /// Refused writes and reads that only what is known explains.
    pub founded: usize,
    /// Refused writes and reads that only a lease without an answer explains, or a failover.
    pub excused: usize,
    pub reads: usize,
    pub grants: usize,
    /// Acknowledged writes without an effect, at least so many: not there, or written over.
    pub lost: usize,
    /// Acknowledged writes that a failover was allowed to lose.
    pub failed_over: usize,
    /// Reads that were outranked while they were made, and saw something of the newer holder.
    pub overtaken: usize,
    /// Reads of what a failover has lost.
    pub unchecked: usize,
    /// Windows for which an order of effects was searched for.
    pub windows: usize,
}

impl Verdict {
    /// Judges a history.
    pub fn of(history: &History) -> Self {
        let mut verdict = Self::default();
        verdict.count(history);
        let sorted = Sorted::of(history);
        writes::check(history, &sorted, &mut verdict);
        order::check(history, &sorted, &mut verdict);
        folds::check(history, &sorted, &mut verdict);
        refusals::check(history, &sorted, &mut verdict);
        verdict
    }

    pub fn is_good(&self) -> bool {
        self.violations.is_empty()
    }

    fn violated(&mut self, kind: Kinds, what: impl FnOnce() -> String) {
        *self.violations.entry(kind).or_default() += 1;
        let shown = self
            .examples
            .iter()
            .filter(|one| one.starts_with(&format!("{kind:?}")));
        if shown.count() < 3 {
            self.examples.push(format!("{kind:?}: {}", what()));
        }
    }

    fn count(&mut self, history: &History) {
        let mut counted = HashSet::new();
        for operation in &history.operations {
            // A write of several resources is one.
            if operation.parts > 1
                && let Some((entry, _)) = operation.written()
                && !counted.insert(entry)
            {
                continue;
            }
            let count = match (operation.kind, operation.answer) {
                (Kind::Grant, Answer::Done) => &mut self.grants,
                (Kind::Read(_), Answer::Done) => &mut self.reads,
                (Kind::Grant | Kind::Read(_), _) => continue,
                (_, Answer::Done) => &mut self.acknowledged,
                (_, Answer::Unknown) => &mut self.unknown,
                (_, Answer::Refused) => &mut self.refused,
                (_, Answer::Undone) => &mut self.undone,
            };
            *count += 1;
        }
    }
}

/// A history by resource.
struct Sorted<'a> {
    /// The operations of each resource, as they were invoked.
    operations: Vec<Vec<&'a Operation>>,
    /// The log of each resource, and the write of each of its lines.
    logs: Vec<(&'a [Line], Vec<Option<&'a Operation>>)>,
}

impl<'a> Sorted<'a> {
    fn of(history: &'a History) -> Self {
        let mut operations = vec![vec![]; history.states.len()];
        let mut by_entry = HashMap::with_capacity(history.operations.len());
        for operation in &history.operations {
            operations[operation.resource].push(operation);
            if let Some((entry, _)) = operation.written() {
                by_entry.insert((operation.resource, entry), operation);
            }
        }
        for operations in &mut operations {
            operations.sort_by_key(|operation| operation.invoked);
        }
        let logs = (0..history.states.len()).map(|resource| {
            let log = &history.log[lines(&history.log, resource)];
            let write = |line: &Line| by_entry.get(&(resource, line.entry)).copied();
            (log, log.iter().map(write).collect())
        });
        let logs = logs.collect();
        Self { operations, logs }
    }
}

/// Where the lines of a resource are.
fn lines(log: &[Line], resource: usize) -> Range<usize> {
    let first = log.partition_point(|line| line.resource < resource);
    let last = log.partition_point(|line| line.resource <= resource);
    first..last
}
