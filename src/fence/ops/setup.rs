//! Creation of the fence's tables and functions in a database, their distribution over a Citus
//! cluster, and the check that they can be used.

use sqlx::migrate::MigrateError;

use crate::fence::{
    Fence,
    error::AdmitError,
    fault::Failure,
    sql::{Begin, FenceDatabase, On},
    tx::Transaction,
};

impl<DB: FenceDatabase> Fence<DB> {
    /// Creates the fence's tables and functions, or updates them.
    ///
    /// On Postgres they are in the schema `tower_fence` or in another
    /// [`schema`](crate::FenceBuilder::schema), which this method also creates, and on SQLite they
    /// have the prefix `tower_fence_`. Their migration history is separate from that of the
    /// application. Call this method at each start: if the tables are current, it needs no
    /// privilege to create objects. The method waits at most 10 s for a lock.
    ///
    /// On Postgres, if the role owns the objects, each call also makes the owner of the schema
    /// their owner, and revokes the privileges of `PUBLIC` on the objects, and those of all other
    /// roles on the trigger functions of [protected tables](crate::guide::protected_tables).
    /// Without these steps, every role could use the objects after a dump without privileges was
    /// loaded.
    ///
    /// # Errors
    ///
    /// Returns sqlx's error in the following cases:
    ///
    /// - The database is unreachable or refuses a statement.
    /// - The server is not Postgres 14 or later, or its encoding is not UTF8.
    /// - The encoding of an SQLite file is not UTF-8.
    /// - The schema belongs to another role that is not a superuser, and the tables are missing or
    ///   outdated, or the calling role may create schemas; see [roles](crate::deployment#roles).
    /// - The server does not reveal its timeline, or keeps it when it is restored; see
    ///   [`failover_detection`](crate::FenceBuilder::failover_detection).
    /// - The fence in the database cannot be used after the migration; see [`check`](Self::check).
    pub async fn migrate(&self) -> Result<(), MigrateError> {
        let mut conn = self.pool().acquire().await?;
        if DB::HAS_SERVER {
            // The connection keeps the settings of the migration, so it must not return to the
            // pool.
            conn.close_on_drop();
        }
        let names = &self.connections.names;
        DB::migrate(On::new(&mut *conn, names), self.failover_detection).await?;
        DB::check(On::new(&mut *conn, names)).await?;
        // Requests may run under another role, so the next use of the fence checks it again.
        names.require_check();
        Ok(())
    }

    /// Checks that the fence in the database can be used.
    ///
    /// The tables must exist, `PUBLIC` must not be able to execute any function that runs with the
    /// privileges of its owner, and row-level security must not hide rows of the tables. If another
    /// role may write whole rows of the tables, this method logs a warning. The first use of a
    /// fence performs the same check. On SQLite, this method only checks that the encoding of the
    /// file is UTF-8: a missing table is reported by the first statement that needs it.
    ///
    /// # Errors
    ///
    /// Returns [`AdmitError::Misconfigured`] with the required change, [`AdmitError::NotMigrated`]
    /// if tables are missing or outdated, and otherwise the errors of [`inspect`](Self::inspect).
    pub async fn check(&self) -> Result<(), AdmitError> {
        let begun = Transaction::begin(&self.connections, self.limits, Begin::ToRead);
        let mut transaction = begun.await?;
        let is_migrated = transaction.run(async |on| DB::check(on).await);
        match is_migrated.await? {
            true => Ok(()),
            false => Err(Failure::not_migrated().into()),
        }
    }

    /// Returns a script of everything that [`migrate`](Self::migrate) creates in an empty database,
    /// for teams that migrate with another tool.
    ///
    /// The script uses this fence's [`schema`](crate::FenceBuilder::schema). Apply it in one
    /// transaction. It also writes the migration history, so that `migrate` treats the tables as
    /// current afterwards. This method uses only the settings of the fence, and needs no
    /// connection. However, sqlx creates a pool only in a Tokio runtime.
    ///
    /// ```
    /// # #[cfg(feature = "postgres")]
    /// #[tokio::main]
    /// async fn main() -> sqlx::Result<()> {
    ///     let pool = sqlx::PgPool::connect_lazy("postgres://")?;
    ///     println!("{}", tower_fence::Fence::new(pool).schema_sql());
    ///     Ok(())
    /// }
    /// # #[cfg(not(feature = "postgres"))]
    /// # fn main() {}
    /// ```
    #[must_use]
    pub fn schema_sql(&self) -> String {
        DB::schema_sql(&self.connections.names, self.failover_detection)
    }
}

#[cfg(feature = "postgres")]
impl Fence<sqlx::Postgres> {
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
        names.set_topology(crate::fence::sql::Topology::Distributed);
        names.require_check();
        Ok(distributed)
    }
}
