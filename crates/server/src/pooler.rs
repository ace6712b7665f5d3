//! A pooler in front of the database that gives each transaction a server of its own.
//!
//! 1. A session of Postgres has one process from its first statement to its last, and no other session has it. Where that
//!    is not so, a pooler is in between.
//! 2. Such a pooler hands a server on after each transaction, so one connection asks inside and outside of the
//!    transactions of another one.

use sqlx::{Connection, PgConnection, Row, postgres::PgConnectOptions};

/// What to do where one is found, and was not named.
pub const REFUSED: &str = "a pooler in transaction mode stands in front of it: give --transaction-pooling, and in --listen-url \
                           (TOWER_FENCE_LISTEN_URL) a URL that leads to the Postgres itself";

/// The process of a session, and since when its server runs: two servers may use one number.
const PROCESS: &str =
    "SELECT concat(pg_catalog.pg_backend_pid(), ' ', pg_catalog.pg_postmaster_start_time())";

/// Whether there is one on the way to this database.
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
    // A pooler with a single server has none left for the first connection now.
    if own == other || process(first).await? != own {
        return Ok(true);
    }
    sqlx::raw_sql("ROLLBACK").execute(&mut *second).await?;
    // A pooler that takes its servers in turn takes another one for each statement.
    for _ in 0..2 {
        if process(first).await? != own {
            return Ok(true);
        }
    }
    Ok(process(second).await? != other)
}

async fn process(conn: &mut PgConnection) -> sqlx::Result<String> {
    // As text: a prepared statement may be unknown to the next server.
    let row = sqlx::raw_sql(PROCESS).fetch_one(conn).await?;
    row.try_get(0)
}
