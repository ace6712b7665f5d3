//! The promises, the rules, and the bounds in which each rule is missed.

use std::fmt;

use super::{Bounds, Loss};

#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub enum Promise {
    Distinct,
    Later,
    Outranked,
    StaysDead,
    Stands,
    OwnEpochs,
}

impl Promise {
    pub const ALL: [Self; 6] = [
        Self::Distinct,
        Self::Later,
        Self::Outranked,
        Self::StaysDead,
        Self::Stands,
        Self::OwnEpochs,
    ];

    pub const fn text(self) -> &'static str {
        match self {
            Self::Distinct => "two leases never have one token",
            Self::Later => "a later grant has a higher token",
            Self::Outranked => "a deposed master grants nothing above the new one",
            Self::StaysDead => "a lease that was succeeded stays dead",
            Self::Stands => "a lease ends by its time, its holder or a loss alone",
            Self::OwnEpochs => "who grants counts in epochs of its own database",
        }
    }
}

#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub enum Rule {
    Epoch,
    History,
    Incarnation,
    AboveTheClock,
    NotAhead,
    EndOfNumbers,
    Durable,
    BroughtBack,
    Again,
    MoveUp,
    Memory,
    FindMaster,
    BeginsAbove,
    AboveTheMemory,
    LeaseOfAClock,
    LeaseOfTheEpoch,
    Source,
    RenewCompares,
    ReleaseCompares,
    LeaseOfANumber,
    HistoryOfBlank,
}

impl Rule {
    pub const ALL: &[Self] = &[
        Self::Epoch,
        Self::History,
        Self::Incarnation,
        Self::AboveTheClock,
        Self::NotAhead,
        Self::EndOfNumbers,
        Self::Durable,
        Self::BroughtBack,
        Self::Again,
        Self::MoveUp,
        Self::Memory,
        Self::FindMaster,
        Self::BeginsAbove,
        Self::LeaseOfAClock,
        Self::LeaseOfTheEpoch,
        Self::Source,
        Self::RenewCompares,
        Self::ReleaseCompares,
    ];

    /// What breaks nothing when it alone is left out: other rules stand before it.
    pub const SPARE: [Self; 3] = [
        Self::LeaseOfANumber,
        Self::HistoryOfBlank,
        Self::AboveTheMemory,
    ];

    /// The smallest bounds in which it is missed, or might be.
    pub fn bounds(self) -> Bounds {
        let two = Bounds {
            holders: 2,
            ..Bounds::default()
        };
        let losing = |most, losses| Bounds {
            most,
            losses,
            ..two
        };
        let alone = |bounds| Bounds {
            issuers: 1,
            ..bounds
        };
        let flushed = |most| losing(most, &[Loss::RedisIsFlushed]);
        match self {
            Self::Epoch => flushed(1),
            Self::History | Self::HistoryOfBlank => losing(1, &[Loss::RedisRestartsFromAnOldFile]),
            Self::Incarnation => Bounds {
                abandoned: 1,
                ..flushed(1)
            },
            Self::AboveTheClock => Bounds {
                abandoned: 1,
                numbers: 2,
                ..two
            },
            Self::NotAhead => Bounds {
                holders: 3,
                ..flushed(1)
            },
            Self::EndOfNumbers => Bounds {
                new_tokens: 2,
                numbers: 2,
                ..alone(flushed(1))
            },
            Self::Durable => losing(2, &[Loss::DatabaseCrashes, Loss::RedisIsFlushed]),
            Self::BroughtBack | Self::Again => {
                losing(2, &[Loss::StandbyIsPromoted, Loss::RedisIsFlushed])
            }
            Self::MoveUp => Bounds {
                notices: true,
                ..losing(2, &[Loss::StandbyIsPromoted, Loss::RedisIsFlushed])
            },
            Self::Memory | Self::BeginsAbove => alone(losing(1, &[Loss::KeysAreCopiedBack])),
            Self::AboveTheMemory => alone(losing(
                2,
                &[Loss::StandbyIsPromoted, Loss::KeysAreCopiedBack],
            )),
            Self::FindMaster => Bounds {
                holders: 3,
                ..alone(losing(1, &[Loss::ReplicaIsPromoted]))
            },
            Self::LeaseOfAClock | Self::LeaseOfANumber => Bounds {
                renewals: true,
                ..losing(1, &[Loss::RedisRestartsFromAnOldFile])
            },
            Self::LeaseOfTheEpoch => Bounds {
                holders: 3,
                apart: true,
                renewals: true,
                ..alone(losing(1, &[Loss::RedisRestartsFromAnOldFile]))
            },
            Self::Source => Bounds {
                applications: 2,
                ..two
            },
            Self::RenewCompares => Bounds {
                renewals: true,
                ..two
            },
            Self::ReleaseCompares => Bounds {
                renewals: true,
                releases: true,
                ..two
            },
        }
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Epoch => "the epoch in a token",
            Self::History => "a clock counts in its own history only",
            Self::Incarnation => "an epoch begins only on the incarnation that needed it",
            Self::AboveTheClock => "an epoch begins only above what the clock has counted in",
            Self::NotAhead => "an epoch is taken when it is needed, not ahead",
            Self::EndOfNumbers => "a new epoch at the end of the numbers",
            Self::Durable => "an epoch is on the disk before it is used",
            Self::BroughtBack => "epochs are brought back to the database",
            Self::Again => "and again each minute, since it may have forgotten them",
            Self::MoveUp => "epochs move up when the database changed its timeline",
            Self::Memory => "an issuer remembers how far a partition has counted",
            Self::FindMaster => "the master is found again before its clock is replaced",
            Self::BeginsAbove => "a clock below the memory is replaced",
            Self::AboveTheMemory => "the epoch for it is above the memory",
            Self::LeaseOfAClock => "a stored lease counts only under a clock that counts",
            Self::LeaseOfTheEpoch => "a stored lease counts only in the clock's epoch",
            Self::LeaseOfANumber => {
                "a stored lease counts only with a number that the clock has counted"
            }
            Self::HistoryOfBlank => "an epoch begins only in the history that needed it",
            Self::Source => "a clock belongs to one source of epochs",
            Self::RenewCompares => "a renewal compares the lease id",
            Self::ReleaseCompares => "a release compares the lease id",
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
