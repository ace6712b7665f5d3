//! A read with a token: no write with an older token follows it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering::Relaxed},
    },
    time::Duration,
};

use axum::{
    Router,
    extract::{Path, State},
    http::StatusCode,
    routing::{any, get, post},
};
use sqlx::{Pool, Postgres};
use tokio::{
    sync::Semaphore,
    time::{sleep, timeout},
};
use tower_fence::{AdmitError, FenceLayer, FencedTx, PathParam};

use crate::support::{
    database::{Fresh, TestDatabase, on_both_databases},
    eventually,
    fence::{resource, token, use_up},
    http::{Answer, Server},
};

on_both_databases!(
    read_waits_for_a_write_in_progress,
    write_waits_for_a_read_in_progress,
    a_handler_reads_once,
    older_write_is_refused_after_a_read_that_finds_nothing,
    read_is_answered_only_if_its_transaction_commits,
    a_handler_may_read_in_the_transaction,
    read_with_a_used_token_reports_the_use,
);

struct Plan<DB: TestDatabase> {
    pool: Pool<DB>,
    /// The number of calls of the reader.
    reads: AtomicI64,
    /// Permits for reads to continue.
    readers: Semaphore,
    writes: AtomicI64,
    writers: Semaphore,
}

type Shared<DB> = State<Arc<Plan<DB>>>;

async fn stock<DB: TestDatabase>(pool: &Pool<DB>) -> i64 {
    let mut conn = pool.acquire().await.unwrap();
    DB::number(&mut conn, "SELECT n FROM stock").await.unwrap()
}

/// Reads the stock, waits for its permit, and answers.
async fn read<DB: TestDatabase>(State(plan): Shared<DB>) -> String {
    let n = stock(&plan.pool).await;
    plan.reads.fetch_add(1, Relaxed);
    plan.readers.acquire().await.unwrap().forget();
    n.to_string()
}

async fn write<DB: TestDatabase>(State(plan): Shared<DB>, mut tx: FencedTx<DB>) {
    DB::run(&mut tx, "UPDATE stock SET n = n + 1").await;
    plan.writes.fetch_add(1, Relaxed);
    plan.writers.acquire().await.unwrap().forget();
}

async fn setup<DB: TestDatabase>(
    db: &Fresh<DB>,
    readers: usize,
    writers: usize,
) -> (Server, Arc<Plan<DB>>) {
    db.execute("INSERT INTO stock VALUES ('a', 0)").await;
    let plan = Arc::new(Plan {
        pool: db.pool.clone(),
        reads: AtomicI64::new(0),
        readers: Semaphore::new(readers),
        writes: AtomicI64::new(0),
        writers: Semaphore::new(writers),
    });
    let layer = FenceLayer::new(db.fence(), PathParam("sku")).reusable();
    let both = get(read::<DB>).post(write::<DB>).route_layer(layer);
    let server = Server::at("/{sku}", both.with_state(plan.clone())).await;
    (server, plan)
}

fn fenced(server: &Server, token: i64) -> tokio::task::JoinHandle<Answer> {
    let request = server.get("/a").header("Fencing-Token", token);
    tokio::spawn(Answer::to(request))
}

/// A write in progress holds the row lock, for which the admission of the read waits.
async fn read_waits_for_a_write_in_progress<DB: TestDatabase>() {
    let db = DB::fresh(4).await;
    let (server, plan) = setup(&db, 1_000, 0).await;
    let request = server.post("/a").header("Fencing-Token", "3");
    let writing = tokio::spawn(Answer::to(request));
    eventually!("the handler has written", plan.writes.load(Relaxed) == 1);
    let reading = fenced(&server, 5);
    sleep(Duration::from_millis(50)).await;
    assert_eq!(plan.reads.load(Relaxed), 0);
    plan.writers.add_permits(1_000);
    assert_eq!(writing.await.unwrap().status, 200);
    assert_eq!(reading.await.unwrap().text, "1");
    assert_eq!(plan.reads.load(Relaxed), 1);
}

