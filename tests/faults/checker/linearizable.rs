//! The checker and a search for an order of effects, on many short histories: they judge alike.

use std::collections::HashMap;

use rand::{RngExt, SeedableRng, rngs::StdRng};
use stateright::semantics::{ConsistencyTester, LinearizabilityTester, SequentialSpec};

use super::{
    Verdict,
    samples::{good, settle},
};
use crate::history::{Answer, History, Kind, Operation, State};

/// One resource behind a fence.
#[derive(Clone, Debug, Default)]
struct Fenced {
    dead: i64,
    state: State,
    entries: Vec<i64>,
}

#[derive(Clone, Debug)]
enum Op {
    Write {
        token: i64,
        entry: i64,
        amount: i64,
        reusable: bool,
    },
    Read {
        token: i64,
    },
    /// All that is there, in the end.
    Audit,
}

#[derive(Clone, Debug, PartialEq)]
enum Ret {
    Written,
    Refused,
    Read(State),
    Audited(Vec<i64>),
}

impl SequentialSpec for Fenced {
    type Op = Op;
    type Ret = Ret;

    fn invoke(&mut self, op: &Op) -> Ret {
        match *op {
            Op::Write { token, .. } | Op::Read { token } if token <= self.dead => Ret::Refused,
            Op::Write {
                token,
                entry,
                amount,
                reusable,
            } => {
                self.dead = token - i64::from(reusable);
                self.state = self.state.with(entry, amount);
                self.entries.push(entry);
                Ret::Written
            }
            Op::Read { token } => {
                self.dead = self.dead.max(token - 1);
                Ret::Read(self.state)
            }
            Op::Audit => Ret::Audited(self.entries.clone()),
        }
    }
}

/// A short history of one resource without what the search knows nothing of.
fn short(seed: u64, random: &mut StdRng) -> History {
    let whole = good(seed, 6, 150);
    let resource = random.random_range(4..6);
    let of_it = |operation: &&Operation| {
        operation.resource == resource
            && operation.kind != Kind::Grant
            && operation.answer != Answer::Refused
    };
    let operations = whole.operations.iter().filter(of_it).take(8).copied();
    let mut history = History {
        operations: operations
            .map(|one| Operation { resource: 0, ..one })
            .collect(),
        states: vec![State::default()],
        ..History::default()
    };
    let is_in = |entry| {
        history
            .operations
            .iter()
            .any(|one| one.written().is_some_and(|w| w.0 == entry))
    };
    let log = whole
        .log
        .iter()
        .filter(|line| line.resource == resource && is_in(line.entry));
    history.log = log
        .map(|line| crate::history::Line {
            resource: 0,
            ..*line
        })
        .collect();
    settle(&mut history);
    history
}

/// Changes something that may matter, or may not.
fn disturb(history: &mut History, random: &mut StdRng) {
    let n = random.random_range(0..history.operations.len());
    let other = random.random_range(0..history.operations.len());
    match random.random_range(0..6) {
        0 if !history.log.is_empty() => {
            history
                .log
                .remove(random.random_range(0..history.log.len()));
        }
        1 if history.log.len() > 1 => {
            let line = random.random_range(1..history.log.len());
            history.log.swap(line, line - 1);
        }
        2 => {
            if let Kind::Read(seen) = history.operations[other].kind
                && let Kind::Read(saw) = &mut history.operations[n].kind
            {
                *saw = seen;
            }
        }
        3 => {
            let operation = &mut history.operations[n];
            let later = random.random_range(0..100);
            operation.invoked += later;
            operation.answered += later;
        }
        4 => history.operations[n].answer = Answer::Unknown,
        _ => {
            let (token, entry) = (
                history.operations[other].token,
                history.operations[n].written(),
            );
            history.operations[n].token = token;
            for line in &mut history.log {
                if entry.is_some_and(|(entry, _)| entry == line.entry) {
                    line.token = token;
                }
            }
        }
    }
    settle(history);
}

/// Whether an order of effects explains all answers, and what is there.
fn is_linearizable(history: &History) -> bool {
    let mut events = vec![];
    for (n, operation) in history.operations.iter().enumerate() {
        events.push((operation.invoked, 0, n));
        if operation.answer == Answer::Done {
            // What is answered at the moment at which another is asked for is at the same time.
            events.push((operation.answered, 1, n));
        }
    }
    events.sort_unstable();
    let mut tester = LinearizabilityTester::new(Fenced::default());
    for (_, event, n) in events {
        let operation = &history.operations[n];
        let token = operation.token;
        let (op, ret) = match operation.kind {
            Kind::Write { entry, amount } => (
                Op::Write {
                    token,
                    entry,
                    amount,
                    reusable: false,
                },
                Ret::Written,
            ),
            Kind::Rewrite { entry, amount } => (
                Op::Write {
                    token,
                    entry,
                    amount,
                    reusable: true,
                },
                Ret::Written,
            ),
            Kind::Read(seen) => (Op::Read { token }, Ret::Read(seen)),
            Kind::Grant => unreachable!("there are none"),
        };
        // Each is a thread of its own.
        let noted = match event {
            0 => tester.on_invoke(n, op),
            _ => tester.on_return(n, ret),
        };
        noted.unwrap();
    }
    let entries = history.log.iter().map(|line| line.entry).collect();
    let last = history.operations.len();
    tester
        .on_invret(last, Op::Audit, Ret::Audited(entries))
        .unwrap();
    tester.is_consistent()
}

pub fn the_checker_and_a_search_for_an_order_judge_alike() {
    let seed: u64 = rand::random();
    println!("seed {seed}");
    let mut random = StdRng::seed_from_u64(seed);
    let mut verdicts = HashMap::<bool, usize>::new();
    for round in 0..6_000_u64 {
        let mut history = short(seed.wrapping_add(round), &mut random);
        if history.operations.is_empty() {
            continue;
        }
        for _ in 0..random.random_range(0..3) {
            disturb(&mut history, &mut random);
        }
        let verdict = Verdict::of(&history);
        // A fence that looked, and then let read, is none that does both at once.
        let is_good = verdict.is_good() && verdict.overtaken == 0;
        assert_eq!(
            is_good,
            is_linearizable(&history),
            "{verdict:?}: {history:#?}"
        );
        *verdicts.entry(is_good).or_default() += 1;
    }
    println!("good and bad: {verdicts:?}");
    assert!(
        verdicts[&true] > 1_000 && verdicts[&false] > 1_000,
        "{verdicts:?}"
    );
}
