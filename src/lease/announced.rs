//! Leases whose grants are announced before they are answered.
//!
//! The resource has the last word. It keeps the highest token that was announced, and to which lease:
//!
//! 1. A token that is above all that the resource has seen, or repeats the last announcement while it
//!    is alive, is announced.
//! 2. Otherwise nothing changes there, and the store is asked for a token above it, for the same lease
//!    and only while that is held. That one is announced in turn.
//! 3. A renewal that needed the second step is lost: what its holder has read is not covered.
//!
//! A store hands out the token of a lease from the moment on at which it was taken, also to a request
//! that comes while another one still announces it. So a renewal announces every token that this
//! process has not announced itself; where it has, a renewal needs no resource.

use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

use super::{
    Acquire, Held, Lease, LeaseError, LeaseId, Leases, ListError, Operate, Page, Renew, after,
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
    known: Arc<Mutex<Known>>,
}

/// The tokens of held leases that this process has announced.
#[derive(Default)]
struct Known {
    tokens: HashMap<LeaseDigest, (Token, Instant)>,
    /// How many there were after the last sweep.
    swept: usize,
}

impl Known {
    fn has(&self, lease: &LeaseDigest, token: Token) -> bool {
        let known = self.tokens.get(lease);
        known.is_some_and(|(known, _)| *known == token)
    }

    /// Remembers a token for as long as its lease may last, and forgets what has ended, each time the
    /// number may have doubled.
    fn note(&mut self, lease: LeaseDigest, token: Token, ttl: Duration) {
        if self.tokens.len() >= 2 * self.swept + 16 {
            let now = Instant::now();
            self.tokens.retain(|_, (_, until)| *until > now);
            self.tokens.shrink_to(2 * self.tokens.len());
            self.swept = self.tokens.len();
        }
        self.tokens.insert(lease, (token, after(ttl)));
    }
}

impl<L, A> Announced<L, A> {
    pub(super) fn new(leases: L, resources: A) -> Self {
        Self {
            leases: Arc::new(leases),
            resources: Arc::new(resources),
            known: Arc::default(),
        }
    }
}

impl<L: Leases, A: Announce + 'static> Leases for Announced<L, A> {
    async fn acquire(&self, resource: &Resource, request: Acquire) -> Result<Lease, LeaseError> {
        let (ttl, chosen_id) = (request.ttl, request.chosen_id);
        let lease = self.leases.acquire(resource, request).await?;
        // Nobody has it before it is announced; whoever goes away now may not have it at all. Who chose
        // the id may ask again, and may have been answered elsewhere meanwhile.
        let mut unused = GiveBack::granted(&self.leases, &lease);
        if chosen_id {
            unused.keep();
        }
        let announced = match self.announce(lease, ttl, false, Self::token_above).await {
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
        let digest = LeaseDigest::of(id.expose());
        if self.known().has(&digest, lease.token) {
            self.known().note(digest, lease.token, lease.ttl);
            return Ok(lease);
        }
        let keeps_token = !request.new_token;
        let announced = self
            .announce(lease.clone(), request.ttl, keeps_token, Self::lost)
            .await;
        if let Err(LeaseError::Lost { .. }) = announced {
            // Its holder has read what is not covered, and may not go on under any token. After any
            // other failure the next renewal announces it.
            drop(GiveBack::granted(&self.leases, &lease).now().await);
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

impl<L, A> Announced<L, A> {
    fn known(&self) -> MutexGuard<'_, Known> {
        // Nothing panics while the lock is held.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<L: Leases, A: Announce> Announced<L, A> {
    /// Announces the token of a lease, and makes sure that the lease is held afterwards. Where it
    /// `keeps_token`, one that was used up since it was announced will do.
    async fn announce<F>(
        &self,
        mut lease: Lease,
        ttl: Duration,
        keeps_token: bool,
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
                        self.known().note(digest, token, lease.ttl);
                        return Ok(lease);
                    }
                }
                // Its holder has used the token since, and nobody was granted another one.
                Err(AnnounceError::Outranked { was_last: true, .. }) if keeps_token => {
                    self.known().note(digest, token, lease.ttl);
                    return Ok(lease);
                }
                Err(AnnounceError::Outranked { next, .. }) => {
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
        Err(LeaseError::unavailable(AnnounceError::Outranked {
            next,
            was_last: false,
        }))
    }

    /// Asks for a token above those that the resource has seen, for the same lease.
    async fn token_above(
        leases: Arc<L>,
        lease: Lease,
        ttl: Duration,
        next: Token,
    ) -> Result<Lease, LeaseError> {
        let renew = Renew::new(ttl).at_least(next);
        let outranked = || {
            LeaseError::unavailable(AnnounceError::Outranked {
                next,
                was_last: false,
            })
        };
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
            known: Arc::clone(&self.known),
        }
    }
}

impl<L: fmt::Debug, A> fmt::Debug for Announced<L, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Announced").field(&self.leases).finish()
    }
}
