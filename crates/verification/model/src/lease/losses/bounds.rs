//! The bounds of the searches.

use super::Loss;

/// The maximum number of events of each kind.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    pub holders: usize,
    pub issuers: usize,
    /// The number of applications. If there are two, each has its own issuer and database.
    pub applications: usize,
    /// Whether the last holder uses another resource of the partition.
    pub apart: bool,
    /// The possible losses.
    pub losses: &'static [Loss],
    /// The maximum number of losses.
    pub most: u8,
    /// The number of requests that continue after their caller has disconnected.
    pub abandoned: u8,
    /// Whether holders renew.
    pub renewals: bool,
    /// Whether holders release. A lease that is not released expires.
    pub releases: bool,
    /// The number of renewals with a new token.
    pub new_tokens: u8,
    /// The exclusive upper bound of the numbers of a counter. It is 10⁹ in the crate.
    pub numbers: u8,
    /// Whether the database detects that its timeline has changed.
    pub notices: bool,
}

impl Default for Bounds {
    fn default() -> Self {
        Self {
            holders: 3,
            issuers: 2,
            applications: 1,
            apart: false,
            losses: &[],
            most: 0,
            abandoned: 0,
            renewals: false,
            releases: false,
            new_tokens: 0,
            numbers: 8,
            notices: false,
        }
    }
}

/// Returns bounds with two holders.
pub(super) fn two() -> Bounds {
    Bounds {
        holders: 2,
        ..Bounds::default()
    }
}

/// Returns bounds with two holders and these losses.
pub(super) fn losing(most: u8, losses: &'static [Loss]) -> Bounds {
    Bounds {
        most,
        losses,
        ..two()
    }
}

/// Returns the bounds that a normal test run searches.
pub fn small() -> Vec<Bounds> {
    let alone = |bounds| Bounds {
        issuers: 1,
        ..bounds
    };
    let promoted_and_flushed = losing(2, &[Loss::StandbyIsPromoted, Loss::RedisIsFlushed]);
    vec![
        Bounds {
            renewals: true,
            releases: true,
            new_tokens: 1,
            ..two()
        },
        Bounds {
            abandoned: 1,
            numbers: 2,
            ..two()
        },
        losing(1, &[Loss::RedisIsFlushed]),
        losing(1, ANY_OF_REDIS),
        losing(2, &[Loss::DatabaseCrashes, Loss::RedisIsFlushed]),
        promoted_and_flushed,
        Bounds {
            notices: true,
            ..promoted_and_flushed
        },
        Bounds {
            renewals: true,
            ..alone(losing(1, &[Loss::KeysAreCopiedBack]))
        },
        alone(losing(
            2,
            &[Loss::StandbyIsPromoted, Loss::KeysAreCopiedBack],
        )),
        losing(1, &[Loss::ReplicaIsPromoted]),
        losing(2, &[Loss::ReplicaIsPromoted, Loss::RedisIsFlushed]),
        Bounds {
            applications: 2,
            ..losing(2, &[Loss::RedisIsFlushed])
        },
    ]
}

/// Returns the bounds whose searches take minutes.
pub fn large() -> Vec<Bounds> {
    vec![
        Bounds {
            holders: 3,
            ..losing(1, ANY_OF_REDIS)
        },
        Bounds {
            holders: 3,
            ..losing(2, &[Loss::RedisIsFlushed, Loss::RedisRestartsFromAnOldFile])
        },
        losing(2, ANY_OF_REDIS),
        Bounds {
            abandoned: 1,
            ..losing(1, ANY_OF_REDIS)
        },
        Bounds {
            holders: 3,
            ..losing(1, &[Loss::ReplicaIsPromoted])
        },
        losing(2, PROMOTION_AND_ANOTHER),
        Bounds {
            notices: true,
            ..losing(
                2,
                &[Loss::StandbyIsPromoted, Loss::RedisRestartsFromAnOldFile],
            )
        },
    ]
}

/// The restarts of issuers, and all losses of Redis except promotions and keys that are restored
/// under the same replication id.
const ANY_OF_REDIS: &[Loss] = &[
    Loss::RedisRestartsEmpty,
    Loss::RedisRestartsFromAnOldFile,
    Loss::RedisRestarts,
    Loss::RedisIsFlushed,
    Loss::CounterIsEvicted,
    Loss::IssuerRestarts(0),
    Loss::IssuerRestarts(1),
];

/// A promotion, and other losses before or after it.
const PROMOTION_AND_ANOTHER: &[Loss] = &[
    Loss::ReplicaIsPromoted,
    Loss::RedisIsFlushed,
    Loss::CounterIsEvicted,
    Loss::IssuerRestarts(0),
    Loss::IssuerRestarts(1),
];
