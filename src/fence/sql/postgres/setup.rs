//! Migrations, and the check of the fence's tables, functions and privileges in a database.

use std::error::Error;

use sqlx::{
    AssertSqlSafe, Executor, PgConnection, Postgres, Row,
    migrate::{Migrate, MigrateError},
};

use crate::fence::sql::{
    Names, On, Setup, Topology,
    migrations::{self, TableState},
};

/// Statement that reads the state of a fence. It needs no privilege. It reads:
///
/// - whether the tables exist, including that of the last migration, and whether the role may use
///   their schema;
/// - which functions that run with the privileges of their owner, including the guards of protected
///   tables, may be executed by `PUBLIC`, as after a dump was loaded without privileges. A trigger
///   function counts as a guard only if its owner has privileges on the fence. Otherwise any role
///   could make the check fail with a fake guard;
/// - which tables have policies that hide rows, and which tables a crash would empty;
/// - for a warning, which roles may write whole rows of the tables. Members of the owner's role do
///   not count.
const CHECK: &str = "SELECT \
    n.oid IS NOT NULL AND NOT pg_catalog.has_schema_privilege(n.oid, 'USAGE') AS is_denied, \
    EXISTS (SELECT FROM pg_catalog.pg_proc AS p WHERE p.pronamespace = n.oid AND p.proname = 'try_admit') \
        AND EXISTS (SELECT FROM pg_catalog.pg_class AS c WHERE c.relnamespace = n.oid AND c.relname = 'resources') \
        AND EXISTS (SELECT FROM pg_catalog.pg_class AS c WHERE c.relnamespace = n.oid AND c.relname = '{last_table}') \
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
    (SELECT pg_catalog.string_agg(t.relname, ', ' ORDER BY t.relname) FROM pg_catalog.pg_class AS t \
        WHERE t.relnamespace = n.oid AND t.relkind IN ('r', 'p') AND t.relpersistence <> 'p') AS unlogged_tables, \
    (SELECT pg_catalog.string_agg(DISTINCT pg_catalog.concat(CASE a.grantee WHEN 0 THEN 'PUBLIC' \
            ELSE pg_catalog.pg_get_userbyid(a.grantee) END, ' on ', t.relname), ', ') \
        FROM pg_catalog.pg_class AS t, pg_catalog.aclexplode(t.relacl) AS a \
        WHERE t.relnamespace = n.oid AND t.relkind IN ('r', 'p', 'v') \
            AND a.privilege_type IN ('INSERT', 'UPDATE', 'DELETE', 'TRUNCATE', 'TRIGGER') \
            AND CASE a.grantee WHEN 0 THEN true \
                ELSE NOT pg_catalog.pg_has_role(a.grantee, t.relowner, 'MEMBER') END) AS writers, \
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
            AND t.tgenabled = 'A') \
        AND EXISTS (SELECT FROM pg_catalog.pg_dist_partition AS p \
            WHERE p.logicalrelid = pg_catalog.to_regclass('tower_fence.commit_marks')) AS is_joined";

/// Block that creates the schema. `IF NOT EXISTS` alone requires the privilege to create a schema
/// even if the schema exists. With schema-based sharding, Citus would distribute the tables of the
/// new schema.
const CREATE_SCHEMA: &str = "DO $fence$ DECLARE \
    setting CONSTANT text := 'citus.enable_schema_based_sharding'; \
    value CONSTANT text := pg_catalog.current_setting(setting, true); \
    BEGIN IF pg_catalog.to_regnamespace('{schema}') IS NULL THEN \
        PERFORM pg_catalog.set_config(setting, 'off', true) WHERE value IS NOT NULL; \
        CREATE SCHEMA IF NOT EXISTS {schema}; \
        PERFORM pg_catalog.set_config(setting, value, true) WHERE value IS NOT NULL; \
    END IF; END $fence$;\n";

