//! What the fence asks of a database, and what it answers.

use std::time::Duration;

use crate::{
    fence::{
        claims::{Claim, TokenUse},
        settings::TransactionLimits,
    },
    stale::StaleToken,
    token::{Resource, Token},
};

/// The admission of one token.
#[derive(Clone, Copy)]
pub(crate) struct Admit<'a> {
    pub(in crate::fence) resource: &'a Resource,
    pub(in crate::fence) token: Token,
    pub(in crate::fence) token_use: TokenUse,
    /// The limits of its transaction, which the statement sets.
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

    /// What `max_token` becomes.
    pub(in crate::fence) const fn raised_to(&self) -> i64 {
        self.token_use.dead(self.token)
    }
}

/// The outcome of an admission.
pub(crate) enum Admission {
    /// The token was admitted, and `max_token` raised.
    Admitted(Option<TransactionId>),
    /// The token is not greater than `max_token`.
    Stale(Dead),
    /// The row or the partition was last used on another timeline of the database, or was until a
    /// moment ago: [`Backend::catch_up`](super::Backend::catch_up) comes first. Nothing was changed.
    Behind,
}

/// The number of a transaction, by which it is found on its server.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TransactionId(pub(in crate::fence) i64);

/// The highest stale token of a resource.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dead {
    pub(in crate::fence) max_token: i64,
    /// Whether that is the floor of its partition, since it has no row.
    pub(in crate::fence) by_floor: bool,
    /// Whether a newer token was announced as granted: then the highest stale one need not have been used.
    pub(in crate::fence) announced: bool,
}

impl Dead {
    /// The refusal of a stale token.
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

/// Which idle rows of a partition may be removed, and how many of them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Idle {
    pub(in crate::fence) older_than: Duration,
    pub(in crate::fence) at_most: u32,
    /// The highest token that was granted for certain; by default the last of the last epoch.
    pub(in crate::fence) granted: Option<Token>,
    /// The lowest token of a lease that is held, if any is known.
    pub(in crate::fence) live: Option<Token>,
}

/// The outcome of the announcement of a grant.
pub(crate) enum Announcement {
    /// All tokens below it are stale.
    Announced,
    /// A token as high as `highest` was seen or announced before; `was_last` if that was this very
    /// grant. Nothing was changed.
    Outranked { highest: i64, was_last: bool },
    /// As [`Admission::Behind`]; or another transaction has made the row meanwhile.
    Behind,
}
