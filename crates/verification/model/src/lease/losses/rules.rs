//! The promises, the rules, and the bounds in which each rule is needed.

use super::{
    Bounds, Loss, Losses,
    bounds::{losing, two},
};
use crate::search::{self, promises, rules};

promises! {
    Losses, |state| state.past.broken,
    Distinct: "no two leases have the same token",
    Later: "a later grant has a higher token",
    Superseded: "a deposed master grants no token above those of the new master",
    StaysSuperseded: "a superseded lease is not renewed",
    Stands: "a lease ends only if it expires or is released, or if data is lost",
    OwnEpochs: "an issuer uses only epochs of its own database",
}

rules! {
    Epoch: "a token contains an epoch",
    ReplicationId: "a counter is valid only under the replication id that it contains",
    Incarnation: "an epoch begins only on the blank counter for which it was taken",
    AboveTheCounter: "an epoch begins only on a counter with a lower epoch",
    NotAhead: "an epoch is taken when it is needed, not in advance",
    EndOfNumbers: "a new epoch begins when the numbers of an epoch are used up",
    Durable: "an epoch is on disk before it is used",
    ReReported: "issuers re-report epochs to the database",
    Again: "issuers re-report epochs every minute, not only once",
    MoveUp: "the database skips epochs after its timeline has changed",
    Memory: "an issuer keeps the highest count of a partition in memory",
    FindMaster: "an issuer looks up the master again before it replaces a counter",
    BeginsAbove: "a counter below the highest count that the issuer has seen is replaced",
    LeaseOfACounter: "a stored lease is valid only if the counter is valid",
    LeaseOfTheEpoch: "a stored lease is valid only in the epoch of the counter",
    Source: "a counter belongs to one source of epochs",
    RenewCompares: "a renewal compares the lease id",
    ReleaseCompares: "a release compares the lease id",
}

impl Rule {
    /// Returns the smallest bounds in which a promise breaks without the rule.
    pub fn bounds(self) -> Bounds {
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
                ..two()
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
                ..two()
            },
            Self::RenewCompares => Bounds {
                renewals: true,
                ..two()
            },
            Self::ReleaseCompares => Bounds {
                renewals: true,
                releases: true,
                ..two()
            },
        }
    }
}

pub type Rules = search::Rules<Rule>;
