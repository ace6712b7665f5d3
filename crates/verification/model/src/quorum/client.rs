//! What the clients do with the answers: `src/lease/quorum/grant.rs` and `renew.rs`.

use std::fmt;

use super::{
    rules::{Rule, Rules},
    server::{Taken, Token},
};

/// A request for a token of a lease: one attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    pub lease: u8,
    pub attempt: u8,
    pub resource: usize,
    pub wish: Wish,
    /// It goes on for this one, the epoch of whose token has turned out to be over.
    pub(super) instead_of: Option<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wish {
    Grant,
    /// Another token for a lease that is held, above this one where the resource has seen one from elsewhere.
    Another(Option<Token>),
}

impl Request {
    pub(super) const fn new(lease: u8, attempt: u8) -> Self {
        Self {
            lease,
            attempt,
            resource: 0,
            wish: Wish::Grant,
            instead_of: None,
        }
    }

    pub(super) const fn on_second_resource(self) -> Self {
        Self {
            resource: 1,
            ..self
        }
    }

    pub(super) const fn another_token(self, above: Option<Token>) -> Self {
        Self {
            wish: Wish::Another(above),
            ..self
        }
    }

    pub(super) const fn instead_of(self, request: usize) -> Self {
        Self {
            instead_of: Some(request),
            ..self
        }
    }

    /// Only a lease that is held already is given a token.
    pub const fn only_mine(&self) -> bool {
        matches!(self.wish, Wish::Another(_))
    }
}

impl fmt::Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lease = char::from(b'a' + self.lease);
        match self.wish {
            Wish::Grant => write!(f, "{lease}")?,
            Wish::Another(_) => write!(f, "{lease}, for another token,")?,
        }
        match self.attempt {
            1 => Ok(()),
            attempt => write!(f, " (attempt {attempt})"),
        }
    }
}

/// What had been answered when a request began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Before {
    /// The highest token of the same lease.
    pub(super) own: Token,
    /// The highest token of the other leases of the resource.
    pub(super) others: Token,
    /// What the process remembers to have been counted.
    pub(super) seen: Token,
}

/// How far a request has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Progress {
    /// Nothing before it has begun.
    pub(super) before: Option<Before>,
    /// An epoch that was asked for ahead.
    pub(super) ahead: Option<u8>,
    pub choice: Option<Choice>,
    /// The token that was answered.
    pub granted: Option<Token>,
    /// Its client has given up: whatever is sealed still, nothing is answered.
    pub(super) over: bool,
}

/// A token, and by what it was counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Choice {
    pub token: Token,
    pub count: Token,
    /// It is for a lease that is held, but another lease had been granted before the request began, above all tokens
    /// that had been chosen for this one.
    pub(super) revives: bool,
    /// A majority has stored it, so that it is answered without being sealed.
    pub(super) is_stored: bool,
}

/// What a token is chosen from: what a majority has answered, and what the process knows.
pub(super) struct Counted<'a> {
    pub(super) taken: &'a [Taken],
    pub(super) majority: usize,
    pub(super) seen: Token,
    pub(super) is_over: bool,
    pub(super) ahead: Option<u8>,
}

/// Chooses a token. `next_epoch` asks the database for an epoch above that one.
pub(super) fn choose(
    rules: Rules,
    wish: Wish,
    counted: &Counted<'_>,
    next_epoch: impl FnOnce(u8) -> u8,
) -> Choice {
    let mut taken = counted.taken.to_vec();
    if !rules.has(Rule::HighestOfMajority) {
        taken.truncate(1);
    }
    if !rules.has(Rule::LostIsNotPassedOver) && taken.iter().any(|taken| taken.usable) {
        taken.retain(|taken| taken.usable);
    }
    if !rules.has(Rule::LostIsNotZero) {
        for lost in taken.iter_mut().filter(|taken| !taken.usable) {
            (lost.usable, lost.counted) = (true, Token::new(1, 0));
        }
    }
    let highest = taken.iter().map(|taken| taken.counted).max();
    let highest = highest.unwrap_or_default();
    let all = taken.iter().all(|taken| taken.usable);
    let usable = all && highest >= counted.seen && !counted.is_over;

    let enough = match rules.has(Rule::StoredOnMajority) {
        true => counted.majority,
        false => 1,
    };
    let stored: Vec<_> = counted.taken.iter().map(|taken| taken.stored).collect();
    if usable
        && wish == Wish::Grant
        && let Some(token) = most(&stored, enough)
    {
        return Choice {
            token,
            count: token,
            revives: false,
            is_stored: true,
        };
    }
    let count = match counted.ahead {
        _ if usable => Token::new(highest.epoch, highest.n + 1),
        Some(epoch) => Token::new(epoch, 1),
        None if rules.has(Rule::EpochFromDatabase) => {
            Token::new(next_epoch(highest.epoch.max(counted.seen.epoch)), 1)
        }
        None => Token::new(highest.epoch + 1, 1),
    };
    let mut token = count;
    if let Some(stored) = stored.into_iter().flatten().max()
        && rules.has(Rule::AboveStoredToken)
    {
        token = token.max(Token::new(stored.epoch, stored.n + 1));
    }
    if let Wish::Another(Some(above)) = wish {
        token = token.max(above);
    }
    Choice {
        token,
        count,
        revives: false,
        is_stored: false,
    }
}

/// The token that so many have said.
pub(super) fn most(said: &[Option<Token>], enough: usize) -> Option<Token> {
    let is_most = |token: &&Token| {
        let same = said.iter().flatten().filter(|other| *other == *token);
        same.count() >= enough
    };
    said.iter().flatten().find(is_most).copied()
}
