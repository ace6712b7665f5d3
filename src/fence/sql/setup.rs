//! Setup of the fence in a database.

use sqlx::{Connection, Database, migrate::MigrateError, pool::PoolOptions};

use super::{Names, On};

#[trait_variant::make(Send)]
pub(crate) trait Setup: Database {
    /// Returns the options of a pool that the fence opens itself, and of its connections.
    fn own_pool(
        pool: PoolOptions<Self>,
        options: <Self::Connection as Connection>::Options,
    ) -> (PoolOptions<Self>, <Self::Connection as Connection>::Options) {
        (pool, options)
    }

    /// Returns the prefix of the names of the fence's tables and functions, for the schema that the
    /// application has chosen.
    fn prefix(schema: Option<&str>) -> String;

    /// Checks that the fence can be used; see [`Fence::check`](crate::Fence::check). Records the
    /// [topology](super::Topology) of the fence if the check passes. Returns false if the tables
    /// are missing or have another version. Returns [`sqlx::Error::Configuration`] with the
    /// required change if the database must be set up differently.
    async fn check(on: On<'_, Self>) -> sqlx::Result<bool>;

    /// Creates the fence's tables and functions, or updates them. The connection must not be used
    /// for anything else afterwards.
    async fn migrate(on: On<'_, Self>, failover_detection: bool) -> Result<(), MigrateError>;

    /// Returns everything that `migrate` creates in an empty database, as one script.
    fn schema_sql(names: &Names, failover_detection: bool) -> String;
}
