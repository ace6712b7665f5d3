//! The history of a run: all operations with their answers, and the final contents of the tables.

use std::sync::Mutex;

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

/// The contents of a resource: the fold of the entries that were written to it, in their order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub struct State {
    pub count: i64,
    /// A digest of all entries and of their order.
    pub digest: i64,
    pub balance: i64,
}

impl State {
    /// Returns the state after another entry. `tables.rs` has the same function in SQL.
    pub const fn with(self, entry: i64, amount: i64) -> Self {
        Self {
            count: self.count + 1,
            digest: (self.digest * 1_000_003 + entry) % 2_147_483_647,
            balance: self.balance + amount,
        }
    }
}

/// A kind of operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub enum Kind {
    /// A request for a lease. Its token is in the answer.
    Grant,
    /// A write under a single-use token.
    Write { entry: i64, amount: i64 },
    /// A write under a reusable token.
    Rewrite { entry: i64, amount: i64 },
    /// A read with a token, and the state that it returned.
    Read(State),
}

/// The answer to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub enum Answer {
    Done,
    /// The token was stale. The request has had no effect, and will never have one.
    Refused,
    /// The request has had no effect for another reason. A retry may succeed.
    Undone,
    /// The request may have had its effect already, may have it later, or may never have it.
    Unknown,
}

/// A moment, in nanoseconds of a monotonic clock that all processes of the machine share.
pub type Moment = u64;

/// An operation on one resource. A request for several resources has one operation for each
/// resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct Operation {
    pub kind: Kind,
    /// The number of the resource.
    pub resource: usize,
    pub token: i64,
    /// The number of resources of the request.
    pub parts: u8,
    pub invoked: Moment,
    pub answered: Moment,
    pub answer: Answer,
}

impl Operation {
    /// Creates a request for a lease whose token is unknown.
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

    /// Returns the entry and the amount of a write.
    pub const fn written(&self) -> Option<(i64, i64)> {
        match self.kind {
            Kind::Write { entry, amount } | Kind::Rewrite { entry, amount } => {
                Some((entry, amount))
            }
            Kind::Grant | Kind::Read(_) => None,
        }
    }

    /// Returns the moment from which the operation is known to be done, or `MAX` if it is not known
    /// to be done.
    pub const fn done(&self) -> Moment {
        match self.answer {
            Answer::Done => self.answered,
            Answer::Refused | Answer::Undone | Answer::Unknown => Moment::MAX,
        }
    }
}

/// A failover to a standby. Afterwards, all earlier tokens are stale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failover {
    /// Whether the failover may have lost the most recently confirmed writes.
    pub loses: bool,
    /// All operations that were confirmed before this moment have reached the standby.
    pub from: Moment,
    /// All operations that were confirmed before this moment were confirmed by the lost server.
    pub crashed: Moment,
    /// All requests after this moment reach only the promoted server.
    pub until: Moment,
}

impl Failover {
    /// Whether the failover may have lost the effect of an operation. It loses no effect that the
    /// promoted server has confirmed.
    pub const fn concerns(&self, operation: &Operation) -> bool {
        self.loses && operation.answered >= self.from && operation.invoked <= self.crashed
    }
}

/// A line of the log. Each write adds a line in the transaction of the write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Line {
    pub resource: usize,
    pub entry: i64,
    pub token: i64,
    /// The count of the resource after the write.
    pub position: i64,
}

/// All operations of a run, and the final contents of the tables.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct History {
    pub operations: Vec<Operation>,
    pub failovers: Vec<Failover>,
    /// The log, ordered by resource and position.
    pub log: Vec<Line>,
    /// The final state of each resource.
    pub states: Vec<State>,
    /// Groups of resources whose balances have a constant sum. A group is its first resource, the
    /// resource after its last one, and the sum.
    pub sums: Vec<(usize, usize, i64)>,
}

/// Returns the current moment.
pub fn now() -> Moment {
    let now = clock_gettime(ClockId::Monotonic);
    let nanoseconds = i128::from(now.tv_sec) * 1_000_000_000 + i128::from(now.tv_nsec);
    Moment::try_from(nanoseconds).expect("the clock does not exceed some centuries")
}

/// A recorder of operations.
#[derive(Default)]
pub struct Recorder {
    operations: Mutex<Vec<Operation>>,
    /// This is set in a process that may be killed. Such a process prints each operation instead of
    /// storing it. The value is whether the side of the recorder is fenced.
    prints: Option<bool>,
}

impl Recorder {
    /// Creates a recorder that prints `[is_fenced, operation]` when an operation starts, and again
    /// when it is answered.
    pub fn printing(is_fenced: bool) -> Self {
        Self {
            prints: Some(is_fenced),
            ..Self::default()
        }
    }

    /// Records operations before their requests are sent. Only a recorder that prints needs this
    /// call. If its process is killed, the operations count as unknown.
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

    /// Takes the recorded operations.
    pub fn take(&self) -> Vec<Operation> {
        std::mem::take(&mut self.operations.lock().unwrap())
    }
}
