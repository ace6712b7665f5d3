//! How leases are taken, and asked for again.

use std::{fmt, io, sync::Arc, time::Duration};

use http::HeaderName;
use tokio::time::{Instant, sleep_until};

use super::{
    guard::LeaseGuard, held_lease::Bounds, http_error::HttpError, loss::Loss, renewal::pauses,
};
use crate::{
    header::FENCING_TOKEN,
    lease::{Acquire, Lease, LeaseError, LeaseId, Leases, Owner, ReleaseGuard, Renew, time::after},
    token::{InvalidResource, Resource},
};

/// Takes leases, one after the other or many at once. Cheap to clone.
pub struct Holder<L> {
    leases: Arc<L>,
    ttl: Duration,
    wait: Duration,
    lock_delay: Duration,
    bounds: Bounds,
    owner: Option<Owner>,
    header: HeaderName,
}

/// The longest time that one request waits. A longer wait takes several, under one lease id.
const LONGEST_STEP: Duration = Duration::from_secs(30);

/// An issuer with a limit below this one is not waited for.
const SHORTEST_STEP: Duration = Duration::from_millis(500);

/// The pauses between attempts, where a store or a network fails for a moment.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

impl<L: Leases> Holder<L> {
    /// A holder that does not wait, with leases of 30 s.
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

