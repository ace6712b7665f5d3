//! On SQLite, the fence returns a connection to the pool unchanged, so the busy timeout of the
//! application's own queries stays the same.

use std::time::Duration;

use sqlx::{
    Sqlite, SqlitePool,
    sqlite::{SqliteConnectOptions, SqlitePoolOptions},
};
use tower_fence::{AdmitError, Fence, TokenUse};

use crate::support::{
    database::TestDatabase,
    fence::{sku, token},
};

const OWN_MS: i64 = 1_234;

async fn busy_timeout(pool: &SqlitePool) -> i64 {
    sqlx::query_scalar("PRAGMA busy_timeout")
        .fetch_one(pool)
        .await
        .unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_busy_timeout_of_the_pool_is_restored() {
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
    let within: i64 = sqlx::query_scalar("PRAGMA busy_timeout")
        .fetch_one(&mut *tx)
        .await
        .unwrap();
    assert_eq!(within, 20);
    tx.commit().await.unwrap();
    assert_eq!(busy_timeout(&pool).await, OWN_MS, "after a write");
}
