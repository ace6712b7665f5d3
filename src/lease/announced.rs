//! Leases whose grants are announced to the resource before they are returned.
//!
//! The resource determines whether a token is valid. It stores the highest announced token and the
//! lease of that token. Announcements follow these rules:
//!
//! 1. An announcement is accepted if its token is higher than all tokens that the resource has
//!    seen, or if it repeats the last announcement and its token is not stale.
//! 2. Any other announcement is refused, and the resource does not change. If the lease is still
//!    held, [`Announced`] asks the store for a higher token for the same lease, and announces that
//!    token.
//! 3. The announcement of a renewal is also refused if the last announcement was that of another
//!    lease, or if a token above the last announced one was used. After any refusal of a renewal,
//!    [`Announced`] does not follow rule 2, but asks the store for the lease's current token. If
//!    that token is higher, another renewal of the same lease has overtaken this one. This renewal
//!    then returns the higher token or, if it requested a new token, requests another one.
//!    Otherwise the lease is lost, because another holder may have written since this holder last
//!    read its data.
//! 4. An announcement can be slow. If it took at least half the TTL, the lease is renewed before it
//!    is returned, so that no holder receives an expired lease.
//!
//! After a store has assigned a token to a lease, it returns that token to any request under the
//! lease id, even while another request is still announcing the token. A renewal therefore
//! announces the lease's token, unless this process has already announced that token. If the fence
//! already has this announcement, the renewal changes nothing, and does not wait for a write in
//! progress, which may be the holder's own.

use std::{fmt, sync::Arc, time::Duration};

use derive_where::derive_where;
use tokio::time::Instant;

use super::{
    Acquire, Held, Lease, LeaseAdmin, LeaseError, LeaseId, Leases, Page, ReleaseGuard, Renew,
    backend::Expiring,
};
use crate::{
    announce::{Announce, AnnounceError, LeaseDigest},
    events, metrics,
    sampler::Sampler,
    time::after,
    token::{Resource, Token},
};

/// Maximum number of announcements for one call. Each attempt after the first one means that the
/// resource has received a higher token in the meantime.
const ATTEMPTS: usize = 8;

/// Leases of the store `L` whose grants are announced to `A`, for example a `Fence`.
///
/// Each grant, and each renewal whose token this process has not announced yet, is announced before
/// it is returned. The announcement makes all lower tokens stale and, unless a renewal repeats the
/// last announcement, waits for a write in progress. Therefore no earlier holder can write after
/// the new holder has received the grant, and data that the new holder reads stays current until
/// its first write. The value is cheap to clone.
///
/// If the announcement fails, the result is [`LeaseError::Unavailable`],
/// [`LeaseError::Misconfigured`] or [`LeaseError::Exhausted`]. If the caller has chosen the lease
/// id, the lease is kept, and a retry with the same id announces its token. If the caller has not
/// chosen the lease id, the lease is released.
///
/// The resource takes precedence over the store. If the resource has received a token that another
/// issuer granted or that was forged, the store may choose a lower token for a new grant. In that
/// case, the grant is returned with a token that is not stale. A renewal returns
/// [`LeaseError::Lost`] instead, because another holder may have written since this holder last
/// read its data. **Without announcements, a store cannot know** that a resource has received
/// tokens higher than its own. It keeps granting leases whose writes are all refused as stale.
/// Announce the grants, or reset the resource with `Fence::reset`.
///
/// For each resource name on which a lease was ever granted, the fence's table has a row until
/// `Fence::remove_idle` removes it. Do not grant leases on names that clients can invent.
///
/// # Example
///
/// ```
/// # tokio::runtime::Runtime::new()?.block_on(async {
/// use tower_fence::{Fence, client::Holder, lease::MemoryLeases};
///
/// # let pool = sqlx::sqlite::SqlitePoolOptions::new()
/// #     .max_connections(1)
/// #     .connect("sqlite::memory:")
/// #     .await?;
/// let fence = Fence::new(pool);
/// fence.migrate().await?;
/// let leases = MemoryLeases::new(fence.clone()).announced_to(fence.clone());
///
/// let lease = Holder::new(leases).acquire("sku-1").await?;
/// // Every lower token is stale even before the first write.
/// let state = fence.inspect(lease.resource()).await?;
/// assert_eq!(state, Some(lease.token().get() - 1));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// # })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive_where(Clone)]
pub struct Announced<L, A> {
    leases: Arc<L>,
    resources: Arc<A>,
    /// The tokens of held leases that this process has announced.
    tokens: Arc<Expiring<(Resource, LeaseDigest), Token>>,
}

