//! Who there is: holders with their requests, issuers, servers, databases; and what has happened, for the promises.

use std::fmt;

use super::{
    database::Database,
    rules::Promise,
    server::{Blank, Keys, Place, Server},
};

pub const HOLDERS: usize = 3;

#[derive(Clone, Debug, Default, Hash, PartialEq, Eq)]
pub struct State {
    pub holders: [Holder; HOLDERS],
    /// The request that each holder waits for; and last, one whose caller has gone.
    pub requests: [Option<Request>; HOLDERS + 1],
    pub issuers: [Issuer; 2],
    /// The second one is a replica, until it is promoted.
    pub servers: [Server; 2],
    /// The server that counts now.
    pub master: u8,
    /// A file, or a replica that lags.
    pub saved: Option<Keys>,
    pub databases: [Database; 2],
    /// The last history and the last incarnation that were drawn.
    pub histories: u8,
    pub incarnations: u8,
    pub losses: u8,
    pub reconnects: u8,
    pub abandoned: u8,
    pub new_tokens: u8,
    pub past: Past,
}

impl State {
    /// Whether an issuer has an epoch in hand.
    pub fn has_epoch(&self, issuer: u8) -> bool {
        let has = |request: &Request| {
            request.issuer == issuer
                && matches!(request.phase, Phase::NeedsEpoch(_) | Phase::HasEpoch(..))
        };
        self.requests.iter().flatten().any(has)
    }
}

#[derive(Clone, Copy, Debug, Default, Hash, PartialEq, Eq)]
pub enum Holder {
    #[default]
    New,
    Asks,
    Holds(u8),
    Done,
}

/// A process with its memory.
#[derive(Clone, Debug, Default, Hash, PartialEq, Eq)]
pub struct Issuer {
    /// Which server it talks to.
    pub server: u8,
    /// The highest place that it has seen.
    pub seen: Place,
    /// The epoch that it has told the database, or heard from there.
    pub told: u8,
    /// An epoch that it took ahead, where it does that.
    pub ahead: Option<u8>,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq)]
pub struct Request {
    pub id: u8,
    pub issuer: u8,
    pub kind: Kind,
    pub phase: Phase,
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
    Sent {
        seen: Place,
        replaces: bool,
    },
    NeedsEpoch(Blank),
    HasEpoch(Blank, u8),
    Behind,
    /// By the server that counted then, or another one.
    Granted {
        token: u8,
        place: Place,
        server: u8,
        by_master: bool,
    },
}

/// What has happened.
#[derive(Clone, Debug, Default, Hash, PartialEq, Eq)]
pub struct Past {
    /// The tokens that were answered, with their leases.
    pub answered: Vec<(u8, u8)>,
    /// The lowest token that the new master has granted.
    pub first_of_new: Option<u8>,
    /// The highest epoch that each database has handed out.
    pub handed_out: [u8; 2],
    /// The highest epoch that has begun.
    pub begun: u8,
    /// The leases that have run out, or were released by their holders: a set of bits.
    pub ended: u8,
    /// Whether the database has forgotten something, and not a minute with grants has passed since.
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

/// A request, by its place.
#[derive(Clone, Copy, Hash, PartialEq, Eq)]
pub struct Of(pub usize);

impl fmt::Debug for Of {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(["A", "B", "C", "the abandoned request"][self.0])
    }
}
