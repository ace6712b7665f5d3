//! For each thing that can be wrong with a history one that has it, and what the checker says.

use std::time::Instant;

use rand::{SeedableRng, rngs::StdRng, seq::IndexedRandom};

use super::{
    Kinds, Verdict,
    samples::{good, settle},
};
use crate::history::{Answer, Failover, History, Kind, Line, Moment, Operation, State};

type Choice<'a> = &'a mut StdRng;

/// One of the operations of which this holds.
fn one(history: &History, random: Choice<'_>, holds: impl Fn(&Operation) -> bool) -> usize {
    let operations = history.operations.iter().enumerate();
    let fitting: Vec<_> = operations
        .filter(|(_, one)| holds(one))
        .map(|(n, _)| n)
        .collect();
    *fitting.choose(random).expect("the history has one")
}

/// Where the log has the write of this operation.
fn line_of(history: &History, operation: &Operation) -> usize {
    let is_it = |line: &Line| {
        line.resource == operation.resource && Some(line.entry) == operation.written().map(|w| w.0)
    };
    history.log.iter().position(is_it).expect("it is there")
}

fn is_done(operation: &Operation) -> bool {
    operation.answer == Answer::Done && operation.written().is_some()
}

fn is_read(operation: &Operation) -> bool {
    matches!(operation.kind, Kind::Read(_))
}

/// Loses the last write of a resource, beside a failover.
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
    let write = history.operations[self::one(history, random, is_last)];
    history.log.remove(line_of(history, &write));
    settle(history);
    history.failovers.push(failover(&write));
}

/// Has a failover between a grant and what is done under it.
fn outlive(history: &mut History, random: Choice<'_>, is_of_use: fn(&Operation) -> bool) {
    let granted = |one: &Operation| {
        let of_it = |grant: &&Operation| {
            let is_grant = grant.kind == Kind::Grant && grant.answered + 2 < one.invoked;
            is_grant && (grant.resource, grant.token) == (one.resource, one.token)
        };
        history.operations.iter().find(of_it)
    };
    let late = self::one(history, random, |one| {
        is_of_use(one) && one.answer == Answer::Done && granted(one).is_some()
    });
    let late = history.operations[late];
    let from = granted(&late).expect("it was chosen").answered + 1;
    history.failovers.push(Failover {
        loses: false,
        from,
        crashed: from,
        until: late.invoked - 1,
    });
}

/// A way to go wrong, and what has to be found.
type Fault = (&'static str, Kinds, fn(&mut History, Choice<'_>));

