//! What a store that others read has of a lease id: enough to tell leases from each other, and nothing that renews or releases one.

use std::{
    borrow::Borrow,
    fmt::{self, Write},
};

use crate::{announce::LeaseDigest, lease::LeaseId};

/// How much of the digest is stored. A lease id has 128 random bits; to find one that fits to as many of its digest
/// is no easier than to guess it.
const BYTES: usize = 16;

/// A part of the SHA-256 of a lease id, in hexadecimal digits behind a `#`. No lease id has that character, so what
/// is read there can be presented as one nowhere, not even to an issuer that stores the ids themselves.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(in crate::lease) struct StoredId(Box<str>);

impl StoredId {
    #[cfg_attr(not(feature = "etcd"), allow(dead_code))]
    pub(in crate::lease) fn of(id: &LeaseId) -> Self {
        Self::of_digest(&LeaseDigest::of(id.expose()))
    }

    pub(in crate::lease) fn of_digest(digest: &LeaseDigest) -> Self {
        let mut text = String::with_capacity(1 + 2 * BYTES);
        text.push('#');
        for byte in &digest.as_bytes()[..BYTES] {
            // A String takes what is written to it.
            let _ = write!(text, "{byte:02x}");
        }
        Self(text.into())
    }

    pub(in crate::lease) fn as_str(&self) -> &str {
        &self.0
    }
}

/// So that a line finds a waiter by what a script has published.
impl Borrow<str> for StoredId {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for StoredId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("StoredId(…)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_a_part_of_the_digest_and_no_lease_id() {
        let id = LeaseId::new("a".repeat(22)).unwrap();
        let stored = StoredId::of(&id);
        // printf %s aaaaaaaaaaaaaaaaaaaaaa | sha256sum
        assert_eq!(stored.as_str(), "#ec7c494df6d2a7ea36668d656e6b8979");
        assert!(LeaseId::new(stored.as_str()).is_err());
        // What separates the parts of what is stored and published.
        assert!(!stored.as_str().contains([':', ' ', '\n']));
    }
}
