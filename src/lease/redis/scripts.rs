//! The Lua scripts and their keys.

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use redis::{FromRedisValue, Script, ScriptInvocation};

use super::{
    answer::{Answer, Granted, parse_ms, parse_token, unexpected},
    server::Server,
};
use crate::{
    epochs::{Epoch, SourceId, partition_of},
    lease::{
        Acquire, Held, LeaseError, LeaseId, Owner, Renew,
        memory::Memory,
        single_flight::SingleFlight,
        stored_id::StoredId,
        time::{at_least_1_ms, whole_ms},
    },
    token::{Resource, Token},
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
    /// Set when the server was found to be able to do what it must.
    checked: OnceLock<()>,
    check_flight: SingleFlight,
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

impl Scripts {
    pub(super) fn new(server: Server, memory: Arc<Memory>, key_prefix: &str) -> Self {
        Self {
            server,
            memory,
            checked: OnceLock::new(),
            check_flight: SingleFlight::default(),
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

    pub(super) const fn checked(&self) -> &OnceLock<()> {
        &self.checked
    }

    pub(super) const fn check_flight(&self) -> &SingleFlight {
        &self.check_flight
    }

    pub(super) const fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// There is a sign that the epoch of this resource's partition may be over.
    pub(super) fn doubt_epoch(&self, resource: &Resource) {
        self.memory.doubt(partition_of(resource));
    }

    pub(super) const fn begin_epoch_script(&self) -> &Script {
        &self.begin_epoch
    }

    pub(super) fn key_prefix(&self) -> &str {
        &self.key_prefix
    }

    /// The channel of a partition on which all issuers that have waiters listen.
    pub(super) fn shared_channel(&self, partition: u8) -> String {
        // Channels do not know databases. In the scripts: `publish_end` in line.lua.
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

    pub(super) async fn acquire(
        &self,
        resource: &Resource,
        request: &Acquire,
        ticket: u64,
        wait: Duration,
        channel: &str,
        waiters: usize,
    ) -> Result<Answer, LeaseError> {
        let id = StoredId::of(&request.lease_id);
        let arguments = |script: &mut ScriptInvocation<'_>| {
            script
                .arg(id.as_str())
                .arg(ticket)
                .arg(at_least_1_ms(request.ttl))
                .arg(whole_ms(request.lock_delay))
                .arg(request.owner.as_ref().map_or("", Owner::as_str))
                .arg(whole_ms(wait))
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
        let id = StoredId::of(id);
        let arguments = |script: &mut ScriptInvocation<'_>| {
            script
                .arg(id.as_str())
                .arg(at_least_1_ms(request.ttl))
                .arg(u8::from(request.new_token))
                .arg(request.at_least.map_or(0, Token::get));
        };
        if request.new_token || request.at_least.is_some() {
            return self.granting(&self.renew, resource, &arguments).await;
        }
        // What keeps its token goes on without a database.
        let answer = self.attempts(&self.renew, resource, &arguments).await?;
        if let Answer::Granted(Granted { epoch, n, .. }) = answer {
            self.memory.record_renewal(partition_of(resource), epoch, n);
        }
        Ok(answer)
    }

    /// Leaves the line, and releases what was granted to this request.
    pub(super) async fn abandon(
        &self,
        resource: &Resource,
        id: &StoredId,
        ticket: u64,
    ) -> Result<bool, LeaseError> {
        let mut script = self.invoke(&self.abandon, resource, false);
        self.ending(script.arg(id.as_str()).arg(ticket), resource)
            .await
    }

    /// Releases; true when the lease was held under this id.
    pub(super) async fn release(
        &self,
        resource: &Resource,
        id: &LeaseId,
    ) -> Result<bool, LeaseError> {
        let mut script = self.invoke(&self.release, resource, false);
        self.ending(script.arg(StoredId::of(id).as_str()), resource)
            .await
    }

    /// Ends the lease without its id, where it has the token that was seen; true when it was held.
    pub(super) async fn break_lease(
        &self,
        resource: &Resource,
        seen: Option<Token>,
    ) -> Result<bool, LeaseError> {
        let mut script = self.invoke(&self.break_lease, resource, false);
        let seen = seen.map_or_else(String::new, |seen| seen.get().to_string());
        self.ending(script.arg(seen), resource).await
    }

    /// Looks whether the lease has ended by itself, and hands it over; and whether a waiter is
    /// still in line.
    pub(super) async fn tick(
        &self,
        resource: &Resource,
        waiter: Option<&StoredId>,
    ) -> Result<Answer, LeaseError> {
        let waiter = waiter.map_or("", StoredId::as_str);
        let arguments = |script: &mut ScriptInvocation<'_>| _ = script.arg(waiter);
        self.granting(&self.tick, resource, &arguments).await
    }

    pub(super) async fn inspect(&self, resource: &Resource) -> Result<Option<Held>, LeaseError> {
        self.check_once().await?;
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

    /// A script with the keys and arguments that all of them share.
    pub(super) fn invoke<'a>(
        &'a self,
        script: &'a Script,
        resource: &Resource,
        replaces_clock: bool,
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
            .arg(u8::from(replaces_clock));
        invocation
    }

    /// Runs a script.
    pub(super) async fn run<T: FromRedisValue>(
        &self,
        script: &ScriptInvocation<'_>,
    ) -> Result<T, LeaseError> {
        let answer = self.server.call(script).await;
        let (answer, _) = answer.map_err(|error| self.server.unavailable(error))?;
        Ok(answer)
    }
}
