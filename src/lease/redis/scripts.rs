//! Lua scripts and their keys.
//!
//! The checks in `crates/verification/interleavings` replace this module with a model, and run the
//! [`store`](super::store) and the [`listener`](super::listener) as they are. Therefore the modules
//! stay separate.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use redis::FromRedisValue;

use super::{
    answer::{parse, unexpected},
    script::{Call, Script},
    server::{Runs, Server},
};
use crate::{
    epochs::{Epoch, SourceId, partition_of},
    lease::{
        Held, LeaseError, Owner,
        backend::{Ask, BlankCounter, End, Renewal, Reply, Seen, Waits},
        single_flight::OnceFlight,
    },
    time::{of_ms, whole_ms},
    token::{Resource, Token},
};

/// Returns the text of a script: its fast path (if it has one), the shared functions, and its own
/// part.
macro_rules! script {
    ($first:literal, $file:literal) => {
        concat!(include_str!($first), script!($file))
    };
    ($file:literal) => {
        concat!(
            include_str!("lua/counter.lua"),
            include_str!("lua/queue.lua"),
            include_str!($file)
        )
    };
}

/// Scripts of a store, with its server and its key prefix.
pub(super) struct Scripts {
    server: Arc<Server>,
    /// Set when the server has passed the checks.
    pub(super) checked: OnceFlight<()>,
    key_prefix: Box<str>,
    abandon: Script,
    acquire: Script,
    begin_epoch: Script,
    break_lease: Script,
    inspect: Script,
    release: Script,
    renew: Script,
}

impl Scripts {
    pub(super) fn new(server: Server, key_prefix: &str) -> Self {
        let script = |text: &str| {
            let (publish, database) = (server.publish(), server.source.database());
            let size = Epoch::SIZE;
            Script::new(format!(
                "local SIZE, PUBLISH, DATABASE = {size}, '{publish}', '{database}'\n{text}"
            ))
        };
        Self {
            abandon: script(script!("lua/abandon.lua")),
            acquire: script(script!("lua/acquire_first.lua", "lua/acquire.lua")),
            begin_epoch: script(script!("lua/begin_epoch.lua")),
            break_lease: script(script!("lua/break.lua")),
            inspect: script(script!("lua/inspect_all.lua")),
            release: script(script!("lua/release_first.lua", "lua/release.lua")),
            renew: script(script!("lua/renew.lua")),
            server: Arc::new(server),
            checked: OnceFlight::default(),
            key_prefix: key_prefix.into(),
        }
    }

    pub(super) const fn server(&self) -> &Arc<Server> {
        &self.server
    }

    pub(super) fn key_prefix(&self) -> &str {
        &self.key_prefix
    }

    /// Returns the channel of a partition on which all issuers with waiters listen.
    pub(super) fn shared_channel(&self, partition: u8) -> String {
        // Channels are not separated by database, so the name contains the number. Scripts build
        // the same name in `publish_end` of queue.lua.
        let database = self.server.source.database();
        format!("{}:{{{partition}}}:{database}:everybody", self.key_prefix)
    }

    /// Returns the channel of a partition on which only one issuer listens.
    pub(super) fn own_channel(&self, partition: u8, issuer: i64) -> String {
        let database = self.server.source.database();
        let prefix = &self.key_prefix;
        format!("{prefix}:{{{partition}}}:{database}:issuer:{issuer}")
    }

    fn lease_key(&self, resource: &Resource) -> String {
        let partition = partition_of(resource);
        format!("{}:{{{partition}}}:lease:{resource}", self.key_prefix)
    }

    /// Returns the prefix of all lease keys. The partition, `}:lease:` and the resource follow it.
    pub(super) fn lease_key_prefix(&self) -> String {
        format!("{}:{{", self.key_prefix)
    }

    pub(super) async fn acquire(
        &self,
        resource: &Resource,
        ask: &Ask,
        waits: &Waits,
        seen: Seen<'_>,
    ) -> Result<Reply, LeaseError> {
        let mut call = self.call(&self.acquire, resource, seen);
        call.arg(ask.lease.stored())
            .arg(ask.ticket)
            .arg(whole_ms(ask.ttl) + whole_ms(ask.lock_delay))
            .arg(whole_ms(ask.lock_delay))
            .arg(ask.owner.as_ref().map_or("", Owner::as_str));
        match waits {
            Waits::No => drop(call.arg("no")),
            Waits::Leaves => drop(call.arg("leaves")),
            Waits::Yes {
                listener,
                left,
                queued,
            } => {
                call.arg("waits")
                    .arg(whole_ms(*left))
                    .arg(self.own_channel(partition_of(resource), *listener))
                    .arg(u8::from(*queued));
            }
        }
        self.run_step(&call, seen, ask.ttl).await
    }

    pub(super) async fn renew(
        &self,
        resource: &Resource,
        renewal: &Renewal,
        seen: Seen<'_>,
    ) -> Result<Reply, LeaseError> {
        let mut call = self.call(&self.renew, resource, seen);
        call.arg(renewal.lease.stored())
            .arg(whole_ms(renewal.ttl))
            .arg(u8::from(renewal.new_token))
            .arg(renewal.at_least.map_or(0, Token::get));
        self.run_step(&call, seen, renewal.ttl).await
    }

