//! A thousand clients disconnect at random moments. No lock and no open transaction remains.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use axum::{
    Router,
    extract::{Path, State},
    routing::post,
};
use futures_util::{StreamExt, future::join_all, stream};
use sqlx::{Connection, PgConnection, PgPool, Postgres, postgres::PgPoolOptions};
use tokio::{
    io::AsyncWriteExt,
    net::TcpStream,
    time::{sleep, timeout},
};
use tower_fence::{Fence, FenceLayer, PathParam, PgFencedTx, Resource, Token, TokenUse};

use crate::support::{
    database::{Fresh, TestDatabase, WAITING_FOR_LOCK, is_autocommitted},
    eventually,
    http::Server,
    proxy::Proxy,
};

const CONNECTIONS: u32 = 5;

/// Returns a pool for the application under test. Each message to and from Postgres is delayed, so
/// that clients disconnect in every phase.
async fn slow_pool(db: &Fresh<Postgres>, test: bool) -> (PgPool, Proxy) {
    let proxy = Proxy::delaying(db.addr(), Duration::from_millis(1)).await;
    let options = PgPoolOptions::new()
        .max_connections(CONNECTIONS)
        .test_before_acquire(test)
        .acquire_timeout(Duration::from_secs(20));
    (db.pool_under_test(Some(&proxy), options).await, proxy)
}

/// Sends requests with increasing tokens, and disconnects after at most 100 ms. Every third request
/// is for a resource whose row lock another task takes repeatedly.
async fn disturb(server: &Server, count: i64, tokens: &AtomicI64) {
    let one = |n: i64| async move {
        let sku = if n % 3 == 0 { "hot" } else { "cold" };
        let token = tokens.fetch_add(1, Relaxed);
        let request = format!(
            "POST /{sku}/write HTTP/1.1\r\nHost: x\r\nFencing-Token: {token}\r\n\
             Content-Length: 0\r\n\r\n"
        );
        let mut stream = TcpStream::connect(server.addr).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        sleep(Duration::from_micros(rand::random_range(0..100_000))).await;
    };
    stream::iter(0..count).for_each_concurrent(20, one).await;
}

/// A guard that counts the handlers that are dropped before they have finished.
struct Cut<'a>(Option<&'a AtomicU64>);

