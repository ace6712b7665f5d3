//! The fence in Postgres.

use std::time::Duration;

use futures_util::StreamExt;
use sqlx::{
    AssertSqlSafe, Either, Executor, PgConnection, Postgres, SqlSafeStr,
    migrate::MigrateError,
    postgres::{PgDatabaseError, PgSeverity, PgTransactionManager},
};
use sqlx_core::transaction::TransactionManager;

use super::{
    database::{Admission, Backend, Committed, Fault, TransactionLimits, migrator, statements},
    records::{Record, RecordId, Records, StoredResponse, records},
};
use crate::token::{Resource, Token};

/// A setting that lives as long as the transaction in which it was made. At COMMIT its absence
/// shows that the handler ended that transaction by hand.
const MARK: &str = "tower_fence.admitted";

/// Postgres answers the COMMIT of an aborted transaction with the tag ROLLBACK, which sqlx takes
/// for success. The SELECT makes the whole message fail instead, in an aborted transaction as
/// well as outside the transaction that was marked. The BEGIN opens an empty transaction, which
/// keeps sqlx's count of nested transactions true without another round trip: the ROLLBACK that
/// closes it travels with the pool's own check of the connection.
const PROVE_AND_COMMIT: &str = "\
    SELECT coalesce(nullif(current_setting('tower_fence.admitted', true), ''), \
                    'the transaction was ended by hand')::boolean; \
    COMMIT; BEGIN";

impl Backend for Postgres {
    async fn begin(conn: &mut PgConnection, limits: TransactionLimits) -> sqlx::Result<()> {
        let ms = |limit: Duration| limit.as_millis().clamp(1, i32::MAX as u128);
        let first_wait = limits.key_wait.unwrap_or(limits.lock_wait);
        let (lock_ms, hold_ms) = (ms(first_wait), ms(limits.hold));
        // A statement may wait for a lock first, and so may the claim of a key, and the admission.
        let waits = limits
            .lock_wait
            .saturating_add(limits.key_wait.unwrap_or_default());
        let whole_ms = ms(waits.saturating_add(limits.hold));
        let mut sql = format!(
            "BEGIN ISOLATION LEVEL READ COMMITTED; \
             SET LOCAL lock_timeout = {lock_ms}; \
             SET LOCAL statement_timeout = {whole_ms}; \
             SET LOCAL idle_in_transaction_session_timeout = {hold_ms}; \
             SET LOCAL {MARK} = 'on'"
        );
        // From Postgres 17 on, the server also bounds a transaction that is never idle.
        if conn.server_version_num() >= Some(17_00_00) {
            sql.push_str(&format!("; SET LOCAL transaction_timeout = {whole_ms}"));
        }
        PgTransactionManager::begin(conn, Some(AssertSqlSafe(sql).into_sql_str())).await
    }

    async fn abandon_begin(conn: &mut PgConnection) -> sqlx::Result<()> {
        // BEGIN may have been sent without sqlx having counted it. Given back to the pool as it
        // is, the connection would stay in that transaction.
        conn.execute("ROLLBACK").await?;
        Ok(())
    }

    async fn commit(conn: &mut PgConnection) -> sqlx::Result<Committed> {
        let mut confirmed = 0;
        let mut answers = conn.fetch_many(PROVE_AND_COMMIT);
        while let Some(answer) = answers.next().await {
            match answer {
                Ok(Either::Left(_)) => confirmed += 1,
                Ok(Either::Right(_)) => {}
                // A cancellation that arrives during COMMIT is only noticed at BEGIN.
                Err(_) if confirmed >= 2 => return Ok(Committed::Broken),
                Err(error) => return Err(error),
            }
        }
        drop(answers);
        PgTransactionManager::start_rollback(conn);
        Ok(Committed::Clean)
    }

    fn fault(error: &sqlx::Error) -> Fault {
        let sqlx::Error::Database(error) = error else {
            return Fault::Lost;
        };
        let Some(error) = error.try_downcast_ref::<PgDatabaseError>() else {
            return Fault::Lost;
        };
        match error.code() {
            // lock_not_available, deadlock_detected, serialization_failure, query_canceled (by
            // statement_timeout)
            "55P03" | "40P01" | "40001" | "57014" => Fault::Contention,
            // idle_in_transaction_session_timeout, transaction_timeout: fatal, but only ever
            // raised before the commit.
            "25P03" | "25P04" => Fault::Refused,
            _ if matches!(error.severity(), PgSeverity::Fatal | PgSeverity::Panic) => Fault::Lost,
            _ => Fault::Refused,
        }
    }

    async fn terminate(conn: &mut PgConnection, server_process: i32) -> sqlx::Result<()> {
        // One message, which needs no transaction where a pooler stands in between.
        let sql = format!("SELECT pg_terminate_backend({server_process})");
        conn.execute(AssertSqlSafe(sql)).await?;
        Ok(())
    }

    async fn migrate(pool: &sqlx::PgPool) -> Result<(), MigrateError> {
        migrator([
            (
                1,
                "fence",
                include_str!("../../migrations/postgres/0001_fence.sql"),
            ),
            (
                2,
                "idempotency",
                include_str!("../../migrations/postgres/0002_idempotency.sql"),
            ),
        ])
        .run(pool)
        .await
    }

    statements!(server_process: "pg_backend_pid()");
}

impl Records for Postgres {
    // The wait for the key was the first of the transaction, and may have a limit of its own. The
    // statement that ends it sets the limit of all others, which saves a round trip.
    records!(
        now: "now()",
        expires_at: "now() + $4 * interval '1 millisecond'",
        claimed: "pg_backend_pid(), set_config('lock_timeout', $5, true)",
        skip_locked: "FOR UPDATE SKIP LOCKED",
    );
}
