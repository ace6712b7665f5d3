//! Writes that are repeated under an idempotency key: [`Keys`].
//!
//! A holder sends one write several times under one key, and by mistake another write under the
//! same key. A holder with a newer token writes in between. The answer to a write contains the
//! number of all executed writes, including this write.

mod steps;

use stateright::{Model, Property};

pub use self::steps::{HIGHEST_STALE, Step};
use crate::search::{World, rules};

rules! {
    RecordIsWritten: "the record of a key is committed with the write",
    OneAtATime: "of two requests with the same key, the second waits for the first",
    RecordFirst: "the record is looked up before the token is checked",
    StoredAnswer: "a repeated request gets the stored answer",
    SameRequest: "a stored answer is returned only to a repetition of its request",
    FailureLeavesNone: "a failed write leaves no record",
}

/// The write of a request under the key.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub enum Body {
    /// The intended write.
    Meant,
    /// Another write that has the same key by mistake.
    Mistaken,
}

#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub enum Request {
    First,
    Second,
    Third,
    Mistake,
}

impl Request {
    pub const ALL: [Self; 4] = [Self::First, Self::Second, Self::Third, Self::Mistake];

    pub const fn body(self) -> Body {
        match self {
            Self::Mistake => Body::Mistaken,
            _ => Body::Meant,
        }
    }
}

/// The progress of a request on the server.
#[derive(Clone, Copy, Debug, Default, Hash, PartialEq, Eq)]
pub enum Attempt {
    #[default]
    None,
    Sent,
    /// The transaction of the request has claimed the key.
    Claimed,
    /// The transaction of the request has also locked the row.
    Admitted,
    /// The request has written. Its answer is this number.
    Written(u8),
    /// The write of the request is committed, and its record is not. This occurs only if the record
    /// has a transaction of its own.
    Unrecorded(u8),
    Over,
}

/// A committed record, with its write and its answer. The record of a claim that was left behind
/// has no answer.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub struct Record {
    pub body: Body,
    pub answer: Option<u8>,
}

/// The data of a standby that no longer replicates.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub struct Kept {
    pub max_token: u8,
    pub record: Option<Record>,
    pub written: [u8; 2],
    pub expired: u8,
    pub newer: u8,
}

#[derive(Clone, Debug, Default, Hash, PartialEq, Eq)]
pub struct State {
    /// Whether tokens are single-use.
    pub single_use: bool,
    pub max_token: u8,
    pub record: Option<Record>,
    pub attempts: [Attempt; 4],
    /// The number of times that each write was executed. With reusable tokens, the count starts
    /// again when the record expires.
    pub written: [u8; 2],
    /// The number of writes before the record last expired.
    pub expired: u8,
    pub expiries: u8,
    /// The number of writes of the holder with the newer token.
    pub newer: u8,
    pub crashes: u8,
    pub failures: u8,
    pub failovers: u8,
    pub standby: Option<Kept>,
    /// Whether no token has been admitted on the row since a failover.
    pub is_behind: bool,
    /// The first success that was answered to each write.
    pub answers: [Option<u8>; 2],
    pub answers_differ: bool,
    /// Whether a repeated request was refused, although its write is recorded.
    pub refused_done: bool,
    /// Whether the answer to a repeated request was that another request is in progress, although
    /// that request had ended.
    pub waits_for_ended: bool,
    pub replayed_when_stale: bool,
    pub replayed_after_failover: bool,
    pub failed: bool,
}

impl State {
    pub fn count(&self) -> u8 {
        self.written.iter().sum::<u8>() + self.expired + self.newer
    }
}

#[derive(Clone, Debug)]
pub struct Keys {
    /// The maximum number of times that the write is sent.
    pub requests: usize,
    pub crashes: u8,
    pub failures: u8,
    /// The number of failovers to a standby that lacks the last transactions.
    pub failovers: u8,
    /// The maximum number of times that a record expires.
    pub expiries: u8,
    /// The maximum number of writes of the holder with the newer token.
    pub newer: u8,
    /// Whether tokens are single-use. Each entry is a separate part of the world.
    pub single_use: Vec<bool>,
    pub rules: Rules,
}

impl Keys {
    pub fn small() -> Self {
        Self {
            requests: 2,
            crashes: 1,
            failures: 1,
            failovers: 1,
            expiries: 1,
            newer: 1,
            single_use: vec![true, false],
            rules: Rules::default(),
        }
    }

    pub fn large() -> Self {
        Self {
            requests: 3,
            crashes: 2,
            failures: 2,
            ..Self::small()
        }
    }

    /// Returns one world for each kind of token.
    fn parts(self) -> Vec<Self> {
        let alone = |single_use: &bool| Self {
            single_use: vec![*single_use],
            ..self.clone()
        };
        self.single_use.iter().map(alone).collect()
    }
}

impl World for Keys {
    type Rule = Rule;
    const NAME: &'static str = "Idempotency keys";
    const RULES: &'static [Rule] = Rule::ALL;

    fn worlds() -> Vec<Self> {
        Self::small().parts()
    }

    fn large_worlds() -> Vec<Self> {
        Self::large().parts()
    }

    fn in_bounds_of(rule: Rule) -> Self {
        let mut world = Self::small();
        if rule == Rule::OneAtATime {
            world.single_use = vec![false];
            world.newer = 0;
        }
        world
    }

    fn leave_out(mut self, rule: Rule) -> Self {
        self.rules = Rules::without(rule);
        self
    }
}

impl Model for Keys {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        let state = |single_use: &bool| State {
            single_use: *single_use,
            crashes: self.crashes,
            failures: self.failures,
            failovers: self.failovers,
            ..State::default()
        };
        self.single_use.iter().map(state).collect()
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        self.possible(state, steps);
    }

    fn next_state(&self, state: &State, step: Step) -> Option<State> {
        Some(self.take(state, step))
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let (always, sometimes) = (Property::<Self>::always, Property::<Self>::sometimes);
        vec![
            always(
                "a write under a key is executed at most once",
                |_, state| state.written.iter().all(|times| *times <= 1),
            ),
            always("each reported success was committed", |_, state| {
                let mut answers = state.answers.iter().zip(&state.written);
                answers.all(|(answer, times)| answer.is_none() || *times > 0)
            }),
            always("every success returns the same answer", |_, state| {
                !state.answers_differ
            }),
            always("a recorded write is not refused", |_, state| {
                !state.refused_done
            }),
            always(
                "no client waits for a request that has ended",
                |_, state| !state.waits_for_ended,
            ),
            sometimes(
                "a repeated request with a stale token gets the stored answer",
                |_, state| state.replayed_when_stale,
            ),
            sometimes(
                "a repeated request gets the stored answer after a failover",
                |world, state| world.failovers == 0 || state.replayed_after_failover,
            ),
            sometimes("a repeated request succeeds after a failure", |_, state| {
                state.failed && state.answers[0].is_some()
            }),
        ]
    }
}
