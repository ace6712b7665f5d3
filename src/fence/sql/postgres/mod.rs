//! The fence in Postgres.

mod at_once;
mod catalog;
mod left_open;
mod transaction;

use std::time::Duration;

use sqlx::{
    AssertSqlSafe, Executor, PgConnection, Postgres,
    migrate::MigrateError,
    postgres::{PgConnectOptions, PgRow},
};

use super::{
    Admission, Admit, AdvisoryLock, Announcement, Backend, Claimed, Committed, Dead, Found, Idle,
    Record, RecordId, Records, RowVersion, Rows, StateRow, Statement, States, StoredResponse,
    Tables, migrations, records::records, statements::statements, states::states, tables::quoted,
};
use crate::{
    announce::LeaseDigest,
    epochs::{Epoch, partition_of},
    fence::{settings::TransactionLimits, token_use::TokenUse},
    token::{Resource, Token},
};

/// As [`Backend::make_durable`], without a round trip of its own: for what is raised, so that nobody older is
/// admitted again after a crash.
macro_rules! durably {
    () => {
        "pg_catalog.set_config('synchronous_commit', \
         CASE WHEN pg_catalog.current_setting('synchronous_commit') IN ('off', 'local') THEN 'on' \
             ELSE pg_catalog.current_setting('synchronous_commit') END, true) IS NOT NULL"
    };
}

/// The same where something is raised: the setting stays on a row of another history, of which it is asked next.
macro_rules! and_durably {
    () => {
        concat!(
            " AND CASE WHEN history = {schema}.fence_history() THEN ",
            durably!(),
            " END"
        )
    };
}

/// Revokes what `PUBLIC` may do with the functions and tables of the fence, and with the guards of protected tables: a
/// dump without rights (`--no-acl`) restores functions that everybody may execute. It changes what the role owns, and
/// writes nothing where there is nothing to revoke. Every admission needs `fence_history`, whichever role makes it.
const REVOKE_FROM_PUBLIC: &str = r"DO $fence$
DECLARE
    object text;
BEGIN
    FOR object IN
        SELECT format('FUNCTION %s', p.oid::regprocedure) FROM pg_catalog.pg_proc AS p
        JOIN pg_catalog.pg_namespace AS n ON n.oid = p.pronamespace
        WHERE (n.nspname = current_schema() AND p.proname LIKE 'fence\_%' AND p.proname <> 'fence_history'
                OR p.oid IN (SELECT t.tgfoid FROM pg_catalog.pg_trigger AS t WHERE t.tgname LIKE 'fence\_guard\_%'))
            AND pg_has_role(p.proowner, 'USAGE') AND has_function_privilege('public', p.oid, 'EXECUTE')
        UNION ALL
        SELECT format('TABLE %s', c.oid::regclass) FROM pg_catalog.pg_class AS c
        JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
        WHERE n.nspname = current_schema() AND c.relkind IN ('r', 'p', 'v')
            AND (c.relname LIKE 'fence\_%' OR c.relname = '_tower_fence_migrations')
            AND pg_has_role(c.relowner, 'USAGE')
            AND EXISTS (SELECT FROM aclexplode(c.relacl) AS r WHERE r.grantee = 0)
    LOOP
        EXECUTE format('REVOKE ALL ON %s FROM PUBLIC', object);
    END LOOP;
END
$fence$";

impl Backend for Postgres {
    fn address(options: &PgConnectOptions) -> String {
        match options.get_socket() {
            Some(socket) => socket.display().to_string(),
            None => format!("{}:{}", options.get_host(), options.get_port()),
        }
    }

    async fn begin(conn: &mut PgConnection, limits: TransactionLimits) -> sqlx::Result<()> {
        transaction::begin(conn, limits).await
    }

    async fn find_tables(
        conn: &mut PgConnection,
        schema: Option<&str>,
    ) -> sqlx::Result<Option<Found>> {
        catalog::find_tables(conn, schema).await
    }

    async fn find_denied(
        conn: &mut PgConnection,
        schema: Option<&str>,
    ) -> sqlx::Result<Option<String>> {
        catalog::find_denied(conn, schema).await
    }

    async fn leave_transaction(conn: &mut PgConnection) -> sqlx::Result<()> {
        left_open::leave(conn).await
    }

    async fn abandon_begin(conn: &mut PgConnection) -> sqlx::Result<()> {
        // BEGIN may have been sent without sqlx having counted it. Given back to the pool as it
        // is, the connection would stay in that transaction.
        left_open::end(conn).await
    }

    async fn commit(
        conn: &mut PgConnection,
        next: Option<TransactionLimits>,
    ) -> sqlx::Result<Committed> {
        transaction::commit(conn, next).await
    }

    const HAS_SERVER: bool = true;

