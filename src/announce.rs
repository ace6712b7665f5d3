//! Where the two sides meet at a grant: the lock side tells what it has granted, and the resource
//! side makes everything older dead before anybody uses it.
//!
//! A fence that only checks writes still accepts the old holder between the new holder's grant and
//! its first write. Whatever the new holder read in between may be overwritten unseen: a lost
//! update. [`Leases::announced_to`](crate::lease::Leases::announced_to) closes that gap; `Fence`
//! implements [`Announce`].

use std::{error::Error, pin::Pin};

use crate::token::{Resource, Token};

/// Something that is told of each grant before its holder is.
pub trait Announce: Send + Sync {
    /// Makes every token of the resource that is older than `token` dead, and waits for a write
    /// in flight. To announce the same grant again is no error, even after its token was used.
    ///
    /// # Errors
    ///
    /// [`AnnounceError`] when that could not be done. The grant is not answered then.
    fn announce<'a>(&'a self, resource: &'a Resource, token: Token) -> AnnounceFuture<'a>;
}

/// What [`Announce::announce`] returns.
pub type AnnounceFuture<'a> = Pin<Box<dyn Future<Output = Result<(), AnnounceError>> + Send + 'a>>;

/// Why a grant could not be announced.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AnnounceError {
    /// A newer token was seen already: the store that granted this one was deposed, or is not the
    /// one whose tokens the resource knows.
    #[error("the resource has seen token {max_token}, which is newer than the grant's {token}")]
    Outranked {
        /// The token of the grant.
        token: Token,
        /// The highest token that is dead.
        max_token: i64,
    },
    /// The resource could not be reached, or a write in flight took too long.
    #[error("the grant could not be announced")]
    Unreachable(#[source] Box<dyn Error + Send + Sync>),
}
