//! After a failover: a database that was promoted, or restored, may have lost what it confirmed last.
//!
//! 1. Also that a fence was raised. So an older holder could write, and then the newer one, over it and from
//!    what it had read before: a write would be lost that was confirmed *after* the failover.
//! 2. So every token is dead that was handed out before, or in the part that is lost: each partition's epoch
//!    moves up by 1,000, which is more than any such part can hold, and its rows and its floor to the end of
//!    that epoch. Where an operator tells of it, by 500: a promotion is above what it has lost of that, too.
//! 3. Postgres tells by the timeline of its log that it was promoted, or restored from its archive. Each row
//!    keeps the timeline on which it was admitted last, and nothing is admitted on a row of another one: the
//!    fence catches up first, resource by resource. Where the database cannot tell, an operator says it.

#[cfg(feature = "postgres")]
use sqlx::Postgres;

use crate::{
    epochs::partition_of,
    fence::{Fence, claims::Claims, error::AdmitError, sql::FenceDatabase},
    metrics,
};

impl<DB: FenceDatabase> Fence<DB> {
    /// Makes every token dead that was handed out so far, and every one that the database may have forgotten:
    /// for operators, after the database may have lost what it had confirmed, and **before anybody writes
    /// again**. Leases that are kept in this database end; other stores begin new epochs, within a minute.
    /// Holders acquire anew, and read anew.
    ///
    /// Without it even what is confirmed *afterwards* can be lost: the older of two holders is admitted again,
    /// since the newer one's grant was forgotten, and then the newer one writes over it, from what it had read
    /// before the failover.
    ///
    /// On Postgres the fence does this by itself where the server was promoted, or restored from its archive,
    /// which the timeline of its log tells; see [`notice_failover`](Self::notice_failover). Call it where
    /// nothing tells: a dump was loaded, a copy of the disks was put back, the file of SQLite was restored. What
    /// is restored has to be whole: the fence's tables together with those that it protects.
    ///
    /// Each of 256 partitions moves up by 500 epochs, of which there are 999,999, and by 1,000 for each promotion that was
    /// not noticed there yet, in a transaction of its own that updates the rows of its resources and is durable also with
    /// `synchronous_commit = off`. Where the database knows of no epoch that was handed out, in any
    /// partition, all stays as it is: the tokens there are those of another issuer, which has to see to this itself.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new()?.block_on(async {
    /// # use tower_fence::{Fence, Resource, Token, lease::MemoryLeases, client::Holder};
    /// # let options = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1);
    /// # let fence = Fence::new(options.connect("sqlite::memory:").await?);
    /// # fence.migrate().await?;
    /// # let leases = MemoryLeases::new(fence.clone()).announced_to(fence.clone());
    /// let lease = Holder::new(leases).acquire("sku-1").await?;
    /// fence.after_failover().await?;
    /// assert!(fence.inspect(lease.resource()).await? > Some(lease.token().get()));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// # })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// On Postgres the database's role needs EXECUTE on `tower_fence.after_failover_of`. `tower_fence.after_failover` does
    /// the same from SQL, in one transaction.
    ///
    /// # Errors
    ///
    /// As [`begin`](Self::begin). Some partitions may be done then: call it again.
    ///
    /// # Cancel safety
    ///
    /// Dropped at any moment, each partition is done or not.
    pub async fn after_failover(&self) -> Result<(), AdmitError> {
        for partition in 0..=u8::MAX {
            self.in_transaction(async |conn, names| {
                DB::after_failover(conn, names, partition).await
            })
            .await?;
        }
        tracing::warn!("all tokens that were handed out are dead, as after a failover");
        Ok(())
    }

    /// Brings what is to be admitted into the history of the database, each in a transaction of its own: it holds
    /// whatever becomes of the request.
    pub(super) async fn catch_up(&self, claims: &Claims) -> Result<(), AdmitError> {
        for claim in claims.iter() {
            let behind = self
                .in_transaction(async |conn, names| {
                    DB::catch_up(conn, names, &claim.resource).await
                })
                .await?;
            if behind {
                metrics::count("tower_fence_caught_up_total");
                tracing::info!(
                    resource = %claim.resource, partition = partition_of(&claim.resource),
                    "this resource was last used on another timeline of the database"
                );
            }
        }
        Ok(())
    }
}

#[cfg(feature = "postgres")]
impl Fence<Postgres> {
    /// Whether the fence does by itself what [`after_failover`](Self::after_failover) does, for each resource
    /// before it is written to, read under a token, or raised, when the timeline of the server's log has
    /// changed: at each promotion of a standby, and when a server was restored from its archive. Default: yes.
    /// This is kept in the database, so it holds for all processes, and for the functions in SQL.
    ///
    /// Switched off, a promotion changes nothing: leases go on. That is for those whose standbys are synchronous,
    /// so that a promotion loses nothing, or who call [`after_failover`](Self::after_failover) as a part of it. What has
    /// happened before this call is treated as it would have been without it.
    ///
    /// Where a server does not tell its timeline (`pg_walfile_name` fails there when the tables are made), nothing
    /// is noticed.
    ///
    /// The database's role needs EXECUTE on `tower_fence.notice_failover`.
    ///
    /// # Errors
    ///
    /// As [`begin`](Self::begin).
    pub async fn notice_failover(&self, enabled: bool) -> Result<(), AdmitError> {
        self.in_transaction(async |conn, names| {
            sqlx::query(names.sql("SELECT tower_fence.notice_failover($1)"))
                .bind(enabled)
                .execute(conn)
                .await
        })
        .await?;
        Ok(())
    }
}
