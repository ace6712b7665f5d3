//! A search for an order of effects of a few operations on one resource, against a sequential
//! specification.

use stateright::semantics::{ConsistencyTester, LinearizabilityTester, SequentialSpec};

use crate::history::{Answer, History, Kind, Operation, State};

/// The specification of one resource behind a fence. All tokens up to `highest_stale` are stale.
#[derive(Clone, Debug, Default)]
struct Fenced {
    highest_stale: i64,
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
    /// Reads all entries at the end.
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
            Op::Write { token, .. } | Op::Read { token } if token <= self.highest_stale => {
                Ret::Refused
            }
            Op::Write {
                token,
                entry,
                amount,
                reusable,
            } => {
                self.highest_stale = token - i64::from(reusable);
                self.state = self.state.with(entry, amount);
                self.entries.push(entry);
                Ret::Written
            }
            Op::Read { token } => {
                self.highest_stale = self.highest_stale.max(token - 1);
                Ret::Read(self.state)
            }
            Op::Audit => Ret::Audited(self.entries.clone()),
        }
    }
}

/// The operations of a window, and the state from which they start.
pub struct Window<'a> {
    /// This token and all lower tokens are stale before the window.
    pub highest_stale: i64,
    pub state: State,
    pub operations: Vec<&'a Operation>,
    /// The entries of the writes, in the order of the log.
    pub entries: Vec<i64>,
}

impl<'a> Window<'a> {
    /// Returns a window that contains the whole history of one resource.
    pub fn whole(history: &'a History) -> Self {
        Self {
            highest_stale: 0,
            state: State::default(),
            operations: history.operations.iter().collect(),
            entries: history.log.iter().map(|line| line.entry).collect(),
        }
    }

    /// Whether an order of effects explains all answers and the entries in the log.
    pub fn has_an_order(&self) -> bool {
        let mut events = vec![];
        for (n, operation) in self.operations.iter().enumerate() {
            events.push((operation.invoked, 0, n));
            if operation.answer == Answer::Done {
                // If an operation is answered at the same moment at which another one is sent, they
                // are concurrent.
                events.push((operation.answered, 1, n));
            }
        }
        events.sort_unstable();
        let mut tester = LinearizabilityTester::new(Fenced {
            highest_stale: self.highest_stale,
            state: self.state,
            entries: vec![],
        });
        for (_, event, n) in events {
            let (op, ret) = asked(self.operations[n]);
            // Each operation has its own thread id, because the tester allows one open operation
            // per thread.
            let noted = match event {
                0 => tester.on_invoke(n, op),
                _ => tester.on_return(n, ret),
            };
            noted.unwrap();
        }
        let last = self.operations.len();
        tester
            .on_invret(last, Op::Audit, Ret::Audited(self.entries.clone()))
            .unwrap();
        tester.is_consistent()
    }
}

/// Returns the operation of the specification, and its expected result.
fn asked(operation: &Operation) -> (Op, Ret) {
    let token = operation.token;
    let write = |(entry, amount), reusable| Op::Write {
        token,
        entry,
        amount,
        reusable,
    };
    match operation.kind {
        Kind::Write { entry, amount } => (write((entry, amount), false), Ret::Written),
        Kind::Rewrite { entry, amount } => (write((entry, amount), true), Ret::Written),
        Kind::Read(seen) => (Op::Read { token }, Ret::Read(seen)),
        Kind::Grant => unreachable!("a window contains no grants"),
    }
}
