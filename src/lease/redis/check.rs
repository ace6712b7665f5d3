//! What a server must be able to do, checked once, at the first contact.

use futures_util::future::BoxFuture;
use redis::{RedisError, Script};

use super::{scripts::Scripts, store::RedisBackend};
use crate::lease::{Driver, LeaseError};

impl Driver<RedisBackend> {
    /// Checks that the server takes writes, by one that changes nothing: not on a replica, not without memory, and not
    /// while it stops writes because of its disk or its replicas. For `/readyz` of the program.
    ///
    /// # Errors
    ///
    /// [`LeaseError::Unavailable`] with the reason.
    #[doc(hidden)]
    pub async fn check_writes(&self) -> Result<(), LeaseError> {
        let scripts = self.backend().scripts();
        scripts.check_once().await?;
        // The key is never there.
        let script = Script::new("redis.call('SET', KEYS[1], '', 'XX') return 1");
        let key = format!("{}:{{0}}:readyz", scripts.key_prefix());
        scripts.run::<i64>(&script.key(key)).await.map(drop)
    }
}

impl Scripts {
    /// Checks the server at the first contact, and again until that has succeeded once.
    ///
    /// # Errors
    ///
    /// [`LeaseError::Unavailable`] if the server does not answer, and [`LeaseError::Misconfigured`] if it
    /// cannot be used.
    pub(super) async fn check_once(&self) -> Result<(), LeaseError> {
        if self.checked().get().is_some() {
            return Ok(());
        }
        let flight = self.check_flight().begin().await?;
        if self.checked().get().is_none() {
            // Boxed, or every future that may be the first would contain all of this.
            let checking: BoxFuture<'_, _> = Box::pin(self.check_server());
            match checking.await {
                Ok(()) => drop(self.checked().set(())),
                Err(error) => return Err(flight.fail(error)),
            }
        }
        Ok(())
    }

    /// Refuses a server whose history cannot be read, or where issuers cannot hear of each other's
    /// grants, and warns of one that may drop leases.
    async fn check_server(&self) -> Result<(), LeaseError> {
        let script = Script::new(include_str!("lua/check.lua"));
        let channel = self.shared_channel(0);
        let mut check = script.key(format!("{}:{{0}}:clock", self.key_prefix()));
        check.arg(self.server().publish()).arg(&channel);
        let (history, eviction, refused): (bool, String, String) = self.run(&check).await?;
        if !history {
            return Err(LeaseError::misconfigured(RedisError::from((
                redis::ErrorKind::InvalidClientConfig,
                "the server does not tell its master_replid (INFO replication), without which \
                 tokens would not survive a restart",
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
                "this Redis may evict leases that are held; use `noeviction`"
            );
        }
        Ok(())
    }

    fn no_channels(&self, refused: String) -> RedisError {
        let prefix = self.key_prefix();
        RedisError::from((
            redis::ErrorKind::InvalidClientConfig,
            "the Redis user may not use the channels on which issuers hear of each other's grants",
            format!("`{prefix}:*`, to publish and to subscribe ({refused})"),
        ))
    }
}
