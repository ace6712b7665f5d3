//! Ending of a transaction that the application has left open on a connection of the pool, and that
//! sqlx does not count.
//!
//! Either the `begin` of the transaction was dropped after it was sent, or an SQL statement began
//! the transaction. In such a transaction, a statement that should commit by itself would not be
//! committed.

use sqlx::{Connection, Executor, PgConnection, error::DatabaseError};

/// Statement with which [`leave`] detects an open transaction. The statement also sets the interval
/// at which the server checks, while a statement runs, whether the client is still connected. A
/// statement that commits by itself cannot set this interval for itself.
const TEST: &str = "SELECT set_config('client_connection_check_interval', '1s', false) \
                    WHERE current_setting('client_connection_check_interval') = '0'";

/// Ends a transaction that was left open, if there is one.
pub(super) async fn leave(conn: &mut PgConnection) -> sqlx::Result<()> {
    // `TEST` does not begin a transaction. It is passed to `begin_with` because sqlx reports an
    // open transaction only in `begin_with`.
    let failed = match conn.begin_with(TEST).await {
        Err(sqlx::Error::BeginFailed) => return Ok(()),
        Ok(abandoned) => abandoned.rollback().await.err(),
        Err(error) => Some(error),
    };
    match failed {
        Some(error) if is_aborted(&error) => end(conn).await?,
        Some(error) => return Err(error),
        None => {}
    }
    // The rollback may have undone the interval that `TEST` sets, so run `TEST` again.
    conn.execute(TEST).await?;
    Ok(())
}

/// Returns whether the error shows that an aborted transaction was left open.
pub(super) fn is_aborted(error: &sqlx::Error) -> bool {
    let code = error.as_database_error().and_then(DatabaseError::code);
    // in_failed_sql_transaction
    code.as_deref() == Some("25P02")
}

/// Ends a transaction that sqlx does not count.
pub(super) async fn end(conn: &mut PgConnection) -> sqlx::Result<()> {
    conn.execute("ROLLBACK").await?;
    Ok(())
}
