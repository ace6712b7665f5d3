//! A request for a lease that is under way, and what it may leave behind.

use std::sync::Arc;

use super::{
    server::Etcd,
    waiters::{Seat, Waiters},
};
use crate::{
    lease::{Acquire, background::Background, stored_id::StoredId},
    token::Resource,
};

/// A request that is under way. Dropped before it is [finished](Self::finish), it leaves the line and gives back what
/// was granted to it. Both hang on etcd leases that it has named itself, so what is still under way then comes to
/// nothing.
pub(super) struct PendingAcquire {
    pub(super) etcd: Arc<Etcd>,
    pub(super) waiters: Arc<Waiters>,
    pub(super) resource: Resource,
    pub(super) id: StoredId,
    pub(super) request: Acquire,
    /// Its place among the waiters.
    pub(super) seat: Option<Seat>,
    /// The etcd leases of its grants, of which nobody else knows: each attempt has one. A lease that was there already,
    /// and what has taken its place, are not among them: an earlier request under the same lease id may have been
    /// answered.
    pub(super) unused: Vec<i64>,
    pub(super) background: Background,
}

impl PendingAcquire {
    pub(super) fn new(waiters: &Arc<Waiters>, resource: &Resource, request: Acquire) -> Self {
        Self {
            etcd: Arc::clone(waiters.etcd()),
            waiters: Arc::clone(waiters),
            resource: resource.clone(),
            id: StoredId::of(&request.lease_id),
            request,
            seat: None,
            unused: vec![],
            background: Background::here(),
        }
    }

    /// Leaves the line, and waits until that is done.
    pub(super) async fn leave(&mut self) {
        if let Some(seat) = self.seat.take() {
            self.etcd.revoke(seat.etcd_lease()).await;
        }
    }

    /// Ends the request, and leaves what was granted to it to its caller.
    pub(super) fn finish(mut self) {
        self.unused.clear();
    }
}

impl Drop for PendingAcquire {
    fn drop(&mut self) {
        for unused in self.unused.drain(..) {
            self.etcd.revoke_later(unused, &self.background);
        }
    }
}