    async fn terminate(conn: &mut PgConnection, lock: AdvisoryLock) -> sqlx::Result<()> {
        // One message, which needs no transaction where a pooler stands in between. The two halves
        // of the number are unsigned there. A COMMIT that waits for a synchronous standby is left alone: ended, it would be
        // seen on this server, and lost with it.
        let bits = lock.0.cast_unsigned();
        let (high, low) = (bits >> 32, bits & 0xffff_ffff);
        let sql = format!(
            "SELECT pg_terminate_backend(l.pid) FROM pg_locks AS l \
             JOIN pg_stat_activity AS a ON a.pid = l.pid WHERE l.locktype = 'advisory' \
             AND l.classid = {high} AND l.objid = {low} AND l.objsubid = 1 \
             AND a.wait_event IS DISTINCT FROM 'SyncRep'"
        );
        conn.execute(AssertSqlSafe(sql)).await?;
        Ok(())
    }

    async fn migrate(conn: &mut PgConnection, schema: Option<&str>) -> Result<(), MigrateError> {
        const HISTORY: &str = "SELECT 1 FROM pg_catalog.pg_class AS c \
             JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace \
             WHERE c.relname = '_tower_fence_migrations' \
                 AND n.nspname = pg_catalog.current_schema()";
        if let Some(schema) = schema {
            let set = format!("SET search_path = {schema}");
            conn.execute(AssertSqlSafe(set)).await?;
        }
        // For rows and tables, and for the advisory lock under which sqlx migrates: any role can take that.
        conn.execute("SET lock_timeout = '10s'").await?;
        let has_history = conn.fetch_optional(HISTORY).await?.is_some();
        migrations::migrate(conn, has_history, migrations::POSTGRES).await?;
        conn.execute(REVOKE_FROM_PUBLIC).await?;
        Ok(())
    }

    fn schema_sql() -> String {
        const HISTORY: &str = "    version BIGINT PRIMARY KEY,
    description TEXT NOT NULL,
    installed_on TIMESTAMPTZ NOT NULL DEFAULT now(),
    success BOOLEAN NOT NULL,
    checksum BYTEA NOT NULL,
    execution_time BIGINT NOT NULL";
        migrations::script(migrations::POSTGRES, HISTORY, ["decode('", "', 'hex')"])
    }

    async fn make_durable(conn: &mut PgConnection) -> sqlx::Result<()> {
        // `remote_write` and `remote_apply` wait for the own disk as well, and for more.
        const WAIT_FOR_DISK: &str = "SELECT set_config('synchronous_commit', 'on', true) \
             WHERE current_setting('synchronous_commit') IN ('off', 'local')";
        conn.execute(WAIT_FOR_DISK).await?;
        Ok(())
    }

    async fn outlast_crash(
        conn: &mut PgConnection,
        tables: &Tables,
        resource: &Resource,
    ) -> sqlx::Result<bool> {
        // What writes nothing to the log waits for nothing. This lock is written there, and no writer waits for it.
        const LOCK: &str = concat!(
            "SELECT 1 FROM {schema}.fence_resources WHERE resource = $1 AND ",
            durably!(),
            " FOR KEY SHARE"
        );
        let locked = sqlx::query(tables.sql(LOCK))
            .bind(resource.as_str())
            .fetch_optional(conn);
        Ok(locked.await?.is_some())
    }

    async fn row_version(
        conn: &mut PgConnection,
        tables: &Tables,
        resource: &Resource,
    ) -> sqlx::Result<Option<RowVersion>> {
        const LOOK: &str = "SELECT max_token, xmin::text, \
             history IS DISTINCT FROM {schema}.fence_history(), \
             pg_catalog.current_setting('synchronous_commit') IN ('off', 'local') \
             FROM {schema}.fence_resources WHERE resource = $1";
        let row: Option<(i64, Option<String>, bool, bool)> = sqlx::query_as(tables.sql(LOOK))
            .bind(resource.as_str())
            .fetch_optional(conn)
            .await?;
        let version = |(max_token, version, is_behind, may_be_lost)| RowVersion {
            max_token,
            version,
            is_behind,
            may_be_lost,
        };
        Ok(row.map(version))
    }

    async fn raise_if_unwritten(
        conn: &mut PgConnection,
        tables: &Tables,
        resource: &Resource,
        dead: i64,
        version: &str,
    ) -> sqlx::Result<bool> {
        // At READ COMMITTED the WHERE is evaluated on the newest version of the row, after the wait
        // for its lock; `xmin` too.
        const RAISE: &str = concat!(
            "UPDATE {schema}.fence_resources SET max_token = $2, updated_at = CASE \
             WHEN updated_at > CURRENT_TIMESTAMP THEN updated_at ELSE CURRENT_TIMESTAMP END \
             WHERE resource = $1 AND max_token < $2 AND xmin::text = $3 \
             AND history = {schema}.fence_history()",
            and_durably!()
        );
        let raised = sqlx::query(tables.sql(RAISE))
            .bind(resource.as_str())
            .bind(dead)
            .bind(version)
            .execute(conn);
        Ok(raised.await?.rows_affected() == 1)
    }