impl<L, A> Announced<L, A> {
    /// Announces the grants of `leases` to `resources`. The method `announced_to` of this crate's
    /// stores does the same.
    pub fn new(leases: L, resources: A) -> Self {
        Self {
            leases: Arc::new(leases),
            resources: Arc::new(resources),
            tokens: Arc::default(),
        }
    }
}

impl<L: Leases, A: Announce + 'static> Leases for Announced<L, A> {
    async fn acquire(&self, resource: &Resource, request: Acquire) -> Result<Lease, LeaseError> {
        let deadline = after(request.wait);
        match self.acquire_once(resource, request.clone()).await {
            // The lease was lost before the caller received it, because the epoch of its token has
            // ended. Acquire it again.
            Err(LeaseError::Lost { .. }) => {}
            acquired => return acquired,
        }
        let again = Acquire {
            wait: deadline.saturating_duration_since(Instant::now()),
            ..request
        };
        let acquired = self.acquire_once(resource, again).await;
        acquired.map_err(LeaseError::not_yet_held)
    }

    async fn renew(
        &self,
        resource: &Resource,
        id: &LeaseId,
        request: Renew,
    ) -> Result<Lease, LeaseError> {
        let lease = self.leases.renew(resource, id, request).await?;
        if self.tokens.get(&key_of(&lease)) == Some(lease.token) {
            self.note_announced(&lease);
            return Ok(lease);
        }
        let announced = self
            .announce(lease.clone(), request.ttl, Some(request))
            .await;
        if let Err(LeaseError::Lost { .. }) = announced {
            // The holder's data may be out of date, so the holder must not continue under any
            // token. After any other failure, the next renewal announces the token.
            drop(ReleaseGuard::granted(&self.leases, &lease).release().await);
        }
        announced
    }

    async fn release(&self, resource: &Resource, id: &LeaseId) -> Result<(), LeaseError> {
        let released = self.leases.release(resource, id).await;
        let key = (resource.clone(), LeaseDigest::of(id.expose()));
        self.tokens.take(&key);
        released
    }

    async fn inspect(&self, resource: &Resource) -> Result<Option<Held>, LeaseError> {
        self.leases.inspect(resource).await
    }
}

impl<L: LeaseAdmin, A: Announce + 'static> LeaseAdmin for Announced<L, A> {
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

impl<L, A> Announced<L, A> {
    /// Stores a token until its lease has certainly expired.
    fn note_announced(&self, lease: &Lease) {
        self.tokens.insert(key_of(lease), lease.token, lease.ttl);
    }
}

impl<L: Leases, A: Announce> Announced<L, A> {
    /// Acquires a lease and announces its token. Returns [`LeaseError::Lost`] only if the store no
    /// longer holds the lease when a higher token is requested for it.
    async fn acquire_once(
        &self,
        resource: &Resource,
        request: Acquire,
    ) -> Result<Lease, LeaseError> {
        let (ttl, chosen_id) = (request.ttl, request.chosen_id);
        let acquired = self.leases.acquire(resource, request).await;
        let lease = acquired.map_err(LeaseError::not_yet_held)?;
        // The caller receives the lease only after the announcement. If the call is dropped before
        // that, the lease is released. If the caller has chosen the id, the lease is kept, because
        // the caller may retry, and another call under the id may already have returned the lease.
        let mut unused = ReleaseGuard::granted(&self.leases, &lease);
        if chosen_id {
            unused.keep();
        }
        let announced = self.announce(lease, ttl, None).await;
        match announced {
            Ok(_) => unused.keep(),
            Err(_) => drop(unused.release().await),
        }
        announced
    }

