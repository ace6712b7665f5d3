//! A lease that is released when no one can use it any more.

use std::sync::Arc;

use super::{Lease, LeaseError, LeaseId, Leases, background::Background};
use crate::token::Resource;

/// Releases a lease when it is dropped, in the background. This is a best effort: a release that
/// fails is not repeated, and the lease ends by its time.
pub(crate) struct ReleaseGuard<L: Leases> {
    held: Option<(Arc<L>, Resource, LeaseId)>,
    background: Background,
}

impl<L: Leases> ReleaseGuard<L> {
    /// Guards the lease on `resource` under `id`, which may not have been granted yet.
    pub(crate) fn new(leases: Arc<L>, resource: Resource, id: LeaseId) -> Self {
        Self {
            held: Some((leases, resource, id)),
            background: Background::here(),
        }
    }

    /// Guards a lease that was granted.
    pub(crate) fn granted(leases: &Arc<L>, lease: &Lease) -> Self {
        Self::new(Arc::clone(leases), lease.resource.clone(), lease.id.clone())
    }

    /// Disarms the guard: the lease is in use, or may be asked for again under its id.
    pub(crate) fn keep(&mut self) {
        self.held = None;
    }

    /// Releases the lease and waits for the answer.
    pub(crate) async fn release(mut self) -> Result<(), LeaseError> {
        let Some((leases, resource, id)) = self.held.clone() else {
            return Ok(());
        };
        let released = leases.release(&resource, &id).await;
        self.held = None;
        released
    }
}

impl<L: Leases> Drop for ReleaseGuard<L> {
    fn drop(&mut self) {
        if let Some((leases, resource, id)) = self.held.take() {
            let release = async move { leases.release(&resource, &id).await };
            self.background.spawn(release);
        }
    }
}
