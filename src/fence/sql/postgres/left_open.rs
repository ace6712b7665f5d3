//! A connection of the pool that the application has left in a transaction of which sqlx knows nothing: one whose
//! `begin` was dropped after it was sent, or that was begun by hand. What commits by itself would not commit there.

use sqlx::{Connection, Executor, PgConnection, error::DatabaseError};

/// What is sent to find out. A statement that commits by itself cannot set this for itself: the server
/// then notices, while the statement runs, that its client has disconnected.
const TEST: &str = "SELECT set_config('client_connection_check_interval', '1s', false) \
                    WHERE current_setting('client_connection_check_interval') = '0'";

/// Ends such a transaction, if there is one.
pub(super) async fn leave(conn: &mut PgConnection) -> sqlx::Result<()> {
    // This begins nothing. But sqlx tells only a caller that has asked it to begin a transaction whether one is open.
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

/// Whether a statement that comes before all others has met a transaction in which others were, or have failed.
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