    /// Announces the token of a lease that the store has just granted or, by the request `renewal`,
    /// renewed. If the renewal keeps the token, accepts a token that was used after its
    /// announcement.
    async fn announce(
        &self,
        mut lease: Lease,
        ttl: Duration,
        renewal: Option<Renew>,
    ) -> Result<Lease, LeaseError> {
        let keeps_token = renewal.is_some_and(|request| !request.new_token);
        let digest = LeaseDigest::of(lease.id.expose());
        let mut granted_at = Instant::now();
        for _ in 0..ATTEMPTS {
            let (resource, token) = (&lease.resource, lease.token);
            let announced = self
                .resources
                .announce(resource, token, &digest, renewal.is_some());
            match announced.await {
                Ok(()) => {}
                // The holder has used the token since its announcement, and the resource has not
                // received a higher one.
                Err(AnnounceError::Superseded {
                    max_token,
                    was_last: true,
                }) if keeps_token && max_token == token.get() => {}
                Err(AnnounceError::Superseded { max_token, .. }) => {
                    granted_at = Instant::now();
                    let next = Token::new(max_token.saturating_add(1));
                    lease = match (renewal, next) {
                        (None, Ok(next)) => self.token_above(&lease, ttl, next).await?,
                        (None, Err(_)) => return Err(LeaseError::exhausted(resource, max_token)),
                        (Some(request), next) => {
                            let next = next.unwrap_or(Token::MAX);
                            self.current(&lease, request, next).await?
                        }
                    };
                    continue;
                }
                Err(error) => return Err(error.into()),
            }
            if granted_at.elapsed() >= lease.ttl / 2 {
                granted_at = Instant::now();
                let renewed = self
                    .leases
                    .renew(resource, &lease.id, Renew::new(ttl))
                    .await;
                // The store has granted the lease. Wrap the error, because a `Holder` would
                // otherwise conclude from a connection error that the store has received no
                // request, and would not release the lease.
                lease = renewed.map_err(|error| match error {
                    error @ LeaseError::Unavailable(_) => LeaseError::unavailable(error),
                    error if renewal.is_none() => error.not_yet_held(),
                    other => other,
                })?;
            }
            if lease.token == token {
                self.note_announced(&lease);
                return Ok(lease);
            }
        }
        Err(superseded(lease.token))
    }

    /// Renews the lease with a token of at least `next`, which is above the tokens that the
    /// resource has received.
    async fn token_above(
        &self,
        lease: &Lease,
        ttl: Duration,
        next: Token,
    ) -> Result<Lease, LeaseError> {
        note_superseded(lease, next);
        let renew = Renew::new(ttl).at_least(next);
        match self.leases.renew(&lease.resource, &lease.id, renew).await {
            Ok(lease) if lease.token >= next => Ok(lease),
            // The store does not support a lowest token.
            Ok(_) | Err(LeaseError::Invalid { .. }) => Err(superseded(next)),
            Err(error) => Err(error),
        }
    }

    /// Renews the lease again, after the announcement of its token was refused.
    ///
    /// Returns [`LeaseError::Lost`] if the lease has no higher token, because the holder may have
    /// read its data under an older one.
    async fn current(
        &self,
        lease: &Lease,
        request: Renew,
        next: Token,
    ) -> Result<Lease, LeaseError> {
        let (resource, id) = (&lease.resource, &lease.id);
        let renew = Renew::new(request.ttl);
        let current = self.leases.renew(resource, id, renew).await?;
        if current.token <= lease.token {
            note_superseded(lease, next);
            return Err(LeaseError::lost(resource));
        }
        match request.new_token {
            true => self.leases.renew(resource, id, request).await,
            false => Ok(current),
        }
    }
}

/// Returns the key of a lease in [`Announced::tokens`].
fn key_of(lease: &Lease) -> (Resource, LeaseDigest) {
    (lease.resource.clone(), LeaseDigest::of(lease.id.expose()))
}

