//! A thousand writes whose connections are cut at every stage. Each write is repeated until it is
//! answered. Each write is applied exactly once, and answered like a write on an intact connection.
//!
//! The same workload detects guards that have no keys, and guards that keep their records outside
//! the transaction.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use axum::{
    Router,
    extract::{Path, State},
    http::{HeaderMap, StatusCode},
    routing::post,
};
use futures_util::future::join_all;
use reqwest::Client;
use sqlx::{PgPool, Postgres, postgres::PgPoolOptions};
use tokio::time::{Duration, sleep};
use tower_fence::{Fence, FenceLayer, FencedTx, Idempotency, PathParam, PgFencedTx};

use crate::support::{
    database::{Fresh, TestDatabase},
    http::Server,
    proxy::{Passage, Proxy, Sender},
};

const WORKERS: i64 = 20;
const WRITES: i64 = 50;
const STOCK: i64 = 1_000;

// The stages at which the connection of a request is cut.
const IN_REQUEST: usize = 0;
const AT_WORK: usize = 1;
const BEFORE_ANSWER: usize = 2;
const IN_ANSWER: usize = 3;

/// The number of connections that were cut at each stage.
type Cuts = Arc<[AtomicU64; 4]>;

/// Starts a proxy that serves one request per connection. The proxy cuts four of five connections,
/// equally often at each stage.
async fn cut_requests(server: SocketAddr) -> (Proxy, Cuts) {
    let cuts = Cuts::default();
    let counting = cuts.clone();
    let proxy = Proxy::judging_each(server, move || {
        let (cuts, place) = (counting.clone(), rand::random_range(0..5));
        move |sender, message: &[u8]| {
            let half = || Passage::CutAfter(rand::random_range(1..message.len()));
            let cut = match (sender, place) {
                (Sender::Client, IN_REQUEST) => half(),
                (Sender::Client, AT_WORK) => {
                    // The stages of a handler take up to 100 ms on a machine with other work.
                    let exponent = rand::random_range(-1.0..2.0);
                    Passage::CutLater(Duration::from_secs_f64(10_f64.powf(exponent) / 1_000.0))
                }
                // The handler finished its work before the connection was cut.
                (Sender::Server, AT_WORK) => return Passage::Dropped,
                (Sender::Server, BEFORE_ANSWER) => Passage::CutAfter(0),
                (Sender::Server, IN_ANSWER) => half(),
                _ => return Passage::Whole,
            };
            cuts[place].fetch_add(1, Relaxed);
            cut
        }
    });
    (proxy.await, cuts)
}

/// Starts a proxy that cuts a connection at one of `one_in` messages, in either direction.
async fn cut_messages(server: SocketAddr, one_in: u32) -> (Proxy, Arc<AtomicU64>) {
    let cuts = Arc::<AtomicU64>::default();
    let counting = cuts.clone();
    let proxy = Proxy::judging(server, move |_, _| {
        if rand::random_ratio(1, one_in) {
            counting.fetch_add(1, Relaxed);
            return Passage::CutAfter(0);
        }
        Passage::Whole
    });
    (proxy.await, cuts)
}

/// Takes one item from the stock, and adds a row to `taken`.
async fn take_one<DB: TestDatabase>(
    conn: &mut DB::Connection,
    sku: &str,
) -> Result<String, StatusCode> {
    let unavailable = |_| StatusCode::SERVICE_UNAVAILABLE;
    let read = format!("SELECT n FROM stock WHERE sku = '{sku}'");
    let n = DB::number(conn, &read).await.map_err(unavailable)? - 1;
    sleep(Duration::from_millis(2)).await;
    let write =
        format!("UPDATE stock SET n = {n} WHERE sku = '{sku}'; INSERT INTO taken VALUES (1)");
    DB::execute(conn, &write).await.map_err(unavailable)?;
    Ok(n.to_string())
}

async fn decrement<DB: TestDatabase>(
    mut tx: FencedTx<DB>,
    Path(sku): Path<String>,
) -> Result<String, StatusCode> {
    take_one::<DB>(&mut tx, &sku).await
}

async fn prepare<DB: TestDatabase>(db: &Fresh<DB>) {
    db.execute("CREATE TABLE taken (n BIGINT)").await;
    let outside = "CREATE TABLE outside (key TEXT PRIMARY KEY, answer TEXT)";
    db.execute(outside).await;
    for worker in 0..WORKERS {
        let stock = format!("INSERT INTO stock VALUES ('sku-{worker}', {STOCK})");
        db.execute(&stock).await;
    }
}

