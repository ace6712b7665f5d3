//! Operations for operators: listing leases and breaking them.

use std::sync::Arc;

use super::{Held, LeaseError, Leases};
use crate::{
    live_tokens::LiveTokens,
    token::{Resource, Token},
};

/// Lease store whose leases can be listed and broken.
pub trait LeaseAdmin: Leases {
    /// Lists held leases, at most `limit` of them, starting after the page that returned `cursor`.
    ///
    /// A lease that is held during the whole listing is on one of the pages. A lease that is
    /// granted or ends during the listing may be missing. On Redis, a page that is not the last one
    /// can be short or empty, and each page requires a scan of all keys of the database. On
    /// Postgres, each page may read the rows of all past leases. In a Redis Cluster or behind
    /// Sentinels, a lease may also be missing if its slot moves to another server, or if a replica
    /// is promoted, during the listing.
    ///
    /// # Errors
    ///
    /// - [`LeaseError::Invalid`] with the field `cursor` if this store cannot have returned
    ///   `cursor`.
    /// - [`LeaseError::Unavailable`] if the store is unreachable.
    /// - [`LeaseError::Misconfigured`] if the store is not set up correctly.
    fn list(
        &self,
        limit: usize,
        cursor: Option<&str>,
    ) -> impl Future<Output = Result<Page, LeaseError>> + Send;

    /// Breaks the lease on a resource, without the lease id, and removes the lock delay. Returns
    /// false if no lease was held.
    ///
    /// If `seen` is a token, the store breaks the lease only if the lease still has this token. If
    /// another lease is held by then, or if the lease has a new token, this method returns false.
    /// The store compares the tokens in the step that breaks the lease.
    ///
    /// The next grant on the resource has a higher token.
    ///
    /// # Errors
    ///
    /// - [`LeaseError::Unavailable`] if the store is unreachable.
    /// - [`LeaseError::Misconfigured`] if the store is not set up correctly.
    fn break_lease(
        &self,
        resource: &Resource,
        seen: Option<Token>,
    ) -> impl Future<Output = Result<bool, LeaseError>> + Send;
}

/// Scans all leases for the lowest token of each partition, which `Fence::remove_idle_below` needs.
///
/// # Errors
///
/// Returns the errors of [`LeaseAdmin::list`].
pub async fn live_tokens(leases: &impl LeaseAdmin) -> Result<LiveTokens, LeaseError> {
    let mut live = LiveTokens::default();
    let mut cursor = None;
    loop {
        let page = leases.list(1_000, cursor.as_deref()).await?;
        for (resource, held) in &page.leases {
            live.add(resource, held.token);
        }
        match page.cursor {
            None => return Ok(live),
            next => cursor = next,
        }
    }
}

impl<L: LeaseAdmin> LeaseAdmin for Arc<L> {
    async fn list(&self, limit: usize, cursor: Option<&str>) -> Result<Page, LeaseError> {
        L::list(self, limit, cursor).await
    }

    async fn break_lease(
        &self,
        resource: &Resource,
        seen: Option<Token>,
    ) -> Result<bool, LeaseError> {
        L::break_lease(self, resource, seen).await
    }
}

/// Page of held leases.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Page {
    /// The leases, without their ids.
    pub leases: Vec<(Resource, Held)>,
    /// The cursor of the next page, or `None` on the last page.
    pub cursor: Option<String>,
}

impl Page {
    /// Creates a page from its leases and the cursor of the next page.
    #[must_use]
    pub const fn new(leases: Vec<(Resource, Held)>, cursor: Option<String>) -> Self {
        Self { leases, cursor }
    }
}
