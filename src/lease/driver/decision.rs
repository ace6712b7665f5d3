//! Decides what a pending request does after a reply of the store. The decision has no side
//! effects.

use crate::lease::{LeaseError, backend::Reply};

/// Where a request waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// The request does not wait yet.
    New,
    /// The request waits in this process.
    Waiting,
    /// The request waits in this process, which receives no notification of the request's turn.
    Unnotified,
    /// The request waits in this process and in the store's queue.
    Queued,
}

/// What a request does after a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Return the lease or an error. The store may hold a lease or a position for the request only
    /// if `may_have_traces` is set.
    Return { may_have_traces: bool },
    /// Join the waiting requests of this process, and retry.
    Join,
    /// Pause, and repeat the step, which conflicted with another one.
    Repeat,
    /// Wait in the store's queue. `was_lost` is set if the request was already in the queue, so the
    /// store has skipped it or lost the queue.
    Queue { was_lost: bool },
    /// Wait while the first waiting request of this process polls, because the store has no queue.
    PollFirst,
    /// Poll, because without notifications every waiting request polls, not only the first.
    PollEach,
    /// Wait, and poll again later, because the store is unavailable.
    PollLater,
}

/// Returns what the request does. `is_late` means that its wait is over, and `chosen_id` that the
/// caller has chosen the lease id.
pub(super) fn decide(
    reply: &Result<Reply, LeaseError>,
    is_late: bool,
    stage: Stage,
    chosen_id: bool,
) -> Next {
    let may_have_traces = match (reply, is_late, stage) {
        // In the store, another request now has the position of a displaced request.
        (Ok(Reply::Granted(_) | Reply::Displaced), ..) => false,
        (Ok(Reply::Again), ..) => return Next::Repeat,
        // A request that waits may still have a position.
        (Ok(Reply::Exhausted(_)), _, stage) => stage != Stage::New,
        // The store holds nothing for this request.
        (Ok(Reply::Held { .. }), true, _) => false,
        (Ok(Reply::Queued { .. }), true, _) => true,
        (Ok(Reply::Held { .. } | Reply::Queued { .. }), _, Stage::New) => return Next::Join,
        (Ok(Reply::Held { .. }), _, Stage::Unnotified) => return Next::PollEach,
        (Ok(Reply::Held { .. }), ..) => return Next::PollFirst,
        (Ok(Reply::Queued { joined, .. }), ..) => {
            let was_lost = *joined && stage == Stage::Queued;
            return Next::Queue { was_lost };
        }
        // The lease may have been granted. It is kept, because the caller may retry.
        (Err(_), _, Stage::New) => !chosen_id,
        (Err(LeaseError::Unavailable(_)), false, _) => return Next::PollLater,
        _ => true,
    };
    Next::Return { may_have_traces }
}

#[cfg(test)]
mod tests {
    use std::{fmt, time::Duration};

    use super::*;
    use crate::{lease::backend::Granted, token::Token};

    /// Tests each reply at each stage.
    #[test]
    fn every_combination() {
        use Next::{Join, PollEach as Each, PollFirst as First, PollLater as Later, Repeat};
        let [kept, undone] = [false, true].map(|may_have_traces| Next::Return { may_have_traces });
        let [wait, lost] = [false, true].map(|was_lost| Next::Queue { was_lost });
        let left = Duration::from_secs(1);
        let granted = Reply::Granted(Granted::new(Token::MAX, left));
        let held = || Ok(Reply::Held { left });
        let queued = |joined| Ok(Reply::Queued { left, joined });
        let unavailable = || Err(LeaseError::unavailable(fmt::Error));
        let misconfigured = Err(LeaseError::misconfigured(fmt::Error));
        let any = &[false, true][..];
        let (early, late) = any.split_at(1);
        // The reply, whether the wait is over, and what follows at each stage. In the rows of
        // errors, the caller has chosen the lease id.
        let stages = [Stage::New, Stage::Waiting, Stage::Unnotified, Stage::Queued];
        let unless_new = [kept, undone, undone, undone];
        let table = [
            (Ok(granted), any, [kept; 4]),
            (Ok(Reply::Displaced), any, [kept; 4]),
            (Ok(Reply::Again), any, [Repeat; 4]),
            (Ok(Reply::Exhausted(1)), any, unless_new),
            (held(), early, [Join, First, Each, First]),
            (held(), late, [kept; 4]),
            (queued(false), early, [Join, wait, wait, wait]),
            (queued(true), early, [Join, wait, wait, lost]),
            (queued(true), late, [undone; 4]),
            (Ok(Reply::Lost), any, [undone; 4]),
            (unavailable(), early, [kept, Later, Later, Later]),
            (unavailable(), late, unless_new),
            (misconfigured, any, unless_new),
        ];
        for (reply, times, row) in &table {
            for is_late in *times {
                for (stage, expected) in stages.iter().zip(row) {
                    let what = format!("{reply:?}, {is_late}, {stage:?}");
                    assert_eq!(decide(reply, *is_late, *stage, true), *expected, "{what}");
                    let expected = match reply {
                        Err(_) if *expected == kept => undone,
                        _ => *expected,
                    };
                    assert_eq!(decide(reply, *is_late, *stage, false), expected, "{what}");
                }
            }
        }
    }
}
