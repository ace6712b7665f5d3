//! The Lua scripts, their keys, and their answers.

use std::{sync::Arc, time::Duration};

use redis::{FromRedisValue, RedisError, RedisResult, Script, ScriptInvocation};

use super::{SourceMismatch, Token, server::Server, unexpected};
use crate::{
    epochs::{Epoch, SourceId, partition_of},
    lease::{Acquire, Held, LeaseError, LeaseId, Owner, Renew, memory::Memory, whole_ms},
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
    memory: Arc<Memory>,
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
    Granted(Granted),
    Held {
        left: Duration,
    },
    Queued {
        left: Duration,
    },
    /// Too many wait.
    Full,
    Watched {
        left: Duration,
        in_line: bool,
    },
    Free,
    Released,
    Lost,
    /// There is no token above this one.
    Exhausted(Token),
    NeedsEpoch(Seen),
    /// The clock has counted less far than this process has seen.
    Behind,
    /// The clock belongs to another source of epochs.
    OtherSource(String),
}

/// A grant: its token, and how far the clock has counted.
#[derive(Debug)]
pub(super) struct Granted {
    pub(super) token: Token,
    epoch: Epoch,
    n: i64,
}

/// The clock that had no token to give.
#[derive(Debug)]
pub(super) struct Seen {
    history: String,
    incarnation: String,
    epoch: i64,
}

/// How often a script is run for one call before that gives up: each time means that another issuer
/// was faster, or that the server changed its history again.
const ATTEMPTS: usize = 12;

