//! Guard that releases a lease when it is dropped.

use std::{sync::Arc, time::Duration};

use tokio::time::{Instant, sleep_until};

use super::{Lease, LeaseError, LeaseId, Leases, background::Background};
use crate::token::Resource;

/// Pause after the first attempt to release a lease. It doubles after each further attempt.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
/// Longest pause between two attempts to release.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// Guard that releases a lease in the background when it is dropped. If [`until`](Self::until) was
/// set, a failed release is retried until that time. Otherwise a failed release is not retried, and
/// the lease expires.
pub(crate) struct ReleaseGuard<L: Leases> {
    held: Option<(Arc<L>, Resource, LeaseId)>,
    until: Instant,
    background: Background,
}

impl<L: Leases> ReleaseGuard<L> {
    /// Guards the lease on `resource` under `id`, which may not have been granted yet.
    pub(crate) fn new(leases: Arc<L>, resource: Resource, id: LeaseId) -> Self {
        Self {
            held: Some((leases, resource, id)),
            until: Instant::now(),
            background: Background::here(),
        }
    }

    /// Guards a lease that was granted.
    pub(crate) fn granted(leases: &Arc<L>, lease: &Lease) -> Self {
        Self::new(Arc::clone(leases), lease.resource.clone(), lease.id.clone())
    }

    /// Sets the time by which the lease has certainly expired. A failed release is retried until
    /// then.
    #[cfg(feature = "client")]
    pub(crate) const fn until(&mut self, until: Instant) {
        self.until = until;
    }

    /// Disarms the guard, because the lease is in use or the caller may retry under its id.
    pub(crate) fn keep(&mut self) {
        self.held = None;
    }

    /// Releases the lease and waits for the response.
    pub(crate) async fn release(mut self) -> Result<(), LeaseError> {
        let Some((leases, resource, id)) = self.held.clone() else {
            return Ok(());
        };
        let released = release(&*leases, &resource, &id, self.until).await;
        self.held = None;
        released
    }
}

impl<L: Leases> Drop for ReleaseGuard<L> {
    fn drop(&mut self) {
        if let Some((leases, resource, id)) = self.held.take() {
            let until = self.until;
            let release = async move { release(&*leases, &resource, &id, until).await };
            self.background.spawn(release);
        }
    }
}

/// Releases the lease, and retries until `until` if the store is unavailable.
async fn release<L: Leases>(
    leases: &L,
    resource: &Resource,
    id: &LeaseId,
    until: Instant,
) -> Result<(), LeaseError> {
    let (mut pause, mut is_retry) = (FIRST_PAUSE, false);
    loop {
        match leases.release(resource, id).await {
            // An earlier attempt was executed, but its response was lost.
            Err(LeaseError::Lost { .. }) if is_retry => return Ok(()),
            Err(LeaseError::Unavailable(_)) if Instant::now() + pause < until => {
                sleep_until(Instant::now() + pause).await;
                (pause, is_retry) = ((pause * 2).min(LONGEST_PAUSE), true);
            }
            released => return released,
        }
    }
}
