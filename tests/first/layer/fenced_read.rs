//! A read with a token: what it has seen is not overtaken by anybody older.

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
use tower_fence::{FenceLayer, FencedTx, PathParam, Resource, Token, announce::Announce};

use crate::support::{
    database::{Fresh, TestDatabase, on_both_databases},
    eventually,
    http::{Answer, Server},
    variant::on_other_postgres,
};

on_both_databases!(
    a_write_that_comes_in_while_it_reads_is_seen,
    a_write_under_way_while_it_reads_is_seen,
    nothing_older_lands_behind_a_read,
    where_everyone_older_is_dead_it_reads_once,
    it_holds_no_connection_while_it_reads,
);

on_other_postgres!(
    <DB>
    a_write_that_comes_in_while_it_reads_is_seen,
    a_write_under_way_while_it_reads_is_seen,
    nothing_older_lands_behind_a_read,
);

struct Plan<DB: TestDatabase> {
    pool: Pool<DB>,
    /// How often the reader was called, and how often it may go on.
    reads: AtomicI64,
    readers: Semaphore,
    writes: AtomicI64,
    writers: Semaphore,
}

type Shared<DB> = State<Arc<Plan<DB>>>;

async fn stock<DB: TestDatabase>(pool: &Pool<DB>) -> i64 {
    let mut conn = pool.acquire().await.unwrap();
    DB::number(&mut conn, "SELECT n FROM stock").await.unwrap()
}

/// Reads first, and answers later.
async fn read<DB: TestDatabase>(State(plan): Shared<DB>) -> String {
    let n = stock(&plan.pool).await;
    plan.reads.fetch_add(1, Relaxed);
    plan.readers.acquire().await.unwrap().forget();
    n.to_string()
}

async fn write<DB: TestDatabase>(State(plan): Shared<DB>, mut tx: FencedTx<DB>) {
    DB::execute(&mut tx, "UPDATE stock SET n = n + 1")
        .await
        .unwrap();
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
    let app = Router::new()
        .route("/{sku}", get(read::<DB>).post(write::<DB>))
        .route_layer(layer)
        .with_state(plan.clone());
    (Server::start(app).await, plan)
}

fn fenced(server: &Server, token: i64) -> tokio::task::JoinHandle<Answer> {
    let request = server.get("/a").header("Fencing-Token", token);
    tokio::spawn(Answer::to(request))
}

async fn a_write_that_comes_in_while_it_reads_is_seen<DB: TestDatabase>() {
    let db = DB::fresh(4).await;
    let (server, plan) = setup(&db, 0, 1_000).await;
    // The second write of a reusable token does not move `max_token`.
    for _ in 0..2 {
        assert_eq!(server.write("/a", 3).await.status, 200);
    }
    let reading = fenced(&server, 5);
    eventually("it has read", async || plan.reads.load(Relaxed) == 1).await;
    assert_eq!(server.write("/a", 3).await.status, 200);
    plan.readers.add_permits(2);
    assert_eq!(reading.await.unwrap().text, "3");
    assert_eq!(plan.reads.load(Relaxed), 2);
    let older = server.write("/a", 4).await;
    older.is_problem(412, "stale-token");
    assert_eq!(stock(&db.pool).await, 3);
    assert_eq!(server.write("/a", 5).await.status, 200);
}

async fn a_write_under_way_while_it_reads_is_seen<DB: TestDatabase>() {
    let db = DB::fresh(4).await;
    let (server, plan) = setup(&db, 0, 1).await;
    assert_eq!(server.write("/a", 3).await.status, 200);
    // The reader is another process of the service.
    let (other, others) = {
        let plan = Arc::new(Plan {
            pool: db.pool.clone(),
            reads: AtomicI64::new(0),
            readers: Semaphore::new(0),
            writes: AtomicI64::new(0),
            writers: Semaphore::new(0),
        });
        let layer = FenceLayer::new(db.fence(), PathParam("sku"));
        let app = Router::new()
            .route("/{sku}", get(read::<DB>))
            .route_layer(layer)
            .with_state(plan.clone());
        (Server::start(app).await, plan)
    };
    let reading = fenced(&other, 5);
    eventually("it has read", async || others.reads.load(Relaxed) == 1).await;
    let request = server.post("/a").header("Fencing-Token", "3");
    let writing = tokio::spawn(Answer::to(request));
    eventually("it has written", async || plan.writes.load(Relaxed) == 2).await;
    others.readers.add_permits(2);
    // The raise waits for the writer.
    sleep(Duration::from_millis(50)).await;
    assert!(!reading.is_finished());
    plan.writers.add_permits(1);
    assert_eq!(writing.await.unwrap().status, 200);
    assert_eq!(reading.await.unwrap().text, "2");
}

