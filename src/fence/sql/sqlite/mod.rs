//! Implementation of the fence in SQLite, for a single machine and for evaluation.
//!
//! SQLite allows one writer at a time for the whole file, so the lock of the file serves as the row
//! lock. If a process freezes while it holds the lock, it keeps the lock, because there is no
//! server that could end its transaction.

mod admit;
mod keys;
mod tables;

use sqlx::{
    AssertSqlSafe, Connection, Executor, SqlSafeStr, Sqlite, SqliteConnection,
    error::DatabaseError,
    migrate::MigrateError,
    sqlite::{
        SqliteConnectOptions, SqlitePoolOptions, SqliteSynchronous, SqliteTransactionManager,
    },
};

use crate::fence::{
    settings::{Limits, millis},
    sql::{
        Begin, Committed, Names, On, Setup, Topology, TransactionManager, Transactions, migrations,
        savepoint,
    },
};

impl Transactions for Sqlite {
    fn address(options: &SqliteConnectOptions) -> String {
        options.get_filename().display().to_string()
    }

    const HAS_SERVER: bool = false;

    async fn begin(conn: &mut SqliteConnection, limits: Limits, begin: Begin) -> sqlx::Result<()> {
        // IMMEDIATE takes the write lock at the beginning. A deferred transaction that reads first
        // can fail later with SQLITE_BUSY, without waiting. Before COMMIT, the fence checks that
        // the savepoint still exists.
        let mode = match begin {
            Begin::ToRead => "DEFERRED",
            Begin::WithLimits | Begin::ForAdmission => "IMMEDIATE",
        };
        let lock_ms = millis(limits.lock_timeout);
        let sql = format!(
            "PRAGMA busy_timeout = {lock_ms}; BEGIN {mode}; SAVEPOINT {}",
            savepoint()
        );
        let sql = AssertSqlSafe(sql).into_sql_str();
        match SqliteTransactionManager::begin(conn, Some(sql.clone())).await {
            // An SQL statement of the application has begun a transaction and left it open.
            Err(error) if error.to_string().contains("within a transaction") => {
                conn.execute("ROLLBACK").await?;
                SqliteTransactionManager::begin(conn, Some(sql)).await
            }
            // SQLITE_READONLY: a handler may have set `query_only`, which outlasts its transaction.
            Err(error) if is_read_only(&error) => {
                conn.execute("PRAGMA query_only = 0").await?;
                SqliteTransactionManager::begin(conn, Some(sql)).await
            }
            begun => begun,
        }
    }

    async fn read_busy_timeout(conn: &mut SqliteConnection) -> sqlx::Result<Option<i64>> {
        let busy_timeout = sqlx::query_scalar("PRAGMA busy_timeout").fetch_one(conn);
        busy_timeout.await.map(Some)
    }

    async fn restore_busy_timeout(conn: &mut SqliteConnection, ms: i64) -> sqlx::Result<()> {
        let restore = format!("PRAGMA busy_timeout = {ms}");
        conn.execute(AssertSqlSafe(restore)).await?;
        Ok(())
    }

    async fn leave_transaction(conn: &mut SqliteConnection) -> sqlx::Result<()> {
        // On SQLite, each statement of the fence runs in a transaction, and `begin` ends a
        // transaction that was left open.
        conn.ping().await
    }

    async fn finish_rollback(conn: &mut SqliteConnection, _: bool) -> sqlx::Result<()> {
        // sqlx's worker rolls back a BEGIN whose future was dropped.
        conn.ping().await
    }

    async fn commit(conn: &mut SqliteConnection, _: bool) -> sqlx::Result<Committed> {
        // RELEASE fails if the transaction has already ended, either by a statement (`INSERT OR
        // ROLLBACK`, a full disk) or by an explicit COMMIT or ROLLBACK.
        let release = format!("RELEASE {}", savepoint());
        conn.execute(AssertSqlSafe(release)).await?;
        SqliteTransactionManager::commit(conn).await?;
        Ok(Committed::Clean)
    }
}

impl Setup for Sqlite {
    fn own_pool(
        pool: SqlitePoolOptions,
        options: SqliteConnectOptions,
    ) -> (SqlitePoolOptions, SqliteConnectOptions) {
        // The options have no getters for these settings, and `to_url_lossy` panics for some names.
        let settings = format!("{options:?}");
        // An in-memory database is lost when its last connection closes.
        let pool = match settings.contains(":memory:") || settings.contains("in_memory: true") {
            true => pool
                .max_connections(1)
                .idle_timeout(None)
                .max_lifetime(None),
            false => pool,
        };
        // In the journal mode DELETE, FULL does not sync the folder after the journal is deleted,
        // so a power loss can undo a confirmed COMMIT. In WAL mode, EXTRA is the same as FULL.
        let options = match settings.contains("\"synchronous\": None") {
            true => options.synchronous(SqliteSynchronous::Extra),
            false => options,
        };
        (pool, options)
    }

    fn prefix(schema: Option<&str>) -> String {
        // The prefix selects the connection's own file, not an attached file or a temporary table.
        format!("{}.tower_fence_", schema.unwrap_or("main"))
    }

    async fn check(On { conn, names }: On<'_, Self>) -> sqlx::Result<bool> {
        check_encoding(conn).await?;
        names.mark_checked(Topology::SingleServer);
        Ok(true)
    }

    async fn migrate(On { conn, names }: On<'_, Self>, _: bool) -> Result<(), MigrateError> {
        check_encoding(conn).await?;
        let table = names.apply("tower_fence.migrations");
        let (file, table) = table.split_once('.').unwrap_or(("main", &table));
        let find_history = format!("SELECT 1 FROM {file}.sqlite_master WHERE name = '{table}'");
        let mut repeated = false;
        loop {
            let row = conn
                .fetch_optional(AssertSqlSafe(find_history.clone()))
                .await?;
            match migrations::migrate(conn, row.is_some(), names, migrations::SQLITE).await {
                // sqlx does not lock an SQLite database for migrations. If another process has
                // migrated at the same time, the tables are now current.
                Err(MigrateError::ExecuteMigration(..) | MigrateError::Execute(_)) if !repeated => {
                    repeated = true;
                }
                migrated => return migrated.map(drop),
            }
        }
    }

    fn schema_sql(names: &Names, _: bool) -> String {
        const HISTORY: &str = "    version BIGINT PRIMARY KEY,
    description TEXT NOT NULL,
    installed_on TIMESTAMP NOT NULL DEFAULT CURRENT_TIMESTAMP,
    success BOOLEAN NOT NULL,
    checksum BLOB NOT NULL,
    execution_time BIGINT NOT NULL";
        migrations::script(names, migrations::SQLITE, HISTORY, ["X'", "'"], "")
    }
}

fn is_read_only(error: &sqlx::Error) -> bool {
    let code = error.as_database_error().and_then(DatabaseError::code);
    code.as_deref() == Some("8")
}

/// Checks that the file stores text as UTF-8. In UTF-16, SQLite stores U+FFFE and U+FFFF as U+FFFD,
/// so different names would be one resource. Attached files always have the same encoding.
async fn check_encoding(conn: &mut SqliteConnection) -> sqlx::Result<()> {
    let encoding: String = sqlx::query_scalar("PRAGMA encoding")
        .fetch_one(conn)
        .await?;
    if encoding != "UTF-8" {
        let refused = format!(
            "tower-fence needs a database file with the encoding UTF-8, not {encoding}: copy the tables of the \
             application into another file, with `sqlite3 OLD .dump | sqlite3 NEW`"
        );
        return Err(sqlx::Error::Configuration(refused.into()));
    }
    Ok(())
}
