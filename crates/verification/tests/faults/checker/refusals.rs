//! A write or a read is refused only if a newer operation was sent before the refusal was answered.

use std::{collections::HashMap, time::Duration};

use super::{Kinds, Resource, Verdict, samples::good};
use crate::history::{Answer, History, Kind, Moment, Operation};

/// The maximum time after which a request may arrive although its client has given up.
const LATE: Moment = Duration::from_secs(15).as_nanos() as Moment;

/// The maximum time after a refused request for a lease was sent within which its position may be
/// granted the lease: the wait of two seconds, the three seconds for which an issuer keeps the
/// position, and the steps in between.
const KEPT: Moment = Duration::from_secs(8).as_nanos() as Moment;

pub(super) fn check(history: &History, resources: &[Resource<'_>], verdict: &mut Verdict) {
    // The refusal of a request for several resources is explained if the refusal of any one of its
    // operations is. All operations of a request were answered at the same time, which identifies
    // the request.
    let mut refused = HashMap::new();
    for Resource { operations, .. } in resources {
        let of_one = OfOne::of(history, operations);
        let of_them = operations
            .iter()
            .filter(|one| one.answer == Answer::Refused);
        for one in of_them {
            let request = (one.written().map(|(entry, _)| entry), one.answered);
            let (founded, excused, kept, _) = refused
                .entry(request)
                .or_insert((false, false, false, *one));
            *founded |= of_one.supersedes(one);
            *excused |= of_one.may_be_superseded(one, &of_one.unheard);
            *kept |= of_one.may_be_superseded(one, &of_one.kept);
        }
    }
    for (founded, excused, kept, one) in refused.into_values() {
        if founded {
            verdict.founded += usize::from(!excused);
        } else if excused || kept {
            verdict.excused += 1;
        } else {
            verdict.violated(Kinds::Unfounded, || format!("{one:?}"));
        }
    }
}

/// The operations of one resource.
struct OfOne<'a> {
    /// The operations, in the order in which they were sent.
    operations: &'a [&'a Operation],
    /// At index `n`, the highest token among the first `n` operations.
    highest: Vec<i64>,
    /// The moment at which the lease of each token was requested.
    granted: HashMap<i64, Moment>,
    /// The periods in which an unknown token may have been granted: after a request for a lease
    /// without an answer, and during a failover.
    unheard: Vec<(Moment, Moment)>,
    /// The periods after refused requests for a lease, whose positions may have been granted the
    /// lease. They are frequent, so they count only if nothing else explains a refusal.
    kept: Vec<(Moment, Moment)>,
}

impl<'a> OfOne<'a> {
    fn of(history: &History, operations: &'a [&'a Operation]) -> Self {
        let mut highest = vec![0];
        let (mut granted, mut unheard, mut kept) = (HashMap::new(), vec![], vec![]);
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
                (Kind::Grant, Answer::Undone) => {
                    kept.push((operation.invoked, operation.invoked.saturating_add(KEPT)))
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
            kept,
        }
    }

    /// Whether the refusal is explained by a known newer operation, or by another write that has
    /// used the single-use token.
    fn supersedes(&self, refused: &Operation) -> bool {
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

    /// Whether there may be a newer token that was granted in one of these periods, and that no
    /// client has received.
    fn may_be_superseded(&self, refused: &Operation, periods: &[(Moment, Moment)]) -> bool {
        // If the refused token was requested after the period, it is higher than the unknown token.
        let granted = self.granted.get(&refused.token).unwrap_or(&refused.invoked);
        let mut periods = periods.iter();
        periods.any(|(from, until)| *from < refused.answered && granted < until)
    }
}

const SECOND: Moment = 1_000_000_000;

/// A request for a lease without a known grant excuses a refusal only within its window.
pub fn a_refusal_is_excused_only_within_its_window(seed: u64) {
    let whole = good(seed, 8, 1_000);
    let answered = whole.operations.iter().map(|one| one.answered);
    let begin = answered.max().unwrap() + 1;
    let before = Verdict::of(&whole);
    assert!(before.is_good(), "{:?}", before.examples);
    // The windows are literal numbers, so that the test detects a longer window in the checker.
    for (answer, window) in [(Answer::Unknown, 15 * SECOND), (Answer::Undone, 8 * SECOND)] {
        let end = begin + window;
        // The moments at which the token of the refused write was granted, if this is known, at
        // which the write was sent, and at which it was refused.
        for (granted, sent, refused, is_excused) in [
            (None, begin - 1, begin, false),
            (None, begin - 1, begin + 1, true),
            (None, end - 1, end + SECOND, true),
            (None, end, end + SECOND, false),
            (Some(end - 1), end + 60 * SECOND, end + 61 * SECOND, true),
            (Some(end), end + 60 * SECOND, end + 61 * SECOND, false),
        ] {
            let mut history = whole.clone();
            let own = Operation {
                // No other token is as high.
                token: i64::MAX,
                ..Operation::grant(0, granted.unwrap_or(0), Answer::Done)
            };
            history.operations.extend(granted.map(|_| own));
            history.operations.push(Operation::grant(0, begin, answer));
            history.operations.push(Operation {
                kind: Kind::Write {
                    entry: -1,
                    amount: 0,
                },
                invoked: sent,
                answered: refused,
                answer: Answer::Refused,
                ..own
            });
            let verdict = Verdict::of(&history);
            let case = format!("{answer:?}, {granted:?}, {sent}, {refused}: {verdict:?}");
            let found: Vec<_> = verdict.violations.keys().copied().collect();
            let expected = match is_excused {
                true => vec![],
                false => vec![Kinds::Unfounded],
            };
            assert_eq!(found, expected, "{case}");
            let excused = verdict.excused - before.excused;
            assert_eq!(excused, usize::from(is_excused), "{case}");
        }
    }
}
