//! [`Signed`]: leases whose tokens are signed when they are returned.

use std::sync::Arc;

use derive_where::derive_where;

use super::{Acquire, Held, Lease, LeaseAdmin, LeaseError, LeaseId, Leases, Page, Renew};
use crate::{
    token::{Resource, Token},
    token_keys::TokenKeys,
};

/// Leases of the store `L`, with signed tokens.
///
/// [`Issuer::sign_with`](crate::issuer::Issuer::sign_with) signs the tokens of leases that are
/// returned over HTTP. Use `Signed` for holders in the process of the store. It must be the
/// outermost wrapper, outside of [`Announced`](super::Announced). The value is cheap to clone.
///
/// # Example
///
/// ```
/// # tokio::runtime::Runtime::new()?.block_on(async {
/// use tower_fence::{Fence, TokenKey, TokenKeys, client::Holder};
/// use tower_fence::lease::{MemoryLeases, Signed};
///
/// # let pool = sqlx::sqlite::SqlitePoolOptions::new()
/// #     .max_connections(1)
/// #     .connect("sqlite::memory:")
/// #     .await?;
/// # let fence = Fence::new(pool);
/// # fence.migrate().await?;
/// let keys = TokenKeys::new([TokenKey::random("k1")?])?;
/// let leases = MemoryLeases::new(fence.clone()).announced_to(fence);
/// let lease = Holder::new(Signed::new(leases, keys)).acquire("sku-1").await?;
/// assert!(lease.fencing_token().mac.is_some());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// # })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
#[derive_where(Clone)]
pub struct Signed<L> {
    leases: Arc<L>,
    keys: TokenKeys,
}

impl<L> Signed<L> {
    /// Signs the tokens of `leases`.
    pub fn new(leases: L, keys: TokenKeys) -> Self {
        Self {
            leases: Arc::new(leases),
            keys,
        }
    }
}

impl<L: Leases> Leases for Signed<L> {
    async fn acquire(&self, resource: &Resource, request: Acquire) -> Result<Lease, LeaseError> {
        let lease = self.leases.acquire(resource, request).await?;
        Ok(lease.sign(&self.keys))
    }

    /// Renews the lease and signs its token with the current key.
    async fn renew(
        &self,
        resource: &Resource,
        id: &LeaseId,
        request: Renew,
    ) -> Result<Lease, LeaseError> {
        let lease = self.leases.renew(resource, id, request).await?;
        Ok(lease.sign(&self.keys))
    }

    async fn release(&self, resource: &Resource, id: &LeaseId) -> Result<(), LeaseError> {
        self.leases.release(resource, id).await
    }

    async fn inspect(&self, resource: &Resource) -> Result<Option<Held>, LeaseError> {
        self.leases.inspect(resource).await
    }
}

impl<L: LeaseAdmin> LeaseAdmin for Signed<L> {
    async fn list(&self, limit: usize, cursor: Option<&str>) -> Result<Page, LeaseError> {
        self.leases.list(limit, cursor).await
    }

    async fn break_lease(
        &self,
        resource: &Resource,
        seen: Option<Token>,
    ) -> Result<bool, LeaseError> {
        self.leases.break_lease(resource, seen).await
    }
}