/// Block that refuses a schema whose owner this role cannot trust. The owner of the schema becomes
/// the owner of all functions, and could replace those that other roles execute. If the tables are
/// current, only a role that may create schemas is refused, because it must not read a view that
/// replaces one of the tables. Any other role may find that the tables are current.
const TRUST: &str = "DO $fence$ DECLARE stranger CONSTANT pg_catalog.name := (SELECT o.rolname \
    FROM pg_catalog.pg_namespace AS n \
    JOIN pg_catalog.pg_database AS d ON d.datname = pg_catalog.current_database() \
    JOIN pg_catalog.pg_roles AS o ON o.oid = CASE pg_catalog.pg_get_userbyid(n.nspowner) \
        WHEN 'pg_database_owner' THEN d.datdba ELSE n.nspowner END \
    JOIN pg_catalog.pg_roles AS me ON me.rolname = current_user \
    WHERE n.nspname = '{schema}' AND o.oid <> me.oid AND NOT o.rolsuper \
        AND (pg_catalog.has_database_privilege(me.oid, d.oid, 'CREATE') \
            OR pg_catalog.to_regclass('{schema}.{last_table}') IS NULL)); \
    BEGIN IF stranger IS NOT NULL THEN RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege', \
        MESSAGE = pg_catalog.concat('the schema {schema} belongs to the role ', stranger, \
            ', which could replace functions that other roles execute'), \
        HINT = 'Migrate as the owner of the schema, for example after SET ROLE. If the owner should not have \
            created the schema, drop it, or choose another schema.'; \
    END IF; END $fence$;\n";

/// Block that makes concurrent calls to `migrate` set the privileges one after the other.
/// Otherwise, Postgres refuses concurrent changes of one object ("tuple concurrently updated"). A
/// role that is not allowed to change the table does not own the objects, so it changes no
/// privileges. On a standby, which refuses the lock, RIGHTS finds nothing to change or fails.
const ONE_AT_A_TIME: &str = "DO $fence$ BEGIN \
    IF NOT pg_catalog.pg_is_in_recovery() AND pg_catalog.has_table_privilege('tower_fence.migrations', 'UPDATE') \
    THEN LOCK TABLE tower_fence.migrations IN SHARE ROW EXCLUSIVE MODE; END IF; END $fence$;\n";

/// SQL that sets owners and privileges at the end of each migration.
const RIGHTS: &str = include_str!("../../../../migrations/postgres/rights.sql");

/// Block that prepares a server with Citus. It has no effect on other servers, or if this role
/// cannot execute the function because another role owns it.
const JOIN_CITUS: &str = "DO $fence$ BEGIN \
    IF EXISTS (SELECT FROM pg_catalog.pg_extension AS e WHERE e.extname = 'citus') \
        AND pg_catalog.has_function_privilege('tower_fence.join_citus()', 'EXECUTE') \
    THEN PERFORM tower_fence.join_citus(); END IF; END $fence$";

/// Query that returns a row on a worker of a Citus cluster, to which the coordinator distributes
/// the objects of the fence.
const WORKER: &str = "SELECT 1 FROM pg_catalog.pg_dist_local_group WHERE groupid <> 0";

/// Table that the last migration creates. No migration has been added since version 0.3.0.
const LAST_TABLE: &str = LAST_TABLE_OF_0_3;

/// Table that the last migration of version 0.3.0 creates. If it exists, a call to `migrate` is not
/// the first one, so the call keeps the privileges of named roles.
const LAST_TABLE_OF_0_3: &str = "commit_marks";

fn trust(schema: &str) -> String {
    let sql = TRUST.replace("{schema}", schema);
    sql.replace("{last_table}", LAST_TABLE)
}

impl Setup for Postgres {
    fn prefix(schema: Option<&str>) -> String {
        format!("{}.", schema.unwrap_or("tower_fence"))
    }

