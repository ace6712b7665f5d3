//! The bounds of the searches.

use super::Loss;

/// The maximum number of events of each kind.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    pub holders: usize,
    pub issuers: u8,
    /// The possible losses.
    pub losses: &'static [Loss],
    /// The maximum number of losses.
    pub most: u8,
    /// The number of writes under a forged token.
    pub forged: u8,
    /// Whether the forged token may also be the next one, as a reusable token.
    pub next_is_forged: bool,
    /// The number of grants on other resources of the partition, which share the token counter.
    pub neighbours: u8,
    /// The number of requests that continue after their caller has disconnected.
    pub abandoned: u8,
    /// The number of writes that arrive late.
    pub delayed: u8,
    /// Whether holders renew.
    pub renewals: bool,
    /// Whether holders release. A lease that is not released expires.
    pub releases: bool,
    /// The number of renewals with a new token.
    pub new_tokens: u8,
    /// Whether leases are in the database of the fence. If so, leases are lost only together with
    /// the data of the fence.
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
            next_is_forged: false,
            neighbours: 0,
            abandoned: 0,
            delayed: 0,
            renewals: false,
            releases: false,
            new_tokens: 0,
            one_database: false,
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

/// Returns bounds with two holders and one of these losses.
pub(super) fn losing(losses: &'static [Loss]) -> Bounds {
    Bounds {
        most: 1,
        losses,
        ..two()
    }
}

/// Returns the bounds that a normal test run searches.
pub fn small() -> Vec<Bounds> {
    let two = two();
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
        Bounds {
            forged: 1,
            next_is_forged: true,
            ..alone
        },
        Bounds {
            forged: 1,
            next_is_forged: true,
            neighbours: 2,
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
            next_is_forged: true,
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

/// Returns the bounds whose searches take minutes.
pub fn large() -> Vec<Bounds> {
    let two = two();
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
        losing(any),
        Bounds {
            new_tokens: 1,
            ..losing(any)
        },
    ]
}
