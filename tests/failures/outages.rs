//! Processes that freeze and stop, connections that are terminated, and transactions that conflict.

use std::{
    sync::atomic::{AtomicBool, AtomicI64, Ordering::Relaxed},
    time::Duration,
};

use axum::{
    Router,
    routing::{MethodRouter, post},
};
use futures_util::future::{join, join_all};
use reqwest::Client;
use serde_json::json;
use sqlx::{Connection, Executor, PgConnection, Postgres};
use tokio::{sync::watch, time::sleep};
use tower_fence::{Fence, FenceLayer, PathParam, PgFencedTx, layer::DatabaseError};

use crate::support::{
    database::{TestDatabase, pool_of},
    eventually,
    http::{Answer, Server},
    process::Inventory,
    proxy::{Link, Proxy},
};

/// Starts a service with a fenced route `/{r}`.
async fn serve(fence: Fence<Postgres>, route: MethodRouter) -> Server {
    let layer = FenceLayer::new(fence, PathParam("r"));
    Server::start(Router::new().route("/{r}", route).route_layer(layer)).await
}

/// The process freezes in its handler while it holds the row lock. The server ends the transaction,
/// the successor is admitted, and the resumed process does not report a success.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn process_frozen_in_its_handler_delays_others_only_briefly() {
    let db = Postgres::fresh(3).await;
    let variables = [("DATABASE_URL", db.url.as_str())];
    let frozen = Inventory::start(&variables).await;
    let other = Inventory::start(&variables).await;
    let stock = "INSERT INTO inventory VALUES ('sku-1', 10)";
    db.execute(stock).await;
    let client = Client::new();
    let decrement = |service: &Inventory, token: i64| {
        let request = client.post(service.url("/inventory/sku-1/decrement"));
        let request = request.header("Fencing-Token", token);
        Answer::to(request.json(&json!({ "quantity": 1 })))
    };
    // The statement of the handler waits for a row that another session has locked.
    let mut conn = PgConnection::connect(&db.url).await.unwrap();
    let mut blocker = conn.begin().await.unwrap();
    Postgres::run(&mut blocker, "UPDATE inventory SET stock = stock").await;
    let stuck = tokio::spawn(decrement(&frozen, 1));
    // The request is in its handler.
    db.waits_for_lock().await;
    frozen.signal("-STOP");
    blocker.rollback().await.unwrap();
    eventually("the successor is admitted", async || {
        let answer = decrement(&other, 2).await;
        assert!([200, 503].contains(&answer.status), "{answer:?}");
        answer.status == 200
    })
    .await;
    frozen.signal("-CONT");
    let answer = stuck.await.unwrap();
    let stock = db.number("SELECT stock FROM inventory").await;
    assert!(answer.status >= 400, "{answer:?}, stock {stock}");
    assert_eq!(stock, 9, "both requests wrote");
    // The resumed process works again.
    assert_eq!(decrement(&frozen, 3).await.status, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deadlock_with_the_application_is_busy() {
    async fn write(mut tx: PgFencedTx) -> Result<(), DatabaseError> {
        tx.execute("UPDATE stock SET n = n - 1 WHERE sku = 'r'")
            .await?;
        Ok(())
    }
    let db = Postgres::fresh(4).await;
    db.execute("INSERT INTO stock VALUES ('r', 10)").await;
    let server = serve(db.fence(), post(write)).await;
    assert_eq!(server.write("/r", 1).await.status, 200);
    let mut conn = PgConnection::connect(&db.url).await.unwrap();
    let mut application = conn.begin().await.unwrap();
    // Only the session of the handler looks for deadlocks, so it is the victim.
    let update = "SET LOCAL deadlock_timeout = '1min'; UPDATE stock SET n = n + 100";
    Postgres::run(&mut application, update).await;
    let (answer, ()) = join(server.write("/r", 2), async {
        db.waits_for_lock().await;
        // The locks are taken in the opposite order.
        let opposite = "UPDATE tower_fence.resources SET max_token = max_token";
        Postgres::run(&mut application, opposite).await;
    })
    .await;
    answer.is_problem(503, "fence-busy");
    assert_eq!(answer.headers["retry-after"], "1");
    application.commit().await.unwrap();
    // A retry with the same token succeeds.
    assert_eq!(server.write("/r", 2).await.status, 200);
    assert_eq!(db.number("SELECT n FROM stock").await, 108);
}

/// While writes continue, an administrator terminates one connection after the other, in any phase.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn terminated_connections_cost_only_their_answers() {
    async fn write(mut tx: PgFencedTx) -> Result<(), DatabaseError> {
        tx.execute("UPDATE stock SET n = n - 1 WHERE sku = 'r'")
            .await?;
        tx.execute("INSERT INTO ledger SELECT count(*) + 1 FROM ledger")
            .await?;
        Ok(())
    }
    let db = Postgres::fresh(3).await;
    db.execute("INSERT INTO stock VALUES ('r', 100000)").await;
    let fence = Fence::new(pool_of(&db.url, 4).await);
    let server = serve(fence, post(write)).await;
    let mut administrator = PgConnection::connect(&db.url).await.unwrap();
    let (stop, unknown) = (AtomicBool::new(false), AtomicI64::new(0));
    let acknowledged = AtomicI64::new(0);
    let killer = async {
        let mut killed = 0;
        for _ in 0..3_000 {
            if killed >= 40 {
                break;
            }
            let kill = "SELECT count(pg_terminate_backend(pid)) FROM (\
                 SELECT pid FROM pg_stat_activity \
                 WHERE datname = current_database() AND pid <> pg_backend_pid() \
                 AND query LIKE ANY \
                 (ARRAY['%tower_fence.resources%', '%COMMIT%', '%stock%', '%ledger%', 'BEGIN%']) \
                 ORDER BY random() LIMIT 1) victims";
            killed += Postgres::number(&mut administrator, kill).await.unwrap();
            sleep(Duration::from_millis(15)).await;
            if killed % 4 == 0 {
                // Without this wait, no write would end between two terminations on a busy machine.
                let before = acknowledged.load(Relaxed);
                let goes_on = async || acknowledged.load(Relaxed) > before;
                eventually("a write is acknowledged", goes_on).await;
            }
        }
        stop.store(true, Relaxed);
        killed
    };
    let writer = async {
        for token in 1.. {
            if stop.load(Relaxed) {
                break;
            }
            let answer = server.write("/r", token).await;
            match answer.status {
                200 => drop(acknowledged.fetch_add(1, Relaxed)),
                503 => {
                    let is_unknown = answer.text.contains("outcome-unknown");
                    unknown.fetch_add(i64::from(is_unknown), Relaxed);
                }
                _ => panic!("{answer:?}"),
            }
        }
    };
    let ((), killed) = join(writer, killer).await;
    let acknowledged = acknowledged.into_inner();
    assert!(killed >= 40, "{killed} connections were ended");
    let (entries, unknown) = (db.entries().await, unknown.into_inner());
    println!("{acknowledged} acknowledged, {unknown} unknown, {entries} written");
    assert!(acknowledged > 0);
    assert!((acknowledged..=acknowledged + unknown).contains(&entries));
    assert_eq!(db.number("SELECT n FROM stock").await, 100_000 - entries);
    // After the terminations, writes succeed as before.
    assert_eq!(server.write("/r", 1_000_000).await.status, 200);
}

