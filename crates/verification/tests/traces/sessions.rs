//! Functions that end sessions of a Postgres database, or wait for them.

use crate::support::{
    database::{Fresh, TestDatabase, WAITING_FOR_LOCK},
    eventually,
};

/// Returns the process id of the session.
pub const SESSION: &str = "SELECT pg_backend_pid()::bigint";

pub const IN_TRANSACTION: &str = "state <> 'idle'";

pub const WAITING: &str = "wait_event_type = 'Lock'";

/// Counts the other sessions of this database.
const OTHERS: &str = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() AND";

/// Terminates the sessions that satisfy a condition, and waits until they have ended.
pub async fn end_sessions<DB: TestDatabase>(db: &Fresh<DB>, which: &str) {
    let mut conn = db.pool.acquire().await.unwrap();
    let ended = OTHERS.replace("count(*)", "count(pg_terminate_backend(pid))");
    let ended = DB::number(&mut conn, &format!("{ended} {which}")).await;
    assert!(ended.unwrap() > 0, "no session satisfies the condition");
    eventually!(
        "the sessions have ended",
        DB::number(&mut conn, &format!("{OTHERS} {which}"))
            .await
            .unwrap()
            == 0
    );
}

/// Waits until this number of sessions waits for a lock.
pub async fn sessions_wait<DB: TestDatabase>(db: &Fresh<DB>, count: usize) {
    let count = i64::try_from(count).unwrap();
    eventually!(
        "the requests wait for rows",
        db.number(WAITING_FOR_LOCK).await == count
    );
}
