//! In which bounds the world is searched.

use super::Loss;

/// How much happens at most.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    pub holders: usize,
    pub issuers: u8,
    /// What is lost, and how often in all.
    pub losses: &'static [Loss],
    pub most: u8,
    /// How many writes come under tokens that were granted to nobody.
    pub forged: u8,
    /// How many requests go on after their caller has gone.
    pub abandoned: u8,
    /// How many writes come late.
    pub delayed: u8,
    /// Whether holders renew, and whether they release: otherwise leases run out.
    pub renewals: bool,
    pub releases: bool,
    /// How many renewals take a new token.
    pub new_tokens: u8,
    /// Whether leases are in the database of the fence. Nothing is lost there by itself.
    pub one_database: bool,
}

impl Default for Bounds {
    fn default() -> Self {
        Self {
            holders: 3,
            issuers: 2,
            losses: &[],
            most: 0,
            forged: 0,
            abandoned: 0,
            delayed: 0,
            renewals: false,
            releases: false,
            new_tokens: 0,
            one_database: false,
        }
    }
}

/// What a normal run of the tests searches.
pub fn small() -> Vec<Bounds> {
    let two = Bounds {
        holders: 2,
        ..Bounds::default()
    };
    let losing = |losses| Bounds {
        most: 1,
        losses,
        ..two
    };
    let alone = Bounds { issuers: 1, ..two };
    let one = Bounds { holders: 1, ..two };
    vec![
        Bounds {
            issuers: 1,
            ..Bounds::default()
        },
        Bounds {
            abandoned: 1,
            ..alone
        },
        Bounds {
            releases: true,
            ..two
        },
        Bounds {
            renewals: true,
            new_tokens: 1,
            delayed: 1,
            ..alone
        },
        Bounds {
            renewals: true,
            new_tokens: 1,
            abandoned: 1,
            issuers: 1,
            ..one
        },
        Bounds {
            renewals: true,
            new_tokens: 1,
            delayed: 1,
            ..one
        },
        Bounds { forged: 1, ..alone },
        Bounds {
            forged: 1,
            new_tokens: 1,
            ..alone
        },
        Bounds {
            new_tokens: 1,
            issuers: 1,
            ..losing(&[Loss::KeysAreCopiedBack])
        },
        Bounds {
            one_database: true,
            renewals: true,
            releases: true,
            new_tokens: 1,
            delayed: 1,
            ..alone
        },
        Bounds {
            one_database: true,
            abandoned: 1,
            ..alone
        },
        Bounds {
            one_database: true,
            renewals: true,
            new_tokens: 1,
            forged: 1,
            ..alone
        },
        losing(&[Loss::KeysAreCopiedBack]),
        losing(&[Loss::ReplicaIsPromoted]),
        losing(&[
            Loss::RedisRestarts,
            Loss::IssuerRestarts(0),
            Loss::IssuerRestarts(1),
        ]),
        losing(&[Loss::StandbyIsPromoted]),
        Bounds {
            most: 2,
            ..losing(&[Loss::RedisRestarts, Loss::StandbyIsPromoted])
        },
    ]
}

/// What takes long.
pub fn large() -> Vec<Bounds> {
    let two = Bounds {
        holders: 2,
        ..Bounds::default()
    };
    let any = &[
        Loss::RedisRestarts,
        Loss::KeysAreCopiedBack,
        Loss::ReplicaIsPromoted,
        Loss::IssuerRestarts(0),
        Loss::IssuerRestarts(1),
        Loss::DatabaseCrashes,
        Loss::StandbyIsPromoted,
    ];
    vec![
        Bounds::default(),
        Bounds { forged: 1, ..two },
        Bounds {
            forged: 1,
            new_tokens: 2,
            delayed: 1,
            ..two
        },
        Bounds {
            most: 1,
            losses: any,
            ..two
        },
        Bounds {
            most: 1,
            losses: any,
            new_tokens: 1,
            ..two
        },
    ]
}
