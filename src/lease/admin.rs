//! What operators need beside the holders: who holds what, and an end by force.

use super::{Held, LeaseError, Leases};
use crate::{
    live_tokens::LiveTokens,
    token::{Resource, Token},
};

/// A store that lists its leases and ends them by force.
pub trait LeaseAdmin: Leases {
    /// Lists held leases, at most `limit` of them, from where the last page ended.
    ///
    /// A lease that is held all the while is on one of the pages; one that comes or goes meanwhile
    /// may be. On Redis a page may be short, or empty, without being the last, and each page scans all keys of the
    /// database.
    ///
    /// # Errors
    ///
    /// - [`ListError::Cursor`] when `cursor` is not that of a page.
    /// - [`ListError::Lease`] when the store cannot be reached.
    fn list(
        &self,
        limit: usize,
        cursor: Option<&str>,
    ) -> impl Future<Output = Result<Page, ListError>> + Send;

    /// Ends the lease on a resource without its id, and its lock delay. The next grant outranks
    /// it. False when there was none.
    ///
    /// With the token that was `seen`, it ends that lease alone: false when another lease holds the resource by then, or
    /// when the lease has another token since. The store decides this in the step that ends the lease.
    ///
    /// # Errors
    ///
    /// [`LeaseError::Unavailable`] when the store cannot be reached.
    fn break_lease(
        &self,
        resource: &Resource,
        seen: Option<Token>,
    ) -> impl Future<Output = Result<bool, LeaseError>> + Send;

    /// Looks through all leases for the lowest token of each partition: what
    /// `Fence::remove_idle_below` spares.
    ///
    /// # Errors
    ///
    /// As [`list`](Self::list).
    fn live_tokens(&self) -> impl Future<Output = Result<LiveTokens, ListError>> + Send {
        async {
            let mut live = LiveTokens::default();
            let mut cursor = None;
            loop {
                let page = self.list(1_000, cursor.as_deref()).await?;
                for (resource, held) in &page.leases {
                    live.add(resource, held.token);
                }
                match page.cursor {
                    None => return Ok(live),
                    next => cursor = next,
                }
            }
        }
    }
}

/// Some of the leases that are held.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Page {
    /// The leases, without their ids.
    pub leases: Vec<(Resource, Held)>,
    /// Where the next page begins; `None` on the last one.
    pub cursor: Option<String>,
}

impl Page {
    /// Some leases, and where the next page begins.
    #[must_use]
    pub const fn new(leases: Vec<(Resource, Held)>, cursor: Option<String>) -> Self {
        Self { leases, cursor }
    }
}

/// Why there is no page.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ListError {
    /// The cursor is not one that a page had.
    #[error("the cursor is not that of a page")]
    Cursor,
    /// The store cannot be reached.
    #[error(transparent)]
    Lease(#[from] LeaseError),
}
