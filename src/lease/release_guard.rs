//! Clean-up that runs after a request or a lease is dropped.

use std::{sync::Arc, time::Duration};

use tokio::{
    runtime::Handle,
    time::{Instant, sleep_until},
};

use super::{Lease, LeaseError, LeaseId, Leases};
use crate::{time::after, token::Resource};

/// Guard that releases a lease in the background when it is dropped. By default, a failed release
/// is not retried, and the lease expires; see [`retry_for`](Self::retry_for).
pub(crate) struct ReleaseGuard<L: Leases> {
    held: Option<(Arc<L>, Resource, LeaseId)>,
    retry_for: Duration,
    background: Background,
}

impl<L: Leases> ReleaseGuard<L> {
    /// Guards the lease on `resource` under `id`, which may not have been granted yet.
    pub(crate) fn new(leases: Arc<L>, resource: Resource, id: LeaseId) -> Self {
        Self {
            held: Some((leases, resource, id)),
            retry_for: Duration::ZERO,
            background: Background::here(),
        }
    }

    /// Guards a lease that was granted.
    pub(crate) fn granted(leases: &Arc<L>, lease: &Lease) -> Self {
        Self::new(Arc::clone(leases), lease.resource.clone(), lease.id.clone())
    }

    /// Retries a failed release for the TTL of the lease, after which the lease has certainly
    /// expired. The time counts from the beginning of the release, because a request whose response
    /// was lost may have been executed shortly before.
    #[cfg(feature = "client")]
    pub(crate) const fn retry_for(mut self, ttl: Duration) -> Self {
        self.retry_for = ttl;
        self
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
        let released = release(&*leases, &resource, &id, self.retry_for).await;
        self.held = None;
        released
    }
}

impl<L: Leases> Drop for ReleaseGuard<L> {
    fn drop(&mut self) {
        if let Some((leases, resource, id)) = self.held.take() {
            let retry_for = self.retry_for;
            let release = async move { release(&*leases, &resource, &id, retry_for).await };
            self.background.spawn(release);
        }
    }
}

/// Releases the lease. If the store is unavailable, retries with random pauses. The last attempt is
/// made when `retry_for` has passed.
async fn release<L: Leases>(
    leases: &L,
    resource: &Resource,
    id: &LeaseId,
    retry_for: Duration,
) -> Result<(), LeaseError> {
    let until = after(retry_for);
    let (mut pause, longest) = pauses(retry_for);
    let mut is_retry = false;
    loop {
        match leases.release(resource, id).await {
            // An earlier attempt was executed, but its response was lost.
            Err(LeaseError::Lost { .. }) if is_retry => return Ok(()),
            Err(LeaseError::Unavailable(_)) if Instant::now() < until => {
                let pause_until = Instant::now() + pause.mul_f64(rand::random_range(0.5..1.0));
                sleep_until(pause_until.min(until)).await;
                (pause, is_retry) = ((pause * 2).min(longest), true);
            }
            released => return released,
        }
    }
}

/// Returns the first and the longest pause between the attempts to release a lease. Each pause is
/// twice as long as the previous one. The number of attempts hardly depends on `retry_for`.
fn pauses(retry_for: Duration) -> (Duration, Duration) {
    let first = (retry_for / 100).clamp(Duration::from_millis(50), Duration::from_secs(1));
    (first, (retry_for / 8).max(first))
}

/// Spawner of clean-up tasks. It uses the runtime in which the request is dropped or, outside of
/// any runtime, the runtime in which this value was created. If that runtime has shut down, the
/// clean-up does not run, and the lease or the queue position expires.
#[derive(Debug)]
pub(super) struct Background(Option<Handle>);

impl Background {
    /// Captures the current runtime for a new request.
    pub(super) fn here() -> Self {
        Self(Handle::try_current().ok())
    }

    pub(super) fn spawn<F>(&self, task: F)
    where
        F: Future<Output: Send> + Send + 'static,
    {
        if let Some(runtime) = Handle::try_current().ok().as_ref().or(self.0.as_ref()) {
            runtime.spawn(task);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_make_few_attempts_for_any_ttl() {
        for secs in [1, 10, 30, 300, 3_600, 1_000_000] {
            let retry_for = Duration::from_secs(secs);
            let (mut pause, longest) = pauses(retry_for);
            let (mut passed, mut attempts) = (Duration::ZERO, 1);
            while passed < retry_for {
                // The average of the random pauses is three quarters of `pause`.
                (passed, attempts) = (passed + pause * 3 / 4, attempts + 1);
                pause = (pause * 2).min(longest);
            }
            assert!(attempts < 30, "{secs} s: {attempts} attempts");
        }
    }
}
