//! The promises, the rules, and the bounds in which each rule is needed.

use std::fmt;

use super::{Bounds, Loss};

#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub enum Promise {
    NoLostUpdate,
    OlderIsStale,
    Distinct,
    Later,
    Stands,
    OwnCounter,
}

impl Promise {
    pub const ALL: [Self; 6] = [
        Self::NoLostUpdate,
        Self::OlderIsStale,
        Self::Distinct,
        Self::Later,
        Self::Stands,
        Self::OwnCounter,
    ];

    pub const fn text(self) -> &'static str {
        match self {
            Self::NoLostUpdate => "no write overwrites an update that its holder has not read",
            Self::OlderIsStale => "after an answer under a token, older tokens are stale",
            Self::Distinct => "no two leases have the same token",
            Self::Later => "a later grant has a higher token",
            Self::Stands => "without a fault, the holder of a valid lease is not refused",
            Self::OwnCounter => "no forged token changes a token counter",
        }
    }
}

#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub enum Rule {
    Announce,
    Raise,
    OnDisk,
    Highest,
    WhoseLease,
    Repeats,
    Lift,
    OfTheStore,
    LiftCompares,
    CounterStays,
    NoneBetween,
    Ends,
    NewToken,
    OfOthers,
    MoveUp,
}

impl Rule {
    pub const ALL: &[Self] = &[
        Self::Announce,
        Self::Raise,
        Self::OnDisk,
        Self::Highest,
        Self::WhoseLease,
        Self::Repeats,
        Self::Lift,
        Self::OfTheStore,
        Self::LiftCompares,
        Self::CounterStays,
        Self::NoneBetween,
        Self::Ends,
        Self::NewToken,
        Self::OfOthers,
        Self::MoveUp,
    ];

    /// Returns the smallest bounds in which a promise breaks without the rule.
    pub fn bounds(self) -> Bounds {
        let two = Bounds {
            holders: 2,
            ..Bounds::default()
        };
        let alone = Bounds { issuers: 1, ..two };
        let losing = |losses| Bounds {
            most: 1,
            losses,
            ..two
        };
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

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Announce => "a grant is announced before it is answered",
            Self::Raise => "an announcement makes older tokens stale",
            Self::OnDisk => "an announcement is on disk before the answer",
            Self::Highest => "the row stores the highest announced token",
            Self::WhoseLease => "the row stores the lease of the announced token",
            Self::Repeats => "the last announcement may be repeated",
            Self::Lift => "a superseded grant gets a higher token",
            Self::OfTheStore => "the store, not the announcement, assigns the higher token",
            Self::LiftCompares => "only a lease that is still held gets the higher token",
            Self::CounterStays => "the higher token does not change the token counter",
            Self::NoneBetween => {
                "another lease or a foreign token supersedes a renewal, even below its new token"
            }
            Self::Ends => "a token above the announced one ends the announcement",
            Self::NewToken => "a renewal with a new token is announced",
            Self::OfOthers => "a renewal announces a token that another process has assigned",
            Self::MoveUp => "after a change of the timeline, all earlier tokens are stale",
        })
    }
}

/// The rules in effect: all, or all but one.
#[derive(Clone, Copy, Debug, Default)]
pub struct Rules {
    pub without: Option<Rule>,
}

impl Rules {
    pub fn follows(self, rule: Rule) -> bool {
        self.without != Some(rule)
    }
}