    const AT_ONCE: bool = true;

    async fn write_at_once(
        conn: &mut PgConnection,
        tables: &Tables,
        admit: Admit<'_>,
        lock_wait: Duration,
        statement: &mut Statement<Self>,
    ) -> sqlx::Result<Vec<PgRow>> {
        at_once::write(conn, tables, admit, lock_wait, statement).await
    }

    async fn write_admitted(
        conn: &mut PgConnection,
        statement: &mut Statement<Self>,
    ) -> sqlx::Result<Vec<PgRow>> {
        at_once::write_admitted(conn, statement).await
    }

    async fn find_partitions(
        conn: &mut PgConnection,
        tables: &Tables,
        older_than: Duration,
    ) -> sqlx::Result<u64> {
        const FIND: &str = "SELECT {schema}.fence_find_partitions($1 * interval '1 s', 1000)";
        let found: i32 = sqlx::query_scalar(tables.sql(FIND))
            .bind(older_than.as_secs_f64())
            .fetch_one(conn)
            .await?;
        Ok(found.unsigned_abs().into())
    }

    async fn remove_idle(
        conn: &mut PgConnection,
        tables: &Tables,
        partition: u8,
        idle: Idle,
    ) -> sqlx::Result<u64> {
        const REMOVE: &str =
            "SELECT {schema}.fence_remove_idle_of($1, $2 * interval '1 s', $3, $4, $5)";
        let removed: sqlx::Result<i32> = sqlx::query_scalar(tables.sql(REMOVE))
            .bind(i16::from(partition))
            .bind(idle.older_than.as_secs_f64())
            .bind(i32::try_from(idle.at_most).unwrap_or(i32::MAX))
            .bind(idle.granted.map(Token::get))
            .bind(idle.live.map(Token::get))
            .fetch_one(conn)
            .await;
        Ok(removed?.unsigned_abs().into())
    }

    async fn catch_up(
        conn: &mut PgConnection,
        tables: &Tables,
        resource: &Resource,
    ) -> sqlx::Result<bool> {
        if !tables.capabilities.history {
            return Ok(false);
        }
        sqlx::query_scalar(tables.sql("SELECT {schema}.fence_catch_up($1)"))
            .bind(resource.as_str())
            .fetch_one(conn)
            .await
    }

    async fn catch_up_partition(
        conn: &mut PgConnection,
        tables: &Tables,
        partition: u8,
    ) -> sqlx::Result<()> {
        if !tables.capabilities.history {
            return Ok(());
        }
        sqlx::query(tables.sql("SELECT {schema}.fence_catch_up_partition($1)"))
            .bind(i16::from(partition))
            .execute(conn)
            .await?;
        Ok(())
    }

    async fn after_failover(
        conn: &mut PgConnection,
        tables: &Tables,
        partition: u8,
    ) -> sqlx::Result<()> {
        sqlx::query(tables.sql("SELECT {schema}.fence_after_failover_of($1)"))
            .bind(i16::from(partition))
            .execute(conn)
            .await?;
        Ok(())
    }

    statements!(
        lock: "pg_catalog.pg_try_advisory_xact_lock_shared($4) IS NOT NULL",
        share: " FOR SHARE",
        admitted_by: [
            ", admitted_by = pg_catalog.pg_current_xact_id()",
            ", admitted_by",
            ", pg_catalog.pg_current_xact_id()",
            ", admitted_by = excluded.admitted_by",
        ],
        and_durably: and_durably!(),
        history: [
            ", history",
            " AND history = {schema}.fence_history()",
            " AND f.history = excluded.history",
        ]
    );
}

impl States for Postgres {
    states!(idle_ms: "CAST(extract(epoch FROM clock_timestamp() - updated_at) * 1000 AS bigint)");
}

impl Records for Postgres {
    // The wait for the key was the first of the transaction, and may have a limit of its own. The
    // statement that ends it sets the limit of all others, which saves a round trip.
    records!(
        now: "now()",
        expires_at: "now() + $4 * interval '1 millisecond'",
        claimed: "current_setting('role'), set_config('lock_timeout', $5, true), \
             pg_catalog.pg_try_advisory_xact_lock_shared($6)",
        skip_locked: "FOR UPDATE SKIP LOCKED",
    );

    async fn restore_role(conn: &mut PgConnection, role: &str) -> sqlx::Result<()> {
        // A statement's rights are checked before it runs, so this takes one of its own.
        let role = match role {
            "none" => "NONE".to_owned(),
            role => quoted(role),
        };
        let sql = format!("SET LOCAL ROLE {role}");
        conn.execute(AssertSqlSafe(sql)).await?;
        Ok(())
    }
}
