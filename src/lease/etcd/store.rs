//! The store in etcd: one loop that asks, waits for its turn, and asks again.

use std::{fmt, sync::Arc};

use tokio::time::{Instant, sleep_until};

use super::{acquire::Asked, pending::PendingAcquire, server::Etcd, waiters::Waiters};
use crate::{
    announce::Announce,
    lease::{
        Acquire, Announced, Held, Lease, LeaseError, LeaseId, Leases, ListError, Operate, Page,
        Renew, WaiterLimits, time::after,
    },
    token::{Resource, Token},
};

/// Leases in etcd, over its own HTTP gateway: no gRPC. Cheap to clone; clones share their connections.
///
/// For teams that have etcd already. A lease survives what a majority of etcd survives: the end of a node, a
/// restart, an election. It is lost where etcd is restored from a snapshot, and the tokens after that are higher than
/// those before.
///
/// **etcd counts whole seconds, and has a shortest time** (2 s with its default settings; one and a half times its election
/// time-out). A time to live, and a lock delay, are rounded up; [`Lease::ttl`] and [`Held::ttl`] say what etcd has
/// promised. After an election etcd starts the time of every lease anew.
///
/// Tested with etcd 3.4. See [the guide](crate::guide#24-leases-in-etcd) for what it needs, and how to move from one
/// store to another.
///
/// # Example
///
/// ```no_run
/// # async fn example(pool: sqlx::PgPool) -> Result<(), Box<dyn std::error::Error>> {
/// use axum::Router;
/// use tower_fence::{Fence, issuer, lease::EtcdLeases};
///
/// let fence = Fence::new(pool);
/// let endpoints = ["http://etcd-1:2379", "http://etcd-2:2379", "http://etcd-3:2379"];
/// let leases = EtcdLeases::connect(&endpoints, fence.clone()).await?;
///
/// let app: Router = Router::new().nest("/locks", issuer::router(leases.announced_to(fence)));
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct EtcdLeases {
    etcd: Arc<Etcd>,
    waiters: Arc<Waiters>,
}

impl EtcdLeases {
    pub(super) fn new(etcd: Etcd, limits: WaiterLimits) -> Self {
        let etcd = Arc::new(etcd);
        Self {
            waiters: Waiters::new(Arc::clone(&etcd), limits),
            etcd,
        }
    }

    pub(super) fn etcd(&self) -> &Etcd {
        &self.etcd
    }

    /// These leases, each grant announced to `resources`, a `Fence`, before it is answered. What that
    /// promises: [`Announced`].
    pub fn announced_to<A: Announce>(self, resources: A) -> Announced<Self, A> {
        Announced::new(self, resources)
    }
}

impl Leases for EtcdLeases {
    async fn acquire(&self, resource: &Resource, request: Acquire) -> Result<Lease, LeaseError> {
        let deadline = after(request.wait);
        let chosen_id = request.chosen_id;
        let mut pending = PendingAcquire::new(&self.waiters, resource, request);
        loop {
            // The last time without a wait, which leaves the line.
            match pending.ask(Instant::now() < deadline).await {
                Ok(Asked::Granted(lease)) => {
                    pending.finish();
                    return Ok(lease);
                }
                Ok(Asked::Held { left }) => {
                    pending.leave().await;
                    return Err(LeaseError::Held {
                        resource: resource.clone(),
                        retry_after: left,
                    });
                }
                Ok(Asked::Full) => return Err(LeaseError::too_many_waiters(resource)),
                Ok(Asked::Queued) => {
                    if let Some(seat) = &pending.seat {
                        tokio::select! {
                            () = seat.woken() => {}
                            () = sleep_until(deadline) => {}
                        }
                    }
                }
                Err(error) => {
                    // It may have been granted. A caller who chose the id may ask again.
                    if chosen_id {
                        pending.finish();
                    }
                    return Err(error);
                }
            }
        }
    }

    async fn renew(
        &self,
        resource: &Resource,
        id: &LeaseId,
        request: Renew,
    ) -> Result<Lease, LeaseError> {
        self.etcd.renew(resource, id, request).await
    }

    async fn release(&self, resource: &Resource, id: &LeaseId) -> Result<(), LeaseError> {
        let released = self.etcd.end(resource, Some(id), None).await?;
        released
            .then_some(())
            .ok_or_else(|| LeaseError::lost(resource))
    }

    async fn inspect(&self, resource: &Resource) -> Result<Option<Held>, LeaseError> {
        self.etcd.inspect(resource).await
    }
}

impl Operate for EtcdLeases {
    async fn list(&self, limit: usize, cursor: Option<&str>) -> Result<Page, ListError> {
        self.etcd.list(limit, cursor).await
    }

    async fn break_lease(
        &self,
        resource: &Resource,
        seen: Option<Token>,
    ) -> Result<bool, LeaseError> {
        self.etcd.end(resource, None, seen).await
    }
}

impl fmt::Debug for EtcdLeases {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdLeases").finish_non_exhaustive()
    }
}
