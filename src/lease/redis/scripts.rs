//! The Lua scripts, their keys, and their answers.

use std::{sync::Arc, time::Duration};

use redis::{FromRedisValue, RedisError, RedisResult, Script, ScriptInvocation};

use super::{Token, server::Server, unexpected};
use crate::{
    epochs::{Epoch, Epochs, partition_of},
    lease::{Acquire, Held, LeaseError, LeaseId, Owner, Renew, whole_ms},
    metrics,
    token::Resource,
};

/// A script, after what all of them share; some have a short way in between.
macro_rules! script {
    ($file:literal) => {
        script!("lua/line.lua", $file)
    };
    ($($part:literal),+) => {
        Script::new(concat!(include_str!("lua/clock.lua"), $(include_str!($part)),+))
    };
}

pub(super) struct Scripts {
    server: Server,
    epochs: Arc<dyn Epochs>,
    key_prefix: Box<str>,
    abandon: Script,
    acquire: Script,
    begin_epoch: Script,
    break_lease: Script,
    inspect: Script,
    release: Script,
    renew: Script,
    tick: Script,
}

/// What a script answers.
#[derive(Debug)]
pub(super) enum Answer {
    Granted(Token),
    Held { left: Duration },
    Queued { left: Duration },
    Watched { left: Duration, in_line: bool },
    Free,
    Released,
    Lost,
    NeedsEpoch(Seen),
}

/// The clock that had no token to give.
#[derive(Debug)]
pub(super) struct Seen {
    history: String,
    epoch: i64,
}

/// How often an epoch is begun for one call before that gives up: each failure means that another
/// issuer was faster, or that the server changed its history again.
const EPOCH_ATTEMPTS: usize = 8;

impl Scripts {
    pub(super) fn new(server: Server, epochs: Arc<dyn Epochs>, key_prefix: &str) -> Self {
        Self {
            server,
            epochs,
            key_prefix: key_prefix.into(),
            abandon: script!("lua/abandon.lua"),
            acquire: script!("lua/acquire_free.lua", "lua/line.lua", "lua/acquire.lua"),
            begin_epoch: script!("lua/begin_epoch.lua"),
            break_lease: script!("lua/break.lua"),
            inspect: script!("lua/inspect.lua"),
            release: script!("lua/release_alone.lua", "lua/line.lua", "lua/release.lua"),
            renew: script!("lua/renew.lua"),
            tick: script!("lua/tick.lua"),
        }
    }

    pub(super) const fn server(&self) -> &Server {
        &self.server
    }

    pub(super) fn key_prefix(&self) -> &str {
        &self.key_prefix
    }

    /// The channel of a partition on which all issuers that have waiters listen.
    pub(super) fn everybody(&self, partition: u8) -> String {
        format!("{}:{{{partition}}}:everybody", self.key_prefix)
    }

    /// The channel of a partition on which one issuer listens.
    pub(super) fn own_channel(&self, partition: u8, issuer: &str) -> String {
        format!("{}:{{{partition}}}:issuer:{issuer}", self.key_prefix)
    }

    pub(super) fn lease_key(&self, resource: &Resource) -> String {
        let partition = partition_of(resource);
        format!("{}:{{{partition}}}:lease:{resource}", self.key_prefix)
    }

    /// Refuses a server whose history cannot be read, and warns of one that may drop leases.
    pub(super) async fn check_server(&self) -> Result<(), LeaseError> {
        let check = Script::new(include_str!("lua/check.lua"));
        let (history, eviction): (bool, String) = self.run(&check.prepare_invoke()).await?;
        if !history {
            return Err(LeaseError::unavailable(RedisError::from((
                redis::ErrorKind::InvalidClientConfig,
                "the server does not tell its master_replid (INFO replication), without which \
                 tokens would not survive a restart",
            ))));
        }
        if eviction.starts_with("allkeys") || eviction.starts_with("volatile") {
            tracing::warn!(
                maxmemory_policy = eviction,
                "this Redis may evict leases that are held; use `noeviction`"
            );
        }
        Ok(())
    }

