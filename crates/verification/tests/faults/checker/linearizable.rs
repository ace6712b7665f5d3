//! A comparison of the checker with a search for an order of effects, on many short histories: both
//! must give the same verdict.

use std::collections::HashMap;

use rand::{RngExt, SeedableRng, rngs::StdRng};

use super::{
    Verdict,
    samples::{good, settle},
    search::Window,
};
use crate::history::{Answer, History, Kind, Line, Operation, State};

/// Returns a short history of one resource, without operations that the search does not support.
fn short(seed: u64, random: &mut StdRng) -> History {
    let whole = good(seed, 6, 150);
    let resource = random.random_range(4..6);
    let of_it = |operation: &&Operation| {
        operation.resource == resource
            && operation.kind != Kind::Grant
            && operation.answer != Answer::Refused
    };
    let operations = whole.operations.iter().filter(of_it).take(8);
    let operations: Vec<_> = operations
        .map(|one| Operation {
            resource: 0,
            ..*one
        })
        .collect();
    let written = operations.iter().filter_map(Operation::written);
    let entries: Vec<_> = written.map(|(entry, _)| entry).collect();
    let log = whole
        .log
        .into_iter()
        .filter(|line| line.resource == resource);
    let log = log.filter(|line| entries.contains(&line.entry));
    let mut history = History {
        log: log
            .map(|line| Line {
                resource: 0,
                ..line
            })
            .collect(),
        operations,
        states: vec![State::default()],
        ..History::default()
    };
    settle(&mut history);
    history
}

/// Changes the history in one place. The result may or may not be linearizable.
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

pub fn the_checker_and_a_search_for_an_order_judge_alike(seed: u64) {
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
        // The search checks the token and reads in one step, but the fence does so in two steps.
        let is_good = verdict.is_good() && verdict.overtaken == 0;
        assert_eq!(
            is_good,
            Window::whole(&history).has_an_order(),
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
