//! The fence in Postgres.

use std::time::Duration;

use futures_util::StreamExt;
use sqlx::{
    AssertSqlSafe, Either, Executor, PgConnection, Postgres, Row, SqlSafeStr,
    migrate::MigrateError,
    postgres::{PgConnectOptions, PgRow, PgTransactionManager},
};

use super::{
    Admission, Admit, AdvisoryLock, Announcement, Arguments, Backend, Capabilities, Claimed,
    Committed, Dead, Found, Idle, Record, RecordId, Records, RowVersion, Rows, StateRow, Statement,
    States, StoredResponse, Tables, TransactionManager,
    at_once::{NOTHING, at_once},
    left_open, migrations,
    records::records,
    savepoint,
    statements::statements,
    states::states,
    tables::quoted,
};
use crate::{
    announce::LeaseDigest,
    calls::literal_text,
    epochs::{Epoch, partition_of},
    fence::{settings::TransactionLimits, token_use::TokenUse},
    token::{Resource, Token},
};

/// Postgres answers the COMMIT of an aborted transaction with the tag ROLLBACK, which sqlx takes
/// for success. The RELEASE makes the whole message fail instead, in an aborted transaction as well
/// as outside the transaction whose savepoint this is: there is nothing cheaper that proves both.
/// Another transaction begins with the same message: that keeps sqlx's count of nested transactions
/// true, and where it can be used, it saves the next write a round trip. If nobody wants it, the
/// ROLLBACK that closes it travels with the pool's own check of the connection.
fn prove_and_commit() -> String {
    format!("RELEASE SAVEPOINT {}; COMMIT", savepoint())
}

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

impl Backend for Postgres {
    fn address(options: &PgConnectOptions) -> String {
        match options.get_socket() {
            Some(socket) => socket.display().to_string(),
            None => format!("{}:{}", options.get_host(), options.get_port()),
        }
    }

    async fn begin(conn: &mut PgConnection, limits: TransactionLimits) -> sqlx::Result<()> {
        let sql = AssertSqlSafe(begin(conn, limits)).into_sql_str();
        match PgTransactionManager::begin(conn, Some(sql.clone())).await {
            Err(error) if left_open::is_left_open(&error) => {
                left_open::end(conn).await?;
                PgTransactionManager::begin(conn, Some(sql)).await
            }
            begun => begun,
        }
    }

    async fn find_tables(
        conn: &mut PgConnection,
        schema: Option<&str>,
    ) -> sqlx::Result<Option<Found>> {
        // One message, which needs no transaction where a pooler stands in between.
        let row = conn.fetch_optional(AssertSqlSafe(find(schema))).await?;
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
        }))
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
        let sql = match next {
            Some(limits) => format!("{}; {}", prove_and_commit(), begin(conn, limits)),
            None => format!("{} AND CHAIN", prove_and_commit()),
        };
        let mut confirmed = 0;
        let mut answers = conn.fetch_many(AssertSqlSafe(sql));
        while let Some(answer) = answers.next().await {
            match answer {
                Ok(Either::Left(_)) => confirmed += 1,
                Ok(Either::Right(_)) => {}
                // A cancellation that arrives during COMMIT may only be noticed behind it.
                Err(_) if confirmed >= 2 => return Ok(Committed::Broken),
                Err(error) => return Err(error),
            }
        }
        drop(answers);
        if confirmed < 2 {
            let unconfirmed = "COMMIT was not answered";
            return Err(sqlx::Error::Protocol(unconfirmed.into()));
        }
        if next.is_none() {
            PgTransactionManager::start_rollback(conn);
            return Ok(Committed::Clean);
        }
        Ok(Committed::Begun)
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
        let has_history = conn.fetch_optional(HISTORY).await?.is_some();
        migrations::migrate(conn, has_history, migrations::POSTGRES).await
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
        let mut arguments = statement.arguments.clone();
        let sql = at_once(tables.schema(), trimmed(statement), arguments.len());
        let bound = arguments
            .add(admit.resource.as_str())
            .and_then(|()| arguments.add(admit.token.get()))
            .and_then(|()| arguments.add(admit.dead))
            .and_then(|()| arguments.add(admit.lock.0))
            .and_then(|()| arguments.add(format!("{}ms", millis(lock_wait))));
        bound.map_err(sqlx::Error::Encode)?;
        let query = sqlx::query_with(AssertSqlSafe(sql), arguments);
        // To the end: what comes behind the last row is the answer to its COMMIT.
        match query.fetch_all(conn).await {
            Err(sqlx::Error::Database(error))
                if error.message().contains(NOTHING)
                    // Where the pool's sessions are stricter than READ COMMITTED, this is how they
                    // learn that another transaction was faster; and it may have lost in a deadlock.
                    || matches!(error.code().as_deref(), Some("40001" | "40P01"))
                    // A pooler in between has prepared it on one server and executed it on another:
                    // invalid_sql_statement_name.
                    || error.code().as_deref() == Some("26000") =>
            {
                Ok(Vec::new())
            }
            outcome => outcome,
        }
    }

    async fn write_admitted(
        conn: &mut PgConnection,
        statement: &mut Statement<Self>,
    ) -> sqlx::Result<Vec<PgRow>> {
        let sql = format!(
            "WITH fence AS (SELECT 1), work AS ({}\n) SELECT * FROM work",
            trimmed(statement)
        );
        sqlx::query_with(AssertSqlSafe(sql), statement.arguments.clone())
            .fetch_all(conn)
            .await
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

/// Where the tables are, and what the server can do, by its catalogs: what fails in a transaction ends that.
///
/// Only what is not there counts as missing. A right that was taken away does not, but for that to end sessions.
fn find(schema: Option<&str>) -> String {
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
                 WHERE p.proname = 'fence_history' AND p.pronamespace = n.oid) AS history \
         FROM unnest({schemas}) WITH ORDINALITY AS o (name, place) \
         JOIN pg_catalog.pg_namespace AS n ON n.nspname = o.name \
         JOIN pg_catalog.pg_class AS c \
             ON c.relnamespace = n.oid AND c.relname = 'fence_resources' \
         CROSS JOIN pg_catalog.pg_namespace AS s \
         WHERE s.nspname = 'pg_catalog' \
         ORDER BY o.place LIMIT 1"
    )
}

