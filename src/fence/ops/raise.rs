//! Raising the fence: everyone older is dead, and nothing is written.

use super::retry::Tries;
use crate::{
    fence::{
        Fence, TokenUse,
        claims::{Claim, Claims},
        error::{AdmitError, CommitError},
        sql::FenceDatabase,
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
        if transaction.restart().await.is_ok() {
            let mut tries = Tries::new(self.limits.locking(claims));
            match self.raise_on(transaction, claims, &mut tries).await {
                Ok(false) => {}
                raised => return outranked_or(raised.map(drop)),
            }
        } else {
            // The connection was lost with its transaction; another one may do.
            drop(transaction);
        }
        self.fail_lost(claims).await
    }

    /// Raises the fence for tokens that were admitted in a transaction that is out of reach.
    pub(crate) async fn fail_lost(&self, claims: &Claims) -> Result<(), AdmitError> {
        // Out of turn: the transaction that is out of reach may still have it.
        outranked_or(self.raise_all(claims).await)
    }

    /// Raises in a transaction of its own.
    pub(super) async fn raise_all(&self, claims: &Claims) -> Result<(), AdmitError> {
        let mut tries = Tries::new(self.limits);
        loop {
            let transaction = Transaction::begin(&self.connections, tries.limits()).await?;
            if self.raise_on(transaction, claims, &mut tries).await? {
                return Ok(());
            }
        }
    }

    /// Raises several resources in one transaction. Where one turns out to be stale, the others are
    /// raised all the same. False where it collided with another one: once more, then.
    pub(super) async fn raise_on(
        &self,
        mut transaction: Transaction<DB>,
        claims: &Claims,
        tries: &mut Tries,
    ) -> Result<bool, AdmitError> {
        let names = self.names(&mut transaction).await?;
        let outranked = transaction
            .run(async |conn| {
                let mut outranked = None;
                for Claim { resource, token } in claims.in_lock_order() {
                    let Some(dead) = DB::raise(conn, &names, resource, *token).await? else {
                        return Ok(None);
                    };
                    if dead.max_token >= token.get() {
                        outranked.get_or_insert_with(|| {
                            dead.refuse(resource, *token, TokenUse::Reusable)
                        });
                    }
                }
                Ok(Some(outranked))
            })
            .await;
        let outranked = match outranked {
            Ok(Some(outranked)) => outranked,
            Ok(None) => {
                drop(transaction);
                tries.caught_up()?;
                self.catch_up(claims).await?;
                return Ok(false);
            }
            Err(failure) => {
                drop(transaction);
                tries.after(failure).await?;
                return Ok(false);
            }
        };
        commit(transaction).await?;
        outranked.map_or(Ok(true), |stale| Err(stale.into()))
    }
}

/// Commits a transaction of the fence alone, which is as good as unreachable when it fails.
pub(super) async fn commit<DB: FenceDatabase>(
    transaction: Transaction<DB>,
) -> Result<(), AdmitError> {
    transaction.commit().await.map_err(|error| match error {
        CommitError::Busy(cause) => AdmitError::Busy(cause),
        CommitError::Aborted(cause)
        | CommitError::Unfenced(cause)
        | CommitError::Unavailable(cause)
        | CommitError::OutcomeUnknown(cause) => AdmitError::Unavailable(cause),
        CommitError::Unfinished | CommitError::Escaped | CommitError::Unrecorded => {
            AdmitError::Unavailable(sqlx::Error::BeginFailed.into())
        }
    })
}

/// A raise that came after a newer token did what it was for.
fn outranked_or(raised: Result<(), AdmitError>) -> Result<(), AdmitError> {
    match raised {
        Err(AdmitError::Stale(_)) => Ok(()),
        outcome => outcome,
    }
}
