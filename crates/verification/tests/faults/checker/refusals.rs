//! A write or a read is refused only where something newer was asked for before its answer.

use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

use super::{Kinds, Sorted, Verdict};
use crate::history::{Answer, History, Kind, Moment, Operation};

/// How late a request may arrive whose client has given up.
const LATE: Moment = Duration::from_secs(15).as_nanos() as Moment;

pub fn check(history: &History, sorted: &Sorted<'_>, verdict: &mut Verdict) {
    // One resource is enough for a request for several, which has one moment at which it was answered.
    let (mut founded, mut excused, mut refused) = (HashSet::new(), HashSet::new(), HashMap::new());
    for operations in &sorted.operations {
        let of_one = OfOne::of(history, operations);
        let of_them = operations
            .iter()
            .filter(|one| one.answer == Answer::Refused);
        for one in of_them {
            let request = (one.written().map(|(entry, _)| entry), one.answered);
            refused.insert(request, *one);
            if of_one.outranks(one) {
                founded.insert(request);
            }
            if of_one.may_be_outranked(one) {
                excused.insert(request);
            }
        }
    }
    for (request, one) in refused {
        match (founded.contains(&request), excused.contains(&request)) {
            (true, false) => verdict.founded += 1,
            (true, true) => {}
            (false, true) => verdict.excused += 1,
            (false, false) => verdict.violated(Kinds::Unfounded, || format!("{one:?}")),
        }
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
    /// From when to when a token may have come up that nobody has heard of: by a lease without an answer, and by what
    /// follows a failover.
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
                (Kind::Grant, Answer::Unknown) => {
                    unheard.push((operation.invoked, operation.invoked.saturating_add(LATE)))
                }
                _ => {}
            }
        }
        let failovers = history.failovers.iter();
        unheard.extend(failovers.map(|failover| (failover.from, failover.until)));
        Self {
            operations,
            highest,
            granted,
            unheard,
        }
    }

    /// Whether something newer is known, or its token is used up.
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
        self.operations[..before].iter().any(|one| uses_up(&one))
    }

    /// Whether something newer may be there of which nobody has heard.
    fn may_be_outranked(&self, refused: &Operation) -> bool {
        // A token that came up later is above that.
        let granted = self.granted.get(&refused.token).unwrap_or(&refused.invoked);
        let mut unheard = self.unheard.iter();
        unheard.any(|(from, until)| *from < refused.answered && granted < until)
    }
}
