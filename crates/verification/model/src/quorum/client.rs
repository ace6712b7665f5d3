//! The clients, and their conclusions from the answers. They model `crates/redlock/src/grant.rs`
//! and `renew.rs`.

use super::{
    Rule, Rules,
    server::{Taken, Token},
    state::Holder,
};

/// An attempt at a token of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    pub lease: u8,
    pub attempt: u8,
    /// The number of the request to which the attempt belongs.
    pub ticket: u8,
    pub resource: usize,
    pub wish: Wish,
    /// The token that a take seals if it is above the counter.
    pub proposal: Option<Token>,
    /// The earlier request that this request continues in a new epoch, because the epoch of the
    /// earlier request's token has ended.
    pub(super) instead_of: Option<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wish {
    Grant,
    /// Another token for a held lease. If a foreign token was used for the resource, this is the
    /// lowest permitted token.
    Another(Option<Token>),
}

impl Request {
    pub(super) const fn new(lease: u8, attempt: u8) -> Self {
        Self {
            lease,
            attempt,
            ticket: attempt,
            resource: 0,
            wish: Wish::Grant,
            proposal: None,
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

    /// Continues the first request, with the next attempt.
    pub(super) const fn instead_of_first(self) -> Self {
        Self {
            instead_of: Some(0),
            ticket: 1,
            ..self
        }
    }

    /// Proposes this number of the first epoch.
    pub(super) const fn proposing(self, n: u8) -> Self {
        self.proposing_of(1, n)
    }

    pub(super) const fn proposing_of(self, epoch: u8, n: u8) -> Self {
        Self {
            proposal: Some(Token::new(epoch, n)),
            ..self
        }
    }

    /// Whether the request is for another token of a held lease.
    pub const fn only_mine(&self) -> bool {
        matches!(self.wish, Wish::Another(_))
    }
}

/// The highest tokens that had been returned to clients when a request began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Before {
    /// The highest token of the same lease.
    pub(super) own: Token,
    /// The highest token of the other leases of the resource.
    pub(super) others: Token,
    /// The count that the process had in memory.
    pub(super) seen: Token,
}

/// The progress of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Progress {
    /// The tokens that were returned to clients before the request; `None` if it has not begun.
    pub(super) before: Option<Before>,
    /// The view that the holder has of its lease, if it requests another token.
    pub holder: Option<Holder>,
    /// The epoch that the request begins on the counters that the takes have returned. The request
    /// then takes the keys again.
    pub epoch: Option<u8>,
    /// Whether the request has taken an epoch. It takes only one.
    pub(super) has_epoch: bool,
    pub choice: Option<Choice>,
    /// The token that was returned to the client.
    pub granted: Option<Token>,
    /// Whether the client has given up. If so, no token is returned, even if more nodes are sealed.
    pub(super) over: bool,
}

/// A chosen token, and the count from which it was computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Choice {
    pub token: Token,
    pub count: Token,
    /// Whether, before the request began, another lease had been granted a token above all tokens
    /// of this held lease.
    pub(super) renews_superseded: bool,
    /// Whether a majority has the token already, so that the request returns it without a second
    /// trip.
    pub(super) is_stored: bool,
}

/// The data from which a token is chosen: the answers of a majority, and the memory of the process.
pub(super) struct Counted<'a> {
    pub(super) taken: &'a [Taken],
    pub(super) majority: usize,
    pub(super) seen: Token,
    pub(super) is_over: bool,
}

/// The next action of a client.
pub(super) enum Next {
    /// The client returns this token, or seals it.
    Chooses(Choice),
    /// The client takes an epoch above this one, begins it, and takes the keys again.
    NeedsEpoch(u8),
}

/// Chooses a token from the answers of the first trip.
pub(super) fn choose(
    rules: Rules,
    wish: Wish,
    proposal: Option<Token>,
    counted: &Counted<'_>,
) -> Next {
    let enough = |rule: Rule| match rules.has(rule) {
        true => counted.majority,
        false => 1,
    };
    let stored = |token: Token| {
        Next::Chooses(Choice {
            token,
            count: token,
            renews_superseded: false,
            is_stored: true,
        })
    };
    let mut taken = counted.taken.to_vec();
    if wish == Wish::Grant && !counted.is_over {
        let sealed = taken.iter().filter(|taken| taken.is_sealed);
        let sealed: Vec<_> = sealed.map(|taken| taken.token).collect();
        let added_up = !rules.has(Rule::SameTokenSealed) && sealed.len() >= counted.majority;
        let highest = sealed.iter().copied().flatten().max();
        let token = most(&sealed, enough(Rule::SealedOnMajority));
        if let Some(token) = token.or(highest.filter(|_| added_up))
            && token > counted.seen
        {
            return stored(token);
        }
    }
    if !rules.has(Rule::HighestOfMajority) {
        taken.sort();
        taken.truncate(1);
    }
    if !rules.has(Rule::BlankIsUnknown) {
        for lost in taken.iter_mut().filter(|taken| !taken.usable) {
            (lost.usable, lost.counted) = (true, Token::new(1, 0));
        }
    }
    let highest = taken.iter().map(|taken| taken.counted).max();
    let highest = highest.unwrap_or_default();
    let all = taken.iter().all(|taken| taken.usable);
    if !all || highest < counted.seen || counted.is_over {
        return Next::NeedsEpoch(highest.epoch.max(counted.seen.epoch));
    }
    let tokens: Vec<_> = counted.taken.iter().map(|taken| taken.token).collect();
    if wish == Wish::Grant
        && let Some(token) = most(&tokens, enough(Rule::StoredOnMajority))
        && token.epoch >= highest.epoch
    {
        return stored(token);
    }
    let count = highest.max(proposal.unwrap_or_default()).next();
    let mut token = count;
    if let Some(stored) = tokens.into_iter().flatten().max()
        && rules.has(Rule::OnlyRaises)
    {
        token = token.max(stored.next());
    }
    if let Wish::Another(Some(above)) = wish {
        token = token.max(above);
    }
    Next::Chooses(Choice {
        token,
        count,
        renews_superseded: false,
        is_stored: false,
    })
}

/// Returns the highest token that is in at least `enough` of the answers.
pub(super) fn most(said: &[Option<Token>], enough: usize) -> Option<Token> {
    let is_most = |token: &&Token| {
        let same = said.iter().flatten().filter(|other| *other == *token);
        same.count() >= enough
    };
    said.iter().flatten().filter(is_most).max().copied()
}
