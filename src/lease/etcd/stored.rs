//! What is stored of a lease, and of a place in line.

use serde::{Deserialize, Serialize};

use super::messages::KeyValue;
use crate::{
    epochs::Epoch,
    lease::{Acquire, Owner, stored_id::StoredId},
    token::Token,
};

/// The value of a lease's key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct StoredLease {
    /// What is stored of the lease id: a part of its digest.
    pub(super) id: String,
    pub(super) owner: Option<String>,
    /// How long it lasts, in seconds.
    pub(super) ttl: u64,
    /// How long the resource stays closed when it ends by time, in seconds. Its etcd lease lasts for both.
    pub(super) delay: u64,
    /// The epoch and the revision of the clock that its token is from.
    pub(super) epoch: i64,
    pub(super) clock: i64,
    pub(super) token: StoredToken,
}

/// Where the token of a lease is to be found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum StoredToken {
    /// It is what the clock had counted when this was put, and at least so high.
    New { at_least: i64 },
    /// It was there before.
    Kept(i64),
}

/// A lease as it was read.
#[derive(Clone, Debug)]
pub(super) struct FoundLease {
    pub(super) stored: StoredLease,
    pub(super) token: Token,
    /// When its key was written last.
    pub(super) revision: i64,
    /// The etcd lease that it ends with.
    pub(super) etcd_lease: i64,
}

impl FoundLease {
    /// Reads a lease. `None` where another program has written the key.
    pub(super) fn read(kv: &KeyValue) -> Option<Self> {
        let stored: StoredLease = serde_json::from_slice(&kv.value.0).ok()?;
        let token = match stored.token {
            StoredToken::Kept(token) => token,
            StoredToken::New { at_least } => {
                let n = kv.mod_revision.checked_sub(stored.clock)?;
                let epoch = Epoch::new(stored.epoch).ok()?;
                epoch.token(n)?.get().max(at_least)
            }
        };
        Some(Self {
            token: Token::new(token).ok()?,
            stored,
            revision: kv.mod_revision,
            etcd_lease: kv.lease,
        })
    }

    pub(super) fn owner(&self) -> Option<Owner> {
        let owner = self.stored.owner.clone()?;
        Owner::new(owner).ok()
    }

    pub(super) fn is_of(&self, id: &StoredId) -> bool {
        self.stored.id == id.as_str()
    }
}

/// The value of a place in line.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct StoredPlace {
    pub(super) owner: Option<String>,
}

/// A place in line as it was read.
#[derive(Clone, Debug)]
pub(super) struct FoundPlace {
    pub(super) owner: Option<String>,
    /// When it was taken: who came earlier comes first.
    pub(super) since: i64,
    /// When its key was written last.
    pub(super) revision: i64,
    pub(super) etcd_lease: i64,
}

impl FoundPlace {
    pub(super) fn read(kv: &KeyValue) -> Self {
        let stored: StoredPlace = serde_json::from_slice(&kv.value.0).unwrap_or_default();
        Self {
            owner: stored.owner,
            since: kv.create_revision,
            revision: kv.mod_revision,
            etcd_lease: kv.lease,
        }
    }
}

/// The owner that a request names.
pub(super) fn owner_of(request: &Acquire) -> Option<String> {
    let owner = request.owner.as_ref()?;
    Some(owner.as_str().to_owned())
}

/// A value as it is stored.
pub(super) fn value(stored: &impl Serialize) -> Vec<u8> {
    // Texts and integers have a form in JSON.
    serde_json::to_vec(stored).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::{super::messages::Bytes, *};

    fn kv(token: StoredToken, mod_revision: i64) -> KeyValue {
        let stored = StoredLease {
            id: "#".into(),
            owner: None,
            ttl: 1,
            delay: 0,
            epoch: 2,
            clock: 10,
            token,
        };
        KeyValue {
            value: Bytes(value(&stored)),
            mod_revision,
            ..KeyValue::default()
        }
    }

    #[test]
    fn a_new_token_is_what_the_clock_had_counted() {
        let token = |stored, at| FoundLease::read(&kv(stored, at)).map(|found| found.token.get());
        let new = StoredToken::New { at_least: 0 };
        assert_eq!(token(new, 11), Some(2_000_000_001));
        assert_eq!(token(new, 17), Some(2_000_000_007));
        assert_eq!(token(StoredToken::Kept(5), 17), Some(5));
        let above = StoredToken::New {
            at_least: 9_000_000_000,
        };
        assert_eq!(token(above, 17), Some(9_000_000_000));
        // It can have none from before its clock, or from behind the end of the epoch.
        assert_eq!(token(new, 10), None);
        assert_eq!(token(new, 10 + Epoch::SIZE), None);
    }
}