/// Postgres is unreachable for a while, and then silent for a while.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restored_database_connection_needs_no_restart() {
    let db = Postgres::fresh(2).await;
    let proxy = Proxy::to(db.addr()).await;
    let pool = sqlx::postgres::PgPoolOptions::new().max_connections(4);
    let short = Duration::from_millis(500);
    let fence = Fence::builder()
        .pool_timeout(short)
        .answer_timeout(short)
        .lock_timeout(short)
        .build(pool.connect(&proxy.url(&db.url)).await.unwrap());
    let server = serve(fence, post(async |_tx: PgFencedTx| {})).await;
    let token = AtomicI64::new(1);
    let write = async || server.write("/r", token.fetch_add(1, Relaxed)).await;
    assert_eq!(write().await.status, 200);
    for away in [Link::Cut, Link::Silent] {
        proxy.set(away);
        for _ in 0..3 {
            let answer = tokio::time::timeout(Duration::from_secs(5), write()).await;
            let answer = answer.expect("the request hangs");
            assert_eq!(answer.status, 503, "{answer:?}");
            assert_eq!(answer.headers["retry-after"], "1");
        }
        proxy.set(Link::Whole);
        eventually!("the service writes again", write().await.status == 200);
    }
}

/// The service is stopped under load and started again. Its clients repeat the requests that were
/// not answered.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_under_load_loses_nothing() {
    const CLIENTS: i64 = 16;
    const WRITES: i64 = 60;
    let db = Postgres::fresh(2).await;
    let variables = [("DATABASE_URL", db.url.as_str())];
    let mut service = Inventory::start(&variables).await;
    for client in 0..CLIENTS {
        let stock = format!("INSERT INTO inventory VALUES ('sku-{client}', 1000)");
        db.execute(&stock).await;
    }
    let (at, url) = watch::channel(service.url.clone());
    let (client, done) = (Client::new(), AtomicI64::new(0));
    let write = async |n: i64| {
        let mut refused = 0;
        for token in 1..=WRITES {
            loop {
                let url = url.borrow().clone();
                let request = client.post(format!("{url}/inventory/sku-{n}/decrement"));
                let request = request
                    .header("Fencing-Token", token)
                    .header("Idempotency-Key", format!("\"{token}\""))
                    .json(&json!({ "quantity": 1 }));
                if let Ok(answer) = request.send().await {
                    let answer = Answer::read(answer).await;
                    if answer.status == 200 {
                        assert_eq!(answer.json()["stock"], 1000 - token);
                        break;
                    }
                    assert!(answer.is_busy(), "{answer:?}");
                }
                refused += 1;
                sleep(Duration::from_millis(5)).await;
            }
            done.fetch_add(1, Relaxed);
        }
        refused
    };
    let restarts = async {
        for _ in 0..3 {
            let before = done.load(Relaxed);
            eventually!(
                "writes continue",
                done.load(Relaxed) > before + CLIENTS * WRITES / 6
            );
            service.signal("-TERM");
            let status = service.exit().await;
            assert!(status.success(), "{status}");
            service = Inventory::start(&variables).await;
            at.send_replace(service.url.clone());
        }
    };
    let (refused, ()) = join(join_all((0..CLIENTS).map(write)), restarts).await;
    println!("{} requests were repeated", refused.iter().sum::<i32>());
    let left = "SELECT CAST(sum(stock) AS BIGINT) FROM inventory";
    assert_eq!(db.number(left).await, CLIENTS * (1000 - WRITES));
}

