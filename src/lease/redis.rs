//! Leases in Redis, each step one Lua script.
//!
//! Resources hash into 256 partitions. A partition has one clock, `{history, epoch, n}`, and a
//! key per held lease, all under one hash tag. A grant increments `n`; there is no counter per
//! resource, so memory is held for held leases only.
//!
//! A token is `epoch * 1_000_000_000 + n`, and an epoch is tied to one history of one server:
//! `master_replid`, read inside the script, which changes at each restart and at each promotion of
//! a replica. Where the clock is missing (FLUSHALL, eviction) or belongs to another history (a
//! restart, a failover, an old snapshot), the script grants nothing; a new epoch comes from
//! [`Epochs`], outside of Redis, and outranks all that was granted before.

use std::{fmt, sync::Arc, time::Duration};

use redis::{
    Client, FromRedisValue, RedisError, Script, ScriptInvocation,
    aio::{ConnectionManager, ConnectionManagerConfig},
};
use tokio::time::timeout;

use super::{Acquire, Held, Lease, LeaseError, LeaseId, Leases, Owner, partition, whole_ms};
use crate::{
    epochs::{Epoch, Epochs},
    token::{Resource, Token},
};

/// Leases in a Redis server, reconnecting by itself. Cheap to clone; clones share one connection.
///
/// The server must tell its `master_replid` (`INFO replication`) inside a script. Tested with
/// Redis 7.0.
#[derive(Clone)]
pub struct RedisLeases {
    connection: ConnectionManager,
    epochs: Arc<dyn Epochs>,
    scripts: Arc<Scripts>,
    key_prefix: Arc<str>,
    command_wait: Duration,
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

    /// How long to wait for the answer to a call, reconnection included. Default: 2 s.
    #[must_use]
    pub const fn command_wait(mut self, limit: Duration) -> Self {
        self.command_wait = limit;
        self
    }

    /// Connects to `url`, such as `redis://127.0.0.1:6379`.
    ///
    /// # Errors
    ///
    /// [`LeaseError::Unavailable`] when the URL is not one, or the server does not answer.
    pub async fn connect(self, url: &str) -> Result<RedisLeases, LeaseError> {
        let client = Client::open(url).map_err(LeaseError::unavailable)?;
        // Each caller waits no longer than `command_wait`; the next one tries again.
        let config = ConnectionManagerConfig::new()
            .set_connection_timeout(Some(self.command_wait))
            .set_response_timeout(Some(self.command_wait))
            .set_number_of_retries(1);
        let connection = ConnectionManager::new_with_config(client, config)
            .await
            .map_err(LeaseError::unavailable)?;
        Ok(RedisLeases {
            connection,
            epochs: self.epochs,
            scripts: Arc::new(Scripts::new()),
            key_prefix: self.key_prefix.into(),
            command_wait: self.command_wait,
        })
    }
}

struct Scripts {
    acquire: Script,
    begin_epoch: Script,
    renew: Script,
    release: Script,
    inspect: Script,
}