    async fn check(On { conn, names }: On<'_, Self>) -> sqlx::Result<bool> {
        let schema = names.prefix().trim_end_matches('.');
        // The statement is sent as one message, so it needs no transaction even with a pooler.
        let sql = CHECK.replace("{schema}", schema);
        let sql = sql.replace("{last_table}", LAST_TABLE);
        let row = conn.fetch_one(AssertSqlSafe(sql)).await?;
        if !row.try_get("is_migrated")? {
            return Ok(false);
        }
        if row.try_get("is_denied")? {
            let denied = format!(
                "the role lacks USAGE on the schema {schema}, which has the tables of the fence"
            );
            return Err(misconfigured(denied));
        }
        if let Some(open) = row.try_get::<Option<String>, _>("open_functions")? {
            return Err(misconfigured(format!(
                "PUBLIC may execute {open}, which run with the privileges of their owner: \
                 call `Fence::migrate` as the owner, which revokes that"
            )));
        }
        if let Some(hidden) = row.try_get::<Option<String>, _>("hidden_tables")? {
            return Err(misconfigured(format!(
                "row-level security hides rows of {hidden} in the schema {schema}: disable it on the tables of the fence"
            )));
        }
        if let Some(unlogged) = row.try_get::<Option<String>, _>("unlogged_tables")? {
            return Err(misconfigured(format!(
                "a crash would empty the unlogged tables {unlogged} in the schema {schema}: \
                 set them LOGGED, and if the server has crashed since they became unlogged, \
                 restore a backup"
            )));
        }
        if let Some(writers) = row.try_get::<Option<String>, _>("writers")? {
            tracing::warn!(
                schema,
                roles = writers,
                "roles may write to tables of the fence directly, and thereby make stale tokens valid: \
                 grant only the documented privileges"
            );
        }
        let topology = match row.try_get("has_citus")? {
            true => check_citus(On::new(conn, names)).await?,
            false => Topology::SingleServer,
        };
        names.mark_checked(topology);
        Ok(true)
    }

    async fn migrate(
        On { conn, names }: On<'_, Self>,
        failover_detection: bool,
    ) -> Result<(), MigrateError> {
        let schema = names.prefix().trim_end_matches('.');
        // The timeout applies to rows, to tables, and to the advisory lock of sqlx's migrator,
        // which any role can take. The search path excludes schemas in which another role may have
        // created operators and functions. At a stricter isolation level, a statement that has
        // waited for a lock would not see the changes of the transaction that held the lock. If
        // this process vanishes, the last two settings end its session and release its locks.
        // Postgres 13, which the migration refuses, lacks the second one.
        conn.execute(
            "SET lock_timeout = '10s'; SET search_path = pg_catalog, pg_temp; \
             SET default_transaction_isolation = 'read committed'; \
             SELECT set_config(s.name, '60s', false) FROM pg_settings AS s \
             WHERE s.name IN ('idle_in_transaction_session_timeout', 'idle_session_timeout')",
        )
        .await?;
        let exists = |of: &str| format!("SELECT 1 WHERE pg_catalog.{of} IS NOT NULL");
        let citus = exists("to_regclass('pg_catalog.pg_dist_local_group')");
        if conn.fetch_optional(AssertSqlSafe(citus)).await?.is_some()
            && conn.fetch_optional(WORKER).await?.is_some()
        {
            let refused = "this server is a worker of a Citus cluster: migrate on the coordinator";
            return Err(misconfigured(refused).into());
        }
        // If a first migration has failed half-way, the history and some of the tables may exist.
        let has = async |conn: &mut PgConnection, table: &str| {
            let table = exists(&format!("to_regclass('{schema}.{table}')"));
            let found = conn.fetch_optional(AssertSqlSafe(table)).await?;
            Ok::<_, sqlx::Error>(found.is_some())
        };
        // The first of several concurrent calls creates the tables. The other calls wait for the
        // lock of sqlx's migrator, and then find the tables. The migrator takes the same lock
        // again, without waiting.
        let is_locked = !has(conn, LAST_TABLE).await?;
        if is_locked {
            conn.lock().await?;
        }
        if is_locked && !has(conn, LAST_TABLE).await? {
            let create = CREATE_SCHEMA.replace("{schema}", schema);
            conn.execute(AssertSqlSafe(create)).await?;
            let is_first = !has(conn, LAST_TABLE_OF_0_3).await?;
            let on = |setting| if setting { "on" } else { "off" };
            conn.execute(AssertSqlSafe(format!(
                "SET {schema}.first_migration = '{}'; SET {schema}.failover_detection = '{}'",
                on(is_first),
                on(failover_detection),
            )))
            .await?;
        }
        // Up to this point, no statement has read objects in the schema.
        conn.execute(AssertSqlSafe(trust(schema))).await?;
        let has_history = has(conn, "migrations").await?;
        let steps = migrations::POSTGRES;
        let found = migrations::migrate(conn, has_history, names, steps).await?;
        // RIGHTS could revoke privileges that a newer version has granted.
        let last: &[&str] = match found {
            TableState::Newer => &[],
            TableState::Outdated | TableState::Current => &[RIGHTS, JOIN_CITUS],
        };
        // The statements of one message are one transaction, so each message keeps its table lock
        // to the end. JOIN_CITUS opens other connections to the workers, which would wait for the
        // changes of RIGHTS if both were one transaction.
        for sql in last {
            let sql = names.apply(&format!("{ONE_AT_A_TIME}{sql}"));
            conn.execute(AssertSqlSafe(sql)).await?;
        }
        if is_locked {
            conn.unlock().await?;
        }
        Ok(())
    }

