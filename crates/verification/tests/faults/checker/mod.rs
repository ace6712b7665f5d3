//! The checker, which judges a history. The tokens give the order of the operations, so the checker
//! need not search for an order. `src/proof.md` lists the properties that it checks: those of
//! [`writes`], [`order`], [`folds`] and [`refusals`].
//!
//! In addition, the checker searches short windows of the history for an order of effects. This
//! search does not use the order of the tokens ([`windows`]).

pub mod bad_failovers;
pub mod bad_histories;
mod folds;
pub mod linearizable;
mod order;
pub mod refusals;
mod samples;
mod search;
pub mod windows;
mod writes;

use std::{
    collections::{HashMap, HashSet},
    ops::Range,
};

use self::folds::Folds;
use crate::history::{Answer, History, Kind, Line, Operation, State};

/// A kind of violation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kinds {
    /// An acknowledged write is missing.
    Lost,
    /// A write is in the log more than once.
    Doubled,
    /// A refused write is in the log.
    Refused,
    /// A write in the log was never requested, or was requested with another token.
    Foreign,
    /// A write to several resources took effect on only some of the resources.
    Torn,
    /// A failover lost a write, and kept a newer one.
    LostAlone,
    /// An operation was admitted or granted after a newer one had been answered.
    Order,
    /// Two grants have the same token, or two writes the same single-use token.
    Repeated,
    /// The log is not in the order of the tokens, or not in the order of time.
    Disorder,
    /// The state is not the fold of the log: an update was overwritten.
    Overwritten,
    /// A read missed an earlier write.
    Missed,
    /// A read returned a later write.
    Future,
    /// A read returned a state that never existed.
    Invented,
    /// The sum of the balances is wrong.
    Sum,
    /// A write or a read was refused, although no newer operation was sent.
    Unfounded,
    /// No order of effects explains the answers within a window.
    Unordered,
}

/// The verdict on a history.
#[derive(Debug, Default)]
pub struct Verdict {
    /// The number of violations of each kind.
    pub violations: HashMap<Kinds, usize>,
    /// Descriptions of the first few violations of each kind.
    pub examples: Vec<String>,
    pub acknowledged: usize,
    pub unknown: usize,
    pub refused: usize,
    pub undone: usize,
    /// Refused writes and reads that only a known newer operation explains.
    pub founded: usize,
    /// Refused writes and reads that only a request for a lease without a known grant, or a
    /// failover, explains.
    pub excused: usize,
    pub reads: usize,
    pub grants: usize,
    /// A lower bound of the number of acknowledged writes that are missing or were overwritten.
    pub lost: usize,
    /// Acknowledged writes that a failover was allowed to lose.
    pub failed_over: usize,
    /// Reads that returned a write of a newer holder, which was admitted during the read.
    pub overtaken: usize,
    /// Reads that are not judged, because a failover may have lost the data that they returned.
    pub unchecked: usize,
    /// Windows that were searched for an order of effects.
    pub windows: usize,
}

impl Verdict {
    /// Judges a history.
    pub fn of(history: &History) -> Self {
        let mut verdict = Self::default();
        verdict.count(history);
        let resources = by_resource(history);
        writes::check(history, &resources, &mut verdict);
        order::check(history, &resources, &mut verdict);
        folds::check(history, &resources, &mut verdict);
        refusals::check(history, &resources, &mut verdict);
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
            // A write to several resources counts once.
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

/// The operations of one resource.
struct Resource<'a> {
    /// The operations, in the order in which they were sent.
    operations: Vec<&'a Operation>,
    /// The reads with an answer, each with the state that it returned.
    reads: Vec<(&'a Operation, State)>,
    folds: Folds<'a>,
}

/// Sorts a history by resource.
fn by_resource<'a>(history: &'a History) -> Vec<Resource<'a>> {
    let mut operations = vec![vec![]; history.states.len()];
    let mut by_entry = HashMap::with_capacity(history.operations.len());
    for operation in &history.operations {
        operations[operation.resource].push(operation);
        if let Some((entry, _)) = operation.written() {
            by_entry.insert((operation.resource, entry), operation);
        }
    }
    let resources = operations.into_iter().enumerate();
    let resources = resources.map(|(resource, mut operations)| {
        operations.sort_by_key(|operation| operation.invoked);
        let log = &history.log[lines(&history.log, resource)];
        let write = |line: &Line| by_entry.get(&(resource, line.entry)).copied();
        let read = |one: &&'a Operation| match (one.kind, one.answer) {
            (Kind::Read(seen), Answer::Done) => Some((*one, seen)),
            _ => None,
        };
        Resource {
            reads: operations.iter().filter_map(read).collect(),
            folds: Folds::of(log, log.iter().map(write).collect()),
            operations,
        }
    });
    resources.collect()
}

/// Returns the range of the lines of a resource.
fn lines(log: &[Line], resource: usize) -> Range<usize> {
    let first = log.partition_point(|line| line.resource < resource);
    let last = log.partition_point(|line| line.resource <= resource);
    first..last
}
