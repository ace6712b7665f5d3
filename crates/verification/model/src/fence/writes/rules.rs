//! The rules of the fence for a write.

use std::fmt;

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rule {
    OneTransaction,
    OneStatement,
    Newer,
    Announcement,
    FencedRead,
    ReadLocks,
    ReadCommits,
    ReadLeavesToken,
    NoticesFailover,
    NewVersion,
    NeverBack,
    OneBelow,
    RaiseAfterFailure,
    Rejected,
    GoneAway,
    CommitBeforeAnswer,
    AbortedIsFound,
    UnknownIsNoSuccess,
    Guard,
    GuardByVersion,
    MoveAfterFailover,
}

impl Rule {
    pub const ALL: &[Self] = &[
        Self::OneTransaction,
        Self::OneStatement,
        Self::Newer,
        Self::Announcement,
        Self::FencedRead,
        Self::ReadLocks,
        Self::ReadCommits,
        Self::ReadLeavesToken,
        Self::NoticesFailover,
        Self::NewVersion,
        Self::NeverBack,
        Self::OneBelow,
        Self::RaiseAfterFailure,
        Self::Rejected,
        Self::GoneAway,
        Self::CommitBeforeAnswer,
        Self::AbortedIsFound,
        Self::UnknownIsNoSuccess,
        Self::Guard,
        Self::GuardByVersion,
        Self::MoveAfterFailover,
    ];
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::OneTransaction => "the check and the write are in one transaction",
            Self::OneStatement => {
                "one statement compares a token with `max_token` and updates `max_token`"
            }
            Self::Newer => "an admitted token is above `max_token`, not equal to it",
            Self::Announcement => "a grant is announced before it is answered",
            Self::FencedRead => "a read is fenced like a write",
            Self::ReadLocks => "a fenced read locks the row from its admission to its COMMIT",
            Self::ReadCommits => "a fenced read is answered after its COMMIT",
            Self::ReadLeavesToken => "a fenced read leaves its own token valid",
            Self::NoticesFailover => "an admission detects a failover",
            Self::NewVersion => {
                "a write creates a new version of the row even if `max_token` stays the same"
            }
            Self::NeverBack => "a raise never lowers `max_token`",
            Self::OneBelow => "a raise leaves its own token valid",
            Self::RaiseAfterFailure => {
                "after a handler has failed, the fence is raised before the answer"
            }
            Self::Rejected => "a rejected request does not raise the fence",
            Self::GoneAway => "a client that disconnects leaves no open transaction",
            Self::CommitBeforeAnswer => "a success is reported only after its COMMIT",
            Self::AbortedIsFound => "an aborted transaction is not reported as a success",
            Self::UnknownIsNoSuccess => "an unconfirmed COMMIT is not reported as a success",
            Self::Guard => {
                "a single statement checks that the row has not changed since its snapshot"
            }
            Self::GuardByVersion => {
                "a single statement compares the version of the row, not `max_token`"
            }
            Self::MoveAfterFailover => "after a failover, all earlier tokens are stale",
        })
    }
}
