//! Detection of a pooler in transaction mode.
//!
//! 1. Without a pooler, a session of Postgres keeps one process from its first statement to its
//!    last, and no other session has that process.
//! 2. Behind a pooler in transaction mode, a session may get another process for each transaction.
//!    To detect this, one connection reads its process number during and after a transaction of
//!    another connection.

use sqlx::{Connection, PgConnection, Row, postgres::PgConnectOptions};

/// The error for a pooler that is not configured.
pub const REFUSED: &str = "a pooler in transaction mode is in front of it: set --transaction-pooling, and set --listen-url \
                           (TOWER_FENCE_LISTEN_URL) to a URL that leads directly to Postgres";

/// Reads the process of a session and the start time of its server, because two servers may use the
/// same process number.
const PROCESS: &str =
    "SELECT concat(pg_catalog.pg_backend_pid(), ' ', pg_catalog.pg_postmaster_start_time())";

/// Returns whether a pooler in transaction mode is in front of this database.
pub async fn is_between(options: &PgConnectOptions) -> sqlx::Result<bool> {
    let mut first = PgConnection::connect_with(options).await?;
    let mut second = PgConnection::connect_with(options).await?;
    let found = hands_servers_on(&mut first, &mut second).await?;
    _ = first.close().await;
    _ = second.close().await;
    Ok(found)
}

async fn hands_servers_on(
    first: &mut PgConnection,
    second: &mut PgConnection,
) -> sqlx::Result<bool> {
    let own = process(first).await?;
    sqlx::raw_sql("BEGIN").execute(&mut *second).await?;
    let other = process(second).await?;
    // If the processes are equal, the first connection is not used again, because the open
    // transaction of the second connection may occupy the only process of the pooler.
    if own == other || process(first).await? != own {
        return Ok(true);
    }
    sqlx::raw_sql("ROLLBACK").execute(&mut *second).await?;
    // A pooler that rotates its processes uses another process for each statement.
    for _ in 0..2 {
        if process(first).await? != own {
            return Ok(true);
        }
    }
    Ok(process(second).await? != other)
}

async fn process(conn: &mut PgConnection) -> sqlx::Result<String> {
    // The query is sent as text, because a prepared statement may be unknown to the next process.
    let row = sqlx::raw_sql(PROCESS).fetch_one(conn).await?;
    row.try_get(0)
}