impl Scripts {
    fn new() -> Self {
        Self {
            acquire: Script::new(include_str!("lua/acquire.lua")),
            begin_epoch: Script::new(include_str!("lua/begin_epoch.lua")),
            renew: Script::new(include_str!("lua/renew.lua")),
            release: Script::new(include_str!("lua/release.lua")),
            inspect: Script::new(include_str!("lua/inspect.lua")),
        }
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

    fn clock_key(&self, partition: u8) -> String {
        format!("{}:{{{partition}}}:clock", self.key_prefix)
    }

    fn lease_key(&self, resource: &Resource) -> String {
        let partition = partition(resource);
        format!("{}:{{{partition}}}:lease:{resource}", self.key_prefix)
    }

    /// Runs a script, within the time limit.
    async fn once<T: FromRedisValue>(
        &self,
        script: &ScriptInvocation<'_>,
    ) -> redis::RedisResult<T> {
        let mut connection = self.connection.clone();
        match timeout(self.command_wait, script.invoke_async(&mut connection)).await {
            Ok(outcome) => outcome,
            Err(_) => Err(RedisError::from(std::io::Error::from(
                std::io::ErrorKind::TimedOut,
            ))),
        }
    }

    /// Runs a script that may run twice. The first use of a connection that has died in the
    /// meantime fails, and opens a new one.
    async fn run<T: FromRedisValue>(&self, script: &ScriptInvocation<'_>) -> Result<T, LeaseError> {
        let outcome = match self.once(script).await {
            Err(error) if error.is_unrecoverable_error() && !error.is_timeout() => {
                self.once(script).await
            }
            outcome => outcome,
        };
        outcome.map_err(LeaseError::unavailable)
    }

    /// Takes an epoch for the history that was seen, and begins it there.
    async fn begin_epoch(
        &self,
        partition: u8,
        history: &str,
        clock_epoch: i64,
    ) -> Result<(), LeaseError> {
        let at_least = Epoch::new(clock_epoch + 1).map_err(LeaseError::unavailable)?;
        let epoch =
            (self.epochs.next_epoch(partition, at_least).await).map_err(LeaseError::unavailable)?;
        let began: bool = self
            .run(
                self.scripts
                    .begin_epoch
                    .key(self.clock_key(partition))
                    .arg(history)
                    .arg(epoch.get())
                    .arg(Epoch::SIZE),
            )
            .await?;
        if began {
            tracing::info!(partition, %epoch, "began an epoch");
        }
        Ok(())
    }
}

/// How often a grant asks for an epoch before it gives up: each failure means that another issuer
/// was faster, or that the server changed its history again.
const EPOCH_ATTEMPTS: usize = 8;

impl Leases for RedisLeases {
    async fn acquire(&self, resource: &Resource, request: Acquire) -> Result<Lease, LeaseError> {
        let partition = partition(resource);
        let ttl_ms = whole_ms(request.ttl);
        let mut script = self.scripts.acquire.key(self.clock_key(partition));
        script
            .key(self.lease_key(resource))
            .arg(request.lease_id.expose())
            .arg(ttl_ms)
            .arg(request.owner.as_ref().map_or("", Owner::as_str))
            .arg(Epoch::SIZE);
        for _ in 0..EPOCH_ATTEMPTS {
            let answer: Vec<String> = self.run(&script).await?;
            match &answer[..] {
                [kind, token] if kind == "granted" => {
                    return Ok(Lease {
                        resource: resource.clone(),
                        id: request.lease_id,
                        token: parse_token(token)?,
                        ttl: Duration::from_millis(ttl_ms),
                    });
                }
                [kind, left_ms] if kind == "held" => {
                    return Err(LeaseError::Held {
                        resource: resource.clone(),
                        retry_after: left(left_ms),
                    });
                }
                [kind, history, clock_epoch] if kind == "epoch" => {
                    let clock_epoch = clock_epoch.parse().map_err(|_| unexpected())?;
                    self.begin_epoch(partition, history, clock_epoch).await?;
                }
                _ => return Err(unexpected()),
            }
        }
        Err(unexpected())
    }

    async fn renew(
        &self,
        resource: &Resource,
        id: &LeaseId,
        ttl: Duration,
    ) -> Result<Lease, LeaseError> {
        let ttl_ms = whole_ms(ttl);
        let mut script = self.scripts.renew.key(self.lease_key(resource));
        let answer: Option<String> = self.run(script.arg(id.expose()).arg(ttl_ms)).await?;
        let token = answer.ok_or_else(|| lost(resource))?;
        Ok(Lease {
            resource: resource.clone(),
            id: id.clone(),
            token: parse_token(&token)?,
            ttl: Duration::from_millis(ttl_ms),
        })
    }

    async fn release(&self, resource: &Resource, id: &LeaseId) -> Result<(), LeaseError> {
        let mut script = self.scripts.release.key(self.lease_key(resource));
        // Not repeated: after an answer that was lost, the second one would say "lost".
        let released: bool =
            (self.once(script.arg(id.expose())).await).map_err(LeaseError::unavailable)?;
        released.then_some(()).ok_or_else(|| lost(resource))
    }

    async fn inspect(&self, resource: &Resource) -> Result<Option<Held>, LeaseError> {
        let script = self.scripts.inspect.key(self.lease_key(resource));
        let answer: Option<(String, String, String)> = self.run(&script).await?;
        answer
            .map(|(token, owner, left_ms)| {
                Ok(Held {
                    token: parse_token(&token)?,
                    owner: Owner::new(owner)
                        .ok()
                        .filter(|owner| !owner.as_str().is_empty()),
                    ttl: left(&left_ms),
                })
            })
            .transpose()
    }
}

fn lost(resource: &Resource) -> LeaseError {
    LeaseError::Lost {
        resource: resource.clone(),
    }
}

fn parse_token(digits: &str) -> Result<Token, LeaseError> {
    let value = digits.parse::<i64>().ok();
    (value.and_then(|value| Token::new(value).ok())).ok_or_else(unexpected)
}

/// What is left of a lease, in ms; Redis counts below zero where a key never ends or just ended.
fn left(ms: &str) -> Duration {
    Duration::from_millis(ms.parse().unwrap_or(0))
}

/// Keys that something else has written.
fn unexpected() -> LeaseError {
    LeaseError::unavailable(RedisError::from((
        redis::ErrorKind::UnexpectedReturnType,
        "the script's answer makes no sense",
    )))
}

impl fmt::Debug for RedisLeases {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisLeases")
            .field("key_prefix", &self.key_prefix)
            .field("command_wait", &self.command_wait)
            .finish_non_exhaustive()
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