    fn schema_sql(names: &Names, failover_detection: bool) -> String {
        const HISTORY: &str = "    version BIGINT PRIMARY KEY,
        description TEXT NOT NULL,
        installed_on TIMESTAMPTZ NOT NULL DEFAULT now(),
        success BOOLEAN NOT NULL,
        checksum BYTEA NOT NULL,
        execution_time BIGINT NOT NULL";
        let schema = names.prefix().trim_end_matches('.');
        // Unlike a SELECT, a DO block prints no rows.
        let set = |setting: &str, value: &str| {
            format!(
                "DO $fence$ BEGIN PERFORM set_config('{setting}', {value}, true); END $fence$;\n"
            )
        };
        let own = |setting: &str| format!("{schema}.{setting}");
        // Each part pins the search path, because an upgrade applies only the last parts. Only the
        // first of several parts in one transaction saves the path of the transaction.
        let current = format!(
            "CASE current_setting('search_path') \
             WHEN 'pg_catalog, pg_temp' THEN coalesce(current_setting('{schema}.search_path', true), 'pg_catalog, pg_temp') \
             ELSE current_setting('search_path') END"
        );
        let pin = set(&own("search_path"), &current) + &set("search_path", "'pg_catalog, pg_temp'");
        let steps = migrations::script(
            names,
            migrations::POSTGRES,
            HISTORY,
            ["decode('", "', 'hex')"],
            &pin,
        );
        let create = CREATE_SCHEMA.replace("{schema}", schema);
        let trust = trust(schema);
        let detection = match failover_detection {
            true => String::new(),
            false => set(&own("failover_detection"), "'off'"),
        };
        let first = set(&own("first_migration"), "'on'");
        // The script restores the search path at the end, because the migration tool may run other
        // statements in the same transaction.
        let saved = format!("current_setting('{schema}.search_path')");
        let restore = set("search_path", &saved);
        format!(
            "{pin}{create}{trust}{detection}{first}{steps}\n{}\n{};\n{restore}",
            names.apply(RIGHTS),
            names.apply(JOIN_CITUS)
        )
    }
}

/// Checks that the fence can be used on a server with Citus, and returns its topology.
async fn check_citus(On { conn, names }: On<'_, Postgres>) -> sqlx::Result<Topology> {
    let row = conn.fetch_one(names.sql(CHECK_CITUS)).await?;
    if !row.try_get::<bool, _>("has_nodes")? {
        return Ok(Topology::SingleServer);
    }
    if row.try_get("is_worker")? {
        let worker = "this server is a worker of a Citus cluster: connect to the coordinator";
        return Err(misconfigured(worker));
    }
    if row.try_get("is_distributed")? {
        return Ok(Topology::Distributed);
    }
    if row.try_get("is_joined")? {
        return Ok(Topology::Coordinator);
    }
    let not_joined = "this server is the coordinator of a Citus cluster, which commits its workers first: \
         a COMMIT that fails would leave a write without its token. Call `Fence::migrate` as the owner of the \
         fence's tables, which makes each such transaction commit in two phases";
    Err(misconfigured(not_joined))
}

fn misconfigured(reason: impl Into<Box<dyn Error + Send + Sync>>) -> sqlx::Error {
    sqlx::Error::Configuration(reason.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_table_is_created_by_the_last_migration() {
        let create = format!("CREATE TABLE tower_fence.{LAST_TABLE} (");
        let (_, _, last) = migrations::POSTGRES.last().unwrap();
        assert!(last.contains(&create));
    }
}
