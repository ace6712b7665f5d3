//! Announcement of grants to the fence of the resource.
//!
//! The issuer announces each grant before it responds with it, and the fence makes all older tokens
//! stale. A fence without announcements still accepts the old holder between the new holder's grant
//! and its first write. The old holder may then overwrite data that the new holder has already
//! read, which is a lost update. [`Announced`](crate::lease::Announced) leases close that gap, and
//! `Fence` implements [`Announce`].

use std::{error::Error, fmt, pin::Pin};

use sha2::{Digest, Sha256};

use crate::token::{Resource, Token};

/// Receiver of announced grants, on the side of the resource.
///
/// It receives each grant before the holder does.
pub trait Announce: Send + Sync {
    /// Announces that `token` was granted to a lease.
    ///
    /// This makes every older token of the resource stale, and waits for a write that is in
    /// progress. A grant may be announced again until its token is stale.
    ///
    /// The resource stores the highest announced token and its lease. Unless the call repeats the
    /// last announcement, `token` must be above both that token and the highest stale token. If it
    /// is not, it is outranked, and nothing changes.
    ///
    /// # Errors
    ///
    /// Returns an [`AnnounceError`] if the announcement failed. In that case, do not respond with
    /// the grant.
    fn announce<'a>(
        &'a self,
        resource: &'a Resource,
        token: Token,
        lease: &'a LeaseDigest,
    ) -> AnnounceFuture<'a>;
}

/// Future returned by [`Announce::announce`].
pub type AnnounceFuture<'a> = Pin<Box<dyn Future<Output = Result<(), AnnounceError>> + Send + 'a>>;

/// SHA-256 digest of a lease id, which distinguishes leases without revealing their ids.
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
    /// The resource has already seen a newer token, or such a token was announced. The grant may be
    /// repeated with `next` or any higher token.
    #[error("the resource has seen a newer token than the grant's: the next one is {next}")]
    Outranked {
        /// The lowest token above all tokens that the resource has seen.
        next: Token,
        /// Whether this grant was the last one to be announced. If so, its token has been used
        /// since.
        was_last: bool,
    },
    /// The resource has seen the highest possible token.
    #[error("the resource has seen token {max_token}, and no token is left above it")]
    Exhausted {
        /// The highest token that is stale or was announced.
        max_token: i64,
    },
    /// The resource's fence is unreachable, or the announcement waited too long for a write in
    /// progress.
    #[error("the grant could not be announced")]
    Unreachable(#[source] Box<dyn Error + Send + Sync>),
    /// The resource's fence is not set up correctly, for example because a table or a privilege is
    /// missing. A retry does not help.
    #[error("the grant could not be announced: the resource's fence is misconfigured")]
    Misconfigured(#[source] Box<dyn Error + Send + Sync>),
}
