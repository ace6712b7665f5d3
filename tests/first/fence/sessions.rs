//! Unusable sessions are closed, and other requests are served.

use axum::{Router, routing::post};
use serde_json::json;
use sqlx::{PgPool, Postgres, postgres::PgPoolOptions};
use tower_fence::{
    Fence, FenceLayer, PathParam, issuer,
    lease::{Leases, PostgresLeases},
};

use crate::support::{
    PATIENCE,
    database::{Fresh, TestDatabase},
    eventually,
    fence::{begin, insert, resource, sku, write, write_at_once},
    http::{Answer, Server},
    lease::{LONG, grant},
};

/// The number of connections in the pool. All were opened while the database was read-only.
const CONNECTIONS: u32 = 8;

/// Sets or resets `default_transaction_read_only` for later sessions.
async fn later_sessions(db: &Fresh<Postgres>, change: &str) {
    let name = db.url.rsplit('/').next().unwrap();
    db.execute(&format!("ALTER DATABASE {name} {change}")).await;
}

/// Returns a database whose later sessions are read-only, and a pool of such sessions.
async fn read_only_sessions() -> (Fresh<Postgres>, PgPool) {
    let db = Postgres::fresh(2).await;
    later_sessions(&db, "SET default_transaction_read_only = on").await;
    let options = PgPoolOptions::new()
        .min_connections(CONNECTIONS)
        .max_connections(CONNECTIONS);
    let pool = options.connect(&db.url).await.unwrap();
    (db, pool)
}

async fn read_only_sessions_are_replaced(reuse: bool) {
    let (db, pool) = read_only_sessions().await;
    let open_all = async || {
        let all = (0..CONNECTIONS).map(|_| pool.acquire());
        drop(futures_util::future::try_join_all(all).await.unwrap());
    };
    let fence = Fence::builder()
        .pool_timeout(PATIENCE)
        .reuse_connections(reuse)
        .build(pool.clone());
    let app = Router::new()
        .route("/write/{r}", post(|| async {}))
        .route_layer(FenceLayer::new(fence.clone(), PathParam("r")))
        .nest("/locks", issuer::router(PostgresLeases::new(fence)));
    let server = Server::start(app).await;
    let write = async |token: i64| server.write("/write/r", token).await;
    let grant = async |token: i64| {
        let request = server.post(&format!("/locks/r-{token}"));
        Answer::to(request.json(&json!({ "ttl_ms": 30_000 }))).await
    };
    for token in 1..=i64::from(CONNECTIONS) {
        write(token).await.is_problem(503, "store-unavailable");
        grant(token).await.is_problem(503, "store-unavailable");
    }
    open_all().await;
    later_sessions(&db, "RESET default_transaction_read_only").await;
    let mut refused = 0;
    for token in 10..10 + 2 * i64::from(CONNECTIONS) {
        for answer in [write(token).await, grant(token).await] {
            refused += u32::from(answer.status == 503);
        }
    }
    // Each failed write closes at least its own session.
    assert!(refused <= CONNECTIONS, "{refused} were refused");
    assert_eq!((write(90).await.status, grant(90).await.status), (200, 201));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn read_only_sessions_leave_the_pool() {
    read_only_sessions_are_replaced(false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn read_only_sessions_are_not_reused() {
    read_only_sessions_are_replaced(true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_failed_write_clears_the_pool_of_read_only_sessions() {
    let (db, pool) = read_only_sessions().await;
    eventually!(
        "all connections are open",
        pool.num_idle() == CONNECTIONS as usize
    );
    later_sessions(&db, "RESET default_transaction_read_only").await;
    let fence = Fence::builder().pool_timeout(PATIENCE).build(pool);
    let layer = FenceLayer::new(fence, PathParam("r"));
    let server = Server::at("/{r}", post(|| async {}).route_layer(layer)).await;
    server.refuses("/r", 1, 503, "store-unavailable").await;
    assert_eq!(server.write("/r", 2).await.status, 200);
}

/// The session no longer has the prepared statements that sqlx still uses.
#[tokio::test]
async fn removed_prepared_statements_are_prepared_again() {
    for reuse in [false, true] {
        let db = Postgres::fresh(1).await;
        let fence = db.fence_with(|fence| fence.reuse_connections(reuse));
        let leases = PostgresLeases::new(fence.clone());
        let leased = resource("leased");
        for round in 0..3 {
            let first = 10 * round + 1;
            write(&fence, first).await.unwrap();
            write_at_once(&fence, &sku(), first + 1).await;
            let lease = grant(&leases, &leased, LONG).await;
            leases.release(&leased, &lease.id).await.unwrap();
            let mut tx = begin(&fence, first + 2).await;
            insert(&mut tx, first + 2).await;
            Postgres::run(&mut tx, "DEALLOCATE ALL").await;
            tx.commit().await.unwrap();
        }
        assert_eq!(db.entries().await, 9);
    }
}