/// Older writers wait for the read, and are refused afterwards.
async fn write_waits_for_a_read_in_progress<DB: TestDatabase>() {
    let db = DB::fresh(4).await;
    let (server, plan) = setup(&db, 0, 1_000).await;
    assert_eq!(server.write("/a", 3).await.status, 200);
    let reading = fenced(&server, 5);
    eventually!("the handler has read", plan.reads.load(Relaxed) == 1);
    let request = server.post("/a").header("Fencing-Token", "3");
    let writing = tokio::spawn(Answer::to(request));
    sleep(Duration::from_millis(50)).await;
    assert!(!writing.is_finished());
    plan.readers.add_permits(1_000);
    assert_eq!(reading.await.unwrap().text, "1");
    writing.await.unwrap().is_problem(412, "stale-token");
    assert_eq!(plan.reads.load(Relaxed), 1);
    assert_eq!(stock(&db.pool).await, 1);
    assert_eq!(server.write("/a", 5).await.status, 200);
}

/// A write of another process waits for the row lock while the handler reads.
async fn older_write_is_refused_after_a_read_that_finds_nothing<DB: TestDatabase>() {
    async fn find<DB: TestDatabase>(State(plan): Shared<DB>) -> StatusCode {
        plan.reads.fetch_add(1, Relaxed);
        plan.readers.acquire().await.unwrap().forget();
        StatusCode::NOT_FOUND
    }
    let db = DB::fresh(4).await;
    let (_, plan) = setup(&db, 0, 0).await;
    let layer = FenceLayer::new(db.fence(), PathParam("sku"));
    let find = get(find::<DB>).route_layer(layer).with_state(plan.clone());
    let server = Server::at("/{sku}", find).await;
    let resource = resource("a");
    let elsewhere = db.fence();
    elsewhere.raise(&resource, token(2)).await.unwrap();
    let reading = fenced(&server, 5);
    eventually!("the handler has read", plan.reads.load(Relaxed) == 1);
    let writing = tokio::spawn(async move { use_up(&elsewhere, &resource, token(3)).await });
    sleep(Duration::from_millis(100)).await;
    assert!(!writing.is_finished());
    plan.readers.add_permits(1);
    assert_eq!(reading.await.unwrap().status, 404);
    let written = writing.await.unwrap();
    assert_matches!(written, Err(AdmitError::Stale(_)));
}

/// On Postgres, the failed statement aborts the transaction, which then no longer locks the row. An
/// older token could therefore write after the read and before the raise.
async fn read_is_answered_only_if_its_transaction_commits<DB: TestDatabase>() {
    async fn find<DB: TestDatabase>(mut tx: FencedTx<DB>) -> StatusCode {
        let found = DB::number(&mut tx, "SELECT n FROM nowhere").await;
        found.map_or(StatusCode::NOT_FOUND, |_| StatusCode::OK)
    }
    let db = DB::fresh(2).await;
    let layer = FenceLayer::new(db.fence(), PathParam("sku"));
    let server = Server::at("/{sku}", get(find::<DB>).route_layer(layer)).await;
    let answer = fenced(&server, 5).await.unwrap();
    if DB::ABORTS_ON_ERROR {
        answer.is_problem(500, "transaction-aborted");
    } else {
        assert_eq!(answer.status, 404);
    }
    let state = db.fence().inspect(&resource("a")).await;
    assert_eq!(state.unwrap(), Some(4));
}

async fn a_handler_reads_once<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let (server, plan) = setup(&db, 1_000, 1_000).await;
    assert_eq!(server.write("/a", 3).await.status, 200);
    for (reads, token) in [(1, 5), (2, 6), (3, 6), (4, 9)] {
        assert_eq!(fenced(&server, token).await.unwrap().text, "1");
        assert_eq!(plan.reads.load(Relaxed), reads, "{token}");
    }
    let stale = fenced(&server, 8).await.unwrap();
    stale.is_problem(412, "stale-token");
    server.write("/a", 8).await.is_problem(412, "stale-token");
    assert_eq!(plan.reads.load(Relaxed), 4);
}

