//! Requests to a database, and their outcomes.

use std::time::Duration;

use crate::{
    fence::{
        claims::{Claim, TokenUse},
        settings::TransactionLimits,
    },
    stale::StaleToken,
    token::{Resource, Token},
};

/// Admission of one token.
#[derive(Clone, Copy)]
pub(crate) struct Admit<'a> {
    pub(in crate::fence) resource: &'a Resource,
    pub(in crate::fence) token: Token,
    pub(in crate::fence) token_use: TokenUse,
    /// The limits of the transaction, which the statement sets.
    pub(in crate::fence) limits: TransactionLimits,
}

impl<'a> Admit<'a> {
    pub(in crate::fence) const fn new(
        claim: &'a Claim,
        token_use: TokenUse,
        limits: TransactionLimits,
    ) -> Self {
        Self {
            resource: &claim.resource,
            token: claim.token,
            token_use,
            limits,
        }
    }

    /// Returns the new value of `max_token`.
    pub(in crate::fence) const fn raised_to(&self) -> i64 {
        self.token_use.dead(self.token)
    }
}

/// Outcome of an admission.
pub(crate) enum Admission {
    /// The token was admitted, and `max_token` was raised.
    Admitted(Option<TransactionId>),
    /// The token is not greater than `max_token`.
    Stale(Dead),
    /// The row or the partition was last used on another timeline of the database, or another
    /// session has just moved it to this timeline. Nothing was changed. Call
    /// [`Backend::catch_up`](super::Backend::catch_up) and retry.
    Behind,
}

/// Id of a transaction on its server.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TransactionId(pub(in crate::fence) i64);

/// Highest stale token of a resource.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dead {
    pub(in crate::fence) max_token: i64,
    /// Whether the token is the floor of the partition, because the resource has no row.
    pub(in crate::fence) by_floor: bool,
    /// Whether a newer token was announced as granted. If so, the highest stale token was not
    /// necessarily used.
    pub(in crate::fence) announced: bool,
}

impl Dead {
    /// Returns the refusal of a stale token.
    pub(in crate::fence) fn refuse(
        self,
        resource: &Resource,
        token: Token,
        token_use: TokenUse,
    ) -> StaleToken {
        StaleToken {
            resource: resource.clone(),
            presented_token: token,
            max_token: self.max_token,
            by_floor: self.by_floor,
            used: token_use == TokenUse::SingleUse
                && token.get() == self.max_token
                && !self.by_floor
                && !self.announced,
        }
    }
}

/// Selection of the idle rows of a partition that may be removed, with a maximum number.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Idle {
    pub(in crate::fence) older_than: Duration,
    pub(in crate::fence) at_most: u32,
    /// The highest token that was certainly granted. `None` stands for the last token of the last
    /// epoch.
    pub(in crate::fence) granted: Option<Token>,
    /// The lowest token of a held lease, if known.
    pub(in crate::fence) live: Option<Token>,
}

/// Outcome of the announcement of a grant.
pub(crate) enum Announcement {
    /// The token was announced, and all lower tokens are stale.
    Announced,
    /// The token `highest`, which is not lower, was seen or announced before. `was_last` is true if
    /// it was the last announcement, and of this same grant. Nothing was changed.
    Outranked { highest: i64, was_last: bool },
    /// See [`Admission::Behind`]. Alternatively, another transaction has inserted the row in the
    /// meantime.
    Behind,
}
