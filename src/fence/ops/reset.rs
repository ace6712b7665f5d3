//! Reset of `max_token` by an operator, after a request has presented a token that was far too
//! high.

use tracing::Instrument;

use crate::{
    fence::{Fence, claims::Claims, error::AdmitError, fault::Failure, sql::FenceDatabase},
    token::{Resource, Token},
};

/// Error returned when a reset of `max_token` was refused or is not confirmed.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ResetError {
    /// An issuer has granted tokens above the requested one. After the reset, the fence would admit
    /// stale tokens again. The fence is unchanged.
    #[error(
        "token {token} is below the tokens that issuers have granted on {resource}: reset to {granted} or above"
    )]
    BelowGranted {
        /// The resource.
        resource: Resource,
        /// The requested token.
        token: Token,
        /// The lowest token to which `max_token` may be reset, according to the grants that are
        /// recorded in the database.
        granted: i64,
    },
    /// The database is busy, unreachable or misconfigured. After [`AdmitError::Unavailable`], the
    /// outcome is unknown: repeat the reset. After the other errors, the fence is unchanged.
    #[error(transparent)]
    Fence(#[from] AdmitError),
}

impl<DB: FenceDatabase> Fence<DB> {
    /// Sets `max_token` of a resource to `token`. Every token up to `token` is stale, and every
    /// higher token becomes admissible again. A reset of a resource without a row changes nothing
    /// if `token` is above the floor of its partition.
    ///
    /// Call this method if a request has presented a token that is far too high, and the issuer
    /// does not grant tokens above it.
    ///
    /// **Condition**: from now on, no client uses an existing token above `token`, because the
    /// fence admits these tokens again. Therefore `token` must be the highest token that the issuer
    /// has granted on this resource, and never a lower one. If a lease on the resource is held,
    /// break the lease first, and wait until the requests of its holder have ended.
    ///
    /// This method refuses a token below [`FenceState::granted`](super::FenceState::granted). If a
    /// forged token has caused a grant of the highest possible token, the database no longer has a
    /// record of the earlier grants of the resource.
    ///
    /// For up to ten seconds, other processes still refuse tokens that are stale according to their
    /// caches.
    ///
    /// # Errors
    ///
    /// Returns [`ResetError::BelowGranted`] if an issuer has granted higher tokens, and otherwise
    /// the errors of [`begin`](Self::begin).
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, a task completes the reset and logs it.
    pub async fn reset(&self, resource: &Resource, token: Token) -> Result<(), ResetError> {
        let (fence, resource) = (self.clone(), resource.clone());
        let resetting = async move { fence.reset_and_log(&resource, token).await };
        // The reset may take effect even if the caller is dropped. The task logs it nevertheless.
        let task = tokio::spawn(resetting.in_current_span());
        let outcome = task.await;
        outcome.unwrap_or_else(|_| Err(AdmitError::from(Failure::silent()).into()))
    }

    async fn reset_and_log(&self, resource: &Resource, token: Token) -> Result<(), ResetError> {
        let (name, before) = (resource.as_str(), self.inspect(resource).await?);
        let one = Claims::one(resource.clone(), token);
        let ordered = one.in_lock_order();
        let waited = self.wait_in_queues(&ordered, self.limits.lock_timeout);
        let _permits = waited.await.map_err(AdmitError::from)?;
        let limits = self.limits_on_workers().await?;
        let reset = self.in_transaction(limits, async |on| DB::reset(on, one.first()).await);
        let granted = reset.await.inspect_err(|error| {
            if let AdmitError::Unavailable(cause) = error
                && !Failure::of(cause).cannot_write()
            {
                tracing::warn!(
                    resource = name,
                    token = token.get(),
                    before,
                    "the fence may have been reset: the database has not confirmed it"
                );
            }
        })?;
        if granted > token.get() {
            return Err(ResetError::BelowGranted {
                resource: resource.clone(),
                token,
                granted,
            });
        }
        self.stale.remove(resource);
        tracing::warn!(
            resource = name,
            token = token.get(),
            before,
            "the fence was reset"
        );
        Ok(())
    }
}
