//! Announcement of grants to the fence that protects the resource.
//!
//! The issuer announces each grant before it returns the lease, and the fence makes all older
//! tokens stale. Without announcements, the fence still admits the old holder between the new
//! holder's grant and the new holder's first write. The old holder may then change data that the
//! new holder has already read, and the new holder overwrites that change (a lost update).
//! [`Announced`](crate::lease::Announced) leases close that gap, and `Fence` implements
//! [`Announce`].

use std::{
    error::Error,
    fmt::{self, Write},
    pin::Pin,
    sync::Arc,
};

use sha2::{Digest, Sha256};

use crate::token::{Resource, Token};

/// Receiver of announced grants, which protects the resources.
///
/// The issuer announces each grant to the receiver before the holder gets the lease.
pub trait Announce: Send + Sync {
    /// Announces the grant of `token` to a lease.
    ///
    /// The announcement makes every older token of the resource stale, and waits for a write that
    /// is in progress. Until the token of a grant is stale, the grant may be announced again. If a
    /// renewal repeats the last announcement, the call should not wait, because the write may be
    /// the holder's own, and may take longer than the TTL of the lease.
    ///
    /// For each resource, the receiver stores the highest announced token and its lease. Unless the
    /// call repeats the last announcement, `token` must be above both the highest announced token
    /// and the highest stale token. Otherwise the call fails with [`AnnounceError::Superseded`],
    /// and nothing changes.
    ///
    /// If the token `renews` a lease, its holder has read the data under an earlier token. The call
    /// therefore also fails if the last announcement was that of another lease, or if a token above
    /// the last announced one was used. The new token need not be the number after the last
    /// announced one, because resources share a token counter.
    ///
    /// # Errors
    ///
    /// Returns an [`AnnounceError`] if the announcement failed. In that case, the issuer must not
    /// return the lease.
    fn announce<'a>(
        &'a self,
        resource: &'a Resource,
        token: Token,
        lease: &'a LeaseDigest,
        renews: bool,
    ) -> AnnounceFuture<'a>;
}

impl<A: Announce + ?Sized> Announce for Arc<A> {
    fn announce<'a>(
        &'a self,
        resource: &'a Resource,
        token: Token,
        lease: &'a LeaseDigest,
        renews: bool,
    ) -> AnnounceFuture<'a> {
        (**self).announce(resource, token, lease, renews)
    }
}

/// Future returned by [`Announce::announce`].
pub type AnnounceFuture<'a> = Pin<Box<dyn Future<Output = Result<(), AnnounceError>> + Send + 'a>>;

/// SHA-256 digest of a lease id. A digest distinguishes leases without revealing their ids.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct LeaseDigest([u8; 32]);

impl LeaseDigest {
    /// Computes the digest of a lease id.
    #[must_use]
    pub fn of(lease_id: &str) -> Self {
        Self(Sha256::digest(lease_id.as_bytes()).into())
    }

    /// Returns the 32 bytes of the digest.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// Returns the form in which a store may keep a lease id: `#` and the first 16 bytes of the
    /// digest, in hexadecimal digits. It identifies a lease, but cannot be used to renew or release
    /// it.
    ///
    /// No lease id contains the character `#`. Therefore a client cannot present the stored form as
    /// a lease id, not even to an issuer that stores the ids themselves. A lease id has 128 random
    /// bits, and finding an id that matches 128 bits of the digest is no easier than guessing it.
    #[must_use]
    pub fn stored(&self) -> String {
        let mut text = String::from("#");
        for byte in &self.0[..16] {
            // Writing to a `String` does not fail.
            let _ = write!(text, "{byte:02x}");
        }
        text
    }
}

impl fmt::Debug for LeaseDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LeaseDigest(…)")
    }
}

/// Error returned when a grant could not be announced.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AnnounceError {
    /// The fence of the resource has already received another token that supersedes the grant. The
    /// issuer may repeat the grant with any token above `max_token`, if one is left. If the call
    /// renews a lease, the lease is lost, with the exception below.
    #[error("token {max_token} was already used or announced on the resource")]
    Superseded {
        /// The highest token that is stale or was announced.
        max_token: i64,
        /// Whether the last announcement was of this lease and this token. If so, and if
        /// `max_token` is this token, the token has been used since, and a renewal that keeps it is
        /// not lost.
        was_last: bool,
    },
    /// The resource's fence is unreachable, or the announcement timed out while it waited for a
    /// write in progress.
    #[error("the grant could not be announced")]
    Unreachable(#[source] Box<dyn Error + Send + Sync>),
    /// The resource's fence is not set up correctly, for example because a table or a privilege is
    /// missing. A retry does not help.
    #[error("the grant could not be announced: the resource's fence is misconfigured")]
    Misconfigured(#[source] Box<dyn Error + Send + Sync>),
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lease::LeaseId;

    #[test]
    fn stored_form_is_a_prefix_of_the_digest() {
        let stored = LeaseDigest::of(&"a".repeat(22)).stored();
        // This is the output of: printf %s aaaaaaaaaaaaaaaaaaaaaa | sha256sum
        assert_eq!(stored, "#ec7c494df6d2a7ea36668d656e6b8979");
        assert!(LeaseId::new(&stored).is_err());
        // These characters separate the parts of stored and published values.
        assert!(!stored.contains([':', ' ', '\n']));
    }
}
