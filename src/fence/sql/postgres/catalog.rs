//! Where the fence's tables are, and what a server that speaks Postgres can do.

use sqlx::{AssertSqlSafe, Executor, PgConnection, Row};

use crate::{
    calls::literal_text,
    fence::sql::{Capabilities, Found},
};

/// As [`Backend::find_tables`](crate::fence::sql::Backend::find_tables).
pub(super) async fn find_tables(
    conn: &mut PgConnection,
    schema: Option<&str>,
) -> sqlx::Result<Option<Found>> {
    // One message, which needs no transaction where a pooler stands in between.
    let row = conn.fetch_optional(AssertSqlSafe(find_sql(schema))).await?;
    let Some(row) = row else {
        return Ok(None);
    };
    let capabilities = Capabilities {
        row_versions: row.try_get("row_versions")?,
        advisory_locks: row.try_get("advisory_locks")?,
        ends_sessions: row.try_get("ends_sessions")?,
        transaction_ids: row.try_get("transaction_ids")?,
        history: row.try_get("history")?,
    };
    let is_current: bool = row.try_get("is_current")?;
    Ok(Some(Found {
        schema: row.try_get("schema")?,
        capabilities: is_current.then_some(capabilities),
        flaw: row.try_get("flaw")?,
    }))
}

/// What makes a fence unfit for use: functions with the rights of their owner that `PUBLIC` may execute, as a dump
/// without rights leaves them, and policies that hide rows of the fence's own tables. Null where it is fit.
const FLAW: &str = "coalesce((\
        SELECT concat('PUBLIC may execute ', string_agg(p.proname, ', ' ORDER BY p.proname), \
            ', which have the rights of their owner: call `Fence::migrate` as the owner, which revokes that') \
        FROM pg_catalog.pg_proc AS p \
        WHERE p.pronamespace = n.oid AND p.proname LIKE 'fence\\_%' AND p.prosecdef \
            AND pg_catalog.has_function_privilege('public', p.oid, 'EXECUTE') \
        HAVING count(*) > 0\
    ), (\
        SELECT concat('row-level security hides rows of ', string_agg(t.relname, ', ' ORDER BY t.relname), \
            ': disable it on the tables of the fence') \
        FROM pg_catalog.pg_class AS t \
        WHERE t.relnamespace = n.oid AND t.relname IN ('fence_resources', 'fence_epochs', 'fence_epoch_source', \
            'fence_floors', 'fence_idempotency_keys', 'fence_leases', 'fence_waiters', 'fence_token_keys', \
            'fence_bypasses') \
            AND t.relrowsecurity AND (t.relforcerowsecurity OR pg_catalog.row_security_active(t.oid)) \
        HAVING count(*) > 0\
    ))";

/// As [`Backend::find_denied`](crate::fence::sql::Backend::find_denied). `current_schemas` leaves out what the role may
/// not use.
pub(super) async fn find_denied(
    conn: &mut PgConnection,
    schema: Option<&str>,
) -> sqlx::Result<Option<String>> {
    let name = schema.map_or_else(|| "n.nspname".into(), literal_text);
    let sql = format!(
        "SELECT n.nspname::text AS schema FROM pg_catalog.pg_namespace AS n \
         JOIN pg_catalog.pg_class AS c ON c.relnamespace = n.oid AND c.relname = 'fence_resources' \
         WHERE n.nspname = {name} AND NOT pg_catalog.has_schema_privilege(n.oid, 'USAGE') \
         ORDER BY n.nspname LIMIT 1"
    );
    let row = conn.fetch_optional(AssertSqlSafe(sql)).await?;
    row.map(|row| row.try_get("schema")).transpose()
}

/// Where the tables are, and what the server can do, by its catalogs: what fails in a transaction ends that.
///
/// Only what is not there counts as missing. A right that was taken away does not, but for that to end sessions.
fn find_sql(schema: Option<&str>) -> String {
    // Not what the session sees first, which may be a temporary table.
    let schemas = match schema {
        Some(schema) => format!("ARRAY[{}]::name[]", literal_text(schema)),
        None => "pg_catalog.current_schemas(false)".into(),
    };
    let has_function = |name: &str, also: &str| {
        format!(
            "EXISTS (SELECT 1 FROM pg_catalog.pg_proc AS p WHERE p.proname = '{name}' \
             AND p.pronamespace = s.oid{also})"
        )
    };
    let has_column = |name: &str| {
        format!(
            "EXISTS (SELECT 1 FROM pg_catalog.pg_attribute AS a WHERE a.attrelid = c.oid AND a.attname = '{name}')"
        )
    };
    let [is_current, xmin] = ["history", "xmin"].map(has_column);
    let advisory_locks = has_function("pg_try_advisory_xact_lock_shared", "");
    let may_execute = " AND pg_catalog.has_function_privilege(p.oid, 'EXECUTE')";
    let terminates = has_function("pg_terminate_backend", may_execute);
    let transaction_ids = has_function("pg_current_xact_id", "");
    // A view has none, a foreign table none that says anything, and YugabyteDB has it in this catalog alone.
    format!(
        "SELECT n.nspname::text AS schema, {is_current} AS is_current, \
             {xmin} AND c.relkind IN ('r', 'p') AND pg_catalog.version() NOT LIKE '%-YB-%' AS row_versions, \
             {advisory_locks} AS advisory_locks, \
             {advisory_locks} AND {terminates} AS ends_sessions, \
             {transaction_ids} AS transaction_ids, \
             EXISTS (SELECT 1 FROM pg_catalog.pg_proc AS p \
                 WHERE p.proname = 'fence_history' AND p.pronamespace = n.oid) AS history, \
             {FLAW} AS flaw \
         FROM unnest({schemas}) WITH ORDINALITY AS o (name, place) \
         JOIN pg_catalog.pg_namespace AS n ON n.nspname = o.name \
         JOIN pg_catalog.pg_class AS c \
             ON c.relnamespace = n.oid AND c.relname = 'fence_resources' \
         CROSS JOIN pg_catalog.pg_namespace AS s \
         WHERE s.nspname = 'pg_catalog' \
         ORDER BY o.place LIMIT 1"
    )
}
