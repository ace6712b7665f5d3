//! A write is refused only where something newer was asked for before its answer.

use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

use super::{Kinds, Sorted, Verdict};
use crate::history::{Answer, History, Kind, Moment, Operation};

/// How late a request may arrive whose client has given up, and how late a failover may be noticed.
const LATE: Moment = Duration::from_secs(30).as_nanos() as Moment;

pub fn check(history: &History, sorted: &Sorted<'_>, verdict: &mut Verdict) {
    // One resource is enough for a write of several.
    let (mut founded, mut refused) = (HashSet::new(), HashMap::new());
    for operations in &sorted.operations {
        let of_one = OfOne::of(history, operations);
        let writes = operations
            .iter()
            .filter(|one| one.answer == Answer::Refused);
        for write in writes {
            let Some((entry, _)) = write.written() else {
                continue;
            };
            refused.insert(entry, *write);
            if of_one.outranks(write) {
                founded.insert(entry);
            }
        }
    }
    for (_, write) in refused.iter().filter(|(entry, _)| !founded.contains(entry)) {
        verdict.violated(Kinds::Unfounded, || format!("{write:?}"));
    }
}

/// What has happened to one resource.
struct OfOne<'a> {
    /// As they were invoked.
    operations: &'a [&'a Operation],
    /// The highest token among so many of them.
    highest: Vec<i64>,
    /// When the lease of a token was asked for.
    granted: HashMap<i64, Moment>,
    /// From when to when a token may have come up that nobody has heard of: leases without an answer, and failovers.
    unheard: Vec<(Moment, Moment)>,
}

impl<'a> OfOne<'a> {
    fn of(history: &History, operations: &'a [&'a Operation]) -> Self {
        let mut highest = vec![0];
        let (mut granted, mut unheard) = (HashMap::new(), vec![]);
        for operation in operations {
            let last = highest.last().copied().unwrap_or(0);
            highest.push(last.max(operation.token));
            match (operation.kind, operation.answer) {
                (Kind::Grant, Answer::Done) => {
                    granted.insert(operation.token, operation.invoked);
                }
                (Kind::Grant, _) => {
                    unheard.push((operation.invoked, operation.invoked.saturating_add(LATE)))
                }
                _ => {}
            }
        }
        let failovers = history.failovers.iter();
        unheard
            .extend(failovers.map(|failover| (failover.from, failover.until.saturating_add(LATE))));
        Self {
            operations,
            highest,
            granted,
            unheard,
        }
    }

    fn outranks(&self, refused: &Operation) -> bool {
        let before = self
            .operations
            .partition_point(|one| one.invoked < refused.answered);
        if self.highest[before] > refused.token {
            return true;
        }
        let uses_up = |one: &&&Operation| {
            one.token == refused.token
                && matches!(one.kind, Kind::Write { .. })
                && one.written() != refused.written()
        };
        if self.operations[..before].iter().any(|one| uses_up(&one)) {
            return true;
        }
        // A token that came up later is above what nobody has heard of.
        let granted = self.granted.get(&refused.token).unwrap_or(&refused.invoked);
        let mut unheard = self.unheard.iter();
        unheard.any(|(from, until)| *from < refused.answered && granted < until)
    }
}
