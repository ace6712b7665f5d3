//! What a client leaves behind that disconnects: the server ends its statement within seconds, whatever
//! it waits for, and unlocks the row.

use std::time::Duration;

use axum::{Router, routing::post};
use futures_util::future::join_all;
use sqlx::{
    Executor, PgPool, Postgres,
    postgres::{PgConnectOptions, PgPoolOptions},
};
use tokio::{
    task::JoinHandle,
    time::{Instant, sleep, timeout},
};
use tower_fence::{Fence, FenceLayer, PathParam, PgFencedTx, Resource, Token, TokenUse};

use crate::support::{
    database::{Fresh, TestDatabase},
    eventually,
    http::Server,
};

const POOL: u32 = 8;

/// The server notices within two seconds; a busy machine takes longer.
const BOUND: Duration = Duration::from_secs(5);

fn resource(n: u32) -> Resource {
    Resource::new(format!("r-{n}")).unwrap()
}

fn one() -> Token {
    Token::new(1).unwrap()
}

fn two() -> Token {
    Token::new(2).unwrap()
}

/// The pool of the application under test.
async fn pool_under_test(db: &Fresh<Postgres>) -> PgPool {
    let options: PgConnectOptions = db.url.parse().unwrap();
    PgPoolOptions::new()
        .max_connections(POOL)
        .connect_with(options.application_name("under-test"))
        .await
        .unwrap()
}

async fn sessions(db: &Fresh<Postgres>, condition: &str) -> i64 {
    db.number(&format!(
        "SELECT count(*) FROM pg_stat_activity \
         WHERE datname = current_database() AND application_name = 'under-test' AND {condition}"
    ))
    .await
}

const ASLEEP: &str = "wait_event = 'PgSleep'";