/// Reports that the resource has received a higher token than that of its lease.
fn note_superseded(lease: &Lease, next: Token) {
    static SUPERSEDED: Sampler = Sampler::new();
    let (resource, token) = (&lease.resource, lease.token);
    metrics::count("tower_fence_grants_superseded_total");
    // A renewal may be superseded although its token is the highest. Its lease is then lost.
    if next > token {
        events::superseded(resource, token, next);
    }
    let Some(suppressed) = SUPERSEDED.next() else {
        return;
    };
    tracing::warn!(
        resource = resource.as_str(),
        token = token.get(),
        next = next.get(),
        suppressed,
        "the lease is superseded: the database has failed over or `after_failover` was called (do not reset \
         the resource), the token was used before announcements were enabled, or the resource has received a \
         token of another issuer or a forged token"
    );
}

/// Returns the error for a grant whose announcements were refused.
fn superseded(next: Token) -> LeaseError {
    LeaseError::unavailable(AnnounceError::Superseded {
        max_token: next.get() - 1,
        was_last: false,
    })
}

impl<L: fmt::Debug, A> fmt::Debug for Announced<L, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Announced").field(&self.leases).finish()
    }
}

#[cfg(all(test, feature = "memory"))]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    use tokio::time::advance;

    use super::*;
    use crate::{announce::AnnounceFuture, epochs::testing::FirstEpoch, lease::MemoryLeases};

    /// Resource that counts announcements.
    #[derive(Default)]
    struct Counting(AtomicUsize);

    impl Announce for Counting {
        fn announce<'a>(
            &'a self,
            _: &'a Resource,
            _: Token,
            _: &'a LeaseDigest,
            _: bool,
        ) -> AnnounceFuture<'a> {
            self.0.fetch_add(1, Relaxed);
            Box::pin(async { Ok(()) })
        }
    }

    #[tokio::test(start_paused = true)]
    async fn each_new_token_is_announced_once() {
        let leases = MemoryLeases::new(FirstEpoch).announced_to(Counting::default());
        let announced = || leases.resources.0.load(Relaxed);
        let (resource, ttl) = (Resource::new("sku-1").unwrap(), Duration::from_secs(9));
        let lease = leases.acquire(&resource, Acquire::new(ttl)).await.unwrap();
        for _ in 0..3 {
            leases
                .renew(&resource, &lease.id, Renew::new(ttl))
                .await
                .unwrap();
        }
        assert_eq!(announced(), 1);
        let renew = Renew::new(ttl).with_new_token();
        leases.renew(&resource, &lease.id, renew).await.unwrap();
        assert_eq!(announced(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn equal_token_of_another_resource_is_announced() {
        let leases = MemoryLeases::new(FirstEpoch).announced_to(Counting::default());
        let announced = || leases.resources.0.load(Relaxed);
        let ttl = Duration::from_secs(9);
        let request = Acquire::new(ttl).lease_id(LeaseId::random());
        let [one, other] = ["sku-1", "sku-2"].map(|name| Resource::new(name).unwrap());
        let first = leases.acquire(&one, request.clone()).await.unwrap();
        // The announcement of this grant failed.
        let second = leases.leases.acquire(&other, request).await.unwrap();
        assert_eq!(first.token, second.token);
        let renewal = leases.renew(&other, &second.id, Renew::new(ttl));
        renewal.await.unwrap();
        assert_eq!(announced(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn tokens_are_cached_only_for_held_leases() {
        let leases = MemoryLeases::new(FirstEpoch).announced_to(Counting::default());
        let ttl = Duration::from_secs(9);
        let [expired, released, held] =
            ["sku-1", "sku-2", "sku-3"].map(|name| Resource::new(name).unwrap());
        let acquire = async |resource, ttl| {
            let lease = leases.acquire(resource, Acquire::new(ttl)).await.unwrap();
            assert_eq!(leases.tokens.get(&key_of(&lease)), Some(lease.token));
            lease
        };
        let (expired, released, held) = (
            acquire(&expired, ttl).await,
            acquire(&released, 2 * ttl).await,
            acquire(&held, 2 * ttl).await,
        );
        let release = leases.release(&released.resource, &released.id);
        release.await.unwrap();
        advance(ttl).await;
        let cached =
            [&expired, &released, &held].map(|lease| leases.tokens.get(&key_of(lease)).is_some());
        assert_eq!(cached, [false, false, true]);
    }
}