const FAULTS: [Fault; 26] = [
    (
        "an acknowledged write is lost",
        Kinds::Lost,
        |history, random| {
            let write = one(history, random, is_done);
            let line = line_of(history, &history.operations[write]);
            history.log.remove(line);
            settle(history);
        },
    ),
    (
        "an acknowledged write is there twice",
        Kinds::Doubled,
        |history, random| {
            let write = one(history, random, is_done);
            let line = line_of(history, &history.operations[write]);
            history.log.insert(line, history.log[line]);
            settle(history);
        },
    ),
    (
        "an unknown write is there twice",
        Kinds::Doubled,
        |history, random| {
            let write = one(history, random, is_done);
            history.operations[write].answer = Answer::Unknown;
            let line = line_of(history, &history.operations[write]);
            history.log.insert(line, history.log[line]);
            settle(history);
        },
    ),
    (
        "a refused write is there",
        Kinds::Refused,
        |history, random| {
            let write = one(history, random, is_done);
            history.operations[write].answer = Answer::Refused;
        },
    ),
    (
        "a write is there that was rolled back",
        Kinds::Refused,
        |history, random| {
            let write = one(history, random, is_done);
            history.operations[write].answer = Answer::Undone;
        },
    ),
    (
        "a write is there that nobody made",
        Kinds::Foreign,
        |history, random| {
            let write = one(history, random, is_done);
            let line = line_of(history, &history.operations[write]);
            let entry = i64::from(i32::MAX);
            history.log.insert(
                line,
                Line {
                    entry,
                    ..history.log[line]
                },
            );
            settle(history);
        },
    ),
    (
        "a write is there with another token",
        Kinds::Foreign,
        |history, random| {
            let write = one(history, random, is_done);
            let line = line_of(history, &history.operations[write]);
            history.log[line].token += 1;
        },
    ),
    (
        "half of a transfer is there",
        Kinds::Torn,
        |history, random| {
            let write = one(history, random, |one| is_done(one) && one.parts == 2);
            let line = line_of(history, &history.operations[write]);
            history.log.remove(line);
            settle(history);
        },
    ),
    (
        "a failover keeps what is newer than what it loses",
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
        "a failover loses what was answered before",
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
        "a failover loses what was asked for behind it",
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
        "a holder from before a failover writes behind it",
        Kinds::Order,
        |history, random| outlive(history, random, is_done),
    ),
    (
        "a holder from before a failover reads behind it",
        Kinds::Order,
        |history, random| outlive(history, random, is_read),
    ),
    (
        "an older holder writes after a newer one was answered",
        Kinds::Order,
        |history, random| {
            let write = one(history, random, |one| is_done(one) && one.invoked < 5_000);
            let last = history
                .operations
                .iter()
                .map(|one| one.answered)
                .max()
                .unwrap();
            (
                history.operations[write].invoked,
                history.operations[write].answered,
            ) = (last + 1, last + 2);
        },
    ),
    (
        "an older holder reads after a newer one was answered",
        Kinds::Order,
        |history, random| {
            let read = one(history, random, |one| is_read(one) && one.invoked < 5_000);
            let last = history
                .operations
                .iter()
                .map(|one| one.answered)
                .max()
                .unwrap();
            (
                history.operations[read].invoked,
                history.operations[read].answered,
            ) = (last + 1, last + 2);
        },
    ),
    (
        "a grant is below one that was answered before",
        Kinds::Order,
        |history, random| {
            let grant = one(history, random, |one| {
                one.kind == Kind::Grant && one.invoked > 5_000
            });
            history.operations[grant].token = 1;
        },
    ),
    (
        "two grants have one token",
        Kinds::Repeated,
        |history, random| {
            let grant = one(history, random, |one| one.kind == Kind::Grant);
            history.operations.push(history.operations[grant]);
        },
    ),
    (
        "a token that is for one write writes twice",
        Kinds::Repeated,
        |history, random| {
            let single = |one: &Operation| is_done(one) && matches!(one.kind, Kind::Write { .. });
            let write = one(history, random, |one| single(one) && one.invoked > 5_000);
            let line = line_of(history, &history.operations[write]);
            let before = history.log[line - 1];
            assert_eq!(before.resource, history.log[line].resource);
            (history.operations[write].token, history.log[line].token) =
                (before.token, before.token);
        },
    ),
    (
        "the log is not in order",
        Kinds::Disorder,
        |history, random| {
            let write = one(history, random, |one| is_done(one) && one.invoked > 5_000);
            let line = line_of(history, &history.operations[write]);
            history.log.swap(line, line - 20);
            settle(history);
        },
    ),
    (
        "an update is written over",
        Kinds::Overwritten,
        |history, random| {
            let write = one(history, random, |one| is_done(one) && one.invoked > 5_000);
            let line = line_of(history, &history.operations[write]);
            for line in &mut history.log[line..] {
                line.position -= i64::from(line.resource == history.operations[write].resource);
            }
            let resource = history.operations[write].resource;
            history.states[resource].count -= 1;
        },
    ),
    (
        "a write is refused that nothing outranks",
        Kinds::Unfounded,
        |history, random| {
            let refused = one(history, random, |one| one.answer == Answer::Refused);
            // It has the last lease.
            history.operations[refused].token = i64::MAX;
        },
    ),
    (
        "a write is refused to whoever was granted its lease behind a failover",
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
    ("a read misses a write", Kinds::Missed, |history, random| {
        let read = one(history, random, |one| is_read(one) && one.invoked > 5_000);
        history.operations[read].kind = Kind::Read(State::default());
    }),
    (
        "a read sees the future",
        Kinds::Future,
        |history, random| {
            let read = one(history, random, |one| is_read(one) && one.invoked < 5_000);
            let last = history.states[history.operations[read].resource];
            history.operations[read].kind = Kind::Read(last);
        },
    ),
    (
        "a read sees what never was",
        Kinds::Invented,
        |history, random| {
            let read = one(history, random, is_read);
            if let Kind::Read(seen) = &mut history.operations[read].kind {
                seen.digest += 1;
            }
        },
    ),
];

pub fn each_kind_of_bad_history_is_found() {
    let seed = rand::random();
    println!("seed {seed}");
    let mut random = StdRng::seed_from_u64(seed);
    for round in 0..10 {
        let history = good(seed ^ round, 8, 4_000);
        let verdict = Verdict::of(&history);
        assert!(verdict.is_good(), "{:?}", verdict.examples);
        for (fault, found, make) in FAULTS {
            let mut bad = history.clone();
            make(&mut bad, &mut random);
            let verdict = Verdict::of(&bad);
            let violations = &verdict.violations;
            assert!(violations.contains_key(&found), "{fault}: {violations:?}");
        }
        let mut bad = history.clone();
        let transfer = one(&bad, &mut random, |one| is_done(one) && one.parts == 2);
        if let Kind::Write { amount, .. } = &mut bad.operations[transfer].kind {
            *amount += 1;
        }
        settle(&mut bad);
        assert!(Verdict::of(&bad).violations.contains_key(&Kinds::Sum));
    }
}

pub fn a_million_operations_are_judged() {
    let history = good(rand::random(), 200, 1_000_000);
    let began = Instant::now();
    let verdict = Verdict::of(&history);
    let seconds = began.elapsed().as_secs_f64();
    println!(
        "{} operations judged in {seconds:.1} s",
        history.operations.len()
    );
    assert!(verdict.is_good(), "{:?}", verdict.examples);
    assert!(verdict.acknowledged > 300_000 && verdict.reads > 100_000);
}

pub fn a_failover_may_lose_the_last_writes_with_all_that_is_newer() {
    let mut history = good(rand::random(), 8, 4_000);
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
