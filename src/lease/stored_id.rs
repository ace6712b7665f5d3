//! What a store that others read has of a lease id: enough to tell leases from each other, and nothing that renews or releases one.

use std::fmt::Write;

use crate::announce::LeaseDigest;

/// How much of the digest is stored. A lease id has 128 random bits; to find one that fits to as many of its digest
/// is no easier than to guess it.
const BYTES: usize = 16;

/// A part of the SHA-256 of a lease id, in hexadecimal digits behind a `#`. No lease id has that character, so what
/// is read there can be presented as one nowhere, not even to an issuer that stores the ids themselves.
pub(in crate::lease) fn stored_id(lease: &LeaseDigest) -> String {
    let mut text = String::with_capacity(1 + 2 * BYTES);
    text.push('#');
    for byte in &lease.as_bytes()[..BYTES] {
        // A String takes what is written to it.
        let _ = write!(text, "{byte:02x}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lease::LeaseId;

    #[test]
    fn it_is_a_part_of_the_digest_and_no_lease_id() {
        let stored = stored_id(&LeaseDigest::of(&"a".repeat(22)));
        // printf %s aaaaaaaaaaaaaaaaaaaaaa | sha256sum
        assert_eq!(stored, "#ec7c494df6d2a7ea36668d656e6b8979");
        assert!(LeaseId::new(&stored).is_err());
        // What separates the parts of what is stored and published.
        assert!(!stored.contains([':', ' ', '\n']));
    }
}
