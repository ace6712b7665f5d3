//! What was asked, what was answered, and what is there in the end.

use std::sync::Mutex;

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

/// What a resource holds: the fold of the entries that were written to it, in their order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub struct State {
    pub count: i64,
    /// Of all entries and of their order.
    pub digest: i64,
    pub balance: i64,
}

impl State {
    /// What comes next. `tables.rs` has the same in SQL.
    pub const fn with(self, entry: i64, amount: i64) -> Self {
        Self {
            count: self.count + 1,
            digest: (self.digest * 1_000_003 + entry) % 2_147_483_647,
            balance: self.balance + amount,
        }
    }
}

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub enum Kind {
    /// A lease; its token is in the answer.
    Grant,
    /// A write under a token that writes once.
    Write { entry: i64, amount: i64 },
    /// A write under a token that may write again.
    Rewrite { entry: i64, amount: i64 },
    /// A read with a token, and what it saw.
    Read(State),
}

/// How a request was answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub enum Answer {
    Done,
    /// Its token is outranked: it has changed nothing, and will not.
    Refused,
    /// It has changed nothing, for another reason, and may be tried again.
    Undone,
    /// It may have been done, or may yet be.
    Unknown,
}

/// A moment, in nanoseconds by a clock that all processes of a machine share.
pub type Moment = u64;

/// One request that concerns one resource. One that concerns several is one operation for each of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct Operation {
    pub kind: Kind,
    /// Its number.
    pub resource: usize,
    pub token: i64,
    /// How many resources its request has concerned.
    pub parts: u8,
    pub invoked: Moment,
    pub answered: Moment,
    pub answer: Answer,
}

impl Operation {
    /// A lease that was asked for, and of which no token is known.
    pub const fn grant(resource: usize, invoked: Moment, answer: Answer) -> Self {
        Self {
            kind: Kind::Grant,
            resource,
            token: 0,
            parts: 1,
            invoked,
            answered: invoked,
            answer,
        }
    }

    /// What it writes: an entry, and an amount.
    pub const fn written(&self) -> Option<(i64, i64)> {
        match self.kind {
            Kind::Write { entry, amount } | Kind::Rewrite { entry, amount } => {
                Some((entry, amount))
            }
            Kind::Grant | Kind::Read(_) => None,
        }
    }

    /// From when on it is known to be done.
    pub const fn done(&self) -> Moment {
        match self.answer {
            Answer::Done => self.answered,
            Answer::Refused | Answer::Undone | Answer::Unknown => Moment::MAX,
        }
    }
}

/// A standby has taken the place of its server. Tokens from before are dead afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failover {
    /// Whether it may have lost what was confirmed last.
    pub loses: bool,
    /// What was confirmed before this has reached the standby.
    pub from: Moment,
    /// What was confirmed before this was so by the server that is lost.
    pub crashed: Moment,
    /// What is asked for after this is asked of the promoted server alone.
    pub until: Moment,
}

impl Failover {
    /// Whether an operation may be in the part that is lost: what the promoted server has confirmed is not.
    pub const fn concerns(&self, operation: &Operation) -> bool {
        self.loses && operation.answered >= self.from && operation.invoked <= self.crashed
    }
}

/// One line of the log that each write adds a line to, in its own transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Line {
    pub resource: usize,
    pub entry: i64,
    pub token: i64,
    /// The count of the state that it made.
    pub position: i64,
}

/// All that was done, and all that is there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct History {
    pub operations: Vec<Operation>,
    pub failovers: Vec<Failover>,
    /// The log, ordered by resource and position.
    pub log: Vec<Line>,
    /// Of each resource.
    pub states: Vec<State>,
    /// Groups of resources whose balances have one sum: the first one and the one behind the last, and the sum.
    pub sums: Vec<(usize, usize, i64)>,
}

/// This moment.
pub fn now() -> Moment {
    let now = clock_gettime(ClockId::Monotonic);
    let nanoseconds = i128::from(now.tv_sec) * 1_000_000_000 + i128::from(now.tv_nsec);
    Moment::try_from(nanoseconds).expect("some centuries")
}

/// Writes down what is done while it is done.
#[derive(Default)]
pub struct Recorder {
    operations: Mutex<Vec<Operation>>,
    /// For a process that may be killed, which keeps nothing: what it prints, of this side.
    prints: Option<bool>,
}

impl Recorder {
    /// One that prints `[is_fenced, operation]`, and an operation again when it is answered.
    pub fn printing(is_fenced: bool) -> Self {
        Self {
            prints: Some(is_fenced),
            ..Self::default()
        }
    }

    /// Where nothing is kept, what is about to be asked for has to be known.
    pub fn asks(&self, operations: impl IntoIterator<Item = Operation>) {
        if self.prints.is_some() {
            self.record(operations);
        }
    }

    pub fn record(&self, operations: impl IntoIterator<Item = Operation>) {
        let Some(is_fenced) = self.prints else {
            self.operations.lock().unwrap().extend(operations);
            return;
        };
        for operation in operations {
            println!("{}", serde_json::json!((is_fenced, operation)));
        }
    }

    /// What was written down by now.
    pub fn take(&self) -> Vec<Operation> {
        std::mem::take(&mut self.operations.lock().unwrap())
    }
}
