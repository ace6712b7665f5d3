//! The holders with their requests, the issuers, the stores and the database, and the past events
//! that the promises refer to.

use super::{
    Promise,
    database::{Database, EPOCH},
};
pub use crate::lease::{HOLDERS, Holder, Kind, Of};

#[derive(Clone, Debug, Default, Hash, PartialEq, Eq)]
pub struct State {
    pub holders: [Holder<Held>; HOLDERS],
    /// The request for which each holder waits. The last entry is a request whose caller has
    /// disconnected.
    pub requests: [Option<Request>; HOLDERS + 1],
    /// A write that has not arrived yet, and whose holder continues without an answer.
    pub delayed: Option<Held>,
    pub issuers: [Issuer; 2],
    /// The master, and a replica that may be promoted.
    pub servers: [Server; 2],
    pub master: u8,
    /// A copy of the keys.
    pub saved: Option<Server>,
    pub database: Database,
    /// The data of the database that is on disk.
    pub disk: Database,
    /// The data of a standby that no longer replicates.
    pub standby: Option<Database>,
    pub losses: u8,
    pub reconnects: u8,
    /// The number of leases that the store has granted.
    pub grants: u8,
    pub forged: u8,
    pub neighbours: u8,
    pub abandoned: u8,
    pub delays: u8,
    pub new_tokens: u8,
    pub past: Past,
}

/// A holder's view of its lease.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub struct Held {
    pub id: u8,
    pub token: u8,
    /// The value that the holder has read.
    pub read: Option<u8>,
    /// Whether the holder has sent a write under this token, even without an answer.
    pub used: bool,
    /// Whether a write of this holder may still be in transit. In this case, the holder takes a
    /// new token before it reads again.
    pub in_doubt: bool,
}

/// An issuer, and the token that it has announced for each lease.
#[derive(Clone, Debug, Default, Hash, PartialEq, Eq)]
pub struct Issuer {
    pub server: u8,
    pub announced: [Option<u8>; HOLDERS],
}

/// A store. Its token counter is the last token that it has granted.
#[derive(Clone, Debug, Hash, PartialEq, Eq)]
pub struct Server {
    pub counter: u8,
    /// The id and the token of the lease.
    pub lease: Option<(u8, u8)>,
}

impl Default for Server {
    fn default() -> Self {
        Self {
            counter: EPOCH,
            lease: None,
        }
    }
}

#[derive(Clone, Debug, Hash, PartialEq, Eq)]
pub struct Request {
    pub id: u8,
    pub issuer: u8,
    pub kind: Kind,
    pub phase: Phase,
    /// The number of higher tokens that the request took.
    pub higher: u8,
    /// The highest token that was returned to a client before the request was sent.
    pub after: u8,
}

#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub enum Phase {
    /// The script of the request has not run yet.
    Sent,
    /// The store has granted this token.
    Took(u8),
    /// The fence has refused the token. The request needs at least this one.
    Superseded(u8),
    /// The token is announced.
    Announced(u8),
    /// The lease is lost, and is released next.
    Lost,
}

/// The past events that the promises refer to.
#[derive(Clone, Debug, Default, Hash, PartialEq, Eq)]
pub struct Past {
    /// The tokens that were returned to clients, each with its lease.
    pub answered: Vec<(u8, u8)>,
    /// The highest epoch that was assigned after the first one.
    pub epoch: u8,
    /// The number of the last write.
    pub writes: u8,
    /// The leases that have written, as a bit set.
    pub wrote: u8,
    /// Whether a lease has written after a token was forged.
    pub wrote_after_forgery: bool,
    pub broken: Option<Promise>,
}

impl Past {
    pub fn highest(&self) -> u8 {
        self.answered.last().map_or(0, |(token, _)| *token)
    }

    pub fn breaks(&mut self, promise: Promise) {
        self.broken.get_or_insert(promise);
    }
}