impl Drop for Cut<'_> {
    fn drop(&mut self) {
        if let Some(count) = self.0 {
            count.fetch_add(1, Relaxed);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thousand_disconnected_clients_leave_nothing_behind() {
    a_thousand_go_away(false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn disconnected_clients_leave_nothing_behind_on_reused_connections() {
    a_thousand_go_away(true).await;
}

async fn a_thousand_go_away(reuse: bool) {
    async fn write(mut tx: PgFencedTx, State(cut): State<Arc<AtomicU64>>) {
        let mut cut = Cut(Some(&cut));
        let token = tx.admitted().token();
        for n in 0..3 {
            let entry = token.get() * 10 + n;
            Postgres::run(&mut tx, &format!("INSERT INTO ledger VALUES ({entry})")).await;
        }
        cut.0 = None;
    }

    let db = Postgres::fresh(4).await;
    let (pool, proxy) = slow_pool(&db, true).await;
    let fence = Fence::builder()
        .reuse_connections(reuse)
        .build(pool.clone());
    let cut = Arc::new(AtomicU64::new(0));
    let app = Router::new()
        .route("/{sku}/write", post(write))
        .route_layer(FenceLayer::new(fence, PathParam("sku")))
        .with_state(cut.clone());
    let server = Server::start(app).await;

    // Repeatedly takes the row lock for a while, on a connection of its own.
    let over = Arc::new(AtomicBool::new(false));
    let blocker = tokio::spawn({
        let (pool, over) = (db.pool.clone(), over.clone());
        async move {
            let sql = "SELECT FROM tower_fence.resources WHERE resource = 'hot' FOR UPDATE";
            while !over.load(Relaxed) {
                let mut lock = pool.begin().await.unwrap();
                Postgres::run(&mut lock, sql).await;
                sleep(Duration::from_millis(20)).await;
                lock.rollback().await.unwrap();
                sleep(Duration::from_millis(5)).await;
            }
        }
    });
    let waited = Arc::new(AtomicI64::new(0));
    let watch = tokio::spawn({
        let (over, waited) = (over.clone(), waited.clone());
        let mut observer = PgConnection::connect(&db.url).await.unwrap();
        // The blocker itself also waits.
        let waiting = format!("{WAITING_FOR_LOCK} AND application_name = 'under-test'");
        async move {
            while !over.load(Relaxed) {
                let seen = Postgres::number(&mut observer, &waiting).await;
                waited.fetch_add(seen.unwrap(), Relaxed);
                sleep(Duration::from_millis(10)).await;
            }
        }
    });
    let tokens = AtomicI64::new(2);
    for round in 0..50 {
        let was_seen = cut.load(Relaxed) > 0 && waited.load(Relaxed) > 0;
        // On a busy machine, the test needs more rounds.
        if round >= 10 && was_seen {
            break;
        }
        disturb(&server, 100, &tokens).await;
        // The server ends idle transactions only much later.
        let quiet = eventually("no session is in a transaction", async || {
            db.sessions_under_test("state <> 'idle'").await == 0
        });
        let quiet = timeout(Duration::from_secs(8), quiet).await;
        quiet.expect("a session stays in a transaction");
    }
    over.store(true, Relaxed);
    blocker.await.unwrap();
    watch.await.unwrap();
    let (waited, cut) = (waited.load(Relaxed), cut.load(Relaxed));
    println!("{cut} handlers were cut off, {waited} waits for a lock were seen");
    assert!(
        cut > 0 && waited > 0,
        "no client disconnected in a handler or a lock wait"
    );

    // On a busy machine, a few rollbacks take too long, and their connections are closed.
    let connects = proxy.connections();
    assert!(
        connects <= 2 * u64::from(CONNECTIONS) + cut / 2,
        "{connects} connections were opened"
    );
    // All connections are acquired at the same time, so that each is a different one.
    let connections = join_all((0..CONNECTIONS).map(|_| pool.acquire())).await;
    let mut observer = db.pool.acquire().await.unwrap();
    for (entry, connection) in (-1_000..).zip(connections) {
        is_autocommitted::<Postgres>(&mut connection.unwrap(), &mut observer, entry).await;
    }
    db.execute("DELETE FROM ledger WHERE entry < 0").await;
    for sku in ["hot", "cold"] {
        let path = format!("/{sku}/write");
        let next = server.write(&path, tokens.fetch_add(1, Relaxed));
        let next = timeout(Duration::from_secs(8), next)
            .await
            .expect("the next write was not answered in time");
        assert_eq!(next.status, 200, "{next:?}");
    }
    // Each token has three entries, or none.
    let torn = "SELECT count(*) FROM \
                (SELECT entry / 10 FROM ledger GROUP BY 1 HAVING count(*) <> 3) AS torn";
    assert_eq!(db.number(torn).await, 0);
}

/// The same clients detect a guard that opens its transaction with sqlx's `begin()`: if the answer
/// to BEGIN is dropped, the transaction stays open in the pool.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn test_detects_a_transaction_that_is_unsafe_to_drop() {
    async fn write(State(fence): State<Fence<Postgres>>, Path(sku): Path<String>) {
        // Acquiring the connection itself is safe to drop.
        let acquired = tokio::spawn(fence.pool().acquire()).await.unwrap();
        let mut connection = acquired.unwrap();
        let mut tx = connection.begin().await.unwrap();
        let sku = Resource::new(sku).unwrap();
        let token = Token::new(rand::random_range(1..1_000_000)).unwrap();
        let _ = fence.admit(&mut tx, &sku, token, TokenUse::SingleUse).await;
        tx.commit().await.unwrap();
    }
    let db = Postgres::fresh(4).await;
    // The pool does not test connections before use, because a connection that is dropped during
    // the test is closed, which hides the fault.
    let (pool, _proxy) = slow_pool(&db, false).await;
    let app = Router::new()
        .route("/{sku}/write", post(write))
        .with_state(Fence::new(pool));
    let server = Server::start(app).await;
    let mut caught = false;
    // Only a few clients run at a time, because the next request on a connection ends the
    // transaction that was left open there.
    for _ in 0..200 {
        disturb(&server, 10, &AtomicI64::new(1)).await;
        eventually!(
            "no statement runs",
            db.sessions_under_test("state = 'active'").await == 0
        );
        sleep(Duration::from_millis(50)).await;
        if db
            .sessions_under_test("state LIKE 'idle in transaction%'")
            .await
            > 0
        {
            caught = true;
            break;
        }
    }
    assert!(
        caught,
        "two thousand clients found no fault, so the test proves nothing"
    );
}
