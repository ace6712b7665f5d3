//! What was answered before another was asked for has the lower token; the same one only where it may be used again.

use super::{Kinds, Sorted, Verdict};
use crate::history::{Answer, History, Kind, Operation};

pub fn check(_: &History, sorted: &Sorted<'_>, verdict: &mut Verdict) {
    for (operations, (_, writes)) in sorted.operations.iter().zip(&sorted.logs) {
        in_time(operations, writes, verdict);
        grants(operations, verdict);
        log(writes, verdict);
    }
}

/// What is dead by now.
#[derive(Default)]
struct Dead {
    /// Every token below this one.
    below: i64,
    /// This one and every token below.
    up_to: i64,
    /// The highest that was granted.
    granted: i64,
}

impl Dead {
    fn answered(&mut self, operation: &Operation) {
        let token = operation.token;
        match operation.kind {
            Kind::Grant => {
                self.granted = self.granted.max(token);
                self.below = self.below.max(token);
            }
            Kind::Write { .. } => self.up_to = self.up_to.max(token),
            Kind::Rewrite { .. } | Kind::Read(_) => self.below = self.below.max(token),
        }
    }

    fn admits(&self, operation: &Operation) -> bool {
        let token = operation.token;
        let is_new = operation.kind != Kind::Grant || token > self.granted;
        token >= self.below && token > self.up_to && is_new
    }
}

fn in_time(operations: &[&Operation], writes: &[Option<&Operation>], verdict: &mut Verdict) {
    let there: std::collections::HashSet<_> = writes
        .iter()
        .flatten()
        .filter_map(|write| write.written())
        .collect();
    let is_admitted = |operation: &Operation| match operation.answer {
        Answer::Done => true,
        // It has had its effect at some time after it was asked for.
        Answer::Unknown => operation
            .written()
            .is_some_and(|written| there.contains(&written)),
        Answer::Refused | Answer::Undone => false,
    };
    let mut answered: Vec<_> = operations
        .iter()
        .filter(|operation| operation.answer == Answer::Done)
        .collect();
    answered.sort_by_key(|operation| operation.answered);
    let mut answered = answered.into_iter().peekable();
    let mut dead = Dead::default();
    for operation in operations {
        while let Some(one) = answered.next_if(|one| one.answered < operation.invoked) {
            dead.answered(one);
        }
        if is_admitted(operation) && !dead.admits(operation) {
            let Dead {
                below,
                up_to,
                granted,
            } = dead;
            verdict.violated(Kinds::Order, || {
                format!("below {below}, up to {up_to}, granted {granted}: {operation:?}")
            });
        }
    }
}

fn grants(operations: &[&Operation], verdict: &mut Verdict) {
    let granted =
        |operation: &&&Operation| operation.kind == Kind::Grant && operation.answer == Answer::Done;
    let mut grants: Vec<_> = operations.iter().filter(granted).collect();
    grants.sort_by_key(|operation| operation.token);
    for pair in grants.windows(2) {
        if pair[0].token == pair[1].token {
            verdict.violated(Kinds::Repeated, || format!("{pair:?}"));
        }
    }
}

/// Nothing stands in the log before what was answered before it was asked for.
fn log(writes: &[Option<&Operation>], verdict: &mut Verdict) {
    let mut first_done = u64::MAX;
    for write in writes.iter().rev().flatten() {
        if first_done < write.invoked {
            verdict.violated(Kinds::Disorder, || format!("{write:?} came later"));
        }
        first_done = first_done.min(write.done());
    }
}
