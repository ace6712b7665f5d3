//! One history for each kind of violation. The checker must find each violation.

use std::time::Instant;

use rand::{SeedableRng, rngs::StdRng, seq::IndexedRandom};

use super::{
    Kinds, Verdict,
    bad_failovers::FAILOVERS,
    samples::{good, settle},
};
use crate::history::{Answer, History, Kind, Line, Operation, State};

pub(super) type Choice<'a> = &'a mut StdRng;

/// Chooses an operation that satisfies a condition.
pub(super) fn one(
    history: &History,
    random: Choice<'_>,
    holds: impl Fn(&Operation) -> bool,
) -> usize {
    let operations = history.operations.iter().enumerate();
    let fitting: Vec<_> = operations
        .filter(|(_, one)| holds(one))
        .map(|(n, _)| n)
        .collect();
    *fitting
        .choose(random)
        .expect("the history has such an operation")
}

/// Returns the index of the log line of this operation.
pub(super) fn line_of(history: &History, operation: &Operation) -> usize {
    let is_it = |line: &Line| {
        line.resource == operation.resource && Some(line.entry) == operation.written().map(|w| w.0)
    };
    history
        .log
        .iter()
        .position(is_it)
        .expect("the log contains the write")
}

pub(super) fn is_done(operation: &Operation) -> bool {
    operation.answer == Answer::Done && operation.written().is_some()
}

pub(super) fn is_read(operation: &Operation) -> bool {
    matches!(operation.kind, Kind::Read(_))
}

/// Moves an early operation that satisfies a condition after all others.
fn move_to_the_end(history: &mut History, random: Choice<'_>, holds: fn(&Operation) -> bool) {
    let early = one(history, random, |one| holds(one) && one.invoked < 5_000);
    let last = history.operations.iter().map(|one| one.answered).max();
    let last = last.unwrap();
    let early = &mut history.operations[early];
    (early.invoked, early.answered) = (last + 1, last + 2);
}

/// A name, the violation that must be found, and a function that causes it.
pub(super) type Fault = (&'static str, Kinds, fn(&mut History, Choice<'_>));

const FAULTS: [Fault; 19] = [
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
        "an acknowledged write is present twice",
        Kinds::Doubled,
        |history, random| {
            let write = one(history, random, is_done);
            let line = line_of(history, &history.operations[write]);
            history.log.insert(line, history.log[line]);
            settle(history);
        },
    ),
    (
        "an unknown write is present twice",
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
        "a refused write is present",
        Kinds::Refused,
        |history, random| {
            let write = one(history, random, is_done);
            history.operations[write].answer = Answer::Refused;
        },
    ),
    (
        "a write is present that was rolled back",
        Kinds::Refused,
        |history, random| {
            let write = one(history, random, is_done);
            history.operations[write].answer = Answer::Undone;
        },
    ),
    (
        "a write is present that no client made",
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
        "a write is present with another token",
        Kinds::Foreign,
        |history, random| {
            let write = one(history, random, is_done);
            let line = line_of(history, &history.operations[write]);
            history.log[line].token += 1;
        },
    ),
    (
        "only half of a transfer is present",
        Kinds::Torn,
        |history, random| {
            let write = one(history, random, |one| is_done(one) && one.parts == 2);
            let line = line_of(history, &history.operations[write]);
            history.log.remove(line);
            settle(history);
        },
    ),
    (
        "an older holder writes after a newer one was answered",
        Kinds::Order,
        |history, random| move_to_the_end(history, random, is_done),
    ),
    (
        "an older holder reads after a newer one was answered",
        Kinds::Order,
        |history, random| move_to_the_end(history, random, is_read),
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
        "two grants have the same token",
        Kinds::Repeated,
        |history, random| {
            let grant = one(history, random, |one| one.kind == Kind::Grant);
            history.operations.push(history.operations[grant]);
        },
    ),
    (
        "a single-use token writes twice",
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
        "an update is overwritten",
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
        "a write is refused without a newer operation",
        Kinds::Unfounded,
        |history, random| {
            let refused = one(history, random, |one| one.answer == Answer::Refused);
            // No token is higher than this one.
            history.operations[refused].token = i64::MAX;
        },
    ),
    ("a read misses a write", Kinds::Missed, |history, random| {
        let read = one(history, random, |one| is_read(one) && one.invoked > 5_000);
        history.operations[read].kind = Kind::Read(State::default());
    }),
    (
        "a read returns a later write",
        Kinds::Future,
        |history, random| {
            let read = one(history, random, |one| is_read(one) && one.invoked < 5_000);
            let last = history.states[history.operations[read].resource];
            history.operations[read].kind = Kind::Read(last);
        },
    ),
    (
        "a read returns a state that never existed",
        Kinds::Invented,
        |history, random| {
            let read = one(history, random, is_read);
            if let Kind::Read(seen) = &mut history.operations[read].kind {
                seen.digest += 1;
            }
        },
    ),
];

pub fn each_kind_of_bad_history_is_found(seed: u64) {
    let mut random = StdRng::seed_from_u64(seed);
    for round in 0..10 {
        let history = good(seed ^ round, 8, 4_000);
        let verdict = Verdict::of(&history);
        assert!(verdict.is_good(), "{:?}", verdict.examples);
        for (fault, found, make) in FAULTS.into_iter().chain(FAILOVERS) {
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

pub fn a_million_operations_are_judged(seed: u64) {
    let history = good(seed, 200, 1_000_000);
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
