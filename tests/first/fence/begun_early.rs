//! Transactions that begin together with the COMMIT of the previous one, because connections are
//! reused.

use std::time::Duration;

use sqlx::{Connection, PgConnection, Postgres};
use tower_fence::Fence;

use crate::support::{
    PATIENCE,
    database::{TestDatabase, pool_of},
    eventually,
    fence::{begin, sku},
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropped_early_transaction_leaves_no_lock() {
    let db = Postgres::fresh(2).await;
    // With this timeout, the server ends none of the transactions during the test.
    let fence = db.fence_with(|fence| fence.reuse_connections(true).hold_timeout(2 * PATIENCE));
    for round in 0..10 {
        begin(&fence, 2 * round + 1).await.commit().await.unwrap();
        // The next `begin` comes soon enough to use the transaction that the COMMIT has begun.
        drop(begin(&fence, 2 * round + 2).await);
    }
    // This is a separate connection, because the pool may have the connection under test.
    let mut observer = PgConnection::connect(&db.url).await.unwrap();
    eventually("no transaction is open", async || {
        let open = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() \
            AND state LIKE 'idle in transaction%'";
        Postgres::number(&mut observer, open).await.unwrap() == 0
    })
    .await;
    assert_eq!(fence.inspect(&sku()).await.unwrap(), Some(19));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn broken_early_transaction_costs_no_write() {
    let db = Postgres::fresh(2).await;
    let fence = db.reusing_fence();
    let mut observer = PgConnection::connect(&db.url).await.unwrap();
    // This statement returns when the sessions have ended.
    let end = "SELECT count(pg_terminate_backend(pid, 60000)) FROM pg_stat_activity \
        WHERE datname = current_database() AND pid <> pg_backend_pid()";
    for round in 0..20 {
        begin(&fence, 2 * round + 1).await.commit().await.unwrap();
        Postgres::number(&mut observer, end).await.unwrap();
        begin(&fence, 2 * round + 2).await.commit().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn early_transaction_has_the_limits_of_its_fence() {
    let db = Postgres::fresh(1).await;
    let hold = Duration::from_secs(11);
    let fence = db.fence_with(|fence| fence.reuse_connections(true).hold_timeout(hold));
    for n in 1..20 {
        let mut tx = begin(&fence, n).await;
        let limit = sqlx::query_scalar("SHOW idle_in_transaction_session_timeout");
        let limit: String = limit.fetch_one(&mut *tx).await.unwrap();
        assert_eq!(limit, "12s");
        tx.commit().await.unwrap();
    }
}

/// The timer of a `transaction_timeout` starts with the transaction, before the fence sets its own
/// timeouts. The test covers both ways to set them: in the admission and, under an idempotency key,
/// before it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn timeout_of_the_database_does_not_apply_to_transactions_of_the_fence() {
    let db = Postgres::fresh(1).await;
    let version = "SELECT current_setting('server_version_num')::bigint";
    // Earlier versions do not have this setting, so on them the test shows nothing.
    if db.number(version).await >= 170_000 {
        db.execute(
            "DO $$ BEGIN EXECUTE format( \
                 'ALTER DATABASE %I SET transaction_timeout = 1000', current_database() \
             ); END $$",
        )
        .await;
    }
    for (n, reuse) in [false, true].into_iter().enumerate() {
        let pool = pool_of(&db.url, 1).await;
        let fence = Fence::<Postgres>::builder()
            .reuse_connections(reuse)
            .build(pool);
        for token in 1..=3 {
            let mut tx = begin(&fence, 10 * n as i64 + token).await;
            Postgres::run(&mut tx, "SELECT pg_sleep(1.2)").await;
            tx.commit().await.unwrap();
        }
    }
}