    pub(super) async fn acquire(
        &self,
        resource: &Resource,
        request: &Acquire,
        ticket: u64,
        wait: Duration,
        channel: &str,
    ) -> Result<Answer, LeaseError> {
        let wait_ms = if wait.is_zero() { 0 } else { whole_ms(wait) };
        let delay = request.lock_delay;
        let delay_ms = if delay.is_zero() { 0 } else { whole_ms(delay) };
        let mut script = self.invoke(&self.acquire, resource);
        script
            .arg(request.lease_id.expose())
            .arg(ticket)
            .arg(whole_ms(request.ttl))
            .arg(delay_ms)
            .arg(request.owner.as_ref().map_or("", Owner::as_str))
            .arg(wait_ms)
            .arg(channel);
        self.granting(&script, resource).await
    }

    pub(super) async fn renew(
        &self,
        resource: &Resource,
        id: &LeaseId,
        request: Renew,
    ) -> Result<Answer, LeaseError> {
        let mut script = self.invoke(&self.renew, resource);
        script
            .arg(id.expose())
            .arg(whole_ms(request.ttl))
            .arg(u8::from(request.new_token));
        self.granting(&script, resource).await
    }

    /// Leaves the line, and gives back what was granted to this request.
    pub(super) async fn abandon(
        &self,
        resource: &Resource,
        id: &LeaseId,
        ticket: u64,
    ) -> Result<bool, LeaseError> {
        let mut script = self.invoke(&self.abandon, resource);
        self.ending(script.arg(id.expose()).arg(ticket), resource)
            .await
    }

    /// Releases; true when the lease was held under this id.
    pub(super) async fn release(
        &self,
        resource: &Resource,
        id: &LeaseId,
    ) -> Result<bool, LeaseError> {
        let mut script = self.invoke(&self.release, resource);
        self.ending(script.arg(id.expose()), resource).await
    }

    /// Ends the lease, whoever holds it; true when somebody did.
    pub(super) async fn break_lease(&self, resource: &Resource) -> Result<bool, LeaseError> {
        self.ending(&self.invoke(&self.break_lease, resource), resource)
            .await
    }

    /// Looks whether the lease has ended by itself, and hands it over; and whether a waiter is
    /// still in line.
    pub(super) async fn tick(&self, resource: &Resource, id: &str) -> Result<Answer, LeaseError> {
        let mut script = self.invoke(&self.tick, resource);
        self.granting(script.arg(id), resource).await
    }

    pub(super) async fn inspect(&self, resource: &Resource) -> Result<Option<Held>, LeaseError> {
        let script = self.invoke(&self.inspect, resource);
        let answer: Option<(String, String, String, String)> = self.run(&script).await?;
        answer
            .map(|(token, owner, left_ms, waiters)| {
                let owner = Owner::new(owner).ok();
                Ok(Held {
                    token: parse_token(&token)?,
                    owner: owner.filter(|owner| !owner.as_str().is_empty()),
                    ttl: parse_ms(&left_ms),
                    waiters: waiters.parse().map_err(|_| unexpected())?,
                })
            })
            .transpose()
    }

    /// Runs a script that may grant. Where that needs an epoch, begins one and runs it again.
    async fn granting(
        &self,
        script: &ScriptInvocation<'_>,
        resource: &Resource,
    ) -> Result<Answer, LeaseError> {
        for _ in 0..EPOCH_ATTEMPTS {
            match Answer::parse(self.run(script).await?)? {
                Answer::NeedsEpoch(seen) => self.begin_epoch(resource, &seen).await?,
                answer => return Ok(answer),
            }
        }
        Err(unexpected())
    }