/// Runs workers, each of which makes `writes` writes to its own SKU, one after the other, and
/// repeats each write until it is answered. Returns the number of applied writes, and the number of
/// answers that differ from those on an intact connection.
async fn workload<DB: TestDatabase>(db: &Fresh<DB>, app: Router, writes: i64) -> (i64, u64) {
    let server = Server::start(app).await;
    let (proxy, cuts) = cut_requests(server.addr).await;
    // Each request has its own connection, because each connection is cut at its own stage.
    let client = Client::builder().pool_max_idle_per_host(0).build().unwrap();
    let one = async |worker: i64| {
        let mut odd = 0;
        for n in 1..=writes {
            let answer = loop {
                let request = client.post(format!("http://{}/sku-{worker}", proxy.addr));
                let request = request
                    .header("Fencing-Token", n)
                    .header("Idempotency-Key", format!("\"{worker}-{n}\""));
                let Ok(answer) = request.send().await else {
                    continue;
                };
                let status = answer.status().as_u16();
                let Ok(text) = answer.text().await else {
                    continue;
                };
                match status {
                    200 => break text,
                    412 => break "stale".into(),
                    409 | 500 | 503 => sleep(Duration::from_millis(5)).await,
                    _ => panic!("{status}: {text}"),
                }
            };
            odd += u64::from(answer != (STOCK - n).to_string());
        }
        odd
    };
    let odd = join_all((0..WORKERS).map(one)).await.iter().sum();
    let counts = cuts.each_ref().map(|count| count.load(Relaxed));
    let applied = db.number("SELECT count(*) FROM taken").await;
    println!("cuts: {counts:?}; {applied} applied, {odd} odd answers");
    // Each stage was interrupted.
    assert!(counts.iter().all(|count| *count > 0));
    let left = "SELECT CAST(sum(n) AS BIGINT) FROM stock";
    assert_eq!(WORKERS * STOCK - db.number(left).await, applied);
    (applied, odd)
}

fn guarded<DB: TestDatabase>(layer: FenceLayer<DB, PathParam>) -> Router {
    Router::new()
        .route("/{sku}", post(decrement::<DB>))
        .route_layer(layer)
}

async fn keys_apply_each_write_once<DB: TestDatabase>(reusable: bool, writes: i64) {
    let db = DB::fresh(16).await;
    prepare(&db).await;
    let layer = FenceLayer::new(db.fence(), PathParam("sku")).idempotent(Idempotency::required());
    let layer = if reusable { layer.reusable() } else { layer };
    let outcome = workload(&db, guarded(layer), writes).await;
    assert_eq!(outcome, (WORKERS * writes, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn interrupted_writes_are_applied_once_and_answered() {
    keys_apply_each_write_once::<Postgres>(false, 15).await;
}

/// Only the key prevents a second write, because a reusable token is admitted again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thousand_interrupted_writes_with_reusable_tokens_are_applied_once() {
    keys_apply_each_write_once::<Postgres>(true, WRITES).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn interrupted_writes_on_sqlite_are_applied_once() {
    keys_apply_each_write_once::<sqlx::Sqlite>(true, 25).await;
}

/// The connections to Postgres are cut as well, at any stage.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn interrupted_writes_and_database_connections_apply_once() {
    let db = Postgres::fresh(2).await;
    prepare(&db).await;
    let (proxy, cuts) = cut_messages(db.addr(), 100).await;
    let pool = PgPoolOptions::new().max_connections(16);
    let fence = Fence::new(pool.connect_lazy(&proxy.url(&db.url)).unwrap());
    let keys = Idempotency::required();
    let layer = FenceLayer::new(fence, PathParam("sku"))
        .reusable()
        .idempotent(keys);
    let writes = 15;
    let outcome = workload(&db, guarded(layer), writes).await;
    let cuts = cuts.load(Relaxed);
    println!("{cuts} connections to Postgres were cut");
    assert!(cuts > 50, "Postgres was unavailable too rarely");
    assert_eq!(outcome, (WORKERS * writes, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn test_detects_writes_without_keys() {
    let db = Postgres::fresh(16).await;
    prepare(&db).await;
    let layer = || FenceLayer::new(db.fence(), PathParam("sku"));
    // With single-use tokens, no write is applied twice, but the client does not get the original
    // answer.
    let (applied, odd) = workload(&db, guarded(layer()), 10).await;
    assert_eq!(applied, WORKERS * 10);
    // If no answer is lost, or no write is applied twice, the workload proves nothing.
    assert!(odd > 0);
    let undo = format!("DELETE FROM taken; UPDATE stock SET n = {STOCK}");
    db.execute(&undo).await;
    db.execute("DELETE FROM tower_fence.resources").await;
    let (applied, _) = workload(&db, guarded(layer().reusable()), 10).await;
    assert!(applied > WORKERS * 10, "{applied}");
}

/// The guard keeps its records outside the transaction of the write.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn test_detects_records_outside_the_transaction() {
    async fn recorded(
        State(pool): State<PgPool>,
        Path(sku): Path<String>,
        headers: HeaderMap,
        mut tx: PgFencedTx,
    ) -> Result<String, StatusCode> {
        let key = headers["idempotency-key"].to_str().unwrap();
        let find = sqlx::query_scalar("SELECT answer FROM outside WHERE key = $1").bind(key);
        if let Some(answer) = find.fetch_optional(&pool).await.unwrap() {
            return Ok(answer);
        }
        let answer = take_one::<Postgres>(&mut tx, &sku).await?;
        tx.commit().await.unwrap();
        // This pause is long enough that some of the interruptions happen during it on any machine.
        sleep(Duration::from_millis(20)).await;
        let record = sqlx::query("INSERT INTO outside VALUES ($1, $2)");
        let record = record.bind(key).bind(&answer);
        record.execute(&pool).await.unwrap();
        Ok(answer)
    }
    // 200 writes may pass without a double write on a slow machine.
    for _ in 0..5 {
        let db = Postgres::fresh(50).await;
        prepare(&db).await;
        let layer = FenceLayer::new(db.fence(), PathParam("sku")).reusable();
        let app = Router::new()
            .route("/{sku}", post(recorded))
            .route_layer(layer)
            .with_state(db.pool.clone());
        let (applied, _) = workload(&db, app, 10).await;
        if applied > WORKERS * 10 {
            return;
        }
    }
    panic!("no write was applied twice, so the workload proves nothing");
}
