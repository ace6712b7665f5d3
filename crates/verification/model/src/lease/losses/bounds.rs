//! In which bounds the world is searched.

use super::Loss;

/// How much happens at most.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    pub holders: usize,
    pub issuers: usize,
    /// Where there are two, each issuer is one's, and has a database of its own.
    pub applications: usize,
    /// Whether the last holder wants another resource of the partition.
    pub apart: bool,
    /// What is lost, and how often in all.
    pub losses: &'static [Loss],
    pub most: u8,
    /// How many requests go on after their caller has gone.
    pub abandoned: u8,
    /// Whether holders renew, and whether they release: otherwise leases run out.
    pub renewals: bool,
    pub releases: bool,
    /// How many renewals take a new token.
    pub new_tokens: u8,
    /// A clock's numbers are below this. (10⁹ in the crate.)
    pub numbers: u8,
    /// Whether the database notices that its timeline has changed.
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

/// What a normal run of the tests searches.
pub fn small() -> Vec<Bounds> {
    let two = Bounds {
        holders: 2,
        ..Bounds::default()
    };
    let alone = Bounds { issuers: 1, ..two };
    vec![
        Bounds {
            renewals: true,
            releases: true,
            new_tokens: 1,
            ..two
        },
        Bounds {
            abandoned: 1,
            numbers: 2,
            ..two
        },
        Bounds {
            losses: &[Loss::RedisIsFlushed],
            most: 1,
            ..two
        },
        Bounds {
            losses: ANY_OF_REDIS,
            most: 1,
            ..two
        },
        Bounds {
            losses: &[Loss::DatabaseCrashes, Loss::RedisIsFlushed],
            most: 2,
            ..two
        },
        Bounds {
            losses: &[Loss::StandbyIsPromoted, Loss::RedisIsFlushed],
            most: 2,
            ..two
        },
        Bounds {
            notices: true,
            losses: &[Loss::StandbyIsPromoted, Loss::RedisIsFlushed],
            most: 2,
            ..two
        },
        Bounds {
            renewals: true,
            losses: &[Loss::KeysAreCopiedBack],
            most: 1,
            ..alone
        },
        Bounds {
            losses: &[Loss::ReplicaIsPromoted],
            most: 1,
            ..two
        },
        Bounds {
            losses: &[Loss::ReplicaIsPromoted, Loss::RedisIsFlushed],
            most: 2,
            ..two
        },
        Bounds {
            applications: 2,
            losses: &[Loss::RedisIsFlushed],
            most: 2,
            ..two
        },
    ]
}

/// What takes long.
pub fn large() -> Vec<Bounds> {
    let two = Bounds {
        holders: 2,
        ..Bounds::default()
    };
    let losing = |most, losses| Bounds {
        most,
        losses,
        ..two
    };
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

/// All that Redis may lose, but for copies within one history, and promotions.
const ANY_OF_REDIS: &[Loss] = &[
    Loss::RedisRestartsEmpty,
    Loss::RedisRestartsFromAnOldFile,
    Loss::RedisRestarts,
    Loss::RedisIsFlushed,
    Loss::ClockIsEvicted,
    Loss::IssuerRestarts(0),
    Loss::IssuerRestarts(1),
];

/// A promotion, and what may be lost before or after it.
const PROMOTION_AND_ANOTHER: &[Loss] = &[
    Loss::ReplicaIsPromoted,
    Loss::RedisIsFlushed,
    Loss::ClockIsEvicted,
    Loss::IssuerRestarts(0),
    Loss::IssuerRestarts(1),
];