/// The pool has one connection, and the handlers need it.
async fn a_handler_may_read_in_the_transaction<DB: TestDatabase>() {
    async fn in_transaction<DB: TestDatabase>(mut tx: FencedTx<DB>) -> String {
        let n = DB::number(&mut tx, "SELECT n FROM stock").await.unwrap();
        n.to_string()
    }
    let db = DB::fresh(1).await;
    db.execute("INSERT INTO stock VALUES ('a', 7)").await;
    let layer = FenceLayer::new(db.fence(), PathParam("sku"));
    let server = Server::at("/{sku}", get(in_transaction::<DB>).route_layer(layer)).await;
    let reads: Vec<_> = (0..10).map(|_| fenced(&server, 5)).collect();
    for read in reads {
        let read = timeout(Duration::from_secs(10), read).await;
        let answer = read.expect("a read waits for itself").unwrap();
        assert_eq!((answer.status, answer.text.as_str()), (200, "7"));
    }
}

#[tokio::test]
async fn query_method_passes_its_body() {
    let db = Postgres::fresh(2).await;
    let echo = any(|Path(_): Path<String>, body: String| async { (StatusCode::OK, body) });
    let bare = post(|| async {});
    let layer = FenceLayer::new(db.fence(), PathParam("sku"));
    let app = Router::new()
        .route("/{sku}", echo)
        .route("/{sku}/bare", bare)
        .route_layer(layer);
    let server = Server::start(app).await;
    let query = server
        .client
        .request("QUERY".parse().unwrap(), server.url("/a"));
    let query = query.header("Fencing-Token", "5").body("what is left?");
    assert_eq!(Answer::to(query).await.text, "what is left?");
    assert_eq!(server.write("/a/bare", 5).await.status, 200);
}

#[tokio::test]
async fn cache_cannot_answer_a_fenced_read() {
    let db = Postgres::fresh(2).await;
    let cacheable = || async { ([("cache-control", "max-age=60"), ("vary", "accept")], "7") };
    let layer = FenceLayer::new(db.fence(), PathParam("sku"));
    let server = Server::at("/{sku}", get(cacheable).route_layer(layer)).await;
    let header = |answer: &Answer, name: &str| {
        let values = answer.headers.get_all(name).iter();
        values
            .map(|value| value.to_str().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    let plain = Answer::to(server.get("/a")).await;
    assert_eq!(header(&plain, "vary"), ["accept", "fencing-token"]);
    assert_eq!(header(&plain, "cache-control"), ["max-age=60"]);
    let fenced = fenced(&server, 5).await.unwrap();
    assert_eq!(header(&fenced, "cache-control"), ["no-store"]);
    assert_eq!(fenced.text, "7");
}

/// The holder may still have the lease, so it needs a new token, and not a new lease.
async fn read_with_a_used_token_reports_the_use<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let start = async || {
        let layer = FenceLayer::new(db.fence(), PathParam("sku"));
        let route = get(async || "read").post(async || "written");
        Server::at("/{sku}", route.route_layer(layer)).await
    };
    assert_eq!(start().await.write("/a", 5).await.text, "written");
    // The first read queries the database, and the second one finds the refusal in the cache.
    let server = start().await;
    for _ in 0..2 {
        let refused = fenced(&server, 5).await.unwrap();
        let problem = refused.is_problem(412, "stale-token");
        assert_eq!(problem["used"], true);
    }
    // A read under a newer token raises the fence, and its own token stays usable.
    for _ in 0..2 {
        assert_eq!(fenced(&server, 7).await.unwrap().text, "read");
    }
    assert_eq!(server.write("/a", 7).await.text, "written");
}
