//! PgBouncer in front of the database: in transaction mode with the options for it, and detected
//! without them.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use reqwest::Method;
use serde_json::json;
use sqlx::Postgres;

use super::program::{Served, run, run_on, words};
use crate::support::{
    database::{Fresh, TestDatabase},
    eventually,
    http::Answer,
    pgbouncer::PgBouncer,
};

const TRANSACTION: &str = "pool_mode = transaction";

async fn pooled(db: &Fresh<Postgres>) -> PgBouncer {
    PgBouncer::start_with(&db.url, &[TRANSACTION]).await
}

/// Returns the variables for a database behind a pooler.
fn by_way_of<'a>(pooler: &'a str, direct: &'a str) -> [(&'a str, &'a str); 3] {
    [
        ("TOWER_FENCE_DATABASE_URL", pooler),
        ("TOWER_FENCE_LISTEN_URL", direct),
        ("TOWER_FENCE_TRANSACTION_POOLING", "true"),
    ]
}

#[tokio::test]
async fn a_pooler_in_transaction_mode_is_refused_without_its_options() {
    let db = Postgres::fresh(2).await;
    for settings in [
        &[TRANSACTION][..],
        &[TRANSACTION, "default_pool_size = 1"],
        &[TRANSACTION, "server_round_robin = 1", "min_pool_size = 4"],
    ] {
        let pooler = PgBouncer::start_with(&db.url, settings).await;
        let url = pooler.url();
        for arguments in [
            "serve --listen 127.0.0.1:0",
            "migrate",
            "check",
            "reset sku-1 --to 7 --yes",
            "run --direct --resource sku-1 -- true",
        ] {
            let refused = run_on(&url, &words(arguments)).await;
            refused.is(78).says("--transaction-pooling");
            refused.says("--listen-url");
        }
    }
    // A pooler in session mode needs no options.
    let pooler = PgBouncer::start_with(&db.url, &["pool_mode = session"]).await;
    run_on(&pooler.url(), &["check"]).await.is(0);
}

#[tokio::test]
async fn migration_bypasses_the_pooler() {
    let db = Postgres::fresh(2).await;
    db.execute("DROP SCHEMA tower_fence CASCADE").await;
    let pooler = pooled(&db).await;
    let url = pooler.url();
    let [database, listen, pooling] = by_way_of(&url, &db.url);
    for command in ["migrate", "distribute"] {
        let without = run(&[command], &[database, pooling]).await;
        without.is(78).says("--listen-url");
    }
    let through = [database, ("TOWER_FENCE_LISTEN_URL", &*url), pooling];
    for command in ["migrate", "serve --migrate --listen 127.0.0.1:0"] {
        let refused = run(&words(command), &through).await;
        refused.is(78).says("transaction mode");
    }
    let all = [database, listen, pooling];
    let refused = run(&["check"], &all).await;
    refused.is(78).says("tower-fence migrate");
    for command in [
        "migrate",
        "check",
        "reset sku-1 --to 7 --yes",
        "run --direct --resource sku-1 --wait 5s -- true",
    ] {
        run(&words(command), &all).await.is(0);
    }
}

/// Acquires, renews, inspects, and releases a lease. Returns the statuses.
async fn client(server: &Served, number: usize) -> Vec<u16> {
    let path = format!("/locks/sku-{}", number % 12);
    let body = json!({"wait_ms": 30_000, "ttl_ms": 60_000});
    let granted = server.post(&path, &body).await;
    let mut statuses = vec![granted.status];
    if granted.status != 201 {
        return statuses;
    }
    let lease = granted.json();
    let renewal = server.of_holder(Method::PUT, &lease);
    let renewed = Answer::to(renewal.json(&json!({"new_token": true}))).await;
    statuses.push(renewed.status);
    for path in [&*path, "/locks", "/readyz", "/console/api/fences"] {
        statuses.push(server.get(path).await.status);
    }
    let release = server.of_holder(Method::DELETE, &lease);
    statuses.push(Answer::to(release).await.status);
    statuses
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_of_many_clients_succeed_through_a_pooler() {
    let db = Postgres::fresh(2).await;
    let (pooler, direct) = (pooled(&db).await, db.url.clone());
    let url = pooler.url();
    let server = Served::start_with(&[], &by_way_of(&url, &direct)).await;
    let console = server.get("/console/api/fences").await.status;
    let all = join_all((0..120).map(|number| client(&server, number))).await;
    let log = server.log();
    // On a busy machine, a statement may take longer than a second, and so may the wait for a
    // connection.
    let is_slow =
        |line: &&str| line.contains("slow statement") || line.contains("slow_acquire_threshold");
    let log: Vec<_> = log.lines().filter(|line| !is_slow(line)).collect();
    let log = log.join("\n");
    for statuses in all {
        assert_eq!(statuses, [201, 200, 200, 200, 200, console, 204], "{log}");
    }
    for trace in ["WARN", "ERROR", "prepared statement"] {
        assert!(!log.contains(trace), "{log}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_behind_a_pooler_are_served_in_order() {
    let db = Postgres::fresh(2).await;
    let (pooler, direct) = (pooled(&db).await, db.url.clone());
    let url = pooler.url();
    let server = Served::start_with(&[], &by_way_of(&url, &direct)).await;
    let body = json!({"ttl_ms": 60_000});
    let holder = server.post("/locks/sku-1", &body).await;
    let began = Instant::now();
    let waiter = async |place: i64| {
        let join = async || db.number("SELECT count(*) FROM tower_fence.waiters").await >= place;
        eventually("the earlier waiters are in the queue", join).await;
        let body = json!({"wait_ms": 30_000, "ttl_ms": 60_000});
        let granted = server.post("/locks/sku-1", &body).await;
        assert_eq!(granted.status, 201, "{granted:?}");
        let at = began.elapsed();
        release(&server, &granted).await;
        (place, granted.json()["token"].as_i64().unwrap(), at)
    };
    let released = async {
        let all = async || db.number("SELECT count(*) FROM tower_fence.waiters").await == 8;
        eventually("all waiters are in the queue", all).await;
        release(&server, &holder).await;
        began.elapsed()
    };
    let (mut served, mut last) = tokio::join!(join_all((0..8).map(waiter)), released);
    served.sort_by_key(|&(_, token, _)| token);
    let places: Vec<_> = served.iter().map(|&(place, ..)| place).collect();
    assert_eq!(places, [0, 1, 2, 3, 4, 5, 6, 7]);
    let mut pauses = vec![];
    for (_, _, at) in served {
        pauses.push(at.saturating_sub(last));
        last = at;
    }
    // Polling would take a quarter of a second on average for one waiter, and much longer for
    // several waiters.
    pauses.sort();
    assert!(pauses[4] < Duration::from_millis(200), "{pauses:?}");
}

async fn release(server: &Served, granted: &Answer) {
    let request = server.of_holder(Method::DELETE, &granted.json());
    assert_eq!(Answer::to(request).await.status, 204);
}
