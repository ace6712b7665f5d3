//! Values of a lease's key and of a position in the queue.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use tower_fence::{
    Token,
    epochs::Epoch,
    lease::{Owner, backend::Ask},
};

use crate::messages::KeyValue;

/// Value of a lease's key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StoredLease {
    /// The [stored form](tower_fence::announce::LeaseDigest::stored) of the lease id.
    pub(crate) id: String,
    /// The ticket of the request to which the lease was granted, or `None` if several requests have
    /// used the lease id.
    pub(crate) ticket: Option<i64>,
    pub(crate) owner: Option<String>,
    /// The time of the grant in seconds since 1970, by the clock of the issuer.
    pub(crate) granted_at: u64,
    /// The TTL in seconds.
    pub(crate) ttl: u64,
    /// The lock delay in seconds, which is how long the resource stays blocked after the lease has
    /// expired. The etcd lease lasts for the TTL and the lock delay.
    pub(crate) delay: u64,
    /// The epoch of the counter from which the token comes.
    pub(crate) epoch: i64,
    /// The revision in which that epoch began.
    pub(crate) base: i64,
    pub(crate) token: StoredToken,
}

impl StoredLease {
    /// Returns the token, if this value was written in the given revision. Returns `None` if the
    /// epoch has no token for this revision.
    pub(crate) fn token_at(&self, revision: i64) -> Option<Token> {
        let token = match self.token {
            StoredToken::Kept(token) => token,
            StoredToken::New { at_least } => {
                let n = revision.checked_sub(self.base)?;
                let epoch = Epoch::new(self.epoch).ok()?;
                epoch.token(n)?.get().max(at_least)
            }
        };
        Token::new(token).ok()
    }
}

/// Token of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum StoredToken {
    /// A new token. It is the count of the counter when this value was written, or `at_least` if
    /// that is higher.
    New { at_least: i64 },
    /// The token that the lease had before.
    Kept(i64),
}

/// Lease that was read.
#[derive(Clone, Debug)]
pub(crate) struct FoundLease {
    pub(crate) stored: StoredLease,
    pub(crate) token: Token,
    /// The revision in which the key was written last.
    pub(crate) revision: i64,
    /// The etcd lease of the key.
    pub(crate) etcd_lease: i64,
}

impl FoundLease {
    /// Reads a lease. Returns `None` if another program has written the key.
    pub(crate) fn read(kv: &KeyValue) -> Option<Self> {
        let stored: StoredLease = serde_json::from_slice(&kv.value.0).ok()?;
        Some(Self {
            token: stored.token_at(kv.mod_revision)?,
            stored,
            revision: kv.mod_revision,
            etcd_lease: kv.lease,
        })
    }

    /// Returns the time of the grant, by the clock of the issuer.
    pub(crate) fn granted_at(&self) -> Option<SystemTime> {
        UNIX_EPOCH.checked_add(Duration::from_secs(self.stored.granted_at))
    }

    pub(crate) fn owner(&self) -> Option<Owner> {
        let owner = self.stored.owner.clone()?;
        Owner::new(owner).ok()
    }
}

/// Value of a position in the queue.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct StoredPosition {
    /// The ticket of the request that has the position.
    pub(crate) ticket: i64,
    pub(crate) owner: Option<String>,
}

/// Position in the queue that was read.
#[derive(Clone, Debug)]
pub(crate) struct FoundPosition {
    pub(crate) stored: StoredPosition,
    /// The revision in which the position was taken. Earlier positions are served first.
    pub(crate) since: i64,
    /// The revision in which the key was written last.
    pub(crate) revision: i64,
    pub(crate) etcd_lease: i64,
}

impl FoundPosition {
    pub(crate) fn read(kv: &KeyValue) -> Self {
        Self {
            stored: serde_json::from_slice(&kv.value.0).unwrap_or_default(),
            since: kv.create_revision,
            revision: kv.mod_revision,
            etcd_lease: kv.lease,
        }
    }
}

/// Returns the owner that a request names.
pub(crate) fn owner_of(ask: &Ask) -> Option<String> {
    ask.owner.as_ref().map(ToString::to_string)
}

/// Encodes a value.
pub(crate) fn value(stored: &impl Serialize) -> Vec<u8> {
    // Every value consists of strings and numbers, which JSON can represent.
    serde_json::to_vec(stored).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use tower_fence::announce::LeaseDigest;

    use super::*;
    use crate::messages::Bytes;

    fn kv(token: StoredToken, mod_revision: i64) -> KeyValue {
        let stored = StoredLease {
            id: LeaseDigest::of("a").stored(),
            ticket: None,
            owner: None,
            granted_at: 0,
            ttl: 1,
            delay: 0,
            epoch: 2,
            base: 10,
            token,
        };
        KeyValue {
            value: Bytes(value(&stored)),
            mod_revision,
            ..KeyValue::default()
        }
    }

    #[test]
    fn new_token_is_the_value_of_the_counter() {
        let token = |stored, at| FoundLease::read(&kv(stored, at)).map(|found| found.token.get());
        let new = StoredToken::New { at_least: 0 };
        assert_eq!(token(new, 11), Some(2_000_000_001));
        assert_eq!(token(new, 17), Some(2_000_000_007));
        assert_eq!(token(StoredToken::Kept(5), 17), Some(5));
        let above = StoredToken::New {
            at_least: 9_000_000_000,
        };
        assert_eq!(token(above, 17), Some(9_000_000_000));
        // No token precedes its counter or follows the end of the epoch.
        assert_eq!(token(new, 10), None);
        assert_eq!(token(new, 10 + Epoch::SIZE), None);
    }
}
