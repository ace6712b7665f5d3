//! The store in Redis: one loop that asks, waits, and asks again.

use std::{fmt, sync::Arc, time::Duration};

use tokio::time::{Instant, sleep, sleep_until};

use super::{
    answer::{Answer, unexpected},
    listener::Listener,
    pending::PendingAcquire,
    scripts::Scripts,
    waiters::Waiters,
};
use crate::{
    announce::Announce,
    epochs::partition_of,
    lease::{
        Acquire, Announced, Held, Lease, LeaseError, LeaseId, Leases, ListError, Operate, Page,
        Renew, WaiterLimits, time::after,
    },
    token::{Resource, Token},
};

/// Leases in a Redis server, reconnecting by itself. Cheap to clone; clones share their
/// connections.
///
/// The server must tell its `master_replid` (`INFO replication`) inside a script. Tested with
/// Redis 7.0.
///
/// # Example
///
/// ```no_run
/// # async fn example(pool: sqlx::PgPool) -> Result<(), Box<dyn std::error::Error>> {
/// use axum::Router;
/// use tower_fence::{Fence, issuer, lease::RedisLeases};
///
/// let fence = Fence::new(pool);
/// let leases = RedisLeases::connect("redis://localhost", fence.clone()).await?;
/// // Or, where the service may start before its Redis does:
/// let leases = RedisLeases::builder(fence.clone())
///     .key_prefix("shop")
///     .connect_lazy("redis://localhost")?;
///
/// let app: Router = Router::new().nest("/locks", issuer::router(leases.announced_to(fence)));
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct RedisLeases {
    scripts: Arc<Scripts>,
    waiters: Arc<Waiters>,
    listener: Listener,
}

impl RedisLeases {
    pub(super) fn new(scripts: Arc<Scripts>, limits: WaiterLimits) -> Self {
        let waiters = Waiters::new(Arc::clone(&scripts), limits);
        Self {
            scripts,
            listener: Listener::new(Arc::clone(&waiters)),
            waiters,
        }
    }

    pub(super) fn scripts(&self) -> &Scripts {
        &self.scripts
    }

    /// These leases, each grant announced to `resources`, a `Fence`, before it is answered. What that
    /// promises: [`Announced`].
    ///
    /// ```no_run
    /// # async fn example(fence: tower_fence::Fence<sqlx::Postgres>) -> Result<(), Box<dyn std::error::Error>> {
    /// use tower_fence::lease::RedisLeases;
    ///
    /// let leases = RedisLeases::connect("redis://localhost", fence.clone()).await?;
    /// let leases = leases.announced_to(fence);
    /// # Ok(())
    /// # }
    /// ```
    pub fn announced_to<A: Announce>(self, resources: A) -> Announced<Self, A> {
        Announced::new(self, resources)
    }

    /// Asks for a lease once: to be granted, refused, or, with a `wait`, put in line.
    async fn ask(
        &self,
        resource: &Resource,
        request: &Acquire,
        ticket: u64,
        wait: Duration,
    ) -> Result<Outcome, LeaseError> {
        let channel = if wait.is_zero() {
            String::new()
        } else {
            self.waiters.own_channel(partition_of(resource))
        };
        let max_waiters = self.waiters.max_per_resource();
        let answer = self
            .scripts
            .acquire(resource, request, ticket, wait, &channel, max_waiters)
            .await?;
        match answer {
            Answer::Granted(granted) => {
                let (id, ttl) = (&request.lease_id, request.ttl);
                Ok(Outcome::Granted(Lease::granted(
                    resource,
                    id,
                    granted.token,
                    ttl,
                )))
            }
            Answer::Held { left } => Ok(Outcome::Held { left }),
            Answer::Queued { left } => Ok(Outcome::Queued { left }),
            Answer::Full => Ok(Outcome::Full),
            _ => Err(unexpected()),
        }
    }
}

