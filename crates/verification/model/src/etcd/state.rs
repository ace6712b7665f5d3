//! The state of the world: etcd, the issuers, and the progress of each request.

use super::{
    Promise,
    bounds::{Begins, Etcd},
    server::{Found, Incarnation, PARTITIONS, Row, Seen, Server, Token, Write},
};

/// The maximum number of requests.
pub(super) const REQUESTS: usize = 4;
/// The maximum number of leases.
pub(super) const LEASES: usize = 3;
/// The maximum number of issuers.
pub(super) const ISSUERS: usize = 2;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct State {
    pub etcd: Server,
    pub(super) saved: Option<Server>,
    pub issuers: [Issuer; ISSUERS],
    pub requests: [Progress; REQUESTS],
    /// The last epoch that the database has returned.
    pub(super) epoch: u8,
    /// The number of written incarnations. The next one has a new id.
    pub(super) incarnations: u8,
    pub(super) since_restore: SinceRestore,
    /// Whether the last answer about each lease was that it is released.
    pub(super) released: [bool; LEASES],
    pub(super) spent: Spent,
    /// The promise that was broken first.
    pub(super) broken: Option<Promise>,
}

/// The memory of an issuer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Issuer {
    /// The rows that it has cached.
    pub rows: [Option<Row>; PARTITIONS],
    /// The etcd lease of each lease that it has granted.
    pub etcd_leases: [Option<u8>; LEASES],
}

/// Whether each key was written since etcd began or was restored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct SinceRestore {
    pub(super) incarnation: bool,
    pub(super) rows: [bool; PARTITIONS],
}

/// The number of past events of each limited kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Spent {
    pub(super) snapshots: u8,
    pub(super) restores: u8,
    /// Calls that arrive a second time, or whose answer is lost.
    pub(super) copies: u8,
    /// The calls among `copies` that write the key of the incarnation or a row.
    pub(super) late_writes: u8,
    /// How often a partition is used so much that the lead grows above its earlier value.
    pub(super) grown: u8,
}

/// The progress of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Progress {
    pub stage: Stage,
    pub(super) before: Before,
    /// The token that was returned to the client.
    pub token: Option<Token>,
    /// The etcd lease of the key that the request has found. The request keeps this etcd lease
    /// alive, or moves the key from it to another one.
    pub(super) found: Option<u8>,
    /// Whether the status was read before the transaction.
    pub(super) is_checked: bool,
    /// Whether the key may have been written under the etcd lease of the request.
    pub(super) has_written: bool,
    pub(super) sent: Sent,
}

/// The next call of a request, with its data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Stage {
    #[default]
    New,
    /// The etcd lease exists. A transaction writes the key, or replaces this key.
    Ready(Option<Found>),
    /// A transaction was answered. The status is requested next.
    Answered(Seen),
    /// etcd was restored, or has no key of its incarnation.
    NeedsIncarnation(Needs),
    /// The row names another incarnation, or there is no row.
    NeedsEpoch(Needs),
    HasEpoch(Needs),
    /// The lease has this token under a new etcd lease. The old etcd lease is revoked next.
    Moved {
        old: u8,
        token: Token,
    },
    /// The request has read which etcd lease the key has.
    Found(u8),
    /// The etcd lease was kept alive.
    Alive(u8),
    /// The etcd lease did not exist. The key is read next.
    ReadsKey,
    /// The request was answered: granted, renewed or released.
    Done,
    /// The request was refused, or has given up.
    Over,
}

/// The data from which a new incarnation and a new epoch are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Needs {
    /// The incarnation that was read, and later the incarnation that the row will name; 0 if there
    /// is none.
    pub incarnation: u8,
    /// The revision of the row that is replaced; 0 if there is none.
    pub row: u8,
    /// The lead that was read with the status.
    pub lead: i8,
    pub epoch: u8,
}

/// The highest tokens that had been returned to clients when a request began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Before {
    /// The highest token of the same lease.
    pub(super) own: Token,
    /// The highest token of the other leases of the resource.
    pub(super) others: Token,
    pub(super) released: bool,
}

/// The calls of a request that may arrive a second time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Sent {
    pub(super) lease_grant: bool,
    pub(super) write: Option<Write>,
    /// The key of the incarnation, and the id of the key that it replaces.
    pub(super) incarnation: Option<(Option<u8>, Incarnation)>,
    /// The row, and the revision of the row that it replaces.
    pub(super) row: Option<(u8, Row)>,
    pub(super) revoke: Option<u8>,
}

impl State {
    pub(super) fn new(world: &Etcd) -> Self {
        let etcd = match world.begins {
            Begins::Empty => Server::empty(),
            Begins::Begun => Server::begun(),
            Begins::AfterRestore => Server::begun_after_restore(),
        };
        let issuer = Issuer {
            rows: etcd.rows,
            ..Issuer::default()
        };
        Self {
            etcd,
            saved: None,
            issuers: [issuer.clone(), issuer],
            requests: Default::default(),
            epoch: etcd
                .rows
                .iter()
                .flatten()
                .map(|row| row.epoch)
                .max()
                .unwrap_or(0),
            incarnations: etcd.incarnation.map_or(0, |incarnation| incarnation.id),
            since_restore: SinceRestore {
                incarnation: true,
                rows: [true; PARTITIONS],
            },
            released: [false; LEASES],
            spent: Spent::default(),
            broken: None,
        }
    }

    pub(super) fn fail(&mut self, promise: Promise) {
        self.broken.get_or_insert(promise);
    }
}

impl Stage {
    /// Whether the request has begun and has not ended.
    pub(super) const fn is_under_way(&self) -> bool {
        !matches!(self, Self::New | Self::Done | Self::Over)
    }
}
