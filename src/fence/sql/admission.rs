//! Arguments and outcomes of the fence's operations on a database.

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
    /// The timeouts of the transaction, which the statement sets.
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

    /// Returns the value to which the admission raises `max_token`.
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
    /// The resource or its partition was last used on another timeline of the database, or another
    /// session has just moved it to the current timeline. Nothing was changed. Call
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
    /// Whether `max_token` is the floor of the partition, because the resource has no row.
    pub(in crate::fence) by_floor: bool,
    /// Whether a token above `max_token` was announced. If so, the token `max_token` was not
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

/// Criteria for removing idle rows of a partition, and the maximum number of rows to remove.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Idle {
    pub(in crate::fence) older_than: Duration,
    pub(in crate::fence) at_most: u32,
    /// The highest token that was certainly granted, or `None` for the last token of the last
    /// epoch.
    pub(in crate::fence) granted: Option<Token>,
    /// The lowest token of the held leases in the partition, if known.
    pub(in crate::fence) live: Option<Token>,
}

/// Outcome of the announcement of a grant.
pub(crate) enum Announcement {
    /// The token was announced, and all lower tokens are stale.
    Announced,
    /// The fence has already seen the token `highest`, which is not below the announced token.
    /// `was_last` is true if this same grant was the last announcement. Nothing was changed.
    Outranked { highest: i64, was_last: bool },
    /// The cause is that of [`Admission::Behind`], or another transaction has inserted the row in
    /// the meantime.
    Behind,
}
