//! A handler that takes too long is answered at its timeout, and its connection is kept.

use std::time::Duration;

use axum::{Router, http::StatusCode, routing::post};
use sqlx::Postgres;
use tokio::time::Instant;
use tower_fence::{FenceLayer, PathParam, PgFencedTx};

use crate::support::{
    database::{Fresh, TestDatabase},
    eventually,
    fence::resource,
    http::Server,
    lease::LONG,
};

async fn start(db: &Fresh<Postgres>, hold: Duration) -> Server {
    let fence = db.fence_with(|fence| fence.hold_timeout(hold));
    let sleep = |mut tx: PgFencedTx| async move {
        let sleep = sqlx::raw_sql("SELECT pg_sleep(20)");
        sleep.execute(&mut *tx).await.unwrap();
    };
    let wait = |mut tx: PgFencedTx| async move {
        let insert = sqlx::raw_sql("INSERT INTO ledger VALUES (1)");
        insert.execute(&mut *tx).await.unwrap();
        std::future::pending::<StatusCode>().await
    };
    let app = Router::new()
        .route("/{r}/sleep", post(sleep))
        .route("/{r}/wait", post(wait))
        .route("/{r}/plain", post(|| async {}))
        .route_layer(FenceLayer::new(fence, PathParam("r")));
    Server::start(app).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_an_exhausted_pool_the_answer_leaves_at_the_limit() {
    let db = Postgres::fresh(3).await;
    let server = start(&db, Duration::from_millis(500)).await;
    // The connections are opened before the measurement.
    futures_util::future::join_all((0..3).map(|_| db.number("SELECT 1::bigint"))).await;
    let began = Instant::now();
    let writes = (0..3).map(|n| {
        let path = format!("/r-{n}/sleep");
        let server = &server;
        async move { server.write(&path, 5).await }
    });
    for answer in futures_util::future::join_all(writes).await {
        answer.is_problem(503, "handler-timeout");
    }
    let took = began.elapsed();
    assert!(took >= Duration::from_millis(500), "{took:?}");
    assert!(took < Duration::from_secs(3), "{took:?}");
    // After the answer, the transaction ends and the fence is raised.
    for n in 0..3 {
        let resource = resource(&format!("r-{n}"));
        eventually!(
            "older tokens are stale",
            db.fence().inspect(&resource).await.ok() == Some(Some(4))
        );
        let path = format!("/r-{n}/plain");
        assert_eq!(server.write(&path, 5).await.status, 200);
    }
}

/// Starts a server whose handlers end their transactions or pass them on, and then wait for the
/// timeout.
async fn start_ended(db: &Fresh<Postgres>, lock_timeout: Duration) -> Server {
    let fence = db.fence_with(|fence| {
        let hold = Duration::from_millis(300);
        fence.hold_timeout(hold).lock_timeout(lock_timeout)
    });
    let commit = |mut tx: PgFencedTx| async move {
        let insert = sqlx::raw_sql("INSERT INTO ledger VALUES (1)");
        insert.execute(&mut *tx).await.unwrap();
        tx.commit().await.unwrap();
        std::future::pending::<StatusCode>().await
    };
    let fail = |mut tx: PgFencedTx| async move {
        let insert = sqlx::raw_sql("INSERT INTO child VALUES (1)");
        insert.execute(&mut *tx).await.unwrap();
        tx.commit().await.unwrap_err();
        std::future::pending::<StatusCode>().await
    };
    let spawn = |tx: PgFencedTx| async move {
        tokio::spawn(async move {
            let _tx = tx;
            std::future::pending::<()>().await;
        });
        std::future::pending::<StatusCode>().await
    };
    let app = Router::new()
        .route("/{r}/commit", post(commit))
        .route("/{r}/fail", post(fail))
        .route("/{r}/spawn", post(spawn))
        .route("/{r}/plain", post(|| async {}))
        .route_layer(FenceLayer::new(fence, PathParam("r")));
    Server::start(app).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn timed_out_handler_is_answered_with_its_transaction_outcome() {
    let db = Postgres::fresh(3).await;
    let server = start_ended(&db, LONG).await;
    for (path, status, problem) in [
        ("/a/commit", 503, "outcome-unknown"),
        ("/b/fail", 503, "handler-timeout"),
        ("/c/spawn", 500, "transaction-escaped"),
    ] {
        server.refuses(path, 5, status, problem).await;
    }
    assert_eq!(db.entries().await, 1);
    // Older tokens are stale. The token of a write that was not committed is still usable.
    for (resource, status) in [("a", 412), ("b", 200), ("c", 200)] {
        let path = format!("/{resource}/plain");
        server.refuses(&path, 4, 412, "stale-token").await;
        assert_eq!(server.write(&path, 5).await.status, status, "{resource}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commit_running_at_the_timeout_is_an_unknown_outcome() {
    let slow = "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS \
                $$ BEGIN PERFORM pg_sleep(2); RETURN NULL; END $$; \
                CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON ledger DEFERRABLE INITIALLY DEFERRED \
                FOR EACH ROW EXECUTE FUNCTION slow()";
    // The raise waits for the row lock of the COMMIT. If it fails before the answer is sent, its
    // error does not replace the outcome.
    for lock_timeout in [LONG, Duration::from_millis(50)] {
        let db = Postgres::fresh(3).await;
        sqlx::raw_sql(slow).execute(&db.pool).await.unwrap();
        let server = start_ended(&db, lock_timeout).await;
        server.refuses("/a/commit", 5, 503, "outcome-unknown").await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn timed_out_handler_keeps_its_connection() {
    let db = Postgres::fresh(1).await;
    let server = start(&db, Duration::from_millis(300)).await;
    let backend = async || db.number("SELECT pg_backend_pid()::bigint").await;
    let before = backend().await;
    for token in [5, 6, 7] {
        let answer = server.write("/r/wait", token).await;
        answer.is_problem(503, "handler-timeout");
        assert_eq!(backend().await, before);
    }
    assert_eq!(db.entries().await, 0);
    server.refuses("/r/plain", 6, 412, "stale-token").await;
    assert_eq!(server.write("/r/plain", 7).await.status, 200);
}
