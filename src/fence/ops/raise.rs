//! Raising the fence: everyone older is dead, and nothing is written.

use super::transact::{Plan, Step};
use crate::{
    fence::{
        Fence, TokenUse,
        claims::{Claim, Claims},
        error::AdmitError,
        sql::{FenceDatabase, Names},
        tx::Transaction,
    },
    token::{Resource, Token},
};

impl<DB: FenceDatabase> Fence<DB> {
    /// Makes every token older than `token` dead, without a write: at a grant, or at a read whose
    /// result must not be overtaken. Waits for a write in flight.
    ///
    /// # Errors
    ///
    /// [`AdmitError::Stale`] when `token` itself is dead; the rest as [`begin`](Self::begin), and
    /// [`AdmitError::Unavailable`] when the commit failed.
    ///
    /// # Cancel safety
    ///
    /// Dropped at any moment, it leaves no open transaction and no lock behind.
    pub async fn raise(&self, resource: &Resource, token: Token) -> Result<(), AdmitError> {
        let one = Claims::one(resource.clone(), token);
        self.check_stale(&one, TokenUse::Reusable)?;
        let _permits = self.wait_in_queues(&one).await?;
        self.raise_all(&one).await
    }

    /// Rolls back what was written under admitted tokens, and raises the fence instead, so
    /// that everyone older is dead all the same.
    pub(crate) async fn fail(
        &self,
        mut transaction: Transaction<DB>,
        claims: &Claims,
    ) -> Result<(), AdmitError> {
        let plan = Plan::locking(self.limits, claims);
        let plan = match transaction.restart().await {
            Ok(()) => plan.on(transaction),
            // The connection is lost with its transaction. Its place in the pool is free for another one.
            Err(_) => {
                drop(transaction);
                plan
            }
        };
        outranked_or(self.raise_by(plan, claims).await)
    }

    /// Raises the fence for tokens that were admitted in a transaction that is out of reach.
    pub(crate) async fn fail_lost(&self, claims: &Claims) -> Result<(), AdmitError> {
        // Out of turn: the transaction that is out of reach may still have it.
        outranked_or(self.raise_all(claims).await)
    }

    async fn raise_all(&self, claims: &Claims) -> Result<(), AdmitError> {
        self.raise_by(Plan::locking(self.limits, claims), claims)
            .await
    }

    /// Raises several resources in one transaction. If one turns out to be stale, the others are raised
    /// all the same.
    async fn raise_by(&self, plan: Plan<'_, DB>, claims: &Claims) -> Result<(), AdmitError> {
        let raise = async |conn: &mut DB::Connection, names: &Names| {
            let mut outranked = None;
            for Claim { resource, token } in claims.in_lock_order() {
                let Some(dead) = DB::raise(conn, names, resource, *token).await? else {
                    return Ok(Step::Behind);
                };
                if dead.max_token >= token.get() {
                    outranked
                        .get_or_insert_with(|| dead.refuse(resource, *token, TokenUse::Reusable));
                }
            }
            Ok(Step::Done(outranked))
        };
        let (transaction, outranked) = self
            .open(plan, async |transaction, names| {
                transaction.run(async |conn| raise(conn, names).await).await
            })
            .await?;
        transaction.commit().await?;
        outranked.map_or(Ok(()), |stale| Err(stale.into()))
    }
}

/// A raise that came after a newer token did what it was for.
fn outranked_or(raised: Result<(), AdmitError>) -> Result<(), AdmitError> {
    match raised {
        Err(AdmitError::Stale(_)) => Ok(()),
        outcome => outcome,
    }
}
