//! Checks of the server at the first contact.

use std::ops::RangeInclusive;

use futures_util::future::{BoxFuture, try_join_all};
use redis::RedisError;

use super::{script::Script, scripts::Scripts, store::RedisBackend};
use crate::lease::{Driver, LeaseError};

impl Driver<RedisBackend> {
    /// Checks that the server accepts writes, with a write that has no effect. In a cluster, checks
    /// the servers of these partitions.
    ///
    /// The check fails if the server is a replica, if its memory limit is reached, or if it refuses
    /// writes because of its disk or its replicas. The endpoint `/readyz` and the command `check`
    /// of the server program use this check.
    ///
    /// # Errors
    ///
    /// Returns [`LeaseError::Unavailable`] with the reason, or [`LeaseError::Misconfigured`] if the
    /// server cannot be used.
    #[doc(hidden)]
    pub async fn check_writes(&self, partitions: RangeInclusive<u8>) -> Result<(), LeaseError> {
        let scripts = &self.backend().scripts;
        scripts.check_once().await?;
        // The key never exists, so `SET` with `XX` writes nothing.
        let script = Script::new("redis.call('SET', KEYS[1], '', 'XX') return 1");
        let write = async |partition| {
            let key = format!("{}:{{{partition}}}:readyz", scripts.key_prefix());
            scripts.run::<i64>(&script.call(key)).await
        };
        try_join_all(partitions.map(write)).await.map(drop)
    }
}

impl Scripts {
    /// Checks the server, unless the checks have already succeeded once.
    ///
    /// # Errors
    ///
    /// Returns [`LeaseError::Unavailable`] if the server does not respond, and
    /// [`LeaseError::Misconfigured`] if it cannot be used.
    pub(super) async fn check_once(&self) -> Result<(), LeaseError> {
        // Box this future, so that it does not enlarge every future that may run the checks.
        let check = || -> BoxFuture<'_, _> { Box::pin(self.check_server()) };
        self.checked.determine(check).await
    }

    /// Refuses a server whose replication id cannot be read, a member of a cluster that was
    /// configured as a single server, and a server on which issuers cannot notify each other. Warns
    /// about a server that may evict leases.
    async fn check_server(&self) -> Result<(), LeaseError> {
        let script = Script::new(include_str!("lua/check.lua"));
        let channel = self.shared_channel(0);
        // A member of a cluster that was configured as a single server would refuse a script with a
        // key of another member.
        let is_cluster = self.server().source.is_cluster();
        let key = is_cluster.then(|| format!("{}:{{0}}:clock", self.key_prefix()));
        let mut check = script.call(key);
        check.arg(self.server().publish()).arg(&channel);
        let (history, clustered, eviction, refused): (bool, bool, String, String) =
            self.run(&check).await?;
        if !history {
            return Err(LeaseError::misconfigured(RedisError::from((
                redis::ErrorKind::InvalidClientConfig,
                "scripts cannot read a master_replid (INFO replication) that changes at each promotion, \
                 so tokens could repeat",
            ))));
        }
        if clustered && !is_cluster {
            return Err(LeaseError::misconfigured(RedisError::from((
                redis::ErrorKind::InvalidClientConfig,
                "the server belongs to a Redis Cluster: connect to it as a cluster",
            ))));
        }
        if !refused.is_empty() {
            return Err(LeaseError::misconfigured(self.no_channels(refused)));
        }
        if let Err(error) = self.server().check_subscribe(channel).await {
            let refused = error.code().is_some_and(|code| code == "NOPERM");
            return Err(match refused {
                true => LeaseError::misconfigured(self.no_channels(error.to_string())),
                false => self.server().unavailable(error),
            });
        }
        if eviction.starts_with("allkeys") || eviction.starts_with("volatile") {
            tracing::warn!(
                maxmemory_policy = eviction,
                "this Redis may evict held leases: set maxmemory-policy to `noeviction`"
            );
        }
        Ok(())
    }

    fn no_channels(&self, refused: String) -> RedisError {
        let prefix = self.key_prefix();
        let publish = self.server().publish();
        let subscribe = publish.replace("PUBLISH", "SUBSCRIBE");
        RedisError::from((
            redis::ErrorKind::InvalidClientConfig,
            "the Redis user needs access to the channels on which issuers notify each other",
            format!("allow {publish} and {subscribe} on `{prefix}:*` ({refused})"),
        ))
    }
}