    /// Runs a script that ends a lease. It is not repeated where the answer is lost: the second
    /// one would say "lost".
    async fn ending(
        &self,
        script: &ScriptInvocation<'_>,
        resource: &Resource,
    ) -> Result<bool, LeaseError> {
        let answer = self.once(script).await.map_err(LeaseError::unavailable)?;
        match Answer::parse(answer)? {
            Answer::NeedsEpoch(seen) => {
                // The lease has ended; the next in line needs an epoch first. Where that fails,
                // the watch of the line sees to it.
                if self.begin_epoch(resource, &seen).await.is_ok() {
                    let _ = self.tick(resource, "").await;
                }
                Ok(true)
            }
            answer => Ok(matches!(answer, Answer::Released)),
        }
    }

    /// Takes an epoch for the clock that was seen, and begins it there.
    async fn begin_epoch(&self, resource: &Resource, seen: &Seen) -> Result<(), LeaseError> {
        let partition = partition_of(resource);
        let at_least = Epoch::new(seen.epoch + 1).map_err(LeaseError::unavailable)?;
        let epoch = self.epochs.next_epoch(partition, at_least).await;
        let epoch = epoch.map_err(LeaseError::unavailable)?;
        let mut script = self.invoke(&self.begin_epoch, resource);
        let began: bool = self.run(script.arg(&seen.history).arg(epoch.get())).await?;
        if began {
            metrics::count("tower_fence_epochs_begun_total");
            tracing::info!(partition, %epoch, "began an epoch");
        }
        Ok(())
    }

    /// A script with the keys and arguments that all of them share.
    fn invoke<'a>(&'a self, script: &'a Script, resource: &Resource) -> ScriptInvocation<'a> {
        let partition = partition_of(resource);
        let prefix = &self.key_prefix;
        let mut invocation = script.key(format!("{prefix}:{{{partition}}}:clock"));
        invocation
            .key(self.lease_key(resource))
            .key(format!("{prefix}:{{{partition}}}:queue:{resource}"))
            .key(format!("{prefix}:{{{partition}}}:waiters:{resource}"))
            .arg(Epoch::SIZE)
            .arg(self.server.publish());
        invocation
    }

    /// Runs a script, within the time limit.
    async fn once<T: FromRedisValue>(&self, script: &ScriptInvocation<'_>) -> RedisResult<T> {
        let invoke = |mut connection| async move { script.invoke_async(&mut connection).await };
        self.server.run(invoke).await
    }

    /// Runs a script that may run twice: where the answer was lost, and where the connection has
    /// died in the meantime.
    async fn run<T: FromRedisValue>(&self, script: &ScriptInvocation<'_>) -> Result<T, LeaseError> {
        let outcome = match self.once(script).await {
            Err(error) if error.is_unrecoverable_error() && !error.is_timeout() => {
                self.once(script).await
            }
            outcome => outcome,
        };
        outcome.map_err(LeaseError::unavailable)
    }
}

impl Answer {
    fn parse(words: Vec<String>) -> Result<Self, LeaseError> {
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        Ok(match words[..] {
            ["granted", token] => Self::Granted(parse_token(token)?),
            ["held", left] => Self::Held {
                left: parse_ms(left),
            },
            ["held", left, in_line] => Self::Watched {
                left: parse_ms(left),
                in_line: in_line == "1",
            },
            ["queued", left] => Self::Queued {
                left: parse_ms(left),
            },
            ["free"] => Self::Free,
            ["released"] => Self::Released,
            ["lost"] => Self::Lost,
            ["epoch", history, epoch] => Self::NeedsEpoch(Seen {
                history: history.into(),
                epoch: epoch.parse().map_err(|_| unexpected())?,
            }),
            _ => return Err(unexpected()),
        })
    }
}

fn parse_token(digits: &str) -> Result<Token, LeaseError> {
    let value = digits.parse::<i64>().ok();
    (value.and_then(|value| Token::new(value).ok())).ok_or_else(unexpected)
}

/// What is left of a lease, in ms; Redis counts below zero where a key never ends or just ended.
pub(super) fn parse_ms(ms: &str) -> Duration {
    Duration::from_millis(ms.parse().unwrap_or(0))
}