/// Older holders write all the time. What a fenced read has answered stays so.
async fn nothing_older_lands_behind_a_read<DB: TestDatabase>() {
    let db = DB::fresh(8).await;
    let (server, plan) = setup(&db, 100_000, 100_000).await;
    for round in 1..=10 {
        let token = 2 * round;
        let url = server.url("/a");
        let writers = (0..3).map(|_| {
            let (client, url) = (server.client.clone(), url.clone());
            tokio::spawn(async move {
                let mut written = 0;
                loop {
                    let write = client.post(&url).header("Fencing-Token", token);
                    match Answer::to(write).await.status {
                        200 => written += 1,
                        412 => return written,
                        // SQLite has one lock for all.
                        503 => {}
                        status => panic!("{status}"),
                    }
                }
            })
        });
        let writers: Vec<_> = writers.collect();
        let before = plan.writes.load(Relaxed);
        eventually("they write", async || {
            plan.writes.load(Relaxed) > before + 5
        })
        .await;
        let read = loop {
            let answer = fenced(&server, token + 1).await.unwrap();
            if answer.status == 200 {
                break answer.text;
            }
            assert_eq!(answer.status, 503, "{answer:?}");
        };
        for writer in writers {
            let written: i32 = writer.await.unwrap();
            assert!(written >= 0);
        }
        assert_eq!(read, stock(&db.pool).await.to_string(), "round {round}");
    }
}

async fn where_everyone_older_is_dead_it_reads_once<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let (server, plan) = setup(&db, 1_000, 1_000).await;
    let (a, five) = (Resource::new("a").unwrap(), Token::new(5).unwrap());
    let id = tower_fence::announce::LeaseDigest::of("a lease of somebody's own");
    db.fence().announce(&a, five, &id).await.unwrap();
    for reads in 1..=3 {
        assert_eq!(fenced(&server, 5).await.unwrap().text, "0");
        assert_eq!(plan.reads.load(Relaxed), reads);
    }
    let stale = fenced(&server, 4).await.unwrap();
    stale.is_problem(412, "stale-token");
    assert_eq!(plan.reads.load(Relaxed), 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_nobody_writes_it_reads_once() {
    let db = Postgres::fresh(2).await;
    let (server, plan) = setup(&db, 1_000, 1_000).await;
    assert_eq!(server.write("/a", 3).await.status, 200);
    for (reads, token) in [(1, 5), (2, 6), (3, 6), (4, 9)] {
        assert_eq!(fenced(&server, token).await.unwrap().text, "1");
        assert_eq!(plan.reads.load(Relaxed), reads, "{token}");
    }
    let older = server.write("/a", 8).await;
    older.is_problem(412, "stale-token");
}

/// With one connection in the pool, and handlers that want it.
async fn it_holds_no_connection_while_it_reads<DB: TestDatabase>() {
    let db = DB::fresh(1).await;
    let (server, _) = setup(&db, 1_000, 1_000).await;
    let reads: Vec<_> = (0..10).map(|_| fenced(&server, 5)).collect();
    for read in reads {
        let read = timeout(Duration::from_secs(10), read).await;
        let answer = read.expect("it must not wait for itself").unwrap();
        assert_eq!(answer.text, "0");
    }
}

/// What a handler of a read is sent, it is sent as a whole each time.
#[tokio::test]
async fn a_query_is_sent_its_body_again() {
    let db = Postgres::fresh(2).await;
    let echo = any(|Path(_): Path<String>, body: String| async { (StatusCode::OK, body) });
    let bare = post(|| async {});
    let layer = FenceLayer::new(db.fence(), PathParam("sku"));
    let app = Router::new()
        .route("/{sku}", echo)
        .route("/{sku}/bare", bare)
        .route_layer(layer);
    let server = Server::start(app).await;
    // A resource that was never seen before is read twice.
    let query = server
        .client
        .request("QUERY".parse().unwrap(), server.url("/a"));
    let query = query.header("Fencing-Token", "5").body("what is left?");
    assert_eq!(Answer::to(query).await.text, "what is left?");
    assert_eq!(server.write("/a/bare", 5).await.status, 200);
}
