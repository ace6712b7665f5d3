//! If an operation was answered before another one was sent, the earlier operation has the lower
//! token. If the token is reusable, both may have the same token. After a failover, no token that
//! was granted before the failover is admitted.

use super::{Kinds, Resource, Verdict};
use crate::history::{Answer, History, Kind, Moment, Operation};

pub fn check(history: &History, resources: &[Resource<'_>], verdict: &mut Verdict) {
    for resource in resources {
        let writes = &resource.folds.writes;
        in_time(history, &resource.operations, writes, verdict);
        grants(&resource.operations, verdict);
        log(writes, verdict);
    }
}

/// The stale tokens of a resource at some moment.
#[derive(Default)]
struct Stale {
    /// All tokens below this token are stale.
    below: i64,
    /// This token and all lower tokens are stale.
    up_to: i64,
    /// The highest granted token.
    granted: i64,
}

impl Stale {
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

fn in_time(
    history: &History,
    operations: &[&Operation],
    writes: &[Option<&Operation>],
    verdict: &mut Verdict,
) {
    let there: std::collections::HashSet<_> = writes
        .iter()
        .flatten()
        .filter_map(|write| write.written())
        .collect();
    let is_admitted = |operation: &Operation| match operation.answer {
        Answer::Done => true,
        // A write that is in the log took effect after it was sent, even if it was not answered.
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
    let outlived = history.failovers.iter().map(|failover| {
        let before = answered.partition_point(|one| one.answered < failover.from);
        let highest = answered[..before].iter().map(|one| one.token).max();
        (failover.until, highest.unwrap_or(0))
    });
    let outlived: Vec<_> = outlived.collect();
    let mut answered = answered.into_iter().peekable();
    let mut stale = Stale::default();
    for operation in operations {
        while let Some(one) = answered.next_if(|one| one.answered < operation.invoked) {
            stale.answered(one);
        }
        if is_admitted(operation) && !stale.admits(operation) {
            let Stale {
                below,
                up_to,
                granted,
            } = stale;
            verdict.violated(Kinds::Order, || {
                format!("below {below}, up to {up_to}, granted {granted}: {operation:?}")
            });
        }
        let is_from_before = |(until, highest): &&(Moment, i64)| {
            operation.invoked > *until && operation.token <= *highest
        };
        if is_admitted(operation)
            && let Some((until, _)) = outlived.iter().find(is_from_before)
        {
            verdict.violated(Kinds::Order, || {
                format!("from before a failover until {until}: {operation:?}")
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

/// Checks that, if a write was answered before another one was sent, the log has them in this
/// order.
fn log(writes: &[Option<&Operation>], verdict: &mut Verdict) {
    let mut first_done = u64::MAX;
    for write in writes.iter().rev().flatten() {
        if first_done < write.invoked {
            verdict.violated(Kinds::Disorder, || format!("{write:?} came later"));
        }
        first_done = first_done.min(write.done());
    }
}
