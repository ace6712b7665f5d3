//! Who there is: holders with their requests, issuers, stores, the database; and what has happened, for the promises.

use std::fmt;

use super::{
    database::{Database, EPOCH},
    rules::Promise,
};

pub const HOLDERS: usize = 3;

#[derive(Clone, Debug, Hash, PartialEq, Eq)]
pub struct State {
    pub holders: [Holder; HOLDERS],
    /// The request that each holder waits for; and last, one whose caller has gone.
    pub requests: [Option<Request>; HOLDERS + 1],
    /// A write that is under way while its holder goes on without an answer.
    pub delayed: Option<Held>,
    pub issuers: [Issuer; 2],
    /// The second one is a replica, until it is promoted.
    pub servers: [Server; 2],
    pub master: u8,
    /// A copy of the keys.
    pub saved: Option<Server>,
    pub database: Database,
    /// What is on its disk.
    pub disk: Database,
    /// What its standby has, where that does not follow any more.
    pub standby: Option<Database>,
    pub losses: u8,
    pub reconnects: u8,
    /// How many leases the store has granted.
    pub grants: u8,
    pub forged: u8,
    pub abandoned: u8,
    pub delays: u8,
    pub new_tokens: u8,
    pub past: Past,
}

impl Default for State {
    fn default() -> Self {
        let server = Server {
            clock: EPOCH,
            lease: None,
        };
        Self {
            holders: Default::default(),
            requests: Default::default(),
            delayed: None,
            issuers: Default::default(),
            servers: [server.clone(), server],
            master: 0,
            saved: None,
            database: Database::default(),
            disk: Database::default(),
            standby: None,
            losses: 0,
            reconnects: 0,
            grants: 0,
            forged: 0,
            abandoned: 0,
            delays: 0,
            new_tokens: 0,
            past: Past {
                epoch: 1,
                ..Past::default()
            },
        }
    }
}

#[derive(Clone, Copy, Debug, Default, Hash, PartialEq, Eq)]
pub enum Holder {
    #[default]
    New,
    Asks,
    Holds(Held),
    Done,
}

/// What a holder knows.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub struct Held {
    pub id: u8,
    pub token: u8,
    /// The value that it read.
    pub read: Option<u8>,
    /// Whether it has used this token, perhaps without an answer.
    pub used: bool,
    /// Whether a write may still be under way: it takes a new token before it reads again.
    pub in_doubt: bool,
}

/// A process: which token of each lease it has announced.
#[derive(Clone, Debug, Default, Hash, PartialEq, Eq)]
pub struct Issuer {
    pub server: u8,
    pub announced: [Option<u8>; HOLDERS],
}

/// A store. Its clock is the last token that it counted.
#[derive(Clone, Debug, Hash, PartialEq, Eq)]
pub struct Server {
    pub clock: u8,
    /// A lease id and a token.
    pub lease: Option<(u8, u8)>,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq)]
pub struct Request {
    pub id: u8,
    pub issuer: u8,
    pub kind: Kind,
    pub phase: Phase,
    /// How often it took a higher token.
    pub higher: u8,
    /// The highest token that was answered before this was asked.
    pub after: u8,
}

#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub enum Kind {
    Acquire,
    Renew { new_token: bool },
    Release,
}

#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub enum Phase {
    /// Its script is on the way.
    Sent,
    /// The store has given this token.
    Took(u8),
    /// The fence has seen more: this token at least is needed.
    Outranked(u8),
    /// The token is announced.
    Announced(u8),
    /// The lease is to be given back.
    Lost,
}

/// What has happened.
#[derive(Clone, Debug, Default, Hash, PartialEq, Eq)]
pub struct Past {
    /// The tokens that were answered, with their leases.
    pub answered: Vec<(u8, u8)>,
    /// The highest epoch that was handed out.
    pub epoch: u8,
    /// The number of the last write.
    pub writes: u8,
    /// Which leases have written: a set of bits.
    pub wrote: u8,
    /// Whether a lease has written since a token was forged.
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

/// A request, by its place.
#[derive(Clone, Copy, Hash, PartialEq, Eq)]
pub struct Of(pub usize);

impl fmt::Debug for Of {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(["A", "B", "C", "the abandoned request"][self.0])
    }
}