/// The unread answers fill the sockets, and keep no transaction open.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_stops_reading_holds_no_lock() {
    use tokio::{io::AsyncWriteExt, net::TcpStream};
    async fn long(_tx: PgFencedTx) -> Vec<u8> {
        vec![b'x'; 64 * 1024 * 1024]
    }
    let db = Postgres::fresh(2).await;
    let app = Router::new()
        .route("/long/{r}", post(long))
        .route("/short/{r}", post(async |_tx: PgFencedTx| {}))
        .route_layer(FenceLayer::new(db.fence(), PathParam("r")));
    let server = Server::start(app).await;
    let mut stream = TcpStream::connect(server.addr).await.unwrap();
    let request =
        "POST /long/r HTTP/1.1\r\nHost: x\r\nFencing-Token: 1\r\nContent-Length: 0\r\n\r\n";
    stream.write_all(request.as_bytes()).await.unwrap();
    let admitted = "SELECT count(*) FROM tower_fence.resources WHERE max_token = 1";
    eventually!("the request is admitted", db.number(admitted).await == 1);
    assert_eq!(server.write("/short/r", 2).await.status, 200);
    let idle = "SELECT count(*) FROM pg_stat_activity \
                WHERE state LIKE 'idle in transaction%' AND datname = current_database()";
    eventually!("no transaction is open", db.number(idle).await == 0);
    drop(stream);
}
