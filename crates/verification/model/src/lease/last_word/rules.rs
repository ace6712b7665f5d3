//! The promises, the rules, and the bounds in which each rule is missed.

use std::fmt;

use super::{Bounds, Loss};

#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub enum Promise {
    NoLostUpdate,
    OlderIsDead,
    Distinct,
    Later,
    Stands,
    OwnClock,
}

impl Promise {
    pub const ALL: [Self; 6] = [
        Self::NoLostUpdate,
        Self::OlderIsDead,
        Self::Distinct,
        Self::Later,
        Self::Stands,
        Self::OwnClock,
    ];

    pub const fn text(self) -> &'static str {
        match self {
            Self::NoLostUpdate => "no update is lost that follows a grant's read",
            Self::OlderIsDead => "once answered, older is dead",
            Self::Distinct => "two leases never have one token",
            Self::Later => "a later grant has a higher token",
            Self::Stands => "a holder whose lease stands is not refused without a fault",
            Self::OwnClock => "no token from elsewhere moves a clock",
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
    ClockStays,
    RenewalIsLost,
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
        Self::ClockStays,
        Self::RenewalIsLost,
        Self::NewToken,
        Self::OfOthers,
        Self::MoveUp,
    ];

    /// The smallest bounds in which it is missed.
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
            Self::ClockStays => Bounds {
                forged: 1,
                holders: 1,
                ..alone
            },
            Self::RenewalIsLost => Bounds {
                forged: 1,
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
            Self::Raise => "an announcement makes older tokens dead",
            Self::OnDisk => "an announcement is on the disk before the answer",
            Self::Highest => "the row keeps the highest token that was announced",
            Self::WhoseLease => "the row keeps whose lease that was",
            Self::Repeats => "the last announcement may be repeated",
            Self::Lift => "an outranked grant gets a higher token",
            Self::OfTheStore => "the store gives the higher token, not the announcement",
            Self::LiftCompares => "only a lease that still stands gets it",
            Self::ClockStays => "the clock does not follow it",
            Self::RenewalIsLost => "an outranked renewal is lost",
            Self::NewToken => "a renewal with a new token is announced",
            Self::OfOthers => "a renewal announces what another process took",
            Self::MoveUp => "all are dead when the database changed its timeline",
        })
    }
}

/// Which rules are followed: all, but for one.
#[derive(Clone, Copy, Debug, Default)]
pub struct Rules {
    pub without: Option<Rule>,
}

impl Rules {
    pub fn follows(self, rule: Rule) -> bool {
        self.without != Some(rule)
    }
}
