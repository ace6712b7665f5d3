//! Connections that the fence keeps for its next write, if connections are reused.

use std::{
    sync::atomic::Ordering::SeqCst,
    thread,
    time::{Duration, Instant},
};

use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection, Postgres};
use tokio::runtime::Builder;
use tower_fence::Fence;

use crate::support::{
    database::{TestDatabase, counting_pool},
    eventually,
    fence::{sku, write_at_once},
};

/// The hooks and the limits of the pool must also apply to a connection that is always in use.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn constantly_used_connection_returns_to_the_pool() {
    let db = Postgres::fresh(1).await;
    // If the pool cannot open more connections, the fence returns some of its connections at short
    // intervals, because other users may be waiting.
    let (pool, [_, released]) = counting_pool(&db.url, 8).await;
    let fence = Fence::builder().reuse_connections(true).build(pool);
    write_at_once(&fence, &sku(), 1).await;
    // The first use of the fence reads its tables.
    let before = released.load(SeqCst);
    let (began, mut value) = (Instant::now(), 1);
    while released.load(SeqCst) < before + 2 {
        value += 1;
        write_at_once(&fence, &sku(), value).await;
        let time = began.elapsed();
        assert!(
            time < Duration::from_secs(30),
            "the connection is kept forever"
        );
    }
    assert!(
        value > 20,
        "the connection is not kept between writes: {value}"
    );
}

/// During the pause, no task returns the connection, and the server may end its session.
#[tokio::test]
async fn kept_connection_is_tested_after_a_process_pause() {
    let db = Postgres::fresh(4).await;
    let fence = db.reusing_fence();
    write_at_once(&fence, &sku(), 1).await;
    let url = db.url.clone();
    let ends_all = thread::spawn(move || {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let mut other = PgConnection::connect(&url).await.unwrap();
            let end = "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity \
                WHERE datname = current_database() AND pid <> pg_backend_pid()";
            let ended = other
                .fetch_all(AssertSqlSafe(end.to_owned()))
                .await
                .unwrap();
            assert!(!ended.is_empty());
        });
        thread::sleep(Duration::from_millis(100));
    });
    // The runtime of this test has one thread, which is blocked here.
    ends_all.join().unwrap();
    write_at_once(&fence, &sku(), 2).await;
}

/// The task that returns the connection ends with its runtime.
#[test]
fn kept_connections_return_after_another_runtime_ends() {
    let runtime = || {
        let mut runtime = Builder::new_multi_thread();
        runtime.worker_threads(1).enable_all().build().unwrap()
    };
    let lasting = runtime();
    let (db, fence) = lasting.block_on(async {
        let db = Postgres::fresh(2).await;
        let fence = db.reusing_fence();
        write_at_once(&fence, &sku(), 1).await;
        (db, fence)
    });
    let goes_back = || async {
        let all_idle = async || db.pool.num_idle() == db.pool.size() as usize;
        eventually("the connection is in the pool or closed", all_idle).await;
    };
    lasting.block_on(goes_back());
    let ending = runtime();
    ending.block_on(write_at_once(&fence, &sku(), 2));
    drop(ending);
    lasting.block_on(async {
        goes_back().await;
        write_at_once(&fence, &sku(), 3).await;
        goes_back().await;
    });
    lasting.block_on(async { drop((fence, db)) });
}
