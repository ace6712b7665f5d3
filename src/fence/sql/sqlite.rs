//! The fence in SQLite: for one machine, and for trying things out.
//!
//! SQLite has one writer at a time for the whole file, so the lock of a row is the lock of the
//! file. A process that freezes while it holds that lock keeps it: there is no server to take it
//! away.

use std::time::Duration;

use sqlx::{
    AssertSqlSafe, Connection, Executor, SqlSafeStr, Sqlite, SqliteConnection,
    migrate::MigrateError,
    sqlite::{SqliteConnectOptions, SqliteRow, SqliteTransactionManager},
};

use super::{
    Admission, Admit, AdvisoryLock, Announcement, Backend, Capabilities, Claimed, Committed, Dead,
    Found, Idle, Record, RecordId, Records, RowVersion, Rows, StateRow, Statement, States,
    StoredResponse, Tables, TransactionManager, migrations, records::records, savepoint,
    statements::statements, states::states,
};
use crate::{
    announce::LeaseDigest,
    epochs::{Epoch, partition_of, partition_of_name},
    fence::{settings::TransactionLimits, token_use::TokenUse},
    token::{Resource, Token},
};

impl Backend for Sqlite {
    fn address(options: &SqliteConnectOptions) -> String {
        options.get_filename().display().to_string()
    }

    async fn begin(conn: &mut SqliteConnection, limits: TransactionLimits) -> sqlx::Result<()> {
        // IMMEDIATE takes the write lock now. A deferred transaction that reads first can fail
        // later with SQLITE_BUSY, without any wait. The savepoint marks the transaction, for COMMIT.
        let lock_ms = limits.lock_wait.as_millis().clamp(1, i32::MAX as u128);
        let sql = format!(
            "PRAGMA busy_timeout = {lock_ms}; BEGIN IMMEDIATE; SAVEPOINT {}",
            savepoint()
        );
        SqliteTransactionManager::begin(conn, Some(AssertSqlSafe(sql).into_sql_str())).await
    }

    async fn lock_wait_of_pool(conn: &mut SqliteConnection) -> sqlx::Result<Option<i64>> {
        let busy_timeout = sqlx::query_scalar("PRAGMA busy_timeout").fetch_one(conn);
        busy_timeout.await.map(Some)
    }

    async fn restore_lock_wait(conn: &mut SqliteConnection, ms: i64) -> sqlx::Result<()> {
        let restore = format!("PRAGMA busy_timeout = {ms}");
        conn.execute(AssertSqlSafe(restore)).await?;
        Ok(())
    }

    async fn find_tables(
        _: &mut SqliteConnection,
        schema: Option<&str>,
    ) -> sqlx::Result<Option<Found>> {
        // The file of the connection, not one that is attached to it, nor a temporary table.
        Ok(Some(Found {
            schema: schema.unwrap_or("main").into(),
            capabilities: Some(Capabilities::ALL),
            flaw: None,
        }))
    }

    async fn abandon_begin(_: &mut SqliteConnection) -> sqlx::Result<()> {
        // sqlx's worker rolls back a BEGIN whose answer nobody took.
        Ok(())
    }

    async fn leave_transaction(conn: &mut SqliteConnection) -> sqlx::Result<()> {
        // It is in none, for the same reason.
        conn.ping().await
    }

    async fn commit(
        conn: &mut SqliteConnection,
        _: Option<TransactionLimits>,
    ) -> sqlx::Result<Committed> {
        // Fails where the transaction was ended in between: by a statement (`INSERT OR ROLLBACK`, a
        // full disk), or by hand.
        let release = format!("RELEASE {}", savepoint());
        conn.execute(AssertSqlSafe(release)).await?;
        SqliteTransactionManager::commit(conn).await?;
        Ok(Committed::Clean)
    }

    const HAS_SERVER: bool = false;

    async fn terminate(_: &mut SqliteConnection, _: AdvisoryLock) -> sqlx::Result<()> {
        Ok(())
    }

    async fn migrate(conn: &mut SqliteConnection, _: Option<&str>) -> Result<(), MigrateError> {
        const HISTORY: &str =
            "SELECT 1 FROM main.sqlite_master WHERE name = '_tower_fence_migrations'";
        let has_history = conn.fetch_optional(HISTORY).await?.is_some();
        migrations::migrate(conn, has_history, migrations::SQLITE).await
    }

    fn schema_sql() -> String {
        const HISTORY: &str = "    version BIGINT PRIMARY KEY,
    description TEXT NOT NULL,
    installed_on TIMESTAMP NOT NULL DEFAULT CURRENT_TIMESTAMP,
    success BOOLEAN NOT NULL,
    checksum BLOB NOT NULL,
    execution_time BIGINT NOT NULL";
        migrations::script(migrations::SQLITE, HISTORY, ["X'", "'"])
    }

    async fn make_durable(_: &mut SqliteConnection) -> sqlx::Result<()> {
        // `PRAGMA synchronous` cannot be changed in a transaction.
        Ok(())
    }

    async fn row_version(
        conn: &mut SqliteConnection,
        tables: &Tables,
        resource: &Resource,
    ) -> sqlx::Result<Option<RowVersion>> {
        // Rows have no versions here, and a reusable write need not move `max_token`.
        let max_token = Self::max_token(conn, tables, resource).await?;
        Ok(max_token.map(|max_token| RowVersion {
            max_token,
            version: None,
            is_behind: false,
            may_be_lost: false,
        }))
    }

    async fn raise_if_unwritten(
        _: &mut SqliteConnection,
        _: &Tables,
        _: &Resource,
        _: i64,
        _: &str,
    ) -> sqlx::Result<bool> {
        Ok(false)
    }

    // A statement that writes cannot be part of another one here.
    const AT_ONCE: bool = false;

