//! Leases in Redis, each step one Lua script.
//!
//! Resources hash into 256 partitions. A partition has one clock, `{history, epoch, n}`, and a
//! key per held lease, all under one hash tag. A grant increments `n`; there is no counter per
//! resource, so memory is held for held leases, and for those who wait.
//!
//! A token is `epoch * 1_000_000_000 + n`, and an epoch is tied to one history of one server:
//! `master_replid`, read inside the script, which changes at each restart and at each promotion of
//! a replica. Where the clock is missing (FLUSHALL, eviction) or belongs to another history (a
//! restart, a failover, an old snapshot), the script grants nothing; a new epoch comes from
//! [`Epochs`], outside of Redis, and outranks all that was granted before.
//!
//! Who waits is in line in Redis. The script that releases grants to the first in line, token
//! included, and publishes that to its issuer; see [`line`].

mod connection;
mod line;
mod list;
mod listener;
mod scripts;
mod server;

use std::{fmt, sync::Arc, time::Duration};

use redis::{ErrorKind, RedisError};
use tokio::time::{Instant, sleep, sleep_until};

use self::{
    line::Lines,
    scripts::{Answer, Scripts},
    server::Server,
};
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

/// Settings of [`RedisLeases`], from [`RedisLeases::builder`].
pub struct RedisLeasesBuilder {
    epochs: Arc<dyn Epochs>,
    key_prefix: String,
    command_wait: Duration,
}

impl RedisLeasesBuilder {
    /// What the names of all keys begin with. Default: `tower-fence`.
    ///
    /// Stores with different prefixes are different stores; they may share one source of epochs.
    #[must_use]
    pub fn key_prefix(mut self, prefix: impl Into<String>) -> Self {
        self.key_prefix = prefix.into();
        self
    }

    /// How long to wait for the answer to a command, reconnection included. Default: 2 s.
    #[must_use]
    pub const fn command_wait(mut self, limit: Duration) -> Self {
        self.command_wait = limit;
        self
    }

    /// Connects to a server that stands alone: `redis://127.0.0.1:6379`, for example.
    ///
    /// # Errors
    ///
    /// [`LeaseError::Unavailable`] when the URL is not one, when the server does not answer, or
    /// when it does not tell its history.
    pub async fn connect(self, url: &str) -> Result<RedisLeases, LeaseError> {
        let server = Server::alone(url, self.command_wait).map_err(LeaseError::unavailable)?;
        self.connect_to(server).await
    }

    /// Connects to the master that sentinels name, and follows it through failovers. `sentinels`
    /// are URLs such as `redis://127.0.0.1:26379`, `service` is the master's name there.
    ///
    /// # Errors
    ///
    /// As [`connect`](Self::connect), and when no sentinel knows a master.
    pub async fn connect_sentinels(
        self,
        sentinels: &[&str],
        service: &str,
    ) -> Result<RedisLeases, LeaseError> {
        let server = Server::behind_sentinels(sentinels, service, self.command_wait);
        self.connect_to(server.map_err(LeaseError::unavailable)?)
            .await
    }

    /// Connects to a Redis Cluster (7.0 or newer) and follows it through failovers. `nodes` are
    /// URLs of some of its nodes; it tells the others.
    ///
    /// Resources are spread over 256 slots. While the slot of a resource has no master, or moves
    /// to another one, its leases are [`Unavailable`](LeaseError::Unavailable); others go on, not as fast while a node is silent.
    ///
    /// # Errors
    ///
    /// As [`connect`](Self::connect).
    pub async fn connect_cluster(self, nodes: &[&str]) -> Result<RedisLeases, LeaseError> {
        let server = Server::cluster(nodes, self.command_wait).map_err(LeaseError::unavailable)?;
        self.connect_to(server).await
    }

    async fn connect_to(self, server: Server) -> Result<RedisLeases, LeaseError> {
        let scripts = Arc::new(Scripts::new(server, self.epochs, &self.key_prefix));
        scripts.check_server().await?;
        Ok(RedisLeases {
            lines: Lines::new(Arc::clone(&scripts)),
            scripts,
        })
    }
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
        RedisLeasesBuilder {
            epochs: Arc::new(epochs),
            key_prefix: "tower-fence".into(),
            command_wait: Duration::from_secs(2),
        }
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
            .acquire(resource, request, ticket, wait, &channel)
            .await?
        {
            Answer::Granted(token) => {
                let id = &request.lease_id;
                Ok(Asked::Granted(lease(resource, id, token, request.ttl)))
            }
            Answer::Held { left } => Ok(Asked::Held { left }),
            Answer::Queued { left } => Ok(Asked::Queued { left }),
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
                Ok(Asked::Held { .. }) => place.join(),
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
            Answer::Granted(token) => Ok(lease(resource, id, token, request.ttl)),
            Answer::Lost => Err(lost(resource)),
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

impl fmt::Debug for RedisLeasesBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisLeasesBuilder")
            .field("key_prefix", &self.key_prefix)
            .field("command_wait", &self.command_wait)
            .finish_non_exhaustive()
    }
}