/// A request whose statement takes twelve seconds, in a transaction or as a statement of its own.
fn slow_request(fence: &Fence<Postgres>, n: u32, at_once: bool) -> JoinHandle<()> {
    let (fence, resource) = (fence.clone(), resource(n));
    tokio::spawn(async move {
        if at_once {
            let query = "INSERT INTO ledger SELECT 1 FROM fence, pg_sleep(12) RETURNING entry";
            let _ = fence
                .write::<(i64,)>(&resource, one(), TokenUse::Reusable, query)
                .await;
        } else {
            let tx = fence.begin(&resource, one(), TokenUse::Reusable);
            let mut tx = tx.await.unwrap();
            let _ = tx.execute("SELECT pg_sleep(12)").await;
        }
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn abandoned_statements_are_ended_although_all_connections_are_taken() {
    let db = Postgres::fresh(3).await;
    for (at_once, reuses) in [(false, false), (false, true), (true, false), (true, true)] {
        let fence = Fence::new(pool_under_test(&db).await).reuse_connections(reuses);
        // The first of each resource is not written at once.
        for n in 0..POOL {
            fence.raise(&resource(n), one()).await.unwrap();
        }
        let requests: Vec<_> = (0..POOL)
            .map(|n| slow_request(&fence, n, at_once))
            .collect();
        eventually("all connections are taken", async || {
            sessions(&db, ASLEEP).await == i64::from(POOL)
        })
        .await;
        // Neither of them is abandoned: one waits for a row of those that are.
        let bystanders = db.fence();
        let free = resource(POOL);
        let other = bystanders.begin(&free, one(), TokenUse::Reusable);
        let other = other.await.unwrap();
        let waiting = tokio::spawn(async move {
            bystanders
                .begin(&resource(0), two(), TokenUse::Reusable)
                .await
        });
        eventually("it waits", async || {
            let waiting = "SELECT count(*) FROM pg_stat_activity \
                           WHERE datname = current_database() AND wait_event_type = 'Lock'";
            db.number(waiting).await == 1
        })
        .await;
        let began = Instant::now();
        for request in &requests {
            request.abort();
        }
        join_all(requests).await;
        let ended = async {
            while sessions(&db, ASLEEP).await > 0 {
                sleep(Duration::from_millis(5)).await;
            }
        };
        let ended = timeout(Duration::from_secs(20), ended).await;
        ended.expect("the statements were not ended");
        let took = began.elapsed();
        println!("at once: {at_once}, reused: {reuses}: ended after {took:?}");
        assert!(took < BOUND, "it took {took:?}");
        other.commit().await.unwrap();
        waiting.await.unwrap().unwrap();
        // The pool is whole.
        for n in 0..2 * POOL {
            fence.raise(&resource(n), one()).await.unwrap();
        }
        fence.get_pool().close().await;
        eventually("all sessions are closed", async || {
            sessions(&db, "true").await == 0
        })
        .await;
    }
}

/// What a handler is in the middle of when its client disconnects.
const MIDST: [(&str, &str); 3] = [
    ("asleep", "SELECT pg_sleep(60)"),
    (
        "waiting for a row lock",
        "UPDATE stock SET n = n + 1 WHERE sku = 'locked'",
    ),
    (
        "in a long UPDATE",
        "UPDATE stock SET n = (SELECT count(*) FROM generate_series(1, 2000000000)) WHERE sku = 'free'",
    ),
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disconnected_client_leaves_no_lock_and_no_session() {
    let db = Postgres::fresh(3).await;
    db.execute("INSERT INTO stock VALUES ('locked', 0), ('free', 0)")
        .await;
    db.fence().raise(&resource(0), one()).await.unwrap();
    let mut locker = db.pool.begin().await.unwrap();
    locker
        .execute("SELECT FROM stock WHERE sku = 'locked' FOR UPDATE")
        .await
        .unwrap();
    for reuses in [false, true] {
        // No limit of its own ends the statement.
        let fence = Fence::new(pool_under_test(&db).await)
            .reuse_connections(reuses)
            .hold_limit(Duration::from_secs(120))
            .lock_wait(Duration::from_secs(120));
        for (midst, statement) in MIDST {
            let handler = move |mut tx: PgFencedTx| async move {
                tx.execute("INSERT INTO ledger VALUES (1)").await.unwrap();
                tx.execute(statement).await.unwrap();
            };
            let app = Router::new()
                .route("/{r}", post(handler))
                .route_layer(FenceLayer::new(fence.clone(), PathParam("r")));
            let server = Server::start(app).await;
            let request = server.post("/r-0").header("Fencing-Token", "5").send();
            let client = tokio::spawn(request);
            let active = format!(
                "SELECT coalesce(max(pid), 0)::bigint FROM pg_stat_activity WHERE datname = current_database() \
                 AND application_name = 'under-test' AND state = 'active' AND query = $q${statement}$q$"
            );
            eventually("the statement runs", async || db.number(&active).await > 0).await;
            let session = format!("pid = {}", db.number(&active).await);
            let row = "SELECT count(*) FROM (SELECT FROM tower_fence.resources WHERE resource = 'r-0' \
                       FOR UPDATE SKIP LOCKED) AS r";
            assert_eq!(db.number(row).await, 0, "{midst}: the row is not locked");

            let began = Instant::now();
            client.abort();
            eventually("the row is unlocked", async || db.number(row).await == 1).await;
            let unlocked = began.elapsed();
            eventually("the session is gone", async || {
                sessions(&db, &session).await == 0
            })
            .await;
            let gone = began.elapsed();
            println!("{midst}, reused: {reuses}: unlocked after {unlocked:?}, gone after {gone:?}");
            assert!(gone < BOUND, "{midst}, reused: {reuses}: {gone:?}");
            assert_eq!(db.entries().await, 0);
            // The pool is whole, and the token stays usable.
            let token = Token::new(5).unwrap();
            let tx = fence.begin(&resource(0), token, TokenUse::Reusable).await;
            tx.unwrap().commit().await.unwrap();
        }
        fence.get_pool().close().await;
    }
    locker.rollback().await.unwrap();
}
