//! Lua scripts, with their keys and arguments.

use std::{sync::LazyLock, time::Duration};

use redis::{Script, ScriptInvocation};
use tower_fence::{
    Resource, Token,
    announce::LeaseDigest,
    epochs::{Epoch, SourceId, partition_of},
    lease::backend::{Ask, Seen},
};

use super::{
    answer::{Found, Stamp},
    attempt::{Attempt, Grant},
};

macro_rules! scripts {
    ($($name:ident: $file:literal),* $(,)?) => {
        $(static $name: LazyLock<Script> =
            LazyLock::new(|| Script::new(concat!(include_str!("lua/node.lua"), include_str!($file))));)*
    };
}

scripts! {
    ABANDON: "lua/abandon.lua",
    BEGIN: "lua/begin.lua",
    CHECK: "lua/check.lua",
    END: "lua/end.lua",
    READ: "lua/read.lua",
    RELEASE: "lua/release.lua",
    RENEW: "lua/renew.lua",
    RETAKE: "lua/retake.lua",
    SEAL: "lua/seal.lua",
    TAKE: "lua/take.lua",
    WRITE: "lua/write.lua",
}

/// Scripts, with the key prefix and the nodes that they share.
pub(crate) struct Scripts {
    pub(crate) key_prefix: Box<str>,
    /// The names of all nodes, as each counter stores them.
    pub(crate) nodes: Box<str>,
}

/// Script that is ready to be sent.
pub(crate) type Call = ScriptInvocation<'static>;

/// Lease that a script concerns.
pub(crate) struct Subject<'a> {
    pub(crate) resource: &'a Resource,
    /// The stored form of the lease id.
    pub(crate) lease: String,
    /// The source of epochs, or an empty text if the issuer does not know it yet.
    pub(crate) source: &'a str,
}

impl<'a> Subject<'a> {
    pub(crate) fn new(resource: &'a Resource, lease: &LeaseDigest, seen: Seen<'a>) -> Self {
        Self {
            lease: lease.stored(),
            ..Self::any(resource, seen)
        }
    }

    /// Returns the subject of a script that concerns any lease of the resource.
    pub(crate) fn any(resource: &'a Resource, seen: Seen<'a>) -> Self {
        Self {
            resource,
            lease: String::new(),
            source: seen.source.map_or("", SourceId::as_str),
        }
    }

    /// Returns the key under which this process has the lease's grant in memory.
    pub(crate) fn grant_key(&self) -> (Resource, String) {
        (self.resource.clone(), self.lease.clone())
    }
}

/// Token that was chosen for an attempt, with the epoch and the number of its count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Choice {
    pub(crate) token: Token,
    pub(crate) counted: (i64, i64),
}

impl Scripts {
    /// Returns the prefix of the names of lease keys. The partition, `}:lease:` and the resource
    /// follow it.
    pub(crate) fn lease_key_prefix(&self) -> String {
        format!("{}:quorum:{{", self.key_prefix)
    }

    pub(crate) fn check(&self, source: &str) -> Call {
        self.call(&CHECK, [self.keys_of(0, "")], source, "")
    }

    pub(crate) fn write(&self) -> Call {
        self.call(&WRITE, [self.keys_of(0, "")], "", "")
    }

    pub(crate) fn take(
        &self,
        subject: &Subject<'_>,
        ask: &Ask,
        attempt: Attempt,
        proposal: Option<(i64, i64)>,
    ) -> Call {
        let mut call = self.of_attempt(&TAKE, subject, attempt);
        call.arg(ms(ask.ttl))
            .arg(ms(ask.lock_delay))
            .arg(ask.owner.as_ref().map_or("", |owner| owner.as_str()));
        match proposal {
            Some((epoch, n)) => call.arg(epoch).arg(n),
            None => call.arg("").arg(""),
        };
        call
    }

