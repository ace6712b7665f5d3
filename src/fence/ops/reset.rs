//! Reset of a fence by an operator, after a request has presented a token that was far too high.

use crate::{
    fence::{Fence, claims::Claims, error::AdmitError, sql::FenceDatabase},
    token::{Resource, Token},
};

/// Error returned when a fence was not reset. Nothing was changed.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ResetError {
    /// An issuer has granted tokens above this one. After the reset, older tokens could write
    /// again.
    #[error("token {token} is below what issuers have granted on {resource}, at least {granted}")]
    BelowGranted {
        /// The resource.
        resource: Resource,
        /// The requested token.
        token: Token,
        /// The lowest token to which the fence may be reset, as far as the database knows.
        granted: i64,
    },
    /// The database is busy or unreachable.
    #[error(transparent)]
    Fence(#[from] AdmitError),
}

impl<DB: FenceDatabase> Fence<DB> {
    /// Sets `max_token` of a resource to `token`. Every token up to `token` is stale, and every
    /// higher token becomes admissible again.
    ///
    /// Operators call this if a request has presented a token that is far too high, and no grant is
    /// above it.
    ///
    /// **Condition**: from now on, no client may write with an earlier token above `token`, because
    /// those tokens become valid again. Therefore `token` must be the highest token that the issuer
    /// has granted on this resource, and never a lower one. With 0, for example, stale tokens would
    /// become valid again. If there is a lease, break it first, and wait until its requests end.
    /// The call checks the grants that are recorded in the database. These are the highest token
    /// that was announced, unless it is the maximum of the range, and the last epoch that was
    /// issued for the resource's partition.
    ///
    /// Other processes refuse tokens from their caches for up to ten seconds.
    ///
    /// # Errors
    ///
    /// Returns [`ResetError::BelowGranted`] if an issuer has granted higher tokens, and otherwise
    /// the errors of [`begin`](Self::begin).
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the reset has taken effect as a whole or not at all.
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
