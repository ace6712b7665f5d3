//! The rules of the fence that a write meets.

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
    TurnedAway,
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
        Self::TurnedAway,
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
            Self::OneTransaction => "check and write are one transaction",
            Self::OneStatement => "a token is compared and `max_token` moved in one statement",
            Self::Newer => "a token is above `max_token`, not equal to it",
            Self::Announcement => "a grant is announced before it is answered",
            Self::FencedRead => "a read is fenced, as a write is",
            Self::ReadLocks => "a fenced read locks the row from its admission until its COMMIT",
            Self::ReadCommits => "a fenced read is answered after its COMMIT",
            Self::ReadLeavesToken => "a fenced read leaves its own token valid",
            Self::NoticesFailover => "an admission notices a failover",
            Self::NewVersion => {
                "a write that leaves `max_token` as it was makes a new version of the row"
            }
            Self::NeverBack => "a raise never takes `max_token` back",
            Self::OneBelow => "a raise leaves its own token alive",
            Self::RaiseAfterFailure => "a failed handler's fence is raised before the answer",
            Self::TurnedAway => "who is turned away raises nothing",
            Self::GoneAway => "who goes away leaves no open transaction",
            Self::CommitBeforeAnswer => "a success is answered after its COMMIT",
            Self::AbortedIsFound => "a transaction that was aborted is no success",
            Self::UnknownIsNoSuccess => "a COMMIT that nobody confirmed is no success",
            Self::Guard => "a single statement looks whether the row is the one of its snapshot",
            Self::GuardByVersion => "it compares the row's version, not its `max_token`",
            Self::MoveAfterFailover => "after a failover all tokens that may be lost are dead",
        })
    }
}
