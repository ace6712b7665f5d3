//! [`Holder`]: acquires leases.

use std::{pin::pin, sync::Arc, time::Duration};

use derive_where::derive_where;
use futures_util::{StreamExt, stream::FuturesUnordered};
use http::HeaderName;
use tokio::time::{Instant, interval, timeout};

use super::{
    guard::LeaseGuard,
    held_lease::{Bounds, HeldLease},
    loss::Loss,
    renewal::renew,
};
use crate::{
    header::FENCING_TOKEN,
    lease::{Lease, LeaseError, LeaseId, Leases, Owner, ReleaseGuard},
    time::after,
    token::{InvalidResource, Resource},
};

/// Maximum time that [`Holder::with_lease`] waits for the release.
const RELEASE_WAIT: Duration = Duration::from_secs(2);

/// Client that acquires leases. A holder can have several leases at the same time.
///
/// A holder is cheap to clone.
#[derive_where(Clone, Debug)]
pub struct Holder<L> {
    #[derive_where(skip(Debug))]
    pub(super) leases: Arc<L>,
    pub(super) ttl: Duration,
    pub(super) wait: Duration,
    pub(super) lock_delay: Duration,
    bounds: Bounds,
    pub(super) owner: Option<Owner>,
    header: HeaderName,
}

impl<L: Leases> Holder<L> {
    /// Creates a holder that does not wait, with a TTL of 30 s.
    pub fn new(leases: L) -> Self {
        Self {
            leases: Arc::new(leases),
            ttl: Duration::from_secs(30),
            wait: Duration::ZERO,
            lock_delay: Duration::ZERO,
            bounds: Bounds::default(),
            owner: None,
            header: FENCING_TOKEN,
        }
    }

