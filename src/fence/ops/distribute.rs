//! A fence whose rows are on the workers of a Citus cluster.

use sqlx::Postgres;

use crate::fence::{Fence, error::AdmitError};

impl Fence<Postgres> {
    /// Distributes the rows of the fence over the workers of a [Citus](https://docs.citusdata.com)
    /// cluster, each beside the rows of `table` whose distribution column has the name of the
    /// resource: check and write are then one transaction of one worker. Without a table the rows
    /// are anywhere, and a write commits on two workers in two phases. Returns false if the fence
    /// was distributed already.
    ///
    /// Nothing is admitted meanwhile. Other processes that use the fence have to be restarted: the
    /// database refuses their admissions. `table` is a table name in SQL syntax, distributed by a
    /// column of type `text`.
    ///
    /// For the owner of the fence's tables, on a connection to the coordinator.
    ///
    /// # Errors
    ///
    /// sqlx's error, with the reason of the database: this is no coordinator, the table is not
    /// distributed by such a column, or there are protected tables.
    pub async fn distribute(&self, table: Option<&str>) -> sqlx::Result<bool> {
        let mut conn = self.pool().acquire().await?;
        let distribute = self
            .names
            .sql("SELECT tower_fence.distribute($1::text::regclass)");
        let distributed = sqlx::query_scalar(distribute)
            .bind(table)
            .fetch_one(&mut *conn)
            .await?;
        self.names.set_distributed(true);
        Ok(distributed)
    }

    /// Keeps the tokens of a distributed fence as they were after shards were moved between
    /// workers, and returns the number of moved shards. Without this call, a moved shard looks like
    /// a failover, and its tokens become stale at the next request.
    ///
    /// # Errors
    ///
    /// As [`begin`](Self::begin). The database refuses it if a worker has failed over since the
    /// fence caught up last: then call [`after_failover`](Self::after_failover).
    pub async fn accept_moved_shards(&self) -> Result<u64, AdmitError> {
        let accepted: i64 = self
            .in_transaction(async |conn, names| {
                sqlx::query_scalar(names.sql("SELECT tower_fence.accept_moved_shards()"))
                    .fetch_one(conn)
                    .await
            })
            .await?;
        Ok(accepted.unsigned_abs())
    }
}
