//! Lowers a fence for operators, after a token that was far too high.

use crate::{
    fence::{Fence, claims::Claims, error::AdmitError, sql::FenceDatabase},
    token::{Resource, Token},
};

/// Reason why a fence was not reset. Nothing was changed.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ResetError {
    /// An issuer has granted tokens above this one, and the reset would let older tokens write
    /// after them.
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
    /// Sets `max_token` of a resource to `token`: every token up to `token` is stale, every higher
    /// one is admissible again.
    ///
    /// It is for operators, if a request has presented a token that is far too high and no grant is
    /// above it.
    ///
    /// **Condition**: no client may write with an earlier token above `token` from now on, because
    /// those tokens become valid again. So `token` is the highest token that the issuer has granted
    /// on this resource, never a lower one: with 0, stale tokens would become valid again. Break
    /// the lease first, if there is one, and wait for its requests to end. The call checks what the
    /// database knows of grants: the highest token that was announced, unless it is the maximum of
    /// the range, and the last epoch that was issued for the resource's partition.
    ///
    /// Other processes refuse tokens from their caches for up to ten seconds.
    ///
    /// # Errors
    ///
    /// [`ResetError::BelowGranted`] if an issuer has granted higher tokens; otherwise those of
    /// [`begin`](Self::begin).
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the reset has either happened or not.
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
