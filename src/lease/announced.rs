//! Leases whose grants are announced before they are answered.

use std::{fmt, sync::Arc};

use super::{
    Acquire, Held, Lease, LeaseError, LeaseId, Leases, ListError, Operate, Page, Renew,
    give_back::GiveBack,
};
use crate::{
    announce::{Announce, LeaseDigest},
    token::Resource,
};

/// Leases whose grants are announced, from [`Leases::announced_to`]. Cheap to clone.
pub struct Announced<L, A> {
    leases: Arc<L>,
    resources: Arc<A>,
}

impl<L, A> Announced<L, A> {
    pub(super) fn new(leases: L, resources: A) -> Self {
        Self {
            leases: Arc::new(leases),
            resources: Arc::new(resources),
        }
    }
}

impl<L: Leases, A: Announce + 'static> Leases for Announced<L, A> {
    async fn acquire(&self, resource: &Resource, request: Acquire) -> Result<Lease, LeaseError> {
        let ttl = request.ttl;
        let lease = self.leases.acquire(resource, request).await?;
        // Nobody has it before it is announced; whoever goes away now may not have it at all.
        let mut unused = GiveBack::granted(&self.leases, &lease);
        let cause = match self
            .resources
            .announce(resource, lease.token, &LeaseDigest::of(lease.id.expose()))
            .await
        {
            // It may have run out meanwhile, or another request under its id have given it back.
            Ok(()) => match self
                .leases
                .renew(resource, &lease.id, Renew::new(ttl))
                .await
            {
                Ok(lease) => {
                    unused.keep();
                    return Ok(lease);
                }
                Err(error) => LeaseError::unavailable(error),
            },
            Err(error) => LeaseError::unavailable(error),
        };
        let _ = unused.now().await;
        Err(cause)
    }

    async fn renew(
        &self,
        resource: &Resource,
        id: &LeaseId,
        request: Renew,
    ) -> Result<Lease, LeaseError> {
        // Everyone older than the grant is dead already; a new token changes nothing about that.
        self.leases.renew(resource, id, request).await
    }

    async fn release(&self, resource: &Resource, id: &LeaseId) -> Result<(), LeaseError> {
        self.leases.release(resource, id).await
    }

    async fn inspect(&self, resource: &Resource) -> Result<Option<Held>, LeaseError> {
        self.leases.inspect(resource).await
    }
}

impl<L: Operate, A: Announce + 'static> Operate for Announced<L, A> {
    async fn list(&self, limit: usize, cursor: Option<&str>) -> Result<Page, ListError> {
        self.leases.list(limit, cursor).await
    }

    async fn break_lease(&self, resource: &Resource) -> Result<bool, LeaseError> {
        self.leases.break_lease(resource).await
    }
}

impl<L, A> Clone for Announced<L, A> {
    fn clone(&self) -> Self {
        Self {
            leases: Arc::clone(&self.leases),
            resources: Arc::clone(&self.resources),
        }
    }
}

impl<L: fmt::Debug, A> fmt::Debug for Announced<L, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Announced").field(&self.leases).finish()
    }
}
