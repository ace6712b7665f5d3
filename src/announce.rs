//! Where the two sides meet at a grant: the lock side announces what it has granted, and the
//! resource side makes everything older dead before the grant is answered.
//!
//! A fence that only checks writes still accepts the old holder between the new holder's grant and
//! its first write. Whatever the new holder read in between may be overwritten unseen: a lost
//! update. [`Announced`](crate::lease::Announced) leases close that gap; `Fence` implements
//! [`Announce`].

use std::{error::Error, fmt, pin::Pin};

use sha2::{Digest, Sha256};

use crate::token::{Resource, Token};

/// The resource side, as the lock side sees it: it learns of each grant before the holder does.
pub trait Announce: Send + Sync {
    /// Announces that `token` was granted to a lease: makes every older token of the resource dead,
    /// and waits for a write in flight. To announce the same grant again is no error while its token
    /// is alive.
    ///
    /// The resource has the last word. It keeps the highest token that was announced, and to which
    /// lease; what is not above both that and the highest dead token, and is no repetition either,
    /// is outranked, and changes nothing.
    ///
    /// # Errors
    ///
    /// [`AnnounceError`] when that could not be done. The grant is not answered then.
    fn announce<'a>(
        &'a self,
        resource: &'a Resource,
        token: Token,
        lease: &'a LeaseDigest,
    ) -> AnnounceFuture<'a>;
}

/// What [`Announce::announce`] returns.
pub type AnnounceFuture<'a> = Pin<Box<dyn Future<Output = Result<(), AnnounceError>> + Send + 'a>>;

/// SHA-256 of a lease id: tells leases from each other, and gives none of their secrets away.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct LeaseDigest([u8; 32]);

impl LeaseDigest {
    /// The digest of a lease id.
    #[must_use]
    pub fn of(lease_id: &str) -> Self {
        Self(Sha256::digest(lease_id.as_bytes()).into())
    }

    /// The 32 bytes.
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

/// Why a grant could not be announced.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AnnounceError {
    /// A newer token was seen or announced already. The grant may be repeated with `next`, or any
    /// token above it.
    #[error("the resource has seen a newer token than the grant's: the next one is {next}")]
    Outranked {
        /// The lowest token that is above all that the resource has seen.
        next: Token,
        /// Whether this very grant was the last one to be announced: its token was used up since.
        was_last: bool,
    },
    /// There is no token above those that the resource has seen.
    #[error("the resource has seen token {max_token}, above which there is none")]
    Exhausted {
        /// The highest token that is dead, or was announced.
        max_token: i64,
    },
    /// The resource could not be reached, or a write in flight took too long.
    #[error("the grant could not be announced")]
    Unreachable(#[source] Box<dyn Error + Send + Sync>),
    /// The resource side is not set up: a table or a right is missing, for example. It does not pass
    /// by itself.
    #[error("the grant could not be announced: the resource side is misconfigured")]
    Misconfigured(#[source] Box<dyn Error + Send + Sync>),
}
