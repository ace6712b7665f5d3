//! Migrations in Postgres.

use sqlx::{AssertSqlSafe, Executor, PgConnection, migrate::MigrateError};

use crate::fence::sql::{Names, migrations};

/// SQL that sets owners and privileges at the end of each migration.
const RIGHTS: &str = include_str!("../../../../migrations/postgres/rights.sql");

/// Block that prepares the coordinator of a Citus cluster. It has no effect on other servers, or if
/// this role may not execute the function because another role owns it.
const JOIN_CITUS: &str = "DO $fence$ BEGIN \
    IF EXISTS (SELECT FROM pg_catalog.pg_extension AS e WHERE e.extname = 'citus') \
        AND pg_catalog.has_function_privilege('tower_fence.join_citus()', 'EXECUTE') \
    THEN PERFORM tower_fence.join_citus(); END IF; END $fence$";
/// Query that returns a row on a worker of a Citus cluster, to which the coordinator distributes
/// the objects of the fence.
const WORKER: &str = "SELECT 1 FROM pg_catalog.pg_dist_local_group WHERE groupid <> 0";

/// Table that the last migration creates.
const LAST_TABLE: &str = "commit_marks";

/// Implements [`Backend::migrate`](crate::fence::sql::Backend::migrate).
pub(super) async fn migrate(
    conn: &mut PgConnection,
    names: &Names,
    failover_detection: bool,
) -> Result<(), MigrateError> {
    let schema = names.prefix().trim_end_matches('.');
    // The timeout applies to rows, to tables, and to the advisory lock of sqlx's migrator, which
    // any role can take. The search path excludes schemas in which another role may have created
    // operators and functions.
    conn.execute("SET lock_timeout = '10s'; SET search_path = pg_catalog, pg_temp")
        .await?;
    let exists = |of: &str| format!("SELECT 1 WHERE pg_catalog.{of} IS NOT NULL");
    let citus = exists("to_regclass('pg_catalog.pg_dist_local_group')");
    if conn.fetch_optional(AssertSqlSafe(citus)).await?.is_some()
        && conn.fetch_optional(WORKER).await?.is_some()
    {
        let refused = "this server is a worker of a Citus cluster: migrate on the coordinator";
        return Err(sqlx::Error::Configuration(refused.into()).into());
    }
    // If a first migration has failed half-way, the history and some of the tables may exist.
    let has = async |conn: &mut PgConnection, table: &str| {
        let table = exists(&format!("to_regclass('{schema}.{table}')"));
        let found = conn.fetch_optional(AssertSqlSafe(table)).await?;
        Ok::<_, sqlx::Error>(found.is_some())
    };
    let has_history = has(conn, "migrations").await?;
    if !has(conn, LAST_TABLE).await? {
        // IF NOT EXISTS requires the privilege to create a schema even if the schema exists.
        let found = exists(&format!("to_regnamespace('{schema}')"));
        if conn.fetch_optional(AssertSqlSafe(found)).await?.is_none() {
            let create = format!("CREATE SCHEMA IF NOT EXISTS {schema}");
            conn.execute(AssertSqlSafe(create)).await?;
        }
        conn.execute(AssertSqlSafe(format!(
            "SET {schema}.first_migration = 'on'; SET {schema}.failover_detection = '{}'",
            if failover_detection { "on" } else { "off" }
        )))
        .await?;
    }
    migrations::migrate(conn, has_history, names, migrations::POSTGRES).await?;
    conn.execute(AssertSqlSafe(names.apply(RIGHTS))).await?;
    conn.execute(names.sql(JOIN_CITUS)).await?;
    Ok(())
}

/// Implements [`Backend::schema_sql`](crate::fence::sql::Backend::schema_sql).
pub(super) fn script(names: &Names, failover_detection: bool) -> String {
    const HISTORY: &str = "    version BIGINT PRIMARY KEY,
    description TEXT NOT NULL,
    installed_on TIMESTAMPTZ NOT NULL DEFAULT now(),
    success BOOLEAN NOT NULL,
    checksum BYTEA NOT NULL,
    execution_time BIGINT NOT NULL";
    let schema = names.prefix().trim_end_matches('.');
    let steps = migrations::script(
        names,
        migrations::POSTGRES,
        HISTORY,
        ["decode('", "', 'hex')"],
    );
    // IF NOT EXISTS requires the privilege to create a schema even if the schema exists.
    let create = format!(
        "DO $fence$ BEGIN IF to_regnamespace('{schema}') IS NULL THEN CREATE SCHEMA {schema}; END IF; END $fence$;\n"
    );
    let detection = match failover_detection {
        true => String::new(),
        false => format!("SELECT set_config('{schema}.failover_detection', 'off', true);\n"),
    };
    // The script restores the search path at the end, because the migration tool may run other
    // statements in the same transaction.
    format!(
        "SELECT set_config('{schema}.search_path', current_setting('search_path'), true);\n\
         SELECT set_config('search_path', 'pg_catalog, pg_temp', true);\n{create}{detection}{steps}\n\
         SELECT set_config('{schema}.first_migration', 'on', true);\n{}\n{};\n\
         SELECT set_config('search_path', coalesce(current_setting('{schema}.search_path', true), \
         current_setting('search_path')), true);\n",
        names.apply(RIGHTS),
        names.apply(JOIN_CITUS)
    )
}