    /// Sets how long a lease lasts without renewal. Default: 30 s.
    ///
    /// The guard renews the lease after at most a third of this time. If the holder crashes, the
    /// resource stays locked until the lease expires.
    #[must_use]
    pub const fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = ttl;
        self
    }

    /// Sets how long an acquisition may take. Default: zero, which means a single attempt.
    ///
    /// During this time, the holder waits in the queue while another holder has the lease. If the
    /// store is unavailable, the holder retries after pauses of 50 ms to 2 s (exponential, full
    /// jitter). A wait of more than 30 s, or above the issuer's limit, is split into several
    /// requests under one lease id. If the store does not respond, the acquisition can exceed this
    /// time by the store's own timeout.
    #[must_use]
    pub const fn wait(mut self, limit: Duration) -> Self {
        self.wait = limit;
        self
    }

    /// Sets how long the resource stays blocked after a lease has expired. Default: zero.
    ///
    /// A release does not block the resource. If the lease is lost, requests that the work has sent
    /// may still be in progress, so a guard with a lock delay does not release a lost lease when it
    /// is dropped: the lease expires. To release it earlier, call
    /// [`release`](LeaseGuard::release) when the work has certainly ended.
    #[must_use]
    pub const fn lock_delay(mut self, delay: Duration) -> Self {
        self.lock_delay = delay;
        self
    }

    /// Sets the maximum time for which a lease may be held, including renewals. Default: no limit.
    ///
    /// After that time the lease counts as lost ([`Loss::MaxHold`](super::Loss::MaxHold)), and the
    /// guard no longer renews it. Without this limit, a task that hangs keeps its lease
    /// indefinitely.
    #[must_use]
    pub const fn max_hold(mut self, limit: Duration) -> Self {
        self.bounds.max_hold = Some(limit);
        self
    }

    /// Sets how long the work may run without reporting [progress](LeaseGuard::progress). Default:
    /// no limit.
    ///
    /// After that time the lease counts as lost ([`Loss::NoProgress`](super::Loss::NoProgress)),
    /// and the guard no longer renews it.
    #[must_use]
    pub const fn progress_timeout(mut self, timeout: Duration) -> Self {
        self.bounds.progress_timeout = Some(timeout);
        self
    }

    /// Sets the owner label, which operators see. Default: none.
    #[must_use]
    pub fn owner(mut self, owner: Owner) -> Self {
        self.owner = Some(owner);
        self
    }

    /// Sets the name of the header that carries the token. Default: `fencing-token`.
    #[must_use]
    pub fn header(mut self, name: HeaderName) -> Self {
        self.header = name;
        self
    }

    /// Acquires the lease on a resource.
    ///
    /// The returned guard renews the lease until the guard is released or dropped, or reports a
    /// loss.
    ///
    /// # Errors
    ///
    /// - [`AcquireError::Resource`] if `resource` is not a valid name.
    /// - [`AcquireError::Lease`] with [`LeaseError::Held`], after the wait, if another holder has
    ///   the lease.
    /// - [`AcquireError::Lease`] with [`LeaseError::TooManyWaiters`], after the wait, if too many
    ///   requests wait.
    /// - [`AcquireError::Lease`] with [`LeaseError::Unavailable`], after the wait, if the store did
    ///   not respond, or responded only after the lease had expired; immediately, if the response
    ///   is for another resource ([`HttpError::OtherResource`](super::HttpError::OtherResource)).
    /// - [`AcquireError::Lease`] with any other error of the store, immediately.
    ///
    /// If the store may have granted the lease although the call failed, a task releases the lease,
    /// and retries until the TTL has passed.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the request leaves the queue, and a lease that was granted to it
    /// is released, in a background task. In a loop with `select!`, create the future once, outside
    /// of the loop. Otherwise each iteration leaves such a task, which retries for up to one TTL if
    /// the store is unavailable.
    ///
    /// # Panics
    ///
    /// Panics outside of a Tokio runtime.
    pub async fn acquire(&self, resource: impl AsRef<str>) -> Result<LeaseGuard<L>, AcquireError> {
        let resource = Resource::new(resource)?;
        // All retries use the same id, so a retry finds a grant whose response was lost.
        let id = LeaseId::random();
        let mut release = self.release_guard(resource.clone(), id.clone());
        let mut is_sent = false;
        let granted = self.ask(&resource, &id, &mut is_sent).await;
        let granted = granted.inspect_err(|error| {
            // After a wait, the store may still keep the position in the queue, or it may have
            // granted the lease to an earlier attempt whose answer was lost. A release ends both.
            let has_waited = !self.wait.is_zero()
                && matches!(
                    error,
                    LeaseError::Held { .. } | LeaseError::TooManyWaiters { .. }
                );
            if !is_sent || (!error.may_be_granted() && !has_waited) {
                release.keep();
            }
        })?;
        Ok(self.guard(granted, release))
    }

    /// Acquires the lease if it is free, without waiting. Returns `None` if another holder has the
    /// lease.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`acquire`](Self::acquire), except [`LeaseError::Held`].
    ///
    /// # Cancel safety
    ///
    /// See [`acquire`](Self::acquire).
    ///
    /// # Panics
    ///
    /// Panics outside of a Tokio runtime.
    pub async fn try_acquire(
        &self,
        resource: impl AsRef<str>,
    ) -> Result<Option<LeaseGuard<L>>, AcquireError> {
        match self.clone().wait(Duration::ZERO).acquire(resource).await {
            Ok(lease) => Ok(Some(lease)),
            Err(AcquireError::Lease(LeaseError::Held { .. })) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Acquires the leases on several resources: all of them, or none. Returns the guards in the
    /// order of `resources`.
    ///
    /// The holder acquires the leases one after the other, ordered by resource name. Two holders
    /// that use this method therefore cannot deadlock. A program that acquires the same leases one
    /// by one must follow the same order. [`wait`](Self::wait) limits the whole operation.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new()?.block_on(async {
    /// # use tower_fence::{Fence, client::Holder, lease::MemoryLeases};
    /// # let options = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1);
    /// # let fence = Fence::new(options.connect("sqlite::memory:").await?);
    /// # fence.migrate().await?;
    /// let holder = Holder::new(MemoryLeases::new(fence));
    /// let leases = holder.acquire_all(&["sku-2", "sku-1"]).await?;
    /// assert_eq!(leases[0].resource().as_str(), "sku-2");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// # })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Returns the errors of [`acquire`](Self::acquire), and [`AcquireError::Repeated`] if a
    /// resource is named twice. If one of the granted leases is lost before the last one is
    /// granted, returns [`LeaseError::Unavailable`]. After an error, the granted leases are
    /// released.
    ///
    /// # Cancel safety
    ///
    /// See [`acquire`](Self::acquire).
    ///
    /// # Panics
    ///
    /// Panics outside of a Tokio runtime.
    pub async fn acquire_all<R: AsRef<str>>(
        &self,
        resources: &[R],
    ) -> Result<Vec<LeaseGuard<L>>, AcquireError> {
        let mut ordered = Vec::with_capacity(resources.len());
        for (position, resource) in resources.iter().enumerate() {
            ordered.push((Resource::new(resource)?, position));
        }
        ordered.sort_unstable();
        if let Some(pair) = ordered.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            return Err(AcquireError::Repeated(pair[0].0.clone()));
        }
        let deadline = after(self.wait);
        let mut leases = Vec::with_capacity(ordered.len());
        for (resource, position) in ordered {
            let left = deadline.saturating_duration_since(Instant::now());
            let holder = self.clone().wait(left);
            let next = async {
                let mut lease = holder.acquire(resource).await?;
                // Until the lease is returned, no work runs under it. If it is lost before that, no
                // request can be in progress.
                lease.has_lock_delay = false;
                Ok(lease)
            };
            leases.push((position, self.keep_all(&leases, next).await?));
        }
        leases.sort_unstable_by_key(|(position, _)| *position);
        let returned = leases.into_iter().map(|(_, mut lease)| {
            lease.has_lock_delay = !self.lock_delay.is_zero();
            lease
        });
        Ok(returned.collect())
    }

    /// Waits for the next lease. Until then, reports progress for the leases that were already
    /// acquired. Returns an error if one of them is lost.
    async fn keep_all(
        &self,
        acquired: &[(usize, LeaseGuard<L>)],
        next: impl Future<Output = Result<LeaseGuard<L>, AcquireError>>,
    ) -> Result<LeaseGuard<L>, AcquireError> {
        let mut next = pin!(next);
        let losses = acquired.iter().map(|(_, lease)| lease.lost());
        let mut losses: FuturesUnordered<_> = losses.collect();
        let timeout = self.bounds.progress_timeout.unwrap_or(self.ttl);
        let mut beat = interval((timeout / 3).max(Duration::from_millis(1)));
        let progress = || acquired.iter().for_each(|(_, lease)| lease.progress());
        loop {
            tokio::select! {
                biased;
                Some(loss) = losses.next() => return Err(LeaseError::unavailable(loss).into()),
                lease = &mut next => {
                    progress();
                    // A paused process resumes here, possibly before the timer reports a loss.
                    for (_, acquired) in acquired {
                        acquired.check().map_err(LeaseError::unavailable)?;
                    }
                    return lease;
                }
                _ = beat.tick() => progress(),
            }
        }
    }

    /// Acquires the lease, runs `work` under it, and releases it. If the lease is lost, `work` is
    /// dropped at that moment.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new()?.block_on(async {
    /// # use tower_fence::{Fence, client::Holder, lease::MemoryLeases};
    /// # let options = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1);
    /// # let fence = Fence::new(options.connect("sqlite::memory:").await?);
    /// # fence.migrate().await?;
    /// let holder = Holder::new(MemoryLeases::new(fence));
    /// let token = holder
    ///     .with_lease("sku-1", async |lease| {
    ///         // … client.post(url).headers(lease.headers()).send().await …
    ///         lease.token()
    ///     })
    ///     .await?;
    /// # let _ = token;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// # })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Returns [`WithLeaseError::Acquire`] if the lease was not acquired, and
    /// [`WithLeaseError::Lost`] if the lease was lost before `work` completed. If only the release
    /// fails, this method returns no error. After two seconds without a successful release, it
    /// returns the result of `work`, and a background task retries the release until the lease has
    /// expired.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, `work` is dropped and the lease is released in the background.
    ///
    /// # Panics
    ///
    /// Panics outside of a Tokio runtime.
    pub async fn with_lease<T>(
        &self,
        resource: impl AsRef<str>,
        work: impl AsyncFnOnce(&LeaseGuard<L>) -> T,
    ) -> Result<T, WithLeaseError> {
        let lease = self.acquire(resource).await?;
        let outcome = lease.run(work(&lease)).await?;
        // The work has completed, so a failed release does not matter. If the release is dropped, a
        // background task continues it.
        let _ = timeout(RELEASE_WAIT, lease.release()).await;
        Ok(outcome)
    }

    /// Acquires a lease like [`acquire`](Self::acquire), but under a lease id that the caller has
    /// chosen.
    ///
    /// If the caller repeats the call under the same id, all these calls count as one acquisition.
    /// Choose a new id for each acquisition. Do not use one id per host, because two calls under
    /// one id get the same lease.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`acquire`](Self::acquire). After an error, the lease may have been
    /// granted, or may still be granted to this call. Repeat the call, or release the lease under
    /// `id`.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the request leaves the queue, but the lease may have been granted.
    /// In that case, release it under `id`.
    ///
    /// # Panics
    ///
    /// Panics outside of a Tokio runtime.
    pub async fn acquire_as(
        &self,
        resource: impl AsRef<str>,
        id: LeaseId,
    ) -> Result<LeaseGuard<L>, AcquireError> {
        let resource = Resource::new(resource)?;
        let granted = self.ask(&resource, &id, &mut false).await?;
        Ok(self.guard(granted, self.release_guard(resource, id)))
    }

    fn release_guard(&self, resource: Resource, id: LeaseId) -> ReleaseGuard<L> {
        let leases = Arc::clone(&self.leases);
        ReleaseGuard::new(leases, resource, id).retry_for(self.ttl)
    }

    /// Returns the guard of a lease, whose request was sent at the given time, and starts the
    /// renewals.
    fn guard(
        &self,
        (lease, asked_at): (Lease, Instant),
        release: ReleaseGuard<L>,
    ) -> LeaseGuard<L> {
        let held = HeldLease::new(&lease, asked_at, self.header.clone(), self.bounds);
        let (leases, held) = (Arc::clone(&self.leases), Arc::new(held));
        let (id, granted) = (lease.id, (lease.ttl, asked_at));
        let renewals = renew(leases.clone(), held.clone(), id.clone(), self.ttl, granted);
        LeaseGuard {
            leases,
            id,
            ttl: self.ttl,
            held,
            renewal: tokio::spawn(renewals).abort_handle(),
            release: Some(release),
            has_lock_delay: !self.lock_delay.is_zero(),
        }
    }
}

/// Error returned when a lease could not be acquired.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AcquireError {
    /// The name is not a valid resource name.
    #[error(transparent)]
    Resource(#[from] InvalidResource),
    /// The store did not grant the lease.
    #[error(transparent)]
    Lease(#[from] LeaseError),
    /// This resource was named twice.
    #[error("the resource {0} is named twice")]
    Repeated(Resource),
}

/// Error returned when work under a lease was not started or not completed.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WithLeaseError {
    /// The lease was not acquired. The work was not started.
    #[error(transparent)]
    Acquire(#[from] AcquireError),
    /// The lease was lost, and the work was dropped before it completed.
    #[error(transparent)]
    Lost(#[from] Loss),
}