    pub(crate) fn retake(
        &self,
        subject: &Subject<'_>,
        attempt: Attempt,
        ttl: Duration,
        token: Token,
    ) -> Call {
        let mut call = self.of_attempt(&RETAKE, subject, attempt);
        call.arg(ms(ttl)).arg(token.get());
        call
    }

    pub(crate) fn seal(
        &self,
        subject: &Subject<'_>,
        attempt: Attempt,
        stamp: &Stamp,
        choice: Choice,
        replaced: Option<Token>,
    ) -> Call {
        let mut call = self.of_attempt(&SEAL, subject, attempt);
        call.arg(&stamp.history)
            .arg(&stamp.incarnation)
            .arg(&stamp.serial)
            .arg(choice.token.get())
            .arg(choice.counted.0)
            .arg(choice.counted.1)
            .arg(replaced.map_or_else(String::new, |token| token.get().to_string()));
        call
    }

    pub(crate) fn begin(
        &self,
        subject: &Subject<'_>,
        (history, incarnation): (&str, &str),
        epoch: Epoch,
    ) -> Call {
        let mut call = self.on(&BEGIN, subject);
        call.arg(history).arg(incarnation).arg(epoch.get());
        call
    }

    pub(crate) fn renew(&self, subject: &Subject<'_>, grant: Grant, ttl: Duration) -> Call {
        let mut call = self.of_attempt(&RENEW, subject, grant.attempt);
        call.arg(ms(ttl)).arg(grant.token.get());
        call
    }

    pub(crate) fn release(&self, subject: &Subject<'_>, grant: Grant) -> Call {
        let mut call = self.of_attempt(&RELEASE, subject, grant.attempt);
        call.arg(grant.token.get());
        call
    }

    pub(crate) fn abandon(&self, subject: &Subject<'_>, newest: Attempt) -> Call {
        let mut call = self.on(&ABANDON, subject);
        call.arg(newest.ticket).arg(newest.number);
        call
    }

    /// Returns the call that deletes the lease that was found, if its value has not changed.
    pub(crate) fn end(&self, subject: &Subject<'_>, found: &Found) -> Call {
        let mut call = self.on(&END, subject);
        call.arg(&found.value);
        call
    }

    /// Returns the call that reads the leases of these resources.
    pub(crate) fn read<'a>(&self, resources: impl IntoIterator<Item = &'a Resource>) -> Call {
        let keys = resources.into_iter().map(|resource| self.keys(resource));
        self.call(&READ, keys, "", "")
    }

    fn of_attempt(&self, script: &'static Script, subject: &Subject<'_>, attempt: Attempt) -> Call {
        let mut call = self.on(script, subject);
        call.arg(attempt.number).arg(attempt.ticket);
        call
    }

    fn on(&self, script: &'static Script, subject: &Subject<'_>) -> Call {
        let keys = [self.keys(subject.resource)];
        self.call(script, keys, subject.source, &subject.lease)
    }

    fn call(
        &self,
        script: &'static Script,
        keys: impl IntoIterator<Item = [String; 2]>,
        source: &str,
        lease: &str,
    ) -> Call {
        let mut call = script.arg(source);
        for key in keys.into_iter().flatten() {
            call.key(key);
        }
        call.arg(&*self.nodes)
            .arg(format!("{:032x}", rand::random::<u128>()))
            .arg(Epoch::SIZE)
            .arg(lease);
        call
    }

    /// Returns the keys of the counter and of the lease of a resource.
    fn keys(&self, resource: &Resource) -> [String; 2] {
        self.keys_of(partition_of(resource), resource.as_str())
    }

    fn keys_of(&self, partition: u8, resource: &str) -> [String; 2] {
        let begin = format!("{}{partition}}}", self.lease_key_prefix());
        [
            format!("{begin}:counter"),
            format!("{begin}:lease:{resource}"),
        ]
    }
}

/// Returns a duration in ms. The driver passes whole milliseconds.
fn ms(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
