//! Admission of tokens: its statements, their arguments and their outcomes.

use sqlx::Database;

use super::{On, TransactionId};
use crate::{
    fence::{
        claims::{Claim, TokenUse},
        settings::Limits,
    },
    stale::StaleToken,
};

#[trait_variant::make(Send)]
pub(crate) trait Admissions: Database {
    /// Admits a token, and sets the timeouts of the transaction.
    ///
    /// If `early` is true, the transaction began before its request. In such a transaction, `now()`
    /// is the time at which the transaction began. To prevent `now()` from going backwards from one
    /// write to the next, the transaction must not have begun before the last write to the
    /// resource. If the transaction began before that write, or if the token is not admitted, the
    /// outcome is [`Admission::TooEarly`]. On SQLite, no transaction begins early.
    async fn admit(on: On<'_, Self>, admit: Admit<'_>, early: bool) -> sqlx::Result<Admission>;

    /// Admits a token, and leaves the settings of the transaction unchanged.
    async fn admit_only(on: On<'_, Self>, admit: Admit<'_>) -> sqlx::Result<Admission>;
}

#[derive(Clone, Copy)]
pub(crate) struct Admit<'a> {
    pub(in crate::fence) claim: &'a Claim,
    pub(in crate::fence) token_use: TokenUse,
    /// The timeouts of the transaction, which the statement sets.
    pub(in crate::fence) limits: Limits,
}

impl<'a> Admit<'a> {
    pub(in crate::fence) const fn new(
        claim: &'a Claim,
        token_use: TokenUse,
        limits: Limits,
    ) -> Self {
        Self {
            claim,
            token_use,
            limits,
        }
    }

    pub(in crate::fence) fn is_reusable(&self) -> bool {
        self.token_use == TokenUse::Reusable
    }

    /// Returns the value to which the admission raises `max_token`.
    pub(in crate::fence) const fn raised_to(&self) -> i64 {
        self.token_use.highest_stale(self.claim.token)
    }
}

pub(crate) enum Admission {
    /// The token was admitted, and `max_token` was raised.
    Admitted(Option<TransactionId>),
    /// The token is not greater than `max_token`.
    Stale(HighestStale),
    /// The resource or its partition was last used on another timeline of the database, or another
    /// session has just moved it to the current timeline. Nothing was changed. Call
    /// [`Tables::catch_up`](super::Tables::catch_up) and retry.
    Behind,
    /// The early transaction cannot be used. Nothing was changed.
    TooEarly,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct HighestStale {
    pub(in crate::fence) max_token: i64,
    /// Whether `max_token` is the floor of the partition, because the resource has no row.
    pub(in crate::fence) by_floor: bool,
    /// Whether the resource has received a token above `max_token`: it was announced, or it was
    /// used after `max_token` was announced. If so, the token `max_token` was not necessarily used.
    pub(in crate::fence) announced: bool,
}

impl HighestStale {
    pub(in crate::fence) fn refuse(self, claim: &Claim, token_use: TokenUse) -> StaleToken {
        StaleToken {
            resource: claim.resource.clone(),
            presented_token: claim.token,
            max_token: self.max_token,
            by_floor: self.by_floor,
            used: token_use == TokenUse::SingleUse
                && claim.token.get() == self.max_token
                && !self.by_floor
                && !self.announced,
        }
    }
}
