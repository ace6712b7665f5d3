//! Removal of rows that have not been used for a long time. The floor of the partition keeps the
//! stale tokens of removed rows stale.
//!
//! 1. The removal locks the floor of one partition for a short time. A statement that inserts a row
//!    locks the floor as well, and therefore runs either before the removal or after it.
//! 2. Rows that are idle and not locked are removed, and the floor is raised to the highest token
//!    of the removed rows.
//! 3. Each partition has its own transactions.

use std::time::Duration;

use crate::{
    fence::{
        Fence,
        error::AdmitError,
        sql::{FenceDatabase, Idle},
    },
    live_tokens::LiveTokens,
};

/// Number of rows that are removed in one transaction.
const BATCH: u32 = 500;

impl<DB: FenceDatabase> Fence<DB> {
    /// Removes the rows of resources that have not been used for longer than `older_than`, at most
    /// `at_most` of them, and returns the number of removed rows.
    ///
    /// Call this regularly. Otherwise the row of a resource that was used only once is kept
    /// forever.
    ///
    /// No stale token becomes valid again. For each of 256 partitions, the fence stores a *floor*,
    /// which is the highest token that was stale or granted for the resource of any removed row. If
    /// a resource has no row, the fence admits only tokens above the floor. Therefore this method
    /// is **for issuers whose tokens increase across all resources**: those of this crate, etcd,
    /// ZooKeeper. If each resource has its own counter, do not call this method, because the
    /// counter of a new resource would begin below the floor.
    ///
    /// Choose an `older_than` that is far longer than any lease, such as 90 days. If a lease was
    /// held for longer without a write, its next write may be refused with
    /// [`by_floor`](crate::StaleToken::by_floor); see [the page about
    /// deployment](crate::deployment#resources-that-are-no-longer-used). To exclude held leases,
    /// use [`remove_idle_below`](Self::remove_idle_below). Requests for resources without a row
    /// wait for a few milliseconds while a batch of their partition is removed.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new()?.block_on(async {
    /// # use std::time::Duration;
    /// # use tower_fence::{Fence, Resource, Token, TokenUse};
    /// # let options = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1);
    /// # let fence = Fence::new(options.connect("sqlite::memory:").await?);
    /// # fence.migrate().await?;
    /// const DAY: Duration = Duration::from_secs(24 * 60 * 60);
    /// while fence.remove_idle(90 * DAY, 10_000).await? == 10_000 {}
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// # })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// On Postgres the database role needs EXECUTE on the function `remove_idle_of`. From SQL,
    /// `CALL tower_fence.remove_idle('90 days')` does the same.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`begin`](Self::begin). Rows that were already removed stay removed.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the batch in progress is removed as a whole or not at all.
    pub async fn remove_idle(&self, older_than: Duration, at_most: u64) -> Result<u64, AdmitError> {
        self.remove_idle_below(older_than, at_most, &LiveTokens::default())
            .await
    }

    /// Removes idle rows like [`remove_idle`](Self::remove_idle), but keeps each row with a token
    /// that is not below the lowest token of the held leases in its partition.
    ///
    /// Query the lease store with [`live_tokens`](crate::lease::live_tokens) before you call this
    /// method, as in [this example](crate::deployment#resources-that-are-no-longer-used). A lease
    /// that is granted in between has a token above the tokens of every idle row.
    ///
    /// Tokens below the first epoch belong to other issuers and are treated as granted. With
    /// another issuer whose tokens are higher, such as ZooKeeper, pass the highest token that it is
    /// known to have granted, as [`LiveTokens::granted_up_to`].
    ///
    /// # Errors
    ///
    /// Returns the errors of [`remove_idle`](Self::remove_idle).
    ///
    /// # Cancel safety
    ///
    /// The same as for [`remove_idle`](Self::remove_idle).
    pub async fn remove_idle_below(
        &self,
        older_than: Duration,
        at_most: u64,
        live: &LiveTokens,
    ) -> Result<u64, AdmitError> {
        // The database may not support a longer interval.
        let older_than = older_than.min(Duration::from_secs(1_000 * 365 * 24 * 60 * 60));
        let mut removed = 0;
        // Start at a random partition, so that the same partitions do not always come first.
        let first: u8 = rand::random();
        for offset in 0..=u8::MAX {
            let partition = first.wrapping_add(offset);
            loop {
                let left = at_most - removed;
                if left == 0 {
                    return Ok(removed);
                }
                let idle = Idle {
                    older_than,
                    at_most: BATCH.min(u32::try_from(left).unwrap_or(BATCH)),
                    granted: live.granted,
                    live: live.lowest(partition),
                };
                let batch = self
                    .in_transaction(self.limits, async |on| {
                        DB::remove_idle(on, partition, idle).await
                    })
                    .await?;
                removed += batch;
                // A batch is smaller than requested if some of its rows are in use.
                if batch <= u64::from(idle.at_most / 2) {
                    break;
                }
            }
        }
        Ok(removed)
    }
}