/// The pause before the next attempt where an issuer cannot listen.
const LISTEN_AGAIN: Duration = Duration::from_millis(100);

/// What became of a request for a lease.
enum Outcome {
    Granted(Lease),
    Held { left: Duration },
    Queued { left: Duration },
    Full,
}

impl Leases for RedisLeases {
    async fn acquire(&self, resource: &Resource, request: Acquire) -> Result<Lease, LeaseError> {
        let deadline = after(request.wait);
        let mut pending = PendingAcquire::new(&self.waiters, resource, &request.lease_id);
        // The first time without a wait: most locks are free.
        let mut wait = Duration::ZERO;
        loop {
            match self.ask(resource, &request, pending.ticket(), wait).await {
                Ok(Outcome::Granted(lease)) => {
                    pending.finish();
                    return Ok(lease);
                }
                Ok(Outcome::Held { left }) if Instant::now() >= deadline => {
                    pending.finish();
                    return Err(LeaseError::Held {
                        resource: resource.clone(),
                        retry_after: left,
                    });
                }
                Ok(Outcome::Held { .. }) if pending.join() => {}
                Ok(Outcome::Held { .. } | Outcome::Full) => {
                    // Nothing of it is in Redis.
                    pending.finish();
                    return Err(LeaseError::too_many_waiters(resource));
                }
                Ok(Outcome::Queued { left }) => {
                    pending.closed_for(left);
                    tokio::select! {
                        // The lease may have been granted to this request, or the line may be lost:
                        // the next attempt tells.
                        () = pending.woken() => {}
                        // The last time without a wait, which leaves the line.
                        () = sleep_until(deadline) => {}
                    }
                }
                Err(error) => {
                    // It may have been granted. A caller who chose the id may ask again.
                    if request.chosen_id {
                        pending.finish();
                    }
                    return Err(error);
                }
            }
            // A waiter is granted nothing while its issuer does not listen.
            wait = match self.listener.listen(partition_of(resource)).await {
                Ok(()) => deadline.saturating_duration_since(Instant::now()),
                Err(error) if after(LISTEN_AGAIN) >= deadline => return Err(error),
                // In a cluster it may be another server that is silent. Asking tells.
                Err(_) => {
                    sleep(LISTEN_AGAIN).await;
                    Duration::ZERO
                }
            };
        }
    }

    async fn renew(
        &self,
        resource: &Resource,
        id: &LeaseId,
        request: Renew,
    ) -> Result<Lease, LeaseError> {
        if request.at_least.is_some() {
            // The resource has seen a higher token than this store's.
            self.scripts.doubt_epoch(resource);
        }
        match self.scripts.renew(resource, id, request).await? {
            Answer::Granted(granted) => {
                Ok(Lease::granted(resource, id, granted.token, request.ttl))
            }
            Answer::Lost => Err(LeaseError::lost(resource)),
            Answer::Exhausted(token) => Err(LeaseError::Exhausted {
                resource: resource.clone(),
                max_token: token.get(),
            }),
            _ => Err(unexpected()),
        }
    }

    async fn release(&self, resource: &Resource, id: &LeaseId) -> Result<(), LeaseError> {
        let released = self.scripts.release(resource, id).await?;
        released
            .then_some(())
            .ok_or_else(|| LeaseError::lost(resource))
    }

    async fn inspect(&self, resource: &Resource) -> Result<Option<Held>, LeaseError> {
        self.scripts.inspect(resource).await
    }
}

impl Operate for RedisLeases {
    async fn list(&self, limit: usize, cursor: Option<&str>) -> Result<Page, ListError> {
        self.scripts.list(limit, cursor).await
    }

    async fn break_lease(
        &self,
        resource: &Resource,
        seen: Option<Token>,
    ) -> Result<bool, LeaseError> {
        self.scripts.break_lease(resource, seen).await
    }
}

impl fmt::Debug for RedisLeases {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisLeases").finish_non_exhaustive()
    }
}