    /// How long a lease lasts without renewal. Default: 30 s. It is renewed at a third of that; a
    /// holder that dies keeps others out for the rest.
    #[must_use]
    pub const fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = ttl;
        self
    }

    /// How long to wait: in the queue while another holder has the lease, and for a store that cannot be
    /// reached to come back, with pauses of 50 ms to 2 s (exponential, full jitter). Default: not
    /// at all, one attempt. A wait of more than 30 s, or above the limit of an issuer, takes several
    /// requests under one lease id. A store that falls silent may be waited for longer, by its own
    /// timeout.
    #[must_use]
    pub const fn wait(mut self, limit: Duration) -> Self {
        self.wait = limit;
        self
    }

    /// How long the resource stays closed when a lease ends by time and not by release. Default:
    /// not at all.
    #[must_use]
    pub const fn lock_delay(mut self, delay: Duration) -> Self {
        self.lock_delay = delay;
        self
    }

    /// How long a lease may be held, renewals included. After that it counts as lost
    /// ([`Loss::MaxHold`](super::Loss::MaxHold)) and is not renewed any more: a limit for work that hangs.
    /// Default: no limit.
    #[must_use]
    pub const fn max_hold(mut self, limit: Duration) -> Self {
        self.bounds.max_hold = Some(limit);
        self
    }

    /// How long the work may go on without [progress](LeaseGuard::progress). After that the lease counts as
    /// lost ([`Loss::NoProgress`](super::Loss::NoProgress)) and is not renewed any more. Default: no limit.
    #[must_use]
    pub const fn progress_timeout(mut self, timeout: Duration) -> Self {
        self.bounds.progress_timeout = Some(timeout);
        self
    }

    /// Who holds the leases, for operators. Default: not said.
    #[must_use]
    pub fn owner(mut self, owner: Owner) -> Self {
        self.owner = Some(owner);
        self
    }

    /// The name of the header that carries the token. Default: `fencing-token`.
    #[must_use]
    pub fn header(mut self, name: HeaderName) -> Self {
        self.header = name;
        self
    }

    /// Takes the lease on a resource and keeps it until the guard is released, dropped, or reports
    /// its loss.
    ///
    /// # Errors
    ///
    /// - [`AcquireError::Resource`] when this cannot name a resource.
    /// - [`AcquireError::Lease`] when the wait ran out: [`LeaseError::Held`] where another holds
    ///   the lease, [`LeaseError::Unavailable`] where the store did not answer, or only after the
    ///   lease had ended; or at once, when the store does not take such a request.
    ///
    /// # Cancel safety
    ///
    /// Dropped, it leaves the line, and what was granted meanwhile is released.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime.
    pub async fn acquire(&self, resource: impl AsRef<str>) -> Result<LeaseGuard<L>, AcquireError> {
        let resource = Resource::new(resource)?;
        // The same id each time, so that a grant whose answer was lost is found again.
        let id = LeaseId::random();
        let leases = Arc::clone(&self.leases);
        let mut release = ReleaseGuard::new(leases, resource.clone(), id.clone());
        let asked = self.ask(&resource, &id).await.inspect_err(|error| {
            // It may have been granted all the same; and after a wait its position is kept for a moment.
            let waited = matches!(error, LeaseError::Held { .. }) && !self.wait.is_zero();
            let unknown = matches!(
                error,
                LeaseError::Unavailable(_) | LeaseError::Misconfigured(_)
            );
            if !waited && !unknown {
                release.keep();
            }
        })?;
        Ok(self.guard(asked, release))
    }

    /// Takes the lease if it is free, without waiting. `None` if another holder has it.
    ///
    /// # Errors
    ///
    /// As [`acquire`](Self::acquire), but not [`LeaseError::Held`].
    ///
    /// # Cancel safety
    ///
    /// As [`acquire`](Self::acquire).
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime.
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

    /// Takes the leases on several resources: all of them, or none. The guards are in the order of
    /// `resources`.
    ///
    /// The leases are taken one after the other, in the order of the resources' names, so that two holders that
    /// take several this way never wait for each other. A program that takes them one by one has to follow
    /// that order, too. [`wait`](Self::wait) bounds the whole.
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
    /// As [`acquire`](Self::acquire), and [`AcquireError::Repeated`] if a resource is named twice. The leases
    /// that were granted before are released.
    ///
    /// # Cancel safety
    ///
    /// As [`acquire`](Self::acquire).
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime.
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
            let lease = self.clone().wait(left).acquire(resource).await?;
            leases.push((position, lease));
        }
        leases.sort_unstable_by_key(|(position, _)| *position);
        Ok(leases.into_iter().map(|(_, lease)| lease).collect())
    }

    /// Takes the lease, runs `work` under it, and releases it. At the moment of loss the work is dropped.
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
    /// [`WithLeaseError::Acquire`] if there was no lease, and [`WithLeaseError::Lost`] if it was lost before the
    /// work had ended. A release that fails is no error: the lease ends by its time.
    ///
    /// # Cancel safety
    ///
    /// Dropped, it drops the work, and releases the lease in the background.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime.
    pub async fn with_lease<T>(
        &self,
        resource: impl AsRef<str>,
        work: impl AsyncFnOnce(&LeaseGuard<L>) -> T,
    ) -> Result<T, WithLeaseError> {
        let lease = self.acquire(resource).await?;
        let outcome = lease.run(work(&lease)).await?;
        // The work is done, whatever becomes of the lease.
        let _ = lease.release().await;
        Ok(outcome)
    }

    /// Like [`acquire`](Self::acquire), under a lease id that the caller has chosen. The caller can
    /// repeat the call under the same id, and one wait is then one acquisition, however many calls it
    /// takes. Choose a new id for each acquisition, and never one for each host: two calls under one
    /// id get the same lease.
    ///
    /// # Errors
    ///
    /// Those of [`acquire`](Self::acquire). After [`LeaseError::Unavailable`] the lease may have been
    /// granted: repeat the call, or release the lease under `id`.
    ///
    /// # Cancel safety
    ///
    /// Dropped, it leaves the queue, and the lease may have been granted: release it under `id`.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime.
    pub async fn acquire_as(
        &self,
        resource: impl AsRef<str>,
        id: LeaseId,
    ) -> Result<LeaseGuard<L>, AcquireError> {
        let resource = Resource::new(resource)?;
        let asked = self.ask(&resource, &id).await?;
        let leases = Arc::clone(&self.leases);
        Ok(self.guard(asked, ReleaseGuard::new(leases, resource, id)))
    }

    fn guard(&self, asked: (Lease, Instant), release: ReleaseGuard<L>) -> LeaseGuard<L> {
        let (lease, asked_at) = asked;
        let leases = Arc::clone(&self.leases);
        let header = self.header.clone();
        let bounds = self.bounds;
        LeaseGuard::new(leases, lease, asked_at, self.ttl, header, bounds, release)
    }

    /// Asks until there is a lease with most of its time left, or the wait is over.
    async fn ask(&self, resource: &Resource, id: &LeaseId) -> Result<(Lease, Instant), LeaseError> {
        let deadline = after(self.wait);
        let mut pauses = pauses(FIRST_PAUSE, LONGEST_PAUSE);
        let mut longest_step = LONGEST_STEP;
        loop {
            let asked_at = Instant::now();
            let step = deadline
                .saturating_duration_since(asked_at)
                .min(longest_step);
            let mut request = Acquire::new(self.ttl)
                .lease_id(id.clone())
                .lock_delay(self.lock_delay)
                .wait(step);
            request.owner.clone_from(&self.owner);
            let error = match self.leases.acquire(resource, request).await {
                Ok(lease) if asked_at.elapsed() < lease.ttl / 3 => return Ok((lease, asked_at)),
                // The lease began at some moment since; a renewal tells how long it lasts.
                Ok(_) => match self.renew(resource, id).await {
                    Ok((lease, asked_at)) if asked_at.elapsed() < lease.ttl => {
                        return Ok((lease, asked_at));
                    }
                    Ok(_) => LeaseError::unavailable(io::Error::from(io::ErrorKind::TimedOut)),
                    Err(error) => error,
                },
                Err(error) => error,
            };
            match &error {
                // The issuer's limit of a wait is lower.
                LeaseError::Invalid { field, .. } if field == "wait_ms" && step > SHORTEST_STEP => {
                    longest_step = step / 2;
                    continue;
                }
                // The request has waited for its whole step, and another one goes on at once.
                LeaseError::Held { .. }
                    if !step.is_zero()
                        && asked_at.elapsed() >= step
                        && Instant::now() < deadline =>
                {
                    continue;
                }
                _ => {}
            }
            let may_pass = match &error {
                LeaseError::Unavailable(cause) => {
                    !matches!(cause.downcast_ref(), Some(HttpError::OtherResource { .. }))
                }
                error => matches!(
                    error,
                    LeaseError::Lost { .. }
                        | LeaseError::Held { .. }
                        | LeaseError::TooManyWaiters { .. }
                ),
            };
            let again_at = Instant::now() + pauses.next().unwrap_or(LONGEST_PAUSE);
            if !may_pass || again_at >= deadline {
                return Err(match error {
                    // The caller has not heard of the lease, so it has lost nothing.
                    lost @ LeaseError::Lost { .. } => LeaseError::unavailable(lost),
                    other => other,
                });
            }
            sleep_until(again_at).await;
        }
    }

    async fn renew(
        &self,
        resource: &Resource,
        id: &LeaseId,
    ) -> Result<(Lease, Instant), LeaseError> {
        let asked_at = Instant::now();
        let lease = self
            .leases
            .renew(resource, id, Renew::new(self.ttl))
            .await?;
        Ok((lease, asked_at))
    }
}

/// Why there is no lease.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AcquireError {
    /// This cannot name a resource.
    #[error(transparent)]
    Resource(#[from] InvalidResource),
    /// The store did not grant it.
    #[error(transparent)]
    Lease(#[from] LeaseError),
    /// Of several resources, this one is named twice.
    #[error("the resource {0} is named twice")]
    Repeated(Resource),
}

/// Why work under a lease was not done, or not to its end.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WithLeaseError {
    /// There is no lease. The work was not begun.
    #[error(transparent)]
    Acquire(#[from] AcquireError),
    /// The lease was lost, and the work was dropped.
    #[error(transparent)]
    Lost(#[from] Loss),
}

impl<L> Clone for Holder<L> {
    fn clone(&self) -> Self {
        Self {
            leases: Arc::clone(&self.leases),
            ttl: self.ttl,
            wait: self.wait,
            lock_delay: self.lock_delay,
            bounds: self.bounds,
            owner: self.owner.clone(),
            header: self.header.clone(),
        }
    }
}

impl<L> fmt::Debug for Holder<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Holder")
            .field("ttl", &self.ttl)
            .field("wait", &self.wait)
            .field("owner", &self.owner)
            .finish_non_exhaustive()
    }
}
