//! The holders with their requests, the issuers, the servers and the databases, and the past events
//! that the promises refer to.

use super::{
    Promise,
    database::Database,
    server::{Blank, Keys, Place, Server},
};
pub use crate::lease::{HOLDERS, Holder, Kind, Of};

#[derive(Clone, Debug, Default, Hash, PartialEq, Eq)]
pub struct State {
    pub holders: [Holder<u8>; HOLDERS],
    /// The request for which each holder waits. The last entry is a request whose caller has
    /// disconnected.
    pub requests: [Option<Request>; HOLDERS + 1],
    pub issuers: [Issuer; 2],
    /// The master, and a replica that may be promoted.
    pub servers: [Server; 2],
    /// The current master.
    pub master: u8,
    /// The keys in a file, or those of a replica that lags.
    pub saved: Option<Keys>,
    pub databases: [Database; 2],
    /// The last replication id that was drawn.
    pub replication_ids: u8,
    /// The last incarnation that was drawn.
    pub incarnations: u8,
    pub losses: u8,
    pub reconnects: u8,
    pub abandoned: u8,
    pub new_tokens: u8,
    pub past: Past,
}

impl State {
    /// Whether a request of an issuer needs an epoch, or has an epoch that has not begun.
    pub fn has_epoch(&self, issuer: u8) -> bool {
        let has = |request: &Request| {
            request.issuer == issuer
                && matches!(request.phase, Phase::NeedsEpoch(_) | Phase::HasEpoch(..))
        };
        self.requests.iter().flatten().any(has)
    }
}

/// An issuer, with the values that it keeps in memory.
#[derive(Clone, Debug, Default, Hash, PartialEq, Eq)]
pub struct Issuer {
    /// The server that it uses.
    pub server: u8,
    /// The highest position that it has seen.
    pub seen: Place,
    /// The highest epoch that it has reported to the database, or has received from the database.
    pub reported: u8,
    /// An epoch that it took in advance. Issuers do so only if the rule `NotAhead` is left out.
    pub ahead: Option<u8>,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq)]
pub struct Request {
    pub id: u8,
    pub issuer: u8,
    pub kind: Kind,
    pub phase: Phase,
    /// The highest token that was returned to a client before the request was sent.
    pub after: u8,
}

#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub enum Phase {
    /// The script of the request has not run yet.
    Sent {
        seen: Place,
        replaces: bool,
    },
    NeedsEpoch(Blank),
    HasEpoch(Blank, u8),
    Behind,
    Granted(Grant),
}

#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub struct Grant {
    pub token: u8,
    pub place: Place,
    pub server: u8,
    /// Whether the server was the master at that moment.
    pub by_master: bool,
}

/// The past events that the promises refer to.
#[derive(Clone, Debug, Default, Hash, PartialEq, Eq)]
pub struct Past {
    /// The tokens that were returned to clients, each with its lease.
    pub answered: Vec<(u8, u8)>,
    /// The first token that the new master has granted.
    pub first_of_new: Option<u8>,
    /// The highest epoch that each database has assigned.
    pub granted_epochs: [u8; 2],
    /// The highest epoch that has begun.
    pub begun: u8,
    /// The leases that have expired, or were released by their holders, as a bit set.
    pub ended: u8,
    /// Whether the database has lost an epoch, and no minute with grants has passed since.
    pub just_forgot: bool,
    pub broken: Option<Promise>,
}

impl Past {
    pub fn has_ended(&self, id: u8) -> bool {
        self.ended & 1 << id != 0
    }

    /// Whether this lease was ever granted.
    pub fn was_granted(&self, id: u8) -> bool {
        self.answered.iter().any(|(_, other)| *other == id)
    }

    pub fn breaks(&mut self, promise: Promise) {
        self.broken.get_or_insert(promise);
    }
}
