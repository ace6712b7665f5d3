//! Requests that are cancelled while they wait for a connection. The pool finishes testing or
//! opening the connection, and keeps it.

use std::time::Duration;

use sqlx::{PgPool, Postgres, postgres::PgPoolOptions};
use tokio::time::{sleep, timeout};
use tower_fence::{AdmitError, Fence, TokenUse, fence::WriteError};

use crate::support::{
    database::{TestDatabase, pool_of},
    eventually,
    fence::{sku, token},
    proxy::{Link, Passage, Proxy},
};

async fn write(fence: &Fence<Postgres>) -> Result<(), AdmitError> {
    let tx = fence.begin(&sku(), token(1), TokenUse::Reusable).await?;
    tx.commit().await.unwrap();
    Ok(())
}

/// Returns the process id of the server process behind the only connection of a pool.
async fn process(pool: &PgPool) -> i64 {
    let mut conn = pool.acquire().await.unwrap();
    Postgres::number(&mut conn, "SELECT pg_backend_pid()::bigint")
        .await
        .unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connection_tested_for_a_cancelled_request_is_kept() {
    let db = Postgres::fresh(1).await;
    let pool = PgPoolOptions::new()
        .max_connections(1)
        .before_acquire(|_, _| {
            Box::pin(async {
                sleep(Duration::from_millis(200)).await;
                Ok(true)
            })
        });
    let pool = pool.connect(&db.url).await.unwrap();
    let fence = Fence::new(pool.clone());
    write(&fence).await.unwrap();
    let before = process(&pool).await;
    for _ in 0..3 {
        eventually!("the connection is back in the pool", pool.num_idle() == 1);
        let gone = timeout(Duration::from_millis(20), write(&fence)).await;
        assert!(gone.is_err());
    }
    assert_eq!(process(&pool).await, before);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connection_opened_for_a_cancelled_request_is_kept() {
    let db = Postgres::fresh(1).await;
    let proxy = Proxy::delaying(db.addr(), Duration::from_millis(30)).await;
    for reuse in [false, true] {
        let before = proxy.connections();
        let pool = PgPoolOptions::new().max_connections(3);
        let pool = pool.connect_lazy(&proxy.url(&db.url)).unwrap();
        let fence = Fence::builder()
            .reuse_connections(reuse)
            .build(pool.clone());
        for _ in 0..30 {
            // On a busy machine a write may finish before the timeout.
            let _ = timeout(Duration::from_millis(5), write(&fence)).await;
        }
        write(&fence).await.unwrap();
        let opened = proxy.connections() - before;
        assert!(opened < 15, "{opened} connections, reuse: {reuse}");
        pool.close().await;
    }
}

/// The connection becomes silent after the admission.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unanswered_statement_in_a_transaction_is_given_up() {
    const WRITE: &str = "UPDATE stock SET n = n WHERE EXISTS (SELECT 1 FROM fence) RETURNING n";
    let db = Postgres::fresh(1).await;
    let proxy = Proxy::judging(db.addr(), |_, message| {
        let mut parts = message.windows(WRITE.len());
        Passage::Dropped.when(parts.any(|part| part == WRITE.as_bytes()))
    })
    .await;
    let pool = pool_of(&proxy.url(&db.url), 1).await;
    let brief = Duration::from_millis(300);
    let fence = Fence::builder()
        .transaction_pooling(true)
        .lock_timeout(brief)
        .hold_timeout(brief)
        .answer_timeout(brief)
        .build(pool);
    let (sku, query) = (sku(), sqlx::query(WRITE));
    let write = fence.write::<(i64,)>(&sku, token(1), TokenUse::SingleUse, query);
    let written = timeout(Duration::from_secs(20), write).await;
    let refused = written.expect("the statement is awaited without end");
    assert_matches!(refused, Err(WriteError::Admit(AdmitError::Unavailable(_))));
}

/// No other request has the connection, and the database does not answer on it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failed_connection_test_is_not_reported_as_busy() {
    let db = Postgres::fresh(1).await;
    for reuse in [false, true] {
        let proxy = Proxy::to(db.addr()).await;
        let pool = pool_of(&proxy.url(&db.url), 1).await;
        let fence = Fence::builder()
            .reuse_connections(reuse)
            .pool_timeout(Duration::from_millis(300))
            .build(pool.clone());
        write(&fence).await.unwrap();
        eventually!("the connection is back in the pool", pool.num_idle() == 1);
        proxy.set(Link::Silent);
        let error = write(&fence).await.unwrap_err();
        assert_matches!(error, AdmitError::Unavailable(_));
    }
}
