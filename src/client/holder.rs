//! How leases are taken, and asked for again.

use std::{fmt, io, sync::Arc, time::Duration};

use http::HeaderName;
use tokio::time::{Instant, sleep_until};

use super::{guard::LeaseGuard, http_error::HttpError, renewal::pauses};
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
    owner: Option<Owner>,
    header: HeaderName,
}

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

    /// How long to wait: in line while another holds the lease, and for a store that cannot be
    /// reached to come back, with pauses of 50 ms to 2 s (exponential, full jitter). Default: not
    /// at all, one attempt. An issuer may have a limit (60 s by default). A store that falls silent
    /// may be waited for longer, by its own time limit.
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
        LeaseGuard::new(leases, lease, asked_at, self.ttl, header, release)
    }

    /// Asks until there is a lease with most of its time left, or the wait is over.
    async fn ask(&self, resource: &Resource, id: &LeaseId) -> Result<(Lease, Instant), LeaseError> {
        let deadline = after(self.wait);
        let mut pauses = pauses(FIRST_PAUSE, LONGEST_PAUSE);
        loop {
            let asked_at = Instant::now();
            let mut request = Acquire::new(self.ttl)
                .lease_id(id.clone())
                .lock_delay(self.lock_delay)
                .wait(deadline.saturating_duration_since(asked_at));
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
}

impl<L> Clone for Holder<L> {
    fn clone(&self) -> Self {
        Self {
            leases: Arc::clone(&self.leases),
            ttl: self.ttl,
            wait: self.wait,
            lock_delay: self.lock_delay,
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