    async fn write_at_once(
        _: &mut SqliteConnection,
        _: &Tables,
        _: Admit<'_>,
        _: Duration,
        _: &mut Statement<Self>,
    ) -> sqlx::Result<Vec<SqliteRow>> {
        Ok(Vec::new())
    }

    async fn write_admitted(
        conn: &mut SqliteConnection,
        statement: &mut Statement<Self>,
    ) -> sqlx::Result<Vec<SqliteRow>> {
        let sql = format!("WITH fence AS (SELECT 1) {}", statement.sql.as_str());
        sqlx::query_with(AssertSqlSafe(sql), statement.arguments.clone())
            .fetch_all(conn)
            .await
    }

    async fn find_partitions(
        conn: &mut SqliteConnection,
        tables: &Tables,
        older_than: Duration,
    ) -> sqlx::Result<u64> {
        const UNKNOWN: &str = "SELECT resource FROM {schema}.fence_resources \
             WHERE partition IS NULL AND unixepoch(updated_at) < unixepoch('subsec') - $1 LIMIT 1000";
        const FIND: &str = "UPDATE {schema}.fence_resources SET partition = $2 WHERE resource = $1";
        let unknown: Vec<String> = sqlx::query_scalar(tables.sql(UNKNOWN))
            .bind(older_than.as_secs_f64())
            .fetch_all(&mut *conn)
            .await?;
        for resource in &unknown {
            sqlx::query(tables.sql(FIND))
                .bind(resource)
                .bind(i16::from(partition_of_name(resource)))
                .execute(&mut *conn)
                .await?;
        }
        Ok(unknown.len() as u64)
    }

    async fn remove_idle(
        conn: &mut SqliteConnection,
        tables: &Tables,
        partition: u8,
        idle: Idle,
    ) -> sqlx::Result<u64> {
        // There is one writer at a time, so nobody inserts a row between the two.
        const REMOVE: &str = "DELETE FROM {schema}.fence_resources WHERE resource IN (\
                 SELECT resource FROM {schema}.fence_resources WHERE partition = $1 \
                     AND unixepoch(updated_at) < unixepoch('subsec') - $2 \
                     AND max(max_token, announced) < $4 \
                 LIMIT $3) \
             RETURNING max(max_token, announced)";
        const RAISE: &str = "UPDATE {schema}.fence_floors SET floor = $2 \
             WHERE partition = $1 AND floor < $2";
        let below = match idle.granted {
            Some(granted) => granted.get() + 1,
            None => {
                let last = Self::handed_out_epoch(conn, tables, partition).await?;
                (last.unwrap_or(0) + 1) * Epoch::SIZE
            }
        };
        let below = idle.live.map_or(below, |live| live.get().min(below));
        let removed: Vec<i64> = sqlx::query_scalar(tables.sql(REMOVE))
            .bind(i16::from(partition))
            .bind(idle.older_than.as_secs_f64())
            .bind(idle.at_most)
            .bind(below)
            .fetch_all(&mut *conn)
            .await?;
        if let Some(dead) = removed.iter().max() {
            sqlx::query(tables.sql(RAISE))
                .bind(i16::from(partition))
                .bind(dead)
                .execute(conn)
                .await?;
        }
        Ok(removed.len() as u64)
    }

    async fn after_failover(
        conn: &mut SqliteConnection,
        tables: &Tables,
        partition: u8,
    ) -> sqlx::Result<()> {
        // That of a partition without epochs may be forgotten, too, where others have some.
        const MOVE_UP: &str = "INSERT INTO {schema}.fence_epochs (partition, epoch) SELECT $1, 500 \
             WHERE EXISTS (SELECT 1 FROM {schema}.fence_epochs WHERE epoch > 0) \
             ON CONFLICT (partition) DO UPDATE SET epoch = min(epoch + 500, 999999) \
             RETURNING epoch * 1000000000 + 999999999";
        const FLOOR: &str =
            "UPDATE {schema}.fence_floors SET floor = max(floor, $2) WHERE partition = $1";
        // A row above it, or shortly below, has seen a token from elsewhere or a forged one, and grants were made
        // above that: not so many in a part that was lost.
        const ROWS: &str = "UPDATE {schema}.fence_resources SET max_token = \
             CASE WHEN max(max_token, announced) <= $2 - 500000 THEN $2 \
                 ELSE min(max(max_token, announced) + 500000, 999999999999999) END \
             WHERE partition = $1";
        let dead: Option<i64> = sqlx::query_scalar(tables.sql(MOVE_UP))
            .bind(i16::from(partition))
            .fetch_optional(&mut *conn)
            .await?;
        let Some(dead) = dead else { return Ok(()) };
        for raise in [FLOOR, ROWS] {
            sqlx::query(tables.sql(raise))
                .bind(i16::from(partition))
                .bind(dead)
                .execute(&mut *conn)
                .await?;
        }
        Ok(())
    }

    statements!(
        lock: "$4 IS NOT NULL",
        share: "",
        admitted_by: ["", "", "", ""],
        and_durably: "",
        history: ["", "", ""]
    );
}

impl States for Sqlite {
    states!(idle_ms: "CAST((unixepoch('subsec') - unixepoch(updated_at, 'subsec')) * 1000 AS INTEGER)");
}

impl Records for Sqlite {
    records!(
        now: "CAST(unixepoch('subsec') * 1000 AS INTEGER)",
        expires_at: "CAST(unixepoch('subsec') * 1000 AS INTEGER) + $4",
        // There is nothing left to wait for: the transaction has the lock of the file.
        claimed: "'', $5, $6",
        skip_locked: "",
    );

    async fn restore_role(_: &mut SqliteConnection, _: &str) -> sqlx::Result<()> {
        // There are no roles.
        Ok(())
    }
}
