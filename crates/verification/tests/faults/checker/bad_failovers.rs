//! Histories with a failover. In some, the failover may lose writes. Others contain violations that
//! the checker must still find.

use super::{
    Kinds, Verdict,
    bad_histories::{Fault, is_done, is_read, remove},
    samples::{good, settle},
};
use crate::history::{Answer, Failover, History, Kind, Line, Moment, Operation};

const fn failover(loses: bool, from: Moment, crashed: Moment, until: Moment) -> Failover {
    Failover {
        loses,
        from,
        crashed,
        until,
    }
}

/// Whether an operation is the last write of its resource.
fn is_last(history: &History, one: &Operation) -> bool {
    let of_it = |line: &&Line| line.resource == one.resource;
    let last = history.log.iter().rfind(of_it).map(|line| line.entry);
    let entry = one.written().map(|(entry, _)| entry);
    is_done(history, one) && one.parts == 1 && entry == last
}

/// Removes a write, and adds a failover that never ends, with its first two moments.
fn lose(history: &mut History, write: usize, loses: bool, moments: fn(&Operation) -> [Moment; 2]) {
    let [from, crashed] = moments(&history.operations[write]);
    let failover = failover(loses, from, crashed, Moment::MAX);
    history.failovers.push(failover);
    remove(history, write);
}

/// Returns the grant of the token of an operation, if it was answered well before the operation.
fn grant_of<'a>(history: &'a History, one: &Operation) -> Option<&'a Operation> {
    let of_it = |grant: &&Operation| {
        let is_grant = grant.kind == Kind::Grant && grant.answered + 2 < one.invoked;
        is_grant && (grant.resource, grant.token) == (one.resource, one.token)
    };
    history.operations.iter().find(of_it)
}

/// Adds a failover between a grant and an operation under its token.
fn outlive(history: &mut History, late: usize) {
    let late = &history.operations[late];
    let grant = grant_of(history, late).expect("the chosen operation has a grant");
    let from = grant.answered + 1;
    let failover = failover(false, from, from, late.invoked - 1);
    history.failovers.push(failover);
}

/// The violations that the checker must find although there was a failover.
pub(super) const FAILOVERS: [Fault; 7] = [
    (
        "a failover keeps a write that is newer than a lost one",
        Kinds::LostAlone,
        |history, one| is_done(history, one) && one.invoked < 5_000,
        |history, write| lose(history, write, true, |_| [0, Moment::MAX - 1]),
    ),
    (
        "a failover to a synchronous standby loses a write",
        Kinds::Lost,
        is_last,
        |history, write| lose(history, write, false, |lost| [0, lost.answered]),
    ),
    (
        "a failover loses a write that was answered before it",
        Kinds::Lost,
        is_last,
        |history, write| {
            lose(history, write, true, |lost| {
                [lost.answered + 1, lost.answered + 2]
            });
        },
    ),
    (
        "a failover loses a write that was requested after it",
        Kinds::Lost,
        is_last,
        |history, write| lose(history, write, true, |lost| [0, lost.invoked - 1]),
    ),
    (
        "a holder from before a failover writes after it",
        Kinds::Order,
        |history, one| is_done(history, one) && grant_of(history, one).is_some(),
        outlive,
    ),
    (
        "a holder from before a failover reads after it",
        Kinds::Order,
        |history, one| is_read(history, one) && grant_of(history, one).is_some(),
        outlive,
    ),
    (
        "a write is refused whose lease was granted after a failover",
        Kinds::Unfounded,
        |_, one| one.answer == Answer::Refused && one.invoked > 5_000,
        |history, refused| {
            let until = history.operations[refused].invoked - 1;
            history.operations[refused].token = i64::MAX;
            history.failovers.push(failover(false, 0, until, until));
        },
    ),
];

pub fn a_failover_may_lose_the_last_writes_with_all_that_is_newer(seed: u64) {
    let mut history = good(seed, 8, 4_000);
    let answered = history.operations.iter().map(|one| one.answered);
    let crashed = answered.max().unwrap();
    let of_it = |line: &&Line| line.resource == 7;
    let first_lost = history.log.iter().rev().filter(of_it).nth(9).unwrap().token;
    history
        .log
        .retain(|line| line.resource != 7 || line.token < first_lost);
    settle(&mut history);
    let Verdict { violations, .. } = Verdict::of(&history);
    assert!(violations.contains_key(&Kinds::Lost), "{violations:?}");
    history.failovers.push(failover(true, 0, crashed, crashed));
    let verdict = Verdict::of(&history);
    assert!(verdict.is_good(), "{:?}", verdict.examples);
    assert!(verdict.failed_over > 5, "{verdict:?}");
}
