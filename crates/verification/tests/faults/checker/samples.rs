//! Generated histories without violations.

use std::collections::HashMap;

use rand::{RngExt, SeedableRng, rngs::StdRng};

use crate::history::{Answer, History, Kind, Line, Moment, Operation, State};

/// The number of resources that are written to in pairs, as in transfers.
const PAIRED: usize = 4;

/// The fence and the state of a resource.
#[derive(Clone, Copy, Default)]
struct Fenced {
    granted: i64,
    /// This token and all lower tokens are stale.
    highest_stale: i64,
    state: State,
}

struct Database {
    random: StdRng,
    /// The maximum delay of a request or an answer.
    delay: Moment,
    now: Moment,
    next_entry: i64,
    resources: Vec<Fenced>,
    history: History,
}

/// Generates a history without violations, with at least this number of operations.
pub fn good(seed: u64, resources: usize, operations: usize) -> History {
    let mut database = Database {
        random: StdRng::seed_from_u64(seed),
        delay: 40,
        now: 100,
        next_entry: 1,
        resources: vec![Fenced::default(); resources],
        history: History::default(),
    };
    while database.history.operations.len() < operations {
        database.step();
    }
    let mut history = database.history;
    history.states = vec![State::default(); resources];
    history.sums = (0..PAIRED)
        .step_by(2)
        .map(|one| (one, one + 2, 0))
        .collect();
    // The sort is stable: the lines of one resource keep their order.
    history.log.sort_by_key(|line| line.resource);
    settle(&mut history);
    history
}

impl Database {
    fn step(&mut self) {
        self.now += self.random.random_range(1..10);
        let resource = self.random.random_range(0..self.resources.len());
        let reusable = resource >= PAIRED && resource % 2 == 1;
        match self.random.random_range(0..10) {
            0 => self.grant(resource),
            1..4 => {
                self.admissible(resource);
                let token = self.resources[resource].granted;
                self.resources[resource].highest_stale = token - 1;
                let seen = self.resources[resource].state;
                self.note(Kind::Read(seen), resource, token, 1, Answer::Done);
            }
            4 if self.resources[resource].highest_stale > 0 => {
                let (entry, token) = (self.entry(), self.resources[resource].highest_stale);
                let kind = Kind::Write { entry, amount: 0 };
                self.note(kind, resource, token, 1, Answer::Refused);
            }
            _ if resource < PAIRED => self.write(&[resource & !1, resource | 1], false),
            _ => self.write(&[resource], reusable),
        }
    }

    fn grant(&mut self, resource: usize) {
        let fenced = &mut self.resources[resource];
        fenced.granted += 1 + i64::from(self.random.random_bool(0.1));
        fenced.highest_stale = fenced.granted - 1;
        let token = fenced.granted;
        self.note(Kind::Grant, resource, token, 1, Answer::Done);
    }

    fn admissible(&mut self, resource: usize) {
        if self.resources[resource].granted <= self.resources[resource].highest_stale {
            self.grant(resource);
        }
    }

    fn write(&mut self, resources: &[usize], reusable: bool) {
        resources.iter().for_each(|one| self.admissible(*one));
        let entry = self.entry();
        let (answer, happens) = match self.random.random_range(0..20) {
            0 => (Answer::Unknown, true),
            1 => (Answer::Unknown, false),
            _ => (Answer::Done, true),
        };
        let amounts = [7, -7];
        for (&resource, amount) in resources.iter().zip(amounts) {
            let fenced = &mut self.resources[resource];
            let token = fenced.granted;
            if happens {
                fenced.state = fenced.state.with(entry, amount);
                fenced.highest_stale = token - i64::from(reusable);
                let position = fenced.state.count;
                self.history.log.push(Line {
                    resource,
                    entry,
                    token,
                    position,
                });
            }
            let kind = match reusable {
                true => Kind::Rewrite { entry, amount },
                false => Kind::Write { entry, amount },
            };
            let parts = u8::try_from(resources.len()).unwrap();
            self.note(kind, resource, token, parts, answer);
        }
    }

    fn entry(&mut self) -> i64 {
        self.next_entry += 1;
        self.next_entry
    }

    /// Records an operation that takes effect now. It was sent earlier, and is answered later.
    fn note(&mut self, kind: Kind, resource: usize, token: i64, parts: u8, answer: Answer) {
        self.now += 1;
        let invoked = self.now - self.random.random_range(0..self.delay);
        let answered = self.now + self.random.random_range(0..self.delay);
        self.history.operations.push(Operation {
            kind,
            resource,
            token,
            parts,
            invoked,
            answered,
            answer,
        });
    }
}

/// Computes the positions and the states from the log.
pub fn settle(history: &mut History) {
    let written = |one: &Operation| Some((one.resource, one.written()?));
    let written = history.operations.iter().filter_map(written);
    let amounts = written.map(|(resource, (entry, amount))| ((resource, entry), amount));
    let amounts: HashMap<_, _> = amounts.collect();
    history.states.fill(State::default());
    for line in &mut history.log {
        let state = &mut history.states[line.resource];
        let amount = amounts.get(&(line.resource, line.entry));
        *state = state.with(line.entry, amount.copied().unwrap_or(0));
        line.position = state.count;
    }
}
