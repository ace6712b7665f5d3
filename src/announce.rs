//! Announcement of grants to the fence that protects the resource.
//!
//! The issuer announces each grant before it returns the lease, and the fence makes all older
//! tokens stale. Without announcements, the fence still admits the old holder between the new
//! holder's grant and the new holder's first write. The old holder may then change data that the
//! new holder has already read, and the new holder overwrites that change (a lost update).
//! [`Announced`](crate::lease::Announced) leases close that gap, and `Fence` implements
//! [`Announce`].

use std::{error::Error, fmt, pin::Pin};

use sha2::{Digest, Sha256};

use crate::token::{Resource, Token};

/// Receiver of announced grants, which protects the resources.
///
/// The issuer announces each grant to the receiver before the holder gets the lease.
pub trait Announce: Send + Sync {
    /// Announces the grant of `token` to a lease.
    ///
    /// The announcement makes every older token of the resource stale, and waits for a write that
    /// is in progress. Until the token of a grant is stale, the grant may be announced again.
    ///
    /// For each resource, the receiver stores the highest announced token and its lease. Unless the
    /// call repeats the last announcement, `token` must be above both the highest announced token
    /// and the highest stale token. Otherwise the call fails with [`AnnounceError::Outranked`], and
    /// nothing changes.
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
    ) -> AnnounceFuture<'a>;
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
    /// The fence of the resource has already seen a higher token, or a higher token was announced.
    /// The issuer may repeat the grant with `next` or any higher token.
    #[error("the resource has seen a newer token than the grant's: the next one is {next}")]
    Outranked {
        /// The lowest token above all tokens that were seen or announced.
        next: Token,
        /// Whether this grant was the last announcement. If so, its token has been used since.
        was_last: bool,
    },
    /// The fence of the resource has seen the highest possible token.
    #[error("the resource has seen token {max_token}, and no token is left above it")]
    Exhausted {
        /// The highest token that is stale or was announced.
        max_token: i64,
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
