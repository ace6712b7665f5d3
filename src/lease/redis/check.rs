//! What a server must be able to do, asked once, at connect.

use redis::{RedisError, Script};

use super::scripts::Scripts;
use crate::lease::LeaseError;

impl Scripts {
    /// Refuses a server whose history cannot be read, or where issuers cannot hear of each other's
    /// grants, and warns of one that may drop leases.
    pub(super) async fn check_server(&self) -> Result<(), LeaseError> {
        let script = Script::new(include_str!("lua/check.lua"));
        let channel = self.everybody(0);
        let mut check = script.key(format!("{}:{{0}}:clock", self.key_prefix()));
        check.arg(self.server().publish()).arg(&channel);
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
        if let Err(error) = self.server().try_to_hear(channel).await {
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
        let prefix = self.key_prefix();
        RedisError::from((
            redis::ErrorKind::InvalidClientConfig,
            "the Redis user may not use the channels on which issuers hear of each other's grants",
            format!("`{prefix}:*`, to publish and to subscribe ({refused})"),
        ))
    }
}
