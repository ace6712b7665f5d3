//! The rules of the fence for a write.

use crate::search::rules;

rules! {
    OneTransaction: "the check and the write are in one transaction",
    OneStatement: "one statement compares a token with `max_token` and updates `max_token`",
    Newer: "an admitted token is above `max_token`, not equal to it",
    Announcement: "a grant is announced before it is answered",
    FencedRead: "a read is fenced like a write",
    ReadLocks: "a fenced read locks the row from its admission to its COMMIT",
    ReadCommits: "a fenced read is answered after its COMMIT",
    ReadLeavesToken: "a fenced read leaves its own token valid",
    NoticesFailover: "an admission detects a failover",
    NewVersion: "a write creates a new version of the row even if `max_token` stays the same",
    NeverBack: "a raise never lowers `max_token`",
    OneBelow: "a raise leaves its own token valid",
    RaiseAfterFailure: "after a handler has failed, the fence is raised before the answer",
    Rejected: "a rejected request does not raise the fence",
    GoneAway: "a client that disconnects leaves no open transaction",
    CommitBeforeAnswer: "a success is reported only after its COMMIT",
    AbortedIsFound: "an aborted transaction is not reported as a success",
    UnknownIsNoSuccess: "an unconfirmed COMMIT is not reported as a success",
    Guard: "a single statement checks that the row has not changed since its snapshot",
    GuardByVersion: "a single statement compares the version of the row, not `max_token`",
    MoveAfterFailover: "after a failover, all earlier tokens are stale",
}
