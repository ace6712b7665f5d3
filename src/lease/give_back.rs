//! A lease that nobody may ever use is given back.

use std::sync::Arc;

use tokio::runtime::Handle;

use super::{Lease, LeaseError, LeaseId, Leases};
use crate::token::Resource;

/// Releases a lease when it is dropped, in the background: best effort, the time of the lease
/// sees to the rest.
pub(crate) struct GiveBack<L: Leases> {
    held: Option<(Arc<L>, Resource, LeaseId)>,
    /// For where there is none: it was made in this one.
    runtime: Option<Handle>,
}

impl<L: Leases> GiveBack<L> {
    pub(crate) fn new(leases: Arc<L>, resource: Resource, id: LeaseId) -> Self {
        Self {
            held: Some((leases, resource, id)),
            runtime: Handle::try_current().ok(),
        }
    }

    /// Of a lease that was granted.
    pub(crate) fn granted(leases: &Arc<L>, lease: &Lease) -> Self {
        Self::new(Arc::clone(leases), lease.resource.clone(), lease.id.clone())
    }

    /// Somebody uses it, or may ask for it again.
    pub(crate) fn keep(&mut self) {
        self.held = None;
    }

    /// Releases it and waits for the answer.
    pub(crate) async fn now(mut self) -> Result<(), LeaseError> {
        let Some((leases, resource, id)) = self.held.clone() else {
            return Ok(());
        };
        let released = leases.release(&resource, &id).await;
        self.held = None;
        released
    }
}

impl<L: Leases> Drop for GiveBack<L> {
    fn drop(&mut self) {
        if let Some((leases, resource, id)) = self.held.take()
            && let Some(runtime) = Handle::try_current().ok().or(self.runtime.take())
        {
            runtime.spawn(async move {
                let _ = leases.release(&resource, &id).await;
            });
        }
    }
}
