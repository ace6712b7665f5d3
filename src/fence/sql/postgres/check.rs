//! Check of the fence's tables, functions and privileges in a database.

use sqlx::{AssertSqlSafe, Executor, PgConnection, Row};

use crate::fence::sql::{Fitness, Names};

/// Statement that detects every reason why a fence cannot be used. It needs no privilege. It reads:
///
/// - whether the tables exist, and whether the role may use their schema;
/// - which functions that run with the privileges of their owner, including the guards of protected
///   tables, may be executed by `PUBLIC`, as after a dump was loaded without privileges. A trigger
///   function counts as a guard only if its owner has privileges on the fence. Otherwise any role
///   could make the check fail with a fake guard;
/// - which tables have policies that hide rows.
const CHECK: &str = "SELECT \
    n.oid IS NOT NULL AND NOT pg_catalog.has_schema_privilege(n.oid, 'USAGE') AS is_denied, \
    EXISTS (SELECT FROM pg_catalog.pg_proc AS p WHERE p.pronamespace = n.oid AND p.proname = 'try_admit') \
        AND EXISTS (SELECT FROM pg_catalog.pg_class AS c WHERE c.relnamespace = n.oid AND c.relname = 'resources') \
        AS is_migrated, \
    (SELECT pg_catalog.string_agg(p.proname, ', ' ORDER BY p.proname) FROM pg_catalog.pg_proc AS p \
        WHERE (p.pronamespace = n.oid OR p.oid IN (SELECT t.tgfoid FROM pg_catalog.pg_trigger AS t \
                WHERE pg_catalog.starts_with(t.tgname::pg_catalog.text, 'fence_guard_')) \
                AND (EXISTS (SELECT FROM pg_catalog.pg_class AS c \
                    WHERE c.relnamespace = n.oid AND c.relname = 'resources' \
                        AND pg_catalog.has_table_privilege(p.proowner, c.oid, 'SELECT')) \
                OR EXISTS (SELECT FROM pg_catalog.pg_proc AS q \
                    WHERE q.pronamespace = n.oid AND q.proname = 'require_admission' \
                        AND pg_catalog.has_function_privilege(p.proowner, q.oid, 'EXECUTE')))) \
            AND n.oid IS NOT NULL AND p.prosecdef \
            AND pg_catalog.has_function_privilege('public', p.oid, 'EXECUTE')) AS open_functions, \
    (SELECT pg_catalog.string_agg(t.relname, ', ' ORDER BY t.relname) FROM pg_catalog.pg_class AS t \
        WHERE t.relnamespace = n.oid AND t.relrowsecurity \
            AND (t.relforcerowsecurity OR pg_catalog.row_security_active(t.oid))) AS hidden_tables, \
    EXISTS (SELECT FROM pg_catalog.pg_extension AS e WHERE e.extname = 'citus') AS has_citus \
    FROM (SELECT 1) AS always LEFT JOIN pg_catalog.pg_namespace AS n ON n.nspname = '{schema}'";

/// Statement that reads whether the fence can be used on a server with Citus. `is_worker` and
/// `has_nodes` describe the server. `is_joined` is true if each transaction that writes to the
/// fence commits in two phases.
const CHECK_CITUS: &str = "SELECT \
    EXISTS (SELECT FROM pg_catalog.pg_dist_local_group WHERE groupid <> 0) AS is_worker, \
    EXISTS (SELECT FROM pg_catalog.pg_dist_node) AS has_nodes, \
    EXISTS (SELECT FROM pg_catalog.pg_dist_partition AS p \
        WHERE p.logicalrelid = pg_catalog.to_regclass('tower_fence.resources') AND p.partmethod = 'h') AS is_distributed, \
    EXISTS (SELECT FROM pg_catalog.pg_trigger AS t \
        WHERE t.tgrelid = pg_catalog.to_regclass('tower_fence.resources') AND t.tgname = 'fence_two_phases' \
            AND t.tgenabled = 'A') AS is_joined";

/// Implements [`Backend::check`](crate::fence::sql::Backend::check).
pub(super) async fn check(conn: &mut PgConnection, names: &Names) -> sqlx::Result<Fitness> {
    let schema = names.prefix().trim_end_matches('.');
    // The statement is sent as one message, so it needs no transaction even with a pooler.
    let sql = CHECK.replace("{schema}", schema);
    let row = conn.fetch_one(AssertSqlSafe(sql)).await?;
    if !row.try_get("is_migrated")? {
        return Ok(Fitness::NotMigrated);
    }
    if row.try_get("is_denied")? {
        let denied = format!(
            "the role lacks USAGE on the schema {schema}, which has the tables of the fence"
        );
        return Ok(Fitness::Misconfigured(denied));
    }
    let open: Option<String> = row.try_get("open_functions")?;
    if let Some(open) = open {
        return Ok(Fitness::Misconfigured(format!(
            "PUBLIC may execute {open}, which run with the rights of their owner: \
             call `Fence::migrate` as the owner, which revokes that"
        )));
    }
    let hidden: Option<String> = row.try_get("hidden_tables")?;
    if let Some(hidden) = hidden {
        return Ok(Fitness::Misconfigured(format!(
            "row-level security hides rows of {hidden} in the schema {schema}: disable it on the tables of the fence"
        )));
    }
    if row.try_get("has_citus")? {
        return check_citus(conn, names).await;
    }
    Ok(Fitness::Fit)
}

async fn check_citus(conn: &mut PgConnection, names: &Names) -> sqlx::Result<Fitness> {
    let row = conn.fetch_one(names.sql(CHECK_CITUS)).await?;
    if !row.try_get::<bool, _>("has_nodes")? {
        return Ok(Fitness::Fit);
    }
    let is_distributed = row.try_get("is_distributed")?;
    names.set_distributed(is_distributed);
    let unfit = if row.try_get("is_worker")? {
        "this server is a worker of a Citus cluster: connect to the coordinator"
    } else if is_distributed || row.try_get("is_joined")? {
        return Ok(Fitness::Fit);
    } else {
        "this server is the coordinator of a Citus cluster, which commits its workers first: a COMMIT that fails would \
         leave a write without its token. Call `Fence::migrate` as the owner of the fence's tables, which makes each \
         such transaction commit in two phases"
    };
    Ok(Fitness::Misconfigured(unfit.into()))
}
