//! Removing rows that nobody has used for long: what their tokens have made dead stays dead, by the floor of
//! their partition.
//!
//! 1. The floor of one partition is locked, for a short time. Whoever inserts a row reads it in the same
//!    statement, and so comes before the removal, or after it.
//! 2. Rows that are idle, and that nobody has locked, are removed, and the floor is not below any of them.
//! 3. The next partition takes a transaction of its own.

use std::time::Duration;

use crate::{
    fence::{
        Fence,
        error::AdmitError,
        sql::{FenceDatabase, Idle},
    },
    live_tokens::LiveTokens,
};

/// How many rows are removed in one transaction.
const BATCH: u32 = 500;

impl<DB: FenceDatabase> Fence<DB> {
    /// Removes the rows of resources that nobody has written to for longer than `older_than`, at most
    /// `at_most` of them, and says how many there were. For a task that runs now and then: without it, a
    /// resource that was used once has a row for ever.
    ///
    /// No dead token comes alive. For each of 256 partitions the fence keeps a *floor*, the highest token
    /// that was dead or granted on any row that was removed there, and a resource without a row admits only
    /// what is above it. So this is **for issuers whose tokens grow over all resources**: those of this
    /// crate, etcd, ZooKeeper. Where each resource has a counter of its own, a new resource would begin
    /// below the floor: do not use it there.
    ///
    /// A lease that was held for all of that time, without a write, may be below the floor afterwards. It
    /// is refused as stale, with [`by_floor`](crate::StaleToken::by_floor); its holder renews it with a new
    /// token, and reads again. To spare it, say which leases are held:
    /// [`remove_idle_below`](Self::remove_idle_below).
    ///
    /// Rows whose tokens are of an epoch that was never handed out are left alone, so that a forged token
    /// does not close its partition. Tokens below the first epoch are those of other issuers, and are
    /// taken for granted ones.
    ///
    /// Choose `older_than` far longer than any lease, such as 90 days. New resources wait while a batch of
    /// their partition is removed, for milliseconds.
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
    /// On Postgres the database's role needs EXECUTE on the function `remove_idle_of`. From SQL,
    /// `CALL tower_fence.remove_idle('90 days')` does the same.
    ///
    /// # Errors
    ///
    /// As [`begin`](Self::begin). What was removed before stays removed.
    ///
    /// # Cancel safety
    ///
    /// Dropped at any moment, each batch is removed as a whole, or not at all.
    pub async fn remove_idle(&self, older_than: Duration, at_most: u64) -> Result<u64, AdmitError> {
        self.remove_idle_below(older_than, at_most, &LiveTokens::default())
            .await
    }

    /// The same, but leaves each row whose tokens are not below those of the leases that are held.
    ///
    /// Ask the lease store first, then remove: what is granted in between is above every idle row.
    ///
    /// ```
    /// # #[cfg(feature = "memory")]
    /// # tokio::runtime::Runtime::new()?.block_on(async {
    /// # use std::time::Duration;
    /// use tower_fence::{Fence, lease::{MemoryLeases, LeaseAdmin}};
    /// # let options = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1);
    /// # let fence = Fence::new(options.connect("sqlite::memory:").await?);
    /// # fence.migrate().await?;
    /// # let leases = MemoryLeases::new(fence.clone());
    /// # const DAY: Duration = Duration::from_secs(24 * 60 * 60);
    /// let live = leases.live_tokens().await?;
    /// fence.remove_idle_below(90 * DAY, 10_000, &live).await?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// # })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// With another issuer, say what it has surely granted: [`LiveTokens::granted_up_to`]. For ZooKeeper
    /// that is needed: its numbers look like those of epochs that this database never handed out.
    ///
    /// # Errors
    ///
    /// As [`remove_idle`](Self::remove_idle).
    ///
    /// # Cancel safety
    ///
    /// As [`remove_idle`](Self::remove_idle).
    pub async fn remove_idle_below(
        &self,
        older_than: Duration,
        at_most: u64,
        live: &LiveTokens,
    ) -> Result<u64, AdmitError> {
        // Beyond this a database may not be able to count.
        let older_than = older_than.min(Duration::from_secs(1_000 * 365 * 24 * 60 * 60));
        let mut removed = 0;
        // Not the same ones first each time.
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
                    .in_transaction(async |conn, names| {
                        DB::remove_idle(conn, names, partition, idle).await
                    })
                    .await?;
                removed += batch;
                if batch < u64::from(idle.at_most) {
                    break;
                }
            }
        }
        Ok(removed)
    }
}
