//! Fifty clients, two servers, one SKU: the stock falls by exactly what was acknowledged.
//!
//! Some clients pause until their lease is about to run out, so that two holders write at once. The
//! same workload finds the guard that checks in a transaction of its own.

use std::{
    sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed},
    time::Duration,
};

use axum::{
    Router,
    extract::{Path, State},
    http::{HeaderMap, StatusCode},
    routing::post,
};
use futures_util::future::join_all;
use reqwest::Client;
use serde_json::json;
use sqlx::{PgConnection, PgPool, Postgres, postgres::PgPoolOptions};
use tokio::time::sleep;
use tower_fence::{
    Fence, FenceLayer, PathParam, PgFencedTx, Resource, TokenUse, header, issuer,
    lease::RedisLeases,
};

use crate::support::{
    database::{Fresh, TestDatabase},
    http::{Answer, Server},
    process::Inventory,
    redis::{RedisServer, fresh_prefix, shared_url},
};

const CLIENTS: u64 = 50;
const WRITES: i64 = 1_000;
const STOCK: i64 = 1_000_000;
const TTL_MS: u64 = 100;

/// Acquires, decrements and releases until enough writes are acknowledged, and returns how many
/// were: each by one. Who does not wait in line asks again and again.
async fn workload(urls: &[String], wait_ms: u64) -> i64 {
    let (acknowledged, refused) = (AtomicI64::new(0), AtomicU64::new(0));
    let client = Client::new();
    let one = async |n: u64| {
        let url = &urls[n as usize % urls.len()];
        let lock = format!("{url}/locks/sku-1");
        while acknowledged.load(Relaxed) < WRITES {
            let body = json!({ "ttl_ms": TTL_MS, "wait_ms": wait_ms });
            let lease = Answer::to(client.post(&lock).json(&body)).await;
            if lease.status != 201 {
                // Or its announcement took longer than the lease.
                if lease.status != 503 {
                    lease.is_problem(409, "lock-held");
                }
                sleep(Duration::from_millis(rand::random_range(1..10))).await;
                continue;
            }
            let lease = lease.json();
            if rand::random_ratio(1, 20) {
                let pause = rand::random_range(TTL_MS - 15..TTL_MS + 15);
                sleep(Duration::from_millis(pause)).await;
            }
            let write = client.post(format!("{url}/inventory/sku-1/decrement"));
            let write = write.header("Fencing-Token", lease["fencing_token"].as_str().unwrap());
            let answer = Answer::to(write.json(&json!({ "quantity": 1 }))).await;
            match answer.status {
                200 => acknowledged.fetch_add(1, Relaxed),
                _ => {
                    answer.is_problem(412, "stale-token");
                    refused.fetch_add(1, Relaxed) as i64
                }
            };
            let id = lease["lease_id"].as_str().unwrap();
            Answer::to(client.delete(&lock).header("Lease-Id", id)).await;
        }
    };
    join_all((0..CLIENTS).map(one)).await;
    println!("{acknowledged:?} acknowledged, {refused:?} refused");
    acknowledged.into_inner()
}

/// Two processes of the example, with these variables besides that of the database.
async fn two_processes_lose_nothing(variables: &[(&str, &str)], wait_ms: u64) {
    let db = Postgres::fresh(2).await;
    let variables = [&[("DATABASE_URL", db.url.as_str())], variables].concat();
    // One after the other: both create the tables where they are missing.
    let one = Inventory::start(&variables).await;
    let two = Inventory::start(&variables).await;
    db.execute(&format!("INSERT INTO inventory VALUES ('sku-1', {STOCK})"))
        .await;
    let acknowledged = workload(&[one.url.clone(), two.url.clone()], wait_ms).await;
    assert!(acknowledged >= WRITES);
    let left = db.number("SELECT stock FROM inventory").await;
    assert_eq!(STOCK - left, acknowledged);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_processes_of_the_service_lose_nothing() {
    let redis = RedisServer::start(&[]).await;
    two_processes_lose_nothing(&[("REDIS_URL", &redis.url())], 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_processes_with_leases_in_postgres_lose_nothing() {
    two_processes_lose_nothing(&[], 30_000).await;
}

/// Two servers in this process, each with a pool of its own, whose handlers take some time
/// between read and write.
async fn servers(db: &Fresh<Postgres>, app: impl Fn(Fence<Postgres>) -> Router) -> Vec<Server> {
    let stock = format!("DELETE FROM stock; INSERT INTO stock VALUES ('sku-1', {STOCK})");
    db.execute(&stock).await;
    let prefix = fresh_prefix();
    let mut servers = vec![];
    for _ in 0..2 {
        let pool = PgPoolOptions::new()
            .max_connections(16)
            .connect(&db.url)
            .await
            .unwrap();
        let fence = Fence::new(pool);
        let leases = RedisLeases::builder(fence.clone()).key_prefix(&prefix);
        let leases = leases.connect(&shared_url()).await.unwrap();
        let app = app(fence).nest("/locks", issuer::router(leases));
        servers.push(Server::start(app).await);
    }
    servers
}

async fn fell_by_what_was_acknowledged(db: &Fresh<Postgres>, servers: &[Server]) -> bool {
    let urls: Vec<_> = servers.iter().map(|server| server.url("")).collect();
    let acknowledged = workload(&urls, 0).await;
    let fell = STOCK - db.number("SELECT n FROM stock").await;
    println!("the stock fell by {fell}");
    fell == acknowledged
}

async fn read_think_write(conn: &mut PgConnection) {
    let n = Postgres::number(conn, "SELECT n FROM stock").await.unwrap();
    sleep(Duration::from_millis(5)).await;
    Postgres::execute(conn, &format!("UPDATE stock SET n = {}", n - 1))
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guard_in_the_transaction_loses_nothing() {
    async fn decrement(mut tx: PgFencedTx) {
        read_think_write(&mut tx).await;
    }
    let db = Postgres::fresh(2).await;
    let servers = servers(&db, |fence| {
        Router::new()
            .route("/inventory/{sku}/decrement", post(decrement))
            .route_layer(FenceLayer::new(fence, PathParam("sku")))
    })
    .await;
    assert!(fell_by_what_was_acknowledged(&db, &servers).await);
}

/// The same workload against a guard that commits its check before the handler writes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guard_outside_the_transaction_is_caught() {
    async fn decrement(
        State((fence, pool)): State<(Fence<Postgres>, PgPool)>,
        Path(sku): Path<String>,
        headers: HeaderMap,
    ) -> Result<StatusCode, tower_fence::layer::Rejection> {
        let token = header::parse(headers.get_all(header::FENCING_TOKEN))?[0].token;
        let resource = Resource::new(sku).unwrap();
        let check = fence.begin(&resource, token, TokenUse::SingleUse).await?;
        check.commit().await?;
        let mut tx = pool.begin().await.unwrap();
        read_think_write(&mut tx).await;
        tx.commit().await.unwrap();
        Ok(StatusCode::OK)
    }
    let db = Postgres::fresh(2).await;
    // On a busy machine a round may miss the few milliseconds in which it loses.
    for _ in 0..8 {
        let servers = servers(&db, |fence| {
            let pool = fence.get_pool().clone();
            Router::new()
                .route("/inventory/{sku}/decrement", post(decrement))
                .with_state((fence, pool))
        })
        .await;
        if !fell_by_what_was_acknowledged(&db, &servers).await {
            return;
        }
    }
    panic!("the workload did not find the broken guard: it proves nothing");
}
