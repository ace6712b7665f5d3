//! Ends a transaction that the application has left open on a connection of the pool, and of which
//! sqlx does not know.
//!
//! Either its `begin` was dropped after it was sent, or it was begun by an SQL statement. A
//! statement that is to commit by itself would not commit in it.

use sqlx::{Connection, Executor, PgConnection, error::DatabaseError};

/// The statement that detects such a transaction. It also sets the interval at which the server
/// checks, while a statement runs, whether its client is still connected: a statement that commits
/// by itself cannot set this for itself.
const TEST: &str = "SELECT set_config('client_connection_check_interval', '1s', false) \
                    WHERE current_setting('client_connection_check_interval') = '0'";

/// Ends such a transaction, if there is one.
pub(super) async fn leave(conn: &mut PgConnection) -> sqlx::Result<()> {
    // This begins no transaction. But sqlx reports whether one is open only to a caller that asks
    // it to begin one.
    let begun = match conn.begin_with(TEST).await {
        Err(sqlx::Error::BeginFailed) => return Ok(()),
        Ok(abandoned) => return abandoned.rollback().await,
        Err(error) => error,
    };
    match is_left_open(&begun) {
        true => end(conn).await,
        false => Err(begun),
    }
}

/// Returns whether a statement that must be the first of its transaction ran in a transaction with
/// earlier statements or in a failed one.
pub(super) fn is_left_open(error: &sqlx::Error) -> bool {
    let code = error.as_database_error().and_then(DatabaseError::code);
    // active_sql_transaction, in_failed_sql_transaction
    matches!(code.as_deref(), Some("25001" | "25P02"))
}

/// Ends a transaction that sqlx does not count.
pub(super) async fn end(conn: &mut PgConnection) -> sqlx::Result<()> {
    conn.execute("ROLLBACK").await?;
    Ok(())
}
