//! Distribution of the fence's rows over the workers of a Citus cluster.

use sqlx::Postgres;

use crate::fence::{Fence, sql::Topology};

impl Fence<Postgres> {
    /// Distributes the rows of the fence over the workers of a [Citus](https://docs.citusdata.com)
    /// cluster. Returns false if the fence was already distributed.
    ///
    /// With a table, each row is stored on the same worker as the rows of `table` whose
    /// distribution column contains the name of the resource. The check and the write then run in
    /// one transaction on one worker. Without a table, a row can be on any worker, and a
    /// transaction that writes on two workers commits in two phases. `table` is a table name in SQL
    /// syntax. The table must be distributed by a column of type `text`.
    ///
    /// During the distribution, no token is admitted. Afterwards, restart other processes that use
    /// the fence. Until they are restarted, the database refuses their admissions. The role must
    /// own the fence's tables, and the connection must lead to the coordinator.
    ///
    /// # Errors
    ///
    /// Returns sqlx's error, with the reason from the database. Possible reasons are that the
    /// server is not a coordinator, that the table is not distributed by such a column, or that
    /// there are protected tables.
    pub async fn distribute(&self, table: Option<&str>) -> sqlx::Result<bool> {
        let mut conn = self.pool().acquire().await?;
        let names = &self.connections.names;
        let distribute = names.sql("SELECT tower_fence.distribute($1::text::regclass)");
        let distributed = sqlx::query_scalar(distribute)
            .bind(table)
            .fetch_one(&mut *conn)
            .await?;
        // The check at the next use of the fence finds the rows on the workers.
        names.set_topology(Topology::Distributed);
        names.check_again();
        Ok(distributed)
    }
}
