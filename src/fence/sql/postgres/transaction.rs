//! Beginning and end of a transaction in Postgres.

use std::{
    sync::{
        LazyLock,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use futures_util::StreamExt;
use sqlx::{
    AssertSqlSafe, Column, Either, Executor, PgConnection, Postgres, Row, SqlSafeStr,
    error::DatabaseError,
    postgres::{PgConnectOptions, PgRow, PgTransactionManager},
};

use crate::fence::{
    fault::ends_session,
    settings::{Limits, millis},
    sql::{Begin, Committed, TransactionId, TransactionManager, Transactions, savepoint},
};

impl Transactions for Postgres {
    fn address(options: &PgConnectOptions) -> String {
        match options.get_socket() {
            Some(socket) => socket.display().to_string(),
            None => format!("{}:{}", options.get_host(), options.get_port()),
        }
    }

    const HAS_SERVER: bool = true;

    async fn begin(conn: &mut PgConnection, limits: Limits, begin: Begin) -> sqlx::Result<()> {
        let sql = match begin {
            Begin::WithLimits | Begin::ToRead => {
                let begin = begin_with_limits(conn.server_version_num(), limits);
                AssertSqlSafe(format!("{LEAVE}; {begin}")).into_sql_str()
            }
            Begin::ForAdmission => begin_for_admission(limits.transaction_pooling).into_sql_str(),
        };
        match PgTransactionManager::begin(conn, Some(sql.clone())).await {
            Err(error) if is_aborted(&error) => {
                conn.execute("ROLLBACK").await?;
                PgTransactionManager::begin(conn, Some(sql)).await
            }
            begun => begun,
        }
    }

    async fn leave_transaction(conn: &mut PgConnection) -> sqlx::Result<()> {
        // If the application has leaked a transaction (`mem::forget`), sqlx still counts it.
        for _ in 0..PgTransactionManager::get_transaction_depth(conn) {
            PgTransactionManager::start_rollback(conn);
        }
        match execute_marked(conn, LEAVE, CHECK_CLIENT).await {
            Err(error) if is_aborted(&error) => {
                conn.execute("ROLLBACK").await?;
                execute_marked(conn, LEAVE, CHECK_CLIENT).await
            }
            outcome => outcome,
        }
    }

    async fn finish_rollback(conn: &mut PgConnection, beginning: bool) -> sqlx::Result<()> {
        // BEGIN may have been sent although sqlx has not counted it. If the connection returned to
        // the pool now, the transaction would stay open.
        let sql = if beginning { "ROLLBACK" } else { "" };
        execute_marked(conn, sql, "NULL").await
    }

    async fn commit(conn: &mut PgConnection, begin_next: bool) -> sqlx::Result<Committed> {
        // Postgres responds to the COMMIT of an aborted transaction with the tag ROLLBACK, which
        // sqlx treats as a success. The statements before COMMIT make the whole message fail
        // instead: SHOW in an aborted transaction, and RELEASE outside of the transaction with this
        // savepoint. The first three responses after the mark confirm SHOW, RELEASE and COMMIT.
        let (mut is_marked, mut confirmed) = (false, 0);
        let mut answers = conn.fetch_many(commit(begin_next));
        while let Some(answer) = answers.next().await {
            match answer {
                Ok(Either::Right(row)) => is_marked |= is_mark(&row),
                Ok(Either::Left(_)) => confirmed += u32::from(is_marked),
                // If a cancellation arrives during COMMIT, the server may report it only after
                // COMMIT.
                Err(_) if confirmed >= 3 => return Ok(Committed::Broken),
                Err(error) if is_marked || ends_session(&error) => return Err(error),
                Err(error) => {
                    drop(answers);
                    return Err(error_of_commit(conn, error).await);
                }
            }
        }
        drop(answers);
        if confirmed < 3 {
            return Err(out_of_step());
        }
        if !begin_next {
            PgTransactionManager::start_rollback(conn);
            return Ok(Committed::Clean);
        }
        Ok(Committed::Begun)
    }

    async fn restore_role(conn: &mut PgConnection, role: &str) -> sqlx::Result<()> {
        // This must be a separate statement, because Postgres checks the privileges of a statement
        // before the statement runs.
        let role = match role {
            "none" => "NONE".to_owned(),
            role => format!("\"{}\"", role.replace('"', "\"\"")),
        };
        // The deferred constraints of the application are checked in the role of the hook, as they
        // are at COMMIT without a key.
        let sql = format!("SET CONSTRAINTS ALL IMMEDIATE; SET LOCAL ROLE {role}");
        conn.execute(AssertSqlSafe(sql)).await?;
        Ok(())
    }

    async fn terminate(conn: &mut PgConnection, id: TransactionId) -> sqlx::Result<()> {
        // Do not terminate a session whose COMMIT waits for a synchronous standby. The writes would
        // become visible on this server, although a failover could lose them. The statement is sent
        // as one message, because a pooler may prepare a statement on one server connection and
        // execute it on another.
        let terminate = format!(
            "SELECT pg_terminate_backend(a.pid) FROM pg_stat_activity AS a \
             WHERE a.backend_xid = '{}'::xid8::xid AND a.wait_event IS DISTINCT FROM 'SyncRep'",
            id.0
        );
        sqlx::raw_sql(AssertSqlSafe(terminate))
            .execute(conn)
            .await?;
        Ok(())
    }
}

/// Time by which the server's timeouts for an idle or a long transaction exceed those of the
/// process. When such a timeout passes, the server also closes the connection, which is intended
/// only for frozen processes, not for slow handlers.
const MARGIN: Duration = Duration::from_secs(1);

/// Statements that end a transaction that was left open on the connection. Otherwise, BEGIN would
/// only cause a warning, and the statements of the fence would run in the open transaction, with
/// its `now()` and its settings. `BEGIN` prevents the warning of a `ROLLBACK` outside of any
/// transaction.
const LEAVE: &str = "BEGIN; ROLLBACK";

/// Expression that sets the interval at which the server checks, while a statement runs, whether
/// the client is still connected. A statement that commits by itself cannot set this interval.
const CHECK_CLIENT: &str = "CASE WHEN current_setting('client_connection_check_interval') = '0' \
     THEN set_config('client_connection_check_interval', '1s', false) END";

/// Executes statements in one message, and evaluates an expression after them. Returns an error if
/// the response belongs to an earlier message.
///
/// sqlx assigns responses to statements by counting them, and it miscounts after a COPY that failed
/// at its start or was dropped. From then on, each statement on the connection receives the
/// response to an earlier one. A response with the mark of its message belongs to that message.
async fn execute_marked(
    conn: &mut PgConnection,
    statements: &str,
    expression: &str,
) -> sqlx::Result<()> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let mark = format!("{}_{}", savepoint(), NEXT.fetch_add(1, Relaxed));
    let sql = AssertSqlSafe(format!("{statements}; SELECT '{mark}', {expression}"));
    let rows = conn.fetch_all(sql).await?;
    let is_marked = rows.last().is_some_and(|row| shows(row, &mark));
    is_marked.then_some(()).ok_or_else(out_of_step)
}

/// Returns whether the row begins with this mark.
fn shows(row: &PgRow, mark: &str) -> bool {
    row.try_get(0).is_ok_and(|found: &str| found == mark)
}

/// Statement that marks the message of COMMIT. SHOW costs the server less than SELECT, which it
/// plans.
///
/// The mark is the name of the column, which is the same in each COMMIT. The response to an earlier
/// COMMIT cannot be mistaken for that of a later one, because a connection on which a COMMIT was
/// not answered is closed or passes [`execute_marked`]. An earlier statement of a handler would
/// have to show this setting, which has no use in a handler.
const MARK: &str = "SHOW client_connection_check_interval";

fn is_mark(row: &PgRow) -> bool {
    let first = row.columns().first();
    first.is_some_and(|column| column.name() == "client_connection_check_interval")
}

/// Returns the error with which the message of COMMIT failed. `error` is the last response so far.
/// If it belongs to an earlier statement, the response to COMMIT is one of the next responses, and
/// the server may have executed the COMMIT.
async fn error_of_commit(conn: &mut PgConnection, mut error: sqlx::Error) -> sqlx::Error {
    let mark = savepoint();
    // CHAIN begins a new transaction, because sqlx still counts one, and rolls it back later.
    let sql = AssertSqlSafe(format!("ROLLBACK AND CHAIN; SELECT '{mark}'")).into_sql_str();
    for _ in 0..3 {
        error = match conn.fetch_all(sql.clone()).await {
            // The mark is in the response that follows the response to COMMIT.
            Ok(rows) if rows.last().is_some_and(|row| shows(row, mark)) => return error,
            Ok(_) => out_of_step(),
            Err(error) => error,
        };
    }
    out_of_step()
}

fn out_of_step() -> sqlx::Error {
    sqlx::Error::Protocol("the response belongs to an earlier statement".into())
}

/// Returns whether the error shows that an aborted transaction was left open.
fn is_aborted(error: &sqlx::Error) -> bool {
    let code = error.as_database_error().and_then(DatabaseError::code);
    // in_failed_sql_transaction
    code.as_deref() == Some("25P02")
}

/// First statements of a transaction.
///
/// While a statement runs, the server checks at `client_connection_check_interval` whether the
/// client is still connected. The server reads this setting before it executes a statement.
/// Therefore, it must be set before the statement that admits a token.
const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED; \
     SET LOCAL client_connection_check_interval = 1000";

/// Timeouts of a transaction as settings of the server, in milliseconds.
pub(super) struct Settings {
    pub(super) lock_ms: String,
    pub(super) statement_ms: String,
    pub(super) idle_ms: String,
    /// The timeout of the whole transaction, even if the transaction is never idle. Empty before
    /// Postgres 17, which introduced this setting.
    pub(super) transaction_ms: String,
}

impl Settings {
    /// Returns the settings for these timeouts on this version of the server.
    pub(super) fn of(limits: Limits, version: Option<u32>) -> Self {
        // A statement may first wait for a lock. If it reserves a key and admits a token, it may
        // wait for two locks, one after the other.
        let waits = limits
            .lock_timeout
            .saturating_add(limits.key_timeout.unwrap_or_default());
        let whole = || millis(limits.transaction_timeout().saturating_add(MARGIN));
        Self {
            lock_ms: millis(limits.lock_timeout),
            statement_ms: millis(waits.saturating_add(limits.work_timeout())),
            idle_ms: millis(limits.hold_timeout.saturating_add(MARGIN)),
            transaction_ms: (version >= Some(17_00_00)).then(whole).unwrap_or_default(),
        }
    }
}

/// Returns an SQL expression that sets the timeouts of the transaction, and that is never NULL. Its
/// placeholders have the order of the fields of [`Settings`].
///
/// If the role or the database has a `transaction_timeout`, its timer has started with the
/// transaction. A new value changes this timer only after 0 has stopped it.
macro_rules! set_timeouts {
    ($lock:literal, $statement:literal, $idle:literal, $transaction:literal) => {
        concat!(
            "pg_catalog.set_config('lock_timeout', ",
            $lock,
            ", true) || pg_catalog.set_config('statement_timeout', ",
            $statement,
            ", true) || pg_catalog.set_config('idle_in_transaction_session_timeout', ",
            $idle,
            ", true) || CASE WHEN ",
            $transaction,
            " <> '' THEN pg_catalog.set_config('transaction_timeout', '0', true) || \
             pg_catalog.set_config('transaction_timeout', ",
            $transaction,
            ", true) ELSE '' END"
        )
    };
}

pub(super) use set_timeouts;

/// Returns the statements that begin a transaction whose first statement is an admission, which
/// sets the timeouts.
fn begin_for_admission(transaction_pooling: bool) -> &'static str {
    static BEGIN_BY_POOLING: LazyLock<[String; 2]> = LazyLock::new(|| {
        ["", DEALLOCATE].map(|deallocate| {
            let savepoint = savepoint();
            format!("{LEAVE}; {BEGIN}{deallocate}; SAVEPOINT {savepoint}")
        })
    });
    &BEGIN_BY_POOLING[usize::from(transaction_pooling)]
}

