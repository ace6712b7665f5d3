//! Leases in Redis, each step one Lua script.
//!
//! Resources hash into 256 partitions. A partition has one clock, `{source, history, incarnation,
//! epoch, n}`, and a key per held lease, all under one hash tag. A grant increments `n`; there is no
//! counter per resource, so memory is held for held leases, and for those who wait.
//!
//! 1. A token is `epoch * 1_000_000_000 + n`, and an epoch is tied to one history of one server:
//!    `master_replid`, read inside the script, which changes at each restart and at each promotion of
//!    a replica.
//! 2. Where the clock is missing (FLUSHALL, eviction), belongs to another history (a restart, a
//!    failover, an old snapshot), or has counted less far than the issuer remembers, the script
//!    grants nothing and leaves a blank clock with a fresh incarnation. A new epoch comes from
//!    [`Epochs`], outside of Redis, outranks all that was granted before, and begins on that very
//!    clock or not at all.
//! 3. A clock that names another source of epochs is refused: tokens of two sources say nothing
//!    about each other.
//! 4. A lease keeps the epoch and number of its clock, and counts only under a clock of the same epoch
//!    that has counted as far. One that came back from the past is lost to its holder, and keeps its
//!    resource closed for the rest of its time.
//!
//! The line of those who wait is in Redis. The script that releases grants to the first in line, token
//! included, and publishes that to its issuer; see [`waiters`].

mod answer;
mod builder;
mod check;
mod connection;
mod epochs;
mod lease_end;
mod list;
mod listener;
mod pending;
mod scripts;
mod server;
mod waiters;

use std::{fmt, sync::Arc, time::Duration};

use tokio::time::{Instant, sleep, sleep_until};

pub use self::builder::RedisLeasesBuilder;
use self::{
    answer::{Answer, unexpected},
    listener::Listener,
    pending::PendingAcquire,
    scripts::Scripts,
    waiters::Waiters,
};
use super::{
    Acquire, Announced, Held, Lease, LeaseError, LeaseId, Leases, ListError, Operate, Page, Renew,
    WaiterLimits, after, at_least_1_ms,
};
use crate::{
    announce::Announce,
    epochs::partition_of,
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
    fn new(scripts: Arc<Scripts>, limits: WaiterLimits) -> Self {
        let waiters = Waiters::new(Arc::clone(&scripts), limits);
        Self {
            scripts,
            listener: Listener::new(Arc::clone(&waiters)),
            waiters,
        }
    }

    fn scripts(&self) -> &Scripts {
        &self.scripts
    }

    /// These leases, each grant announced to `resources`, a `Fence`, before it is answered. What that
    /// promises: [`Announced`].
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
                Ok(Outcome::Granted(lease(resource, id, granted.token, ttl)))
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
        match self.scripts.renew(resource, id, request).await? {
            Answer::Granted(granted) => Ok(lease(resource, id, granted.token, request.ttl)),
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

    async fn break_lease(&self, resource: &Resource) -> Result<bool, LeaseError> {
        self.scripts.break_lease(resource).await
    }
}

fn lease(resource: &Resource, id: &LeaseId, token: Token, ttl: Duration) -> Lease {
    Lease {
        resource: resource.clone(),
        id: id.clone(),
        token,
        ttl: Duration::from_millis(at_least_1_ms(ttl)),
    }
}

impl fmt::Debug for RedisLeases {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisLeases").finish_non_exhaustive()
    }
}