/// How much longer than the process the server waits: it ends the connection as well, which is for
/// processes that are frozen, and not for each handler that takes too long.
const MARGIN: Duration = Duration::from_secs(1);

/// The start of a transaction with its time limits.
fn begin(conn: &PgConnection, limits: TransactionLimits) -> String {
    let first_wait = limits.key_wait.unwrap_or(limits.lock_wait);
    let (lock_ms, idle_ms) = (
        millis(first_wait),
        millis(limits.hold.saturating_add(MARGIN)),
    );
    // A statement may wait for a lock first, and so may the claim of a key, and the admission.
    let waits = limits
        .lock_wait
        .saturating_add(limits.key_wait.unwrap_or_default());
    let whole_ms = millis(waits.saturating_add(limits.hold));
    let mut sql = format!(
        "BEGIN ISOLATION LEVEL READ COMMITTED; \
         SET LOCAL lock_timeout = {lock_ms}; \
         SET LOCAL statement_timeout = {whole_ms}; \
         SET LOCAL idle_in_transaction_session_timeout = {idle_ms}"
    );
    // From Postgres 17 on, the server also bounds a transaction that is never idle.
    if conn.server_version_num() >= Some(17_00_00) {
        sql.push_str(&format!("; SET LOCAL transaction_timeout = {whole_ms}"));
    }
    sql.push_str("; SAVEPOINT ");
    sql.push_str(savepoint());
    sql
}

/// A statement that can be put into parentheses, with a new line for what may be a comment.
fn trimmed(statement: &Statement<Postgres>) -> &str {
    let sql = statement.sql.as_str();
    sql.trim_end_matches(|end: char| end == ';' || end.is_whitespace())
}

/// Postgres' settings of times are whole milliseconds; 0 would mean no limit.
fn millis(limit: Duration) -> u128 {
    limit.as_millis().clamp(1, i32::MAX as u128)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_never_none() {
        for (limit, whole) in [
            (Duration::ZERO, 1),
            (Duration::from_micros(2_900), 2),
            (Duration::MAX, i32::MAX as u128),
        ] {
            assert_eq!(millis(limit), whole);
        }
    }

    #[test]
    fn a_statement_ends_before_its_semicolons_and_blanks() {
        for sql in ["SELECT 'fence'", "SELECT 'fence';", "SELECT 'fence' ;\n ; "] {
            let statement = Statement::new(sqlx::query(AssertSqlSafe(sql)))
                .ok()
                .unwrap();
            assert_eq!(trimmed(&statement), "SELECT 'fence'");
        }
    }
}
