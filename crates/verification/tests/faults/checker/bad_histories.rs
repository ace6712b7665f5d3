//! One history for each kind of violation. The checker must find each violation.

use std::time::Instant;

use rand::{SeedableRng, rngs::StdRng, seq::IteratorRandom};

use super::{
    Kinds, Verdict,
    bad_failovers::FAILOVERS,
    samples::{good, settle},
};
use crate::history::{Answer, History, Kind, Line, Operation, State};

/// A condition for an operation of a history.
type Condition = fn(&History, &Operation) -> bool;

/// A name, the violation that must be found, the operations one of which is chosen, and a function
/// that causes the violation there.
pub(super) type Fault = (&'static str, Kinds, Condition, fn(&mut History, usize));

/// Returns the index of the log line of this operation.
fn line_of(history: &History, operation: &Operation) -> usize {
    let entry = operation.written().map(|(entry, _)| entry);
    let is_it = |line: &Line| line.resource == operation.resource && Some(line.entry) == entry;
    let line = history.log.iter().position(is_it);
    line.expect("the log contains the write")
}

/// Changes the log at the line of a write.
fn change_log(history: &mut History, write: usize, change: fn(&mut Vec<Line>, usize)) {
    let line = line_of(history, &history.operations[write]);
    change(&mut history.log, line);
    settle(history);
}

/// Removes a write from the log.
pub(super) fn remove(history: &mut History, write: usize) {
    change_log(history, write, |log, line| {
        log.remove(line);
    });
}

pub(super) fn is_done(_: &History, one: &Operation) -> bool {
    one.answer == Answer::Done && one.written().is_some()
}

fn is_transfer(history: &History, one: &Operation) -> bool {
    is_done(history, one) && one.parts == 2
}

fn is_late_write(history: &History, one: &Operation) -> bool {
    is_done(history, one) && one.invoked > 5_000
}

fn is_late_single_use(history: &History, one: &Operation) -> bool {
    is_late_write(history, one) && matches!(one.kind, Kind::Write { .. })
}

fn is_grant(_: &History, one: &Operation) -> bool {
    one.kind == Kind::Grant
}

pub(super) fn is_read(_: &History, one: &Operation) -> bool {
    matches!(one.kind, Kind::Read(_))
}

/// Moves an operation after all others.
fn move_to_the_end(history: &mut History, early: usize) {
    let last = history.operations.iter().map(|one| one.answered).max();
    let last = last.unwrap();
    let early = &mut history.operations[early];
    (early.invoked, early.answered) = (last + 1, last + 2);
}

const FAULTS: [Fault; 20] = [
    (
        "an acknowledged write is lost",
        Kinds::Lost,
        is_done,
        remove,
    ),
    (
        "an acknowledged write is present twice",
        Kinds::Doubled,
        is_done,
        |history, write| change_log(history, write, |log, line| log.insert(line, log[line])),
    ),
    (
        "an unknown write is present twice",
        Kinds::Doubled,
        is_done,
        |history, write| {
            history.operations[write].answer = Answer::Unknown;
            change_log(history, write, |log, line| log.insert(line, log[line]));
        },
    ),
    (
        "a refused write is present",
        Kinds::Refused,
        is_done,
        |history, write| history.operations[write].answer = Answer::Refused,
    ),
    (
        "a write is present that was rolled back",
        Kinds::Refused,
        is_done,
        |history, write| history.operations[write].answer = Answer::Undone,
    ),
    (
        "a write is present that no client made",
        Kinds::Foreign,
        is_done,
        |history, write| {
            change_log(history, write, |log, line| {
                let entry = i64::from(i32::MAX);
                log.insert(line, Line { entry, ..log[line] });
            });
        },
    ),
    (
        "a write is present with another token",
        Kinds::Foreign,
        is_done,
        |history, write| change_log(history, write, |log, line| log[line].token += 1),
    ),
    (
        "only half of a transfer is present",
        Kinds::Torn,
        is_transfer,
        remove,
    ),
    (
        "a transfer adds more than it takes away",
        Kinds::Sum,
        is_transfer,
        |history, transfer| {
            if let Kind::Write { amount, .. } = &mut history.operations[transfer].kind {
                *amount += 1;
            }
            settle(history);
        },
    ),
    (
        "an older holder writes after a newer one was answered",
        Kinds::Order,
        |history, one| is_done(history, one) && one.invoked < 5_000,
        move_to_the_end,
    ),
    (
        "an older holder reads after a newer one was answered",
        Kinds::Order,
        |history, one| is_read(history, one) && one.invoked < 5_000,
        move_to_the_end,
    ),
    (
        "a grant is below one that was answered before",
        Kinds::Order,
        |history, one| is_grant(history, one) && one.invoked > 5_000,
        |history, grant| history.operations[grant].token = 1,
    ),
    (
        "two grants have the same token",
        Kinds::Repeated,
        is_grant,
        |history, grant| history.operations.push(history.operations[grant]),
    ),
    (
        "a single-use token writes twice",
        Kinds::Repeated,
        is_late_single_use,
        |history, write| {
            let line = line_of(history, &history.operations[write]);
            let before = history.log[line - 1];
            assert_eq!(before.resource, history.log[line].resource);
            history.operations[write].token = before.token;
            history.log[line].token = before.token;
        },
    ),
    (
        "the log is not in order",
        Kinds::Disorder,
        is_late_write,
        |history, write| change_log(history, write, |log, line| log.swap(line, line - 20)),
    ),
    (
        "an update is overwritten",
        Kinds::Overwritten,
        is_late_write,
        |history, write| {
            let line = line_of(history, &history.operations[write]);
            let resource = history.operations[write].resource;
            for line in &mut history.log[line..] {
                line.position -= i64::from(line.resource == resource);
            }
            history.states[resource].count -= 1;
        },
    ),
    (
        "a write is refused without a newer operation",
        Kinds::Unfounded,
        |_, one| one.answer == Answer::Refused,
        // No token is higher than this one.
        |history, refused| history.operations[refused].token = i64::MAX,
    ),
    (
        "a read misses a write",
        Kinds::Missed,
        |history, one| is_read(history, one) && one.invoked > 5_000,
        |history, read| history.operations[read].kind = Kind::Read(State::default()),
    ),
    (
        "a read returns a later write",
        Kinds::Future,
        |history, one| is_read(history, one) && one.invoked < 5_000,
        |history, read| {
            let last = history.states[history.operations[read].resource];
            history.operations[read].kind = Kind::Read(last);
        },
    ),
    (
        "a read returns a state that never existed",
        Kinds::Invented,
        is_read,
        |history, read| {
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
        for (fault, found, fits, spoil) in FAULTS.into_iter().chain(FAILOVERS) {
            let mut bad = history.clone();
            let fitting = (0..bad.operations.len()).filter(|n| fits(&bad, &bad.operations[*n]));
            let chosen = fitting.choose(&mut random);
            spoil(&mut bad, chosen.expect("the history has such an operation"));
            let verdict = Verdict::of(&bad);
            let violations = &verdict.violations;
            assert!(violations.contains_key(&found), "{fault}: {violations:?}");
        }
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
