//! Stored form of a lease id. It identifies a lease, but cannot be used to renew or release it.

use std::fmt::Write;

use crate::announce::LeaseDigest;

/// Number of digest bytes that are stored. A lease id has 128 random bits. Finding an id that
/// matches 128 bits of the digest is no easier than guessing the id.
const BYTES: usize = 16;

/// Returns a prefix of the lease id's SHA-256, in hexadecimal digits after a `#`. No lease id
/// contains this character. Therefore a client cannot present the stored text as a lease id, not
/// even to an issuer that stores the ids themselves.
pub(in crate::lease) fn stored_id(lease: &LeaseDigest) -> String {
    let mut text = String::with_capacity(1 + 2 * BYTES);
    text.push('#');
    for byte in &lease.as_bytes()[..BYTES] {
        // Writing to a `String` does not fail.
        let _ = write!(text, "{byte:02x}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lease::LeaseId;

    #[test]
    fn stored_id_is_a_prefix_of_the_digest() {
        let stored = stored_id(&LeaseDigest::of(&"a".repeat(22)));
        // This is the output of: printf %s aaaaaaaaaaaaaaaaaaaaaa | sha256sum
        assert_eq!(stored, "#ec7c494df6d2a7ea36668d656e6b8979");
        assert!(LeaseId::new(&stored).is_err());
        // These characters separate the parts of stored and published values.
        assert!(!stored.contains([':', ' ', '\n']));
    }
}
