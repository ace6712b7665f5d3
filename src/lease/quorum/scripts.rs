//! The Lua scripts, with their keys and arguments.

use std::{sync::LazyLock, time::Duration};

use redis::{Script, ScriptInvocation};

use super::{
    answer::{Found, Stamp},
    attempt::Attempt,
};
use crate::{
    epochs::partition_of,
    lease::{
        stored_id::StoredId,
        time::{at_least_1_ms, whole_ms},
    },
    token::{Resource, Token},
};

macro_rules! scripts {
    ($($name:ident: $file:literal),* $(,)?) => {
        $(static $name: LazyLock<Script> =
            LazyLock::new(|| Script::new(concat!(include_str!("lua/node.lua"), include_str!($file))));)*
    };
}

scripts! {
    ABANDON: "lua/abandon.lua",
    CHECK: "lua/check.lua",
    END: "lua/end.lua",
    LOOK: "lua/look.lua",
    RENEW: "lua/renew.lua",
    SEAL: "lua/seal.lua",
    TAKE: "lua/take.lua",
}

/// What all scripts of a quorum share.
pub(super) struct Scripts {
    key_prefix: Box<str>,
    /// The nodes, as each clock has them.
    nodes: Box<str>,
}

/// A script that is ready to be sent.
pub(super) type Call = ScriptInvocation<'static>;

/// What is asked for, whichever the attempt.
#[derive(Clone, Copy)]
pub(super) struct Take<'a> {
    pub(super) id: &'a StoredId,
    pub(super) ttl: Duration,
    pub(super) lock_delay: Duration,
    pub(super) owner: &'a str,
    /// Only a lease that has a token already, for another one.
    pub(super) only_mine: bool,
}

/// The token of an attempt, and what it was counted by.
#[derive(Clone, Copy, Debug)]
pub(super) struct Choice {
    pub(super) token: Token,
    pub(super) epoch: i64,
    pub(super) n: i64,
}

impl Scripts {
    pub(super) fn new(key_prefix: &str, nodes: &str) -> Self {
        Self {
            key_prefix: key_prefix.into(),
            nodes: nodes.into(),
        }
    }

    pub(super) fn key_prefix(&self) -> &str {
        &self.key_prefix
    }

    /// The nodes, as each clock has them.
    pub(super) fn nodes(&self) -> &str {
        &self.nodes
    }

    /// What the names of lease keys begin with; after that come the partition, `}:lease:`, and the resource.
    pub(super) fn lease_key_prefix(&self) -> String {
        format!("{}:quorum:{{", self.key_prefix)
    }

    pub(super) fn check(&self, source: &str) -> Call {
        self.call(&CHECK, 0, "", source, "")
    }

    pub(super) fn take(
        &self,
        source: &str,
        resource: &Resource,
        take: Take<'_>,
        attempt: Attempt,
    ) -> Call {
        let mut call = self.on_resource(&TAKE, source, resource, take.id.as_str());
        call.arg(attempt.number)
            .arg(attempt.nonce)
            .arg(at_least_1_ms(take.ttl))
            .arg(whole_ms(take.lock_delay))
            .arg(take.owner)
            .arg(u8::from(take.only_mine));
        call
    }

    pub(super) fn seal(
        &self,
        resource: &Resource,
        id: &StoredId,
        attempt: Attempt,
        stamp: &Stamp,
        choice: Choice,
    ) -> Call {
        let mut call = self.on_resource(&SEAL, "", resource, id.as_str());
        call.arg(attempt.number)
            .arg(attempt.nonce)
            .arg(&stamp.history)
            .arg(&stamp.incarnation)
            .arg(&stamp.serial)
            .arg(choice.token.get())
            .arg(choice.epoch)
            .arg(choice.n);
        call
    }

    pub(super) fn renew(
        &self,
        source: &str,
        resource: &Resource,
        id: &StoredId,
        ttl: Duration,
    ) -> Call {
        let mut call = self.on_resource(&RENEW, source, resource, id.as_str());
        call.arg(at_least_1_ms(ttl));
        call
    }

    pub(super) fn look(&self, resource: &Resource) -> Call {
        self.on_resource(&LOOK, "", resource, "")
    }

    /// Ends the very lease that was found.
    pub(super) fn end(&self, resource: &Resource, found: &Found) -> Call {
        let mut call = self.on_resource(&END, "", resource, "");
        call.arg(&found.value);
        call
    }

    pub(super) fn abandon(
        &self,
        resource: &Resource,
        id: &StoredId,
        attempt: Attempt,
        token: Option<Token>,
    ) -> Call {
        let token = token.map_or_else(String::new, |token| token.get().to_string());
        let mut call = self.on_resource(&ABANDON, "", resource, id.as_str());
        call.arg(attempt.number).arg(attempt.nonce).arg(token);
        call
    }

    fn on_resource(
        &self,
        script: &'static Script,
        source: &str,
        resource: &Resource,
        id: &str,
    ) -> Call {
        self.call(
            script,
            partition_of(resource),
            resource.as_str(),
            source,
            id,
        )
    }

    fn call(
        &self,
        script: &'static Script,
        partition: u8,
        resource: &str,
        source: &str,
        id: &str,
    ) -> Call {
        let begin = format!("{}{partition}}}", self.lease_key_prefix());
        let mut call = script.key(format!("{begin}:clock"));
        call.key(format!("{begin}:lease:{resource}"))
            .arg(source)
            .arg(&*self.nodes)
            .arg(format!("{:032x}", rand::random::<u128>()))
            .arg(id);
        call
    }
}