/// How the arguments of a script are added that it has beside those of all.
trait Arguments: Fn(&mut ScriptInvocation<'_>) + Sync {}
impl<F: Fn(&mut ScriptInvocation<'_>) + Sync> Arguments for F {}

impl Scripts {
    pub(super) fn new(server: Server, memory: Arc<Memory>, key_prefix: &str) -> Self {
        Self {
            server,
            memory,
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
        // Channels do not know databases. In the scripts: `announce` in line.lua.
        let database = self.server.database();
        format!("{}:{{{partition}}}:{database}:everybody", self.key_prefix)
    }

    /// The channel of a partition on which one issuer listens.
    pub(super) fn own_channel(&self, partition: u8, issuer: &str) -> String {
        let database = self.server.database();
        let prefix = &self.key_prefix;
        format!("{prefix}:{{{partition}}}:{database}:issuer:{issuer}")
    }

    pub(super) fn lease_key(&self, resource: &Resource) -> String {
        let partition = partition_of(resource);
        format!("{}:{{{partition}}}:lease:{resource}", self.key_prefix)
    }

    /// Refuses a server whose history cannot be read, or where issuers cannot hear of each other's
    /// grants, and warns of one that may drop leases.
    pub(super) async fn check_server(&self) -> Result<(), LeaseError> {
        let script = Script::new(include_str!("lua/check.lua"));
        let channel = self.everybody(0);
        let mut check = script.key(format!("{}:{{0}}:clock", self.key_prefix));
        check.arg(self.server.publish()).arg(&channel);
        let (history, eviction, refused): (bool, String, String) = self.run(&check).await?;
        if !history {
            return Err(LeaseError::unavailable(RedisError::from((
                redis::ErrorKind::InvalidClientConfig,
                "the server does not tell its master_replid (INFO replication), without which \
                 tokens would not survive a restart",
            ))));
        }
        if !refused.is_empty() {
            return Err(LeaseError::unavailable(self.no_channels(refused)));
        }
        if let Err(error) = self.server.try_to_hear(channel).await {
            let refused = error.code().is_some_and(|code| code == "NOPERM");
            return Err(LeaseError::unavailable(match refused {
                true => self.no_channels(error.to_string()),
                false => error,
            }));
        }
        if eviction.starts_with("allkeys") || eviction.starts_with("volatile") {
            tracing::warn!(
                maxmemory_policy = eviction,
                "this Redis may evict leases that are held; use `noeviction`"
            );
        }
        Ok(())
    }

    fn no_channels(&self, refused: String) -> RedisError {
        let prefix = &self.key_prefix;
        RedisError::from((
            redis::ErrorKind::InvalidClientConfig,
            "the Redis user may not use the channels on which issuers hear of each other's grants",
            format!("`{prefix}:*`, to publish and to subscribe ({refused})"),
        ))
    }

    pub(super) async fn acquire(
        &self,
        resource: &Resource,
        request: &Acquire,
        ticket: u64,
        wait: Duration,
        channel: &str,
        waiters: usize,
    ) -> Result<Answer, LeaseError> {
        let wait_ms = if wait.is_zero() { 0 } else { whole_ms(wait) };
        let delay = request.lock_delay;
        let delay_ms = if delay.is_zero() { 0 } else { whole_ms(delay) };
        let arguments = |script: &mut ScriptInvocation<'_>| {
            script
                .arg(request.lease_id.expose())
                .arg(ticket)
                .arg(whole_ms(request.ttl))
                .arg(delay_ms)
                .arg(request.owner.as_ref().map_or("", Owner::as_str))
                .arg(wait_ms)
                .arg(channel)
                .arg(waiters);
        };
        self.granting(&self.acquire, resource, &arguments).await
    }

    pub(super) async fn renew(
        &self,
        resource: &Resource,
        id: &LeaseId,
        request: Renew,
    ) -> Result<Answer, LeaseError> {
        let arguments = |script: &mut ScriptInvocation<'_>| {
            script
                .arg(id.expose())
                .arg(whole_ms(request.ttl))
                .arg(u8::from(request.new_token))
                .arg(request.at_least.map_or(0, Token::get));
        };
        if request.new_token || request.at_least.is_some() {
            return self.granting(&self.renew, resource, &arguments).await;
        }
        // What keeps its token goes on without a database.
        let answer = self.attempts(&self.renew, resource, &arguments).await?;
        if let Answer::Granted(Granted { epoch, n, .. }) = answer {
            self.memory.note(partition_of(resource), epoch, n);
        }
        Ok(answer)
    }

    /// Leaves the line, and gives back what was granted to this request.
    pub(super) async fn abandon(
        &self,
        resource: &Resource,
        id: &LeaseId,
        ticket: u64,
    ) -> Result<bool, LeaseError> {
        let mut script = self.invoke(&self.abandon, resource, false);
        self.ending(script.arg(id.expose()).arg(ticket), resource)
            .await
    }

    /// Releases; true when the lease was held under this id.
    pub(super) async fn release(
        &self,
        resource: &Resource,
        id: &LeaseId,
    ) -> Result<bool, LeaseError> {
        let mut script = self.invoke(&self.release, resource, false);
        self.ending(script.arg(id.expose()), resource).await
    }

    /// Ends the lease, whoever holds it; true when somebody did.
    pub(super) async fn break_lease(&self, resource: &Resource) -> Result<bool, LeaseError> {
        let script = self.invoke(&self.break_lease, resource, false);
        self.ending(&script, resource).await
    }

    /// Looks whether the lease has ended by itself, and hands it over; and whether a waiter is
    /// still in line.
    pub(super) async fn tick(&self, resource: &Resource, id: &str) -> Result<Answer, LeaseError> {
        let arguments = |script: &mut ScriptInvocation<'_>| _ = script.arg(id);
        self.granting(&self.tick, resource, &arguments).await
    }

    pub(super) async fn inspect(&self, resource: &Resource) -> Result<Option<Held>, LeaseError> {
        let script = self.invoke(&self.inspect, resource, false);
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

    /// Runs a script that may grant.
    async fn granting(
        &self,
        script: &Script,
        resource: &Resource,
        arguments: &impl Arguments,
    ) -> Result<Answer, LeaseError> {
        self.memory.learn_source().await?;
        let answer = self.attempts(script, resource, arguments).await?;
        if let Answer::Granted(Granted { epoch, n, .. }) = answer {
            self.memory.saw(partition_of(resource), epoch, n).await?;
        }
        Ok(answer)
    }

    /// Runs a script. Where that needs an epoch, begins one and runs it again.
    async fn attempts(
        &self,
        script: &Script,
        resource: &Resource,
        arguments: &impl Arguments,
    ) -> Result<Answer, LeaseError> {
        let partition = partition_of(resource);
        let (mut turn, mut insists) = (None, false);
        for _ in 0..ATTEMPTS {
            let mut invocation = self.invoke(script, resource, insists);
            arguments(&mut invocation);
            match (Answer::parse(self.run(&invocation).await?)?, &turn) {
                // One at a time goes on from here. Asking again tells whether somebody else, who was
                // first, has seen to it.
                (Answer::NeedsEpoch(_) | Answer::Behind, None) => {
                    turn = Some(self.memory.turn(partition).await?);
                }
                (Answer::NeedsEpoch(seen), Some(_)) => {
                    if let Err(error) = self.begin_epoch(resource, &seen).await {
                        return Err(turn.map_or(error.clone(), |turn| turn.failed(error)));
                    }
                }
                (Answer::Behind, Some(_)) => {
                    // It may be that of a server that was deposed. Where it is not, it was copied
                    // back, and must not count on from there.
                    tracing::warn!(partition, "the clock has gone back; looking for the master");
                    self.server.find_again().await;
                    insists = true;
                }
                (Answer::OtherSource(theirs), _) => return Err(self.mismatch(partition, theirs)),
                (answer, _) => return Ok(answer),
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
            Answer::NeedsEpoch(_) | Answer::Behind | Answer::OtherSource(_) => {
                // The lease has ended; the next in line needs an epoch first. Where that fails,
                // the watch of the line sees to it.
                let _ = self.tick(resource, "").await;
                Ok(true)
            }
            answer => Ok(matches!(answer, Answer::Released)),
        }
    }

    /// Takes an epoch for the clock that was seen, and begins it there.
    async fn begin_epoch(&self, resource: &Resource, seen: &Seen) -> Result<(), LeaseError> {
        let partition = partition_of(resource);
        let epoch = self.memory.next_epoch(partition, seen.epoch).await?;
        let mut script = self.invoke(&self.begin_epoch, resource, false);
        script
            .arg(&seen.history)
            .arg(&seen.incarnation)
            .arg(epoch.get());
        let began: bool = self.run(&script).await?;
        if began {
            metrics::count("tower_fence_epochs_begun_total");
            tracing::info!(partition, %epoch, "began an epoch");
        }
        Ok(())
    }

    fn mismatch(&self, partition: u8, theirs: String) -> LeaseError {
        LeaseError::unavailable(SourceMismatch {
            key_prefix: self.key_prefix.clone(),
            partition,
            ours: self.memory.source().cloned(),
            theirs,
        })
    }

    /// A script with the keys and arguments that all of them share.
    fn invoke<'a>(
        &'a self,
        script: &'a Script,
        resource: &Resource,
        insists: bool,
    ) -> ScriptInvocation<'a> {
        let partition = partition_of(resource);
        let prefix = &self.key_prefix;
        let (epoch, n) = self.memory.highest(partition);
        let mut invocation = script.key(format!("{prefix}:{{{partition}}}:clock"));
        invocation
            .key(self.lease_key(resource))
            .key(format!("{prefix}:{{{partition}}}:queue:{resource}"))
            .key(format!("{prefix}:{{{partition}}}:waiters:{resource}"))
            .arg(Epoch::SIZE)
            .arg(self.server.publish())
            .arg(self.server.database())
            .arg(self.memory.source().map_or("", SourceId::as_str))
            .arg(rand::random::<u64>())
            .arg(epoch)
            .arg(n)
            .arg(u8::from(insists));
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
            ["granted", token, epoch, n] => Self::Granted(Granted {
                token: parse_token(token)?,
                epoch: Epoch::new(parse_number(epoch)?).map_err(|_| unexpected())?,
                n: parse_number(n)?,
            }),
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
            ["full"] => Self::Full,
            ["free"] => Self::Free,
            ["released"] => Self::Released,
            ["lost"] => Self::Lost,
            ["exhausted", token] => Self::Exhausted(parse_token(token)?),
            ["epoch", history, incarnation, epoch] => Self::NeedsEpoch(Seen {
                history: history.into(),
                incarnation: incarnation.into(),
                epoch: parse_number(epoch)?,
            }),
            ["behind"] => Self::Behind,
            ["source", theirs] => Self::OtherSource(theirs.into()),
            _ => return Err(unexpected()),
        })
    }
}

fn parse_token(digits: &str) -> Result<Token, LeaseError> {
    Token::new(parse_number(digits)?).map_err(|_| unexpected())
}

fn parse_number(digits: &str) -> Result<i64, LeaseError> {
    digits.parse().map_err(|_| unexpected())
}

/// What is left of a lease, in ms; Redis counts below zero where a key never ends or just ended.
pub(super) fn parse_ms(ms: &str) -> Duration {
    Duration::from_millis(ms.parse().unwrap_or(0))
}
