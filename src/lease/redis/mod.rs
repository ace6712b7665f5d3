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
//! Who waits is in line in Redis. The script that releases grants to the first in line, token
//! included, and publishes that to its issuer; see [`line`].

mod answer;
mod builder;
mod check;
mod connection;
mod epochs;
mod line;
mod list;
mod listener;
mod scripts;
mod server;

use std::{fmt, sync::Arc, time::Duration};

use redis::{ErrorKind, RedisError};
use tokio::time::{Instant, sleep, sleep_until};

pub use self::builder::RedisLeasesBuilder;
use self::{answer::Answer, line::Lines, scripts::Scripts};
use super::{
    Acquire, Held, Lease, LeaseError, LeaseId, Leases, ListError, Operate, Page, Renew, after,
    whole_ms,
};
use crate::{
    epochs::{Epochs, partition_of},
    token::{Resource, Token},
};

/// Leases in a Redis server, reconnecting by itself. Cheap to clone; clones share their
/// connections.
///
/// The server must tell its `master_replid` (`INFO replication`) inside a script. Tested with
/// Redis 7.0.
#[derive(Clone)]
pub struct RedisLeases {
    scripts: Arc<Scripts>,
    lines: Arc<Lines>,
}

impl RedisLeases {
    /// Connects with the default settings. `epochs` is a `Fence`, or another durable source.
    ///
    /// # Errors
    ///
    /// As [`RedisLeasesBuilder::connect`].
    pub async fn connect(url: &str, epochs: impl Epochs + 'static) -> Result<Self, LeaseError> {
        Self::builder(epochs).connect(url).await
    }

    /// Settings, to be changed before connecting.
    pub fn builder(epochs: impl Epochs + 'static) -> RedisLeasesBuilder {
        RedisLeasesBuilder::new(Arc::new(epochs))
    }

    /// Asks for a lease once: to be granted, refused, or, with a `wait`, put in line.
    async fn ask(
        &self,
        resource: &Resource,
        request: &Acquire,
        ticket: u64,
        wait: Duration,
    ) -> Result<Asked, LeaseError> {
        let channel = if wait.is_zero() {
            String::new()
        } else {
            self.lines.channel(partition_of(resource))
        };
        match self
            .scripts
            .acquire(
                resource,
                request,
                ticket,
                wait,
                &channel,
                self.lines.per_resource(),
            )
            .await?
        {
            Answer::Granted(granted) => {
                let (id, ttl) = (&request.lease_id, request.ttl);
                Ok(Asked::Granted(lease(resource, id, granted.token, ttl)))
            }
            Answer::Held { left } => Ok(Asked::Held { left }),
            Answer::Queued { left } => Ok(Asked::Queued { left }),
            Answer::Full => Ok(Asked::Full),
            _ => Err(unexpected()),
        }
    }
}

/// How long to leave it where an issuer cannot listen.
const LISTEN_AGAIN: Duration = Duration::from_millis(100);

/// What became of a request for a lease.
enum Asked {
    Granted(Lease),
    Held { left: Duration },
    Queued { left: Duration },
    Full,
}

impl Leases for RedisLeases {
    async fn acquire(&self, resource: &Resource, request: Acquire) -> Result<Lease, LeaseError> {
        let deadline = after(request.wait);
        let mut place = self.lines.enter(resource, &request.lease_id);
        // The first time without a wait: most locks are free.
        let mut wait = Duration::ZERO;
        loop {
            match self.ask(resource, &request, place.ticket(), wait).await {
                Ok(Asked::Granted(lease)) => {
                    place.arrived();
                    return Ok(lease);
                }
                Ok(Asked::Held { left }) if Instant::now() >= deadline => {
                    place.arrived();
                    return Err(held(resource, left));
                }
                Ok(Asked::Held { .. }) if place.join() => {}
                Ok(Asked::Held { .. } | Asked::Full) => {
                    // Nothing of it is in Redis.
                    place.arrived();
                    return Err(LeaseError::TooManyWaiters {
                        resource: resource.clone(),
                    });
                }
                Ok(Asked::Queued { left }) => {
                    place.closed_for(left);
                    tokio::select! {
                        // It may be our turn, or the line may be lost: asking again tells.
                        () = place.called() => {}
                        // The last time without a wait, which leaves the line.
                        () = sleep_until(deadline) => {}
                    }
                }
                Err(error) => {
                    // It may have been granted. Who chose the id may ask again.
                    if request.chosen_id {
                        place.arrived();
                    }
                    return Err(error);
                }
            }
            // Nobody is granted anything whose issuer does not listen.
            wait = match self.lines.listen(resource).await {
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
            Answer::Lost => Err(lost(resource)),
            Answer::Exhausted(token) => Err(LeaseError::Exhausted {
                resource: resource.clone(),
                max_token: token.get(),
            }),
            _ => Err(unexpected()),
        }
    }

    async fn release(&self, resource: &Resource, id: &LeaseId) -> Result<(), LeaseError> {
        let released = self.scripts.release(resource, id).await?;
        released.then_some(()).ok_or_else(|| lost(resource))
    }

    async fn inspect(&self, resource: &Resource) -> Result<Option<Held>, LeaseError> {
        self.scripts.inspect(resource).await
    }
}

impl Operate for RedisLeases {
    async fn list(&self, limit: usize, cursor: Option<&str>) -> Result<Page, ListError> {
        list::list(self, limit, cursor).await
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
        ttl: Duration::from_millis(whole_ms(ttl)),
    }
}

fn held(resource: &Resource, left: Duration) -> LeaseError {
    LeaseError::Held {
        resource: resource.clone(),
        retry_after: left,
    }
}

fn lost(resource: &Resource) -> LeaseError {
    LeaseError::Lost {
        resource: resource.clone(),
    }
}

/// Keys that something else has written.
fn unexpected() -> LeaseError {
    LeaseError::unavailable(RedisError::from((
        ErrorKind::UnexpectedReturnType,
        "the script's answer makes no sense",
    )))
}

impl fmt::Debug for RedisLeases {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisLeases").finish_non_exhaustive()
    }
}
