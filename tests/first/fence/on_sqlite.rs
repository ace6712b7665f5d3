//! Properties of a fence that follow from SQLite's file: its durability, its locks, and concurrent
//! migrations.

use std::{fs, pin::pin, time::Duration};

use sqlx::{
    Connection, Sqlite, SqliteConnection, SqlitePool,
    sqlite::{SqliteConnectOptions, SqlitePoolOptions, SqliteSynchronous},
};
use tokio::time::{sleep, timeout};
use tower_fence::{AdmitError, CommitError, Fence, TokenUse};

use crate::support::{
    database::{Fresh, TestDatabase},
    eventually,
    fence::{begin, insert, resource, sku, token, write},
};

/// Time for which another connection can be expected to wait.
const MOMENT: Duration = Duration::from_millis(50);

/// Returns a database in SQLite's default journal mode.
async fn with_rollback_journal() -> Fresh<Sqlite> {
    // The mode cannot be changed while other connections are open.
    let db = Sqlite::fresh(1).await;
    db.execute("PRAGMA journal_mode = DELETE").await;
    db
}

#[tokio::test]
async fn commits_of_an_own_pool_survive_a_power_loss() {
    let db = Sqlite::fresh(1).await;
    let synchronous = async |fence: Fence<Sqlite>| -> i64 {
        let read = sqlx::query_scalar("PRAGMA synchronous").fetch_one(fence.pool());
        read.await.unwrap()
    };
    // EXTRA
    assert_eq!(synchronous(Fence::connect(&db.url).await.unwrap()).await, 3);
    let chosen: SqliteConnectOptions = db.url.parse().unwrap();
    let chosen = chosen.synchronous(SqliteSynchronous::Normal);
    let fence = Fence::builder().connect_with(SqlitePoolOptions::new(), chosen);
    assert_eq!(synchronous(fence.await.unwrap()).await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn migration_succeeds_after_a_concurrent_one() {
    let db = Sqlite::fresh(2).await;
    let tables = "SELECT group_concat('DROP TABLE ' || name || ';', ' ') FROM sqlite_master \
         WHERE type = 'table' AND name LIKE 'tower_fence_%'";
    let drop = sqlx::query_scalar::<_, String>(tables).fetch_one(&db.pool);
    db.execute(&drop.await.unwrap()).await;
    let script = db.fence().schema_sql();
    let (history, tables) = script.split_at(script.find("-- Version").unwrap());
    db.execute(history).await;
    let mut other = db.pool.begin_with("BEGIN IMMEDIATE").await.unwrap();
    Sqlite::run(&mut other, tables).await;
    let fence = db.fence();
    let migration = tokio::spawn(async move { fence.migrate().await });
    sleep(MOMENT).await;
    other.commit().await.unwrap();
    migration.await.unwrap().unwrap();
    write(&db.fence(), 5).await.unwrap();
}

#[tokio::test]
async fn file_that_is_not_utf_8_is_refused() {
    let fence = async || {
        let options = SqliteConnectOptions::new().in_memory(true);
        let options = options.pragma("encoding", "'UTF-16le'");
        let pool = SqlitePoolOptions::new().max_connections(1);
        Fence::new(pool.connect_with(options).await.unwrap())
    };
    let empty = fence().await;
    let refused = empty.migrate().await.unwrap_err().to_string();
    assert_contains!(refused, "encoding UTF-8, not UTF-16le");
    let tables = sqlx::query_scalar::<_, i64>("SELECT count(*) FROM sqlite_master");
    assert_eq!(tables.fetch_one(empty.pool()).await.unwrap(), 0);

    let migrated = fence().await;
    let mut conn = migrated.pool().acquire().await.unwrap();
    Sqlite::run(&mut conn, &migrated.schema_sql()).await;
    drop(conn);
    assert_matches!(migrated.check().await, Err(AdmitError::Misconfigured(_)));
    let refused = write(&migrated, 7).await;
    assert_matches!(refused, Err(AdmitError::Misconfigured(_)));
}

#[tokio::test]
async fn a_connection_to_a_replaced_file_is_closed() {
    let db = with_rollback_journal().await;
    let fence = db.fence();
    write(&fence, 5).await.unwrap();
    let file = db.url.strip_prefix("sqlite://").unwrap();
    let copy = format!("{file}.copy");
    db.execute(&format!("VACUUM INTO '{copy}'")).await;
    fs::rename(&copy, file).unwrap();
    let refused = write(&fence, 6).await;
    assert_matches!(refused, Err(AdmitError::Unavailable(_)));
    write(&fence, 6).await.unwrap();
    assert_eq!(db.entries().await, 2);
}

/// SQLite does not reset `query_only` at the end of the transaction.
#[tokio::test]
async fn handler_that_forbids_writes_does_not_block_later_ones() {
    let db = Sqlite::fresh(1).await;
    let fence = db.fence();
    let mut tx = begin(&fence, 5).await;
    Sqlite::run(&mut tx, "PRAGMA query_only = 1").await;
    drop(tx);
    write(&fence, 5).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commit_waits_for_readers_up_to_the_lock_timeout() {
    let db = with_rollback_journal().await;
    let fence = db.fence_with(|fence| {
        fence
            .lock_timeout(Duration::from_millis(1_500))
            .answer_timeout(Duration::from_secs(1))
    });
    let mut reader = SqliteConnection::connect(&db.url).await.unwrap();
    Sqlite::run(&mut reader, "BEGIN; SELECT count(*) FROM ledger").await;
    let mut tx = begin(&fence, 5).await;
    insert(&mut tx, 5).await;
    assert_matches!(tx.commit().await, Err(CommitError::Busy(_)));
    Sqlite::run(&mut reader, "COMMIT").await;
    // Nothing was written, so the token is still valid.
    write(&fence, 5).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reads_of_the_fence_do_not_wait_for_a_writer() {
    let db = Sqlite::fresh(2).await;
    let fence = db.fence_with(|fence| fence.lock_timeout(MOMENT));
    write(&fence, 5).await.unwrap();
    let mut tx = begin(&fence, 6).await;
    insert(&mut tx, 6).await;
    assert_eq!(fence.inspect(&sku()).await.unwrap(), Some(5));
    fence.check().await.unwrap();
    tx.commit().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writers_of_different_resources_wait_without_a_connection() {
    let db = Sqlite::fresh(2).await;
    let fence = db.fence();
    let first = begin(&fence, 5).await;
    let other = resource("sku-2");
    let mut second = pin!(fence.begin(&other, token(5), TokenUse::SingleUse));
    assert!(timeout(MOMENT, &mut second).await.is_err());
    eventually!(
        "one connection is in use",
        db.pool.size() as usize - db.pool.num_idle() == 1
    );
    first.commit().await.unwrap();
    second.await.unwrap().commit().await.unwrap();
    // A transaction on both resources takes one place in the queue.
    let both = [(sku(), token(6)), (other.clone(), token(6))];
    let tx = fence.begin_all(&both, TokenUse::SingleUse).await;
    tx.unwrap().commit().await.unwrap();
}

async fn busy_timeout(pool: &SqlitePool) -> i64 {
    let busy_timeout = sqlx::query_scalar("PRAGMA busy_timeout").fetch_one(pool);
    busy_timeout.await.unwrap()
}

/// The fence returns a connection to the pool unchanged, so the busy timeout of the application's
/// own queries stays the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_busy_timeout_of_the_pool_is_restored() {
    const OWN_MS: i64 = 1_234;
    let db = Sqlite::fresh(1).await;
    let options: SqliteConnectOptions = db.url.parse().unwrap();
    let options = options.busy_timeout(Duration::from_millis(OWN_MS as u64));
    let pool = SqlitePoolOptions::new().max_connections(1);
    let pool = pool.connect_with(options).await.unwrap();
    let fence = |lock_timeout| {
        Fence::builder()
            .lock_timeout(lock_timeout)
            .build(pool.clone())
    };
    let patient = fence(Duration::from_secs(5));
    let fence = fence(Duration::from_millis(20));
    let begin = async |n| fence.begin(&sku(), token(n), TokenUse::SingleUse).await;
    // The transactions are committed, rolled back, refused as busy, dropped while they begin, and
    // refused as stale.
    begin(1).await.unwrap().commit().await.unwrap();
    assert_eq!(busy_timeout(&pool).await, OWN_MS, "after a COMMIT");
    drop(begin(2).await.unwrap());
    assert_eq!(busy_timeout(&pool).await, OWN_MS, "after a rollback");
    let mut other = db.pool.begin_with("BEGIN IMMEDIATE").await.unwrap();
    let busy = begin(3).await;
    assert_matches!(busy, Err(AdmitError::Busy(_)));
    assert_eq!(busy_timeout(&pool).await, OWN_MS, "after SQLITE_BUSY");
    let sku = sku();
    let dropped = patient.begin(&sku, token(4), TokenUse::SingleUse);
    let _ = tokio::time::timeout(Duration::from_millis(20), dropped).await;
    sqlx::query("SELECT 1").execute(&mut *other).await.unwrap();
    other.rollback().await.unwrap();
    assert_eq!(busy_timeout(&pool).await, OWN_MS, "after a dropped BEGIN");
    begin(1).await.map(drop).unwrap_err();
    assert_eq!(busy_timeout(&pool).await, OWN_MS, "after a refusal");
    // In the transaction, the lock timeout of the fence applies.
    let mut tx = begin(5).await.unwrap();
    let within = Sqlite::number(&mut tx, "PRAGMA busy_timeout").await;
    assert_eq!(within.unwrap(), 20);
    tx.commit().await.unwrap();
    assert_eq!(busy_timeout(&pool).await, OWN_MS, "after a write");
}
