//! Histories with a failover. In some, the failover may lose writes. Others contain violations that
//! the checker must still find.

use super::{
    Kinds, Verdict,
    bad_histories::{Choice, Fault, is_done, is_read, line_of, one},
    samples::{good, settle},
};
use crate::history::{Answer, Failover, History, Kind, Line, Moment, Operation};

/// Removes the last write of a resource, and adds a failover.
fn lose_the_last_one(
    history: &mut History,
    random: Choice<'_>,
    failover: fn(&Operation) -> Failover,
) {
    let is_last = |one: &Operation| {
        let of_it = |line: &&Line| line.resource == one.resource;
        let last = history.log.iter().rfind(of_it);
        is_done(one) && one.parts == 1 && one.written().map(|w| w.0) == last.map(|line| line.entry)
    };
    let write = history.operations[one(history, random, is_last)];
    history.log.remove(line_of(history, &write));
    settle(history);
    history.failovers.push(failover(&write));
}

/// Adds a failover between a grant and an operation under its token.
fn outlive(history: &mut History, random: Choice<'_>, is_of_use: fn(&Operation) -> bool) {
    let granted = |one: &Operation| {
        let of_it = |grant: &&Operation| {
            let is_grant = grant.kind == Kind::Grant && grant.answered + 2 < one.invoked;
            is_grant && (grant.resource, grant.token) == (one.resource, one.token)
        };
        history.operations.iter().find(of_it)
    };
    let late = one(history, random, |one| {
        is_of_use(one) && one.answer == Answer::Done && granted(one).is_some()
    });
    let late = history.operations[late];
    let from = granted(&late)
        .expect("the chosen operation has a grant")
        .answered
        + 1;
    history.failovers.push(Failover {
        loses: false,
        from,
        crashed: from,
        until: late.invoked - 1,
    });
}

/// The violations that the checker must find although there was a failover.
pub(super) const FAILOVERS: [Fault; 7] = [
    (
        "a failover keeps a write that is newer than a lost one",
        Kinds::LostAlone,
        |history, random| {
            history.failovers.push(Failover {
                loses: true,
                from: 0,
                crashed: Moment::MAX - 1,
                until: Moment::MAX,
            });
            let write = one(history, random, |one| is_done(one) && one.invoked < 5_000);
            let line = line_of(history, &history.operations[write]);
            history.log.remove(line);
            settle(history);
        },
    ),
    (
        "a failover to a synchronous standby loses a write",
        Kinds::Lost,
        |history, random| {
            lose_the_last_one(history, random, |lost| Failover {
                loses: false,
                from: 0,
                crashed: lost.answered,
                until: Moment::MAX,
            });
        },
    ),
    (
        "a failover loses a write that was answered before it",
        Kinds::Lost,
        |history, random| {
            lose_the_last_one(history, random, |lost| Failover {
                loses: true,
                from: lost.answered + 1,
                crashed: lost.answered + 2,
                until: Moment::MAX,
            });
        },
    ),
    (
        "a failover loses a write that was requested after it",
        Kinds::Lost,
        |history, random| {
            lose_the_last_one(history, random, |lost| Failover {
                loses: true,
                from: 0,
                crashed: lost.invoked - 1,
                until: Moment::MAX,
            });
        },
    ),
    (
        "a holder from before a failover writes after it",
        Kinds::Order,
        |history, random| outlive(history, random, is_done),
    ),
    (
        "a holder from before a failover reads after it",
        Kinds::Order,
        |history, random| outlive(history, random, is_read),
    ),
    (
        "a write is refused whose lease was granted after a failover",
        Kinds::Unfounded,
        |history, random| {
            let refused = one(history, random, |one| {
                one.answer == Answer::Refused && one.invoked > 5_000
            });
            let until = history.operations[refused].invoked - 1;
            history.operations[refused].token = i64::MAX;
            history.failovers.push(Failover {
                loses: false,
                from: 0,
                crashed: until,
                until,
            });
        },
    ),
];

pub fn a_failover_may_lose_the_last_writes_with_all_that_is_newer(seed: u64) {
    let mut history = good(seed, 8, 4_000);
    let crashed = history
        .operations
        .iter()
        .map(|one| one.answered)
        .max()
        .unwrap();
    let resource = 7;
    let lost: Vec<_> = history
        .log
        .iter()
        .filter(|line| line.resource == resource)
        .collect();
    let first_lost = lost[lost.len() - 10].token;
    history
        .log
        .retain(|line| line.resource != resource || line.token < first_lost);
    settle(&mut history);
    let Verdict { violations, .. } = Verdict::of(&history);
    assert!(violations.contains_key(&Kinds::Lost), "{violations:?}");
    let failover = Failover {
        loses: true,
        from: 0,
        crashed,
        until: crashed,
    };
    history.failovers.push(failover);
    let verdict = Verdict::of(&history);
    assert!(verdict.is_good(), "{:?}", verdict.examples);
    assert!(verdict.failed_over > 5, "{verdict:?}");
}
