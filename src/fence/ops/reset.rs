//! Taking a fence back, for operators: the cure where a token was far too high.

use crate::{
    fence::{Fence, claims::Claims, error::AdmitError, sql::FenceDatabase},
    token::{Resource, Token},
};

/// Why a fence was not taken back. Nothing was changed.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ResetError {
    /// An issuer has granted higher tokens than this, whose holders would be overtaken.
    #[error("token {token} is below what issuers have granted on {resource}, at least {granted}")]
    BelowGranted {
        /// The resource.
        resource: Resource,
        /// The token that was asked for.
        token: Token,
        /// The lowest token that the fence may be taken back to, for all that the database knows.
        granted: i64,
    },
    /// The database was busy, or could not be reached.
    #[error(transparent)]
    Fence(#[from] AdmitError),
}

impl<DB: FenceDatabase> Fence<DB> {
    /// Takes `max_token` of a resource back to `token`, or up to it: every token up to `token` is
    /// dead, every higher one is admissible again. For operators, where a request has presented a
    /// token that is far too high, and no grant outranks it any more.
    ///
    /// **The one condition**: nobody may write with a token above `token` from now on, for those are
    /// alive again. So `token` is the highest that the issuer has granted on this resource, never
    /// less: with 0 in mind, one revives the dead. Break the lease first, if there is one, and wait
    /// for its requests to end. What the database knows of grants is checked: the highest token that
    /// was announced, unless it is the last one of all, and the last epoch that was handed out for
    /// the resource's partition.
    ///
    /// Other processes refuse from memory what they have seen refused, for up to ten seconds.
    ///
    /// # Errors
    ///
    /// [`ResetError::BelowGranted`] when an issuer has granted more than that; the rest as
    /// [`begin`](Self::begin).
    ///
    /// # Cancel safety
    ///
    /// Dropped at any moment, it has either happened or not.
    pub async fn reset(&self, resource: &Resource, token: Token) -> Result<(), ResetError> {
        let one = Claims::one(resource.clone(), token);
        let _permits = self.wait_in_queues(&one).await?;
        let granted = self
            .in_transaction(async |conn, names| DB::reset(conn, names, resource, token).await)
            .await?;
        if granted > token.get() {
            return Err(ResetError::BelowGranted {
                resource: resource.clone(),
                token,
                granted,
            });
        }
        self.stale.forget(resource);
        tracing::warn!(%resource, token = token.get(), "the fence was reset");
        Ok(())
    }
}
