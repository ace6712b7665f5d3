//! The promises, the rules, and the bounds in which each rule is needed.

use std::fmt;

use super::{Bounds, Loss};

#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub enum Promise {
    Distinct,
    Later,
    Superseded,
    StaysSuperseded,
    Stands,
    OwnEpochs,
}

impl Promise {
    pub const ALL: [Self; 6] = [
        Self::Distinct,
        Self::Later,
        Self::Superseded,
        Self::StaysSuperseded,
        Self::Stands,
        Self::OwnEpochs,
    ];

    pub const fn text(self) -> &'static str {
        match self {
            Self::Distinct => "no two leases have the same token",
            Self::Later => "a later grant has a higher token",
            Self::Superseded => "a deposed master grants no token above those of the new master",
            Self::StaysSuperseded => "a superseded lease is not renewed",
            Self::Stands => "a lease ends only if it expires or is released, or if data is lost",
            Self::OwnEpochs => "an issuer uses only epochs of its own database",
        }
    }
}

#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub enum Rule {
    Epoch,
    ReplicationId,
    Incarnation,
    AboveTheCounter,
    NotAhead,
    EndOfNumbers,
    Durable,
    ReReported,
    Again,
    MoveUp,
    Memory,
    FindMaster,
    BeginsAbove,
    LeaseOfACounter,
    LeaseOfTheEpoch,
    Source,
    RenewCompares,
    ReleaseCompares,
}

impl Rule {
    pub const ALL: &[Self] = &[
        Self::Epoch,
        Self::ReplicationId,
        Self::Incarnation,
        Self::AboveTheCounter,
        Self::NotAhead,
        Self::EndOfNumbers,
        Self::Durable,
        Self::ReReported,
        Self::Again,
        Self::MoveUp,
        Self::Memory,
        Self::FindMaster,
        Self::BeginsAbove,
        Self::LeaseOfACounter,
        Self::LeaseOfTheEpoch,
        Self::Source,
        Self::RenewCompares,
        Self::ReleaseCompares,
    ];

    /// Returns the smallest bounds in which a promise breaks without the rule.
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
            Self::ReplicationId => losing(1, &[Loss::RedisRestartsFromAnOldFile]),
            Self::Incarnation => Bounds {
                abandoned: 1,
                ..flushed(1)
            },
            Self::AboveTheCounter => Bounds {
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
            Self::ReReported | Self::Again => {
                losing(2, &[Loss::StandbyIsPromoted, Loss::RedisIsFlushed])
            }
            Self::MoveUp => Bounds {
                notices: true,
                ..losing(2, &[Loss::StandbyIsPromoted, Loss::RedisIsFlushed])
            },
            Self::Memory | Self::BeginsAbove => alone(losing(1, &[Loss::KeysAreCopiedBack])),
            Self::FindMaster => Bounds {
                holders: 3,
                ..alone(losing(1, &[Loss::ReplicaIsPromoted]))
            },
            Self::LeaseOfACounter => Bounds {
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
            Self::Epoch => "a token contains an epoch",
            Self::ReplicationId => {
                "a counter is valid only under the replication id that it contains"
            }
            Self::Incarnation => "an epoch begins only on the blank counter for which it was taken",
            Self::AboveTheCounter => "an epoch begins only on a counter with a lower epoch",
            Self::NotAhead => "an epoch is taken when it is needed, not in advance",
            Self::EndOfNumbers => "a new epoch begins when the numbers of an epoch are used up",
            Self::Durable => "an epoch is on disk before it is used",
            Self::ReReported => "issuers re-report epochs to the database",
            Self::Again => "issuers re-report epochs every minute, not only once",
            Self::MoveUp => "the database skips epochs after its timeline has changed",
            Self::Memory => "an issuer keeps the highest count of a partition in memory",
            Self::FindMaster => "an issuer looks up the master again before it replaces a counter",
            Self::BeginsAbove => {
                "a counter below the highest count that the issuer has seen is replaced"
            }
            Self::LeaseOfACounter => "a stored lease is valid only if the counter is valid",
            Self::LeaseOfTheEpoch => "a stored lease is valid only in the epoch of the counter",
            Self::Source => "a counter belongs to one source of epochs",
            Self::RenewCompares => "a renewal compares the lease id",
            Self::ReleaseCompares => "a release compares the lease id",
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
