//! Leases whose grants are announced before they are answered.
//!
//! The resource has the last word. It keeps the highest token that was announced, and to which lease:
//!
//! 1. A token that is above all that the resource has seen, or repeats the last announcement while it
//!    is alive, is announced.
//! 2. Otherwise nothing changes there, and the store is asked for a token above it, for the same lease
//!    and only while that is held. That one is announced in turn.
//! 3. A renewal that needed the second step is lost: what its holder has read is not covered.

use std::{fmt, sync::Arc, time::Duration};

use super::{
    Acquire, Held, Lease, LeaseError, LeaseId, Leases, ListError, Operate, Page, Renew,
    give_back::GiveBack,
};
use crate::{
    announce::{Announce, AnnounceError, LeaseDigest},
    metrics,
    token::{Resource, Token},
};

/// How often a token is announced for one call before that gives up: each time after the first means
/// that the resource has seen a higher one meanwhile.
const ATTEMPTS: usize = 8;

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
        let announced = match self.announce(lease, ttl, Self::token_above).await {
            // Nobody has heard of the lease that is lost, so nothing of anybody's is.
            Err(error @ LeaseError::Lost { .. }) => Err(LeaseError::unavailable(error)),
            announced => announced,
        };
        match announced {
            Ok(_) => unused.keep(),
            Err(_) => drop(unused.now().await),
        }
        announced
    }

    async fn renew(
        &self,
        resource: &Resource,
        id: &LeaseId,
        request: Renew,
    ) -> Result<Lease, LeaseError> {
        let lease = self.leases.renew(resource, id, request).await?;
        if !request.new_token {
            return Ok(lease);
        }
        // A later renewal would hand out the token that was never announced, beside which a delayed
        // write under the old one may land. So the lease ends where this one fails.
        let mut unused = GiveBack::granted(&self.leases, &lease);
        let announced = self.announce(lease, request.ttl, Self::lost).await;
        match announced {
            Ok(_) => unused.keep(),
            Err(_) => drop(unused.now().await),
        }
        announced
    }

    async fn release(&self, resource: &Resource, id: &LeaseId) -> Result<(), LeaseError> {
        self.leases.release(resource, id).await
    }

    async fn inspect(&self, resource: &Resource) -> Result<Option<Held>, LeaseError> {
        self.leases.inspect(resource).await
    }
}

impl<L: Leases, A: Announce> Announced<L, A> {
    /// Announces the token of a lease, and makes sure that the lease is held afterwards.
    async fn announce<F>(
        &self,
        mut lease: Lease,
        ttl: Duration,
        outranked: impl Fn(Arc<L>, Lease, Duration, Token) -> F,
    ) -> Result<Lease, LeaseError>
    where
        F: Future<Output = Result<Lease, LeaseError>>,
    {
        let digest = LeaseDigest::of(lease.id.expose());
        for _ in 0..ATTEMPTS {
            let (resource, token) = (&lease.resource, lease.token);
            match self.resources.announce(resource, token, &digest).await {
                Ok(()) => {
                    // It may have run out meanwhile, or another request under its id have given it
                    // back, or taken another token.
                    let renewed = self.leases.renew(resource, &lease.id, Renew::new(ttl));
                    lease = renewed.await?;
                    if lease.token == token {
                        return Ok(lease);
                    }
                }
                Err(AnnounceError::Outranked { next }) => {
                    metrics::count("tower_fence_grants_outranked_total");
                    tracing::warn!(
                        %resource, token = token.get(), next = next.get(),
                        "the resource has seen a newer token than the grant's, of somebody else or a \
                         forged one; `Fence::reset` takes it back"
                    );
                    lease = outranked(Arc::clone(&self.leases), lease, ttl, next).await?;
                }
                Err(AnnounceError::Exhausted { max_token }) => {
                    return Err(LeaseError::Exhausted {
                        resource: lease.resource,
                        max_token,
                    });
                }
                Err(error) => return Err(LeaseError::unavailable(error)),
            }
        }
        let next = lease.token;
        Err(LeaseError::unavailable(AnnounceError::Outranked { next }))
    }

    /// Asks for a token above those that the resource has seen, for the same lease.
    async fn token_above(
        leases: Arc<L>,
        lease: Lease,
        ttl: Duration,
        next: Token,
    ) -> Result<Lease, LeaseError> {
        let renew = Renew::new(ttl).at_least(next);
        let outranked = || LeaseError::unavailable(AnnounceError::Outranked { next });
        match leases.renew(&lease.resource, &lease.id, renew).await {
            Ok(lease) if lease.token >= next => Ok(lease),
            // A store that does not choose its tokens.
            Ok(_) | Err(LeaseError::Invalid { .. }) => Err(outranked()),
            Err(error) => Err(error),
        }
    }

    /// What the holder has read under its older token may be outdated.
    async fn lost(_: Arc<L>, lease: Lease, _: Duration, _: Token) -> Result<Lease, LeaseError> {
        Err(LeaseError::Lost {
            resource: lease.resource,
        })
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