    /// Releases, abandons or breaks a lease. If the script may have run twice and finds no lease,
    /// the reply is [`Reply::Ended`], because the first run may have removed the lease.
    pub(super) async fn end(
        &self,
        resource: &Resource,
        end: &End,
        seen: Seen<'_>,
    ) -> Result<Reply, LeaseError> {
        let mut call;
        match end {
            End::Release(lease) => {
                call = self.call(&self.release, resource, seen);
                call.arg(lease.stored());
            }
            End::Abandon { lease, ticket } => {
                call = self.call(&self.abandon, resource, seen);
                call.arg(lease.stored()).arg(*ticket);
            }
            End::Break(token) => {
                call = self.call(&self.break_lease, resource, seen);
                call.arg(token.map_or_else(String::new, |token| token.get().to_string()));
            }
        }
        self.check_once().await?;
        let mut runs = Runs::UpToTwice;
        if let End::Break(None) = end {
            // If the first run has broken the lease, a second run would break the next one. The
            // server may have closed an idle connection, so another call tests the connection.
            self.inspect(resource, seen).await?;
            runs = Runs::Once;
        }
        let answer = self.server.call(runs, &call).await;
        let (answer, again) = answer.map_err(|error| self.server.unavailable(error))?;
        Ok(match parse(answer, Duration::ZERO)? {
            Reply::Lost if again => Reply::Ended,
            reply => reply,
        })
    }

    /// Begins an epoch on exactly this counter.
    pub(super) async fn begin_epoch(
        &self,
        resource: &Resource,
        counter: &BlankCounter,
        epoch: Epoch,
        seen: Seen<'_>,
    ) -> Result<bool, LeaseError> {
        let (history, incarnation) = counter.mark.split_once(' ').ok_or_else(unexpected)?;
        let mut call = self.call(&self.begin_epoch, resource, seen);
        call.arg(history).arg(incarnation).arg(epoch.get());
        self.run(&call).await
    }

    pub(super) async fn inspect(
        &self,
        resource: &Resource,
        seen: Seen<'_>,
    ) -> Result<Option<Held>, LeaseError> {
        self.check_once().await?;
        let found = self.inspect_all(&[(resource, seen)]).await?;
        Ok(found.into_iter().next().flatten())
    }

    /// Inspects several resources in one script. In a cluster, all of them must be in one slot.
    pub(super) async fn inspect_all(
        &self,
        resources: &[(&Resource, Seen<'_>)],
    ) -> Result<Vec<Option<Held>>, LeaseError> {
        let Some((first, seen)) = resources.first() else {
            return Ok(vec![]);
        };
        let mut call = self.call(&self.inspect, first, *seen);
        for (resource, _) in &resources[1..] {
            for key in self.keys(resource) {
                call.key(key);
            }
        }
        for (_, seen) in resources {
            call.arg(counted(*seen));
        }
        let found: Vec<Option<Found>> = self.run(&call).await?;
        found
            .into_iter()
            .map(|found| found.map(held).transpose())
            .collect()
    }

    /// Returns the keys of a resource, in the order that the scripts expect.
    fn keys(&self, resource: &Resource) -> [String; 4] {
        let (partition, prefix) = (partition_of(resource), &self.key_prefix);
        [
            format!("{prefix}:{{{partition}}}:clock"),
            self.lease_key(resource),
            format!("{prefix}:{{{partition}}}:queue:{resource}"),
            format!("{prefix}:{{{partition}}}:waiters:{resource}"),
        ]
    }

    /// Returns a call to a script, with the keys and arguments that all scripts share.
    fn call<'a>(&'a self, script: &'a Script, resource: &Resource, seen: Seen<'_>) -> Call<'a> {
        let [counter, others @ ..] = self.keys(resource);
        let mut call = script.call(counter);
        for key in others {
            call.key(key);
        }
        call.arg(seen.source.map_or("", SourceId::as_str))
            .arg(rand::random::<u64>())
            .arg(counted(seen))
            .arg(u8::from(seen.replace))
            .arg(seconds_since_1970());
        call
    }

    /// Runs the script of a step that may grant a lease.
    async fn run_step(
        &self,
        call: &Call<'_>,
        seen: Seen<'_>,
        ttl: Duration,
    ) -> Result<Reply, LeaseError> {
        self.check_once().await?;
        if seen.replace {
            // The counter may be on a server that was demoted.
            self.server.find_again().await;
        }
        parse(self.run(call).await?, ttl)
    }

    pub(super) async fn run<T: FromRedisValue>(&self, call: &Call<'_>) -> Result<T, LeaseError> {
        let answer = self.server.call(Runs::UpToTwice, call).await;
        let (answer, _) = answer.map_err(|error| self.server.unavailable(error))?;
        Ok(answer)
    }
}

/// Returns the time by the clock of this process.
fn seconds_since_1970() -> u64 {
    let time = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    time.map_or(0, |time| time.as_secs())
}

/// Returns the highest token that this process has seen, or 0 if it has seen none.
const fn counted(seen: Seen<'_>) -> i64 {
    seen.epoch * Epoch::SIZE + seen.n
}

/// Lease that a script has found: its token, its owner, its remaining milliseconds, the number of
/// its waiters, and the time of the grant in seconds since 1970.
type Found = (i64, String, i64, u64, String);

fn held((token, owner, left_ms, waiters, since): Found) -> Result<Held, LeaseError> {
    let token = Token::new(token).map_err(|_| unexpected())?;
    let since: u32 = since.parse().map_err(|_| unexpected())?;
    let since = SystemTime::UNIX_EPOCH + Duration::from_secs(since.into());
    Ok(Held::new(token, of_ms(left_ms.max(0).unsigned_abs()))
        .owner(Owner::new(owner).ok())
        .waiters(waiters)
        .granted_at(since))
}