/// Returns the statements that commit a transaction.
///
/// The same message begins a further transaction, so that sqlx's count of nested transactions stays
/// correct. If the next write can use that transaction, it saves a round trip. Otherwise the
/// ROLLBACK of that transaction is sent together with the pool's own test of the connection.
fn commit(begin_next: bool) -> &'static str {
    static COMMIT_BY_NEXT: LazyLock<[String; 2]> = LazyLock::new(|| {
        let savepoint = savepoint();
        [
            " AND CHAIN".to_owned(),
            format!("; {BEGIN}; SAVEPOINT {savepoint}"),
        ]
        .map(|next| format!("{MARK}; RELEASE SAVEPOINT {savepoint}; COMMIT{next}"))
    });
    &COMMIT_BY_NEXT[usize::from(begin_next)]
}

/// Statement that removes all prepared statements of the session.
///
/// sqlx names the statements of each connection with numbers from 1. Behind a pooler, another
/// client may have left statements with the same names in the session.
const DEALLOCATE: &str = "; DEALLOCATE ALL";

/// Returns the statements that begin a transaction and set its timeouts, for this version of the
/// server.
fn begin_with_limits(version: Option<u32>, limits: Limits) -> String {
    let lock_timeout = limits.key_timeout.unwrap_or(limits.lock_timeout);
    let settings = Settings::of(limits, version);
    let mut sql = format!(
        "{BEGIN}; \
         SET LOCAL lock_timeout = {}; \
         SET LOCAL statement_timeout = {}; \
         SET LOCAL idle_in_transaction_session_timeout = {}",
        millis(lock_timeout),
        settings.statement_ms,
        settings.idle_ms,
    );
    if !settings.transaction_ms.is_empty() {
        sql.push_str("; SET LOCAL transaction_timeout = 0; SET LOCAL transaction_timeout = ");
        sql.push_str(&settings.transaction_ms);
    }
    if limits.transaction_pooling {
        sql.push_str(DEALLOCATE);
    }
    sql.push_str("; SAVEPOINT ");
    sql.push_str(savepoint());
    sql
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn server_timeout_exceeds_the_transaction_limit_by_one_second() {
        let limits = Limits {
            key_timeout: Some(Duration::from_secs(20)),
            ..Limits::default()
        };
        let whole_ms = limits.transaction_timeout().as_millis() + 1_000;
        let timeout = |version| {
            let sql = begin_with_limits(version, limits);
            let set = sql.rsplit_once("transaction_timeout = ")?.1;
            set.split(';').next()?.parse::<u128>().ok()
        };
        assert_eq!(timeout(Some(17_00_04)), Some(whole_ms));
        assert_eq!(timeout(Some(16_00_09)), None);
        assert_eq!(timeout(None), None);
    }
}
