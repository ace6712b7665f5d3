//! The promises, the rules, and the bounds in which each rule is needed.

use super::{
    Bounds, LastWord, Loss,
    bounds::{losing, two},
};
use crate::search::{self, promises, rules};

promises! {
    LastWord, |state| state.past.broken,
    NoLostUpdate: "no write overwrites an update that its holder has not read",
    OlderIsStale: "after an answer under a token, older tokens are stale",
    Distinct: "no two leases have the same token",
    Later: "a later grant has a higher token",
    Stands: "without a fault, the holder of a valid lease is not refused",
    OwnCounter: "no forged token changes a token counter",
}

rules! {
    Announce: "a grant is announced before it is answered",
    Raise: "an announcement makes older tokens stale",
    OnDisk: "an announcement is on disk before the answer",
    Highest: "the row stores the highest announced token",
    WhoseLease: "the row stores the lease of the announced token",
    Repeats: "the last announcement may be repeated",
    Lift: "a superseded grant gets a higher token",
    OfTheStore: "the store, not the announcement, assigns the higher token",
    LiftCompares: "only a lease that is still held gets the higher token",
    CounterStays: "the higher token does not change the token counter",
    NoneBetween: "another lease or a foreign token supersedes a renewal, even below its new token",
    Ends: "a token above the announced one ends the announcement",
    NewToken: "a renewal with a new token is announced",
    OfOthers: "a renewal announces a token that another process has assigned",
    MoveUp: "after a change of the timeline, all earlier tokens are stale",
}

impl Rule {
    /// Returns the smallest bounds in which a promise breaks without the rule.
    pub fn bounds(self) -> Bounds {
        let two = two();
        let alone = Bounds { issuers: 1, ..two };
        match self {
            Self::Announce | Self::Raise => alone,
            Self::OnDisk => losing(&[Loss::DatabaseCrashes]),
            Self::Highest | Self::WhoseLease => losing(&[Loss::KeysAreCopiedBack]),
            Self::Repeats => Bounds {
                holders: 1,
                renewals: true,
                ..two
            },
            Self::Lift => Bounds { forged: 1, ..alone },
            Self::OfTheStore => alone,
            Self::LiftCompares => alone,
            Self::CounterStays => Bounds {
                forged: 1,
                holders: 1,
                ..alone
            },
            Self::NoneBetween => Bounds {
                forged: 1,
                neighbours: 2,
                new_tokens: 1,
                holders: 1,
                ..alone
            },
            Self::Ends => Bounds {
                forged: 1,
                next_is_forged: true,
                new_tokens: 1,
                holders: 1,
                ..alone
            },
            Self::NewToken => Bounds {
                holders: 1,
                new_tokens: 1,
                delayed: 1,
                ..alone
            },
            Self::OfOthers => Bounds {
                holders: 1,
                renewals: true,
                abandoned: 1,
                new_tokens: 1,
                delayed: 1,
                ..two
            },
            Self::MoveUp => losing(&[Loss::StandbyIsPromoted]),
        }
    }
}

pub type Rules = search::Rules<Rule>;
