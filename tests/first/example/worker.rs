//! The worker as a real process, which is stopped and resumed.

use std::time::Duration;

use serde_json::Value;
use tokio::time::sleep;

use super::caller::Caller;
use crate::support::{
    http::Answer,
    process::{Inventory, Process},
};

const STOCK: i64 = 1_000_000;
const DONE: &str = "200 OK {\"sku\"";

fn worker(service: &Inventory) -> Process {
    let variables = [
        ("INVENTORY_URL", service.url.as_str()),
        ("TTL_MS", "1000"),
        ("PACE_MS", "100"),
    ];
    Process::start("worker", &["sku-1"], &variables)
}

async fn get(service: &Inventory, path: &str) -> Value {
    Answer::to(crate::support::http::client().get(service.url(path)))
        .await
        .json()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stopped_worker_sees_its_loss_and_overwrites_nothing() {
    let service = Inventory::start(&[]).await;
    // The stock suffices for the workers, regardless of the duration of the test.
    Caller::of(&service).set("sku-1", STOCK).await;
    let mut first = worker(&service);
    first.prints(DONE, 3).await;
    let mut second = worker(&service);
    second.prints("waits for the lease", 1).await;
    first.signal("-STOP");
    // The lease expires, and the other worker works.
    second.prints(DONE, 3).await;
    first.signal("-CONT");
    first.prints("lost its lease", 1).await;
    first.prints("writes all the same: 412", 1).await;
    assert!(first.stdout().contains("The fencing token is stale"));
    second.prints(DONE, 5).await;
    second.signal("-STOP");
    // The stock has fallen by the number of acknowledged writes, so no write was overwritten.
    first.prints("holds the lease", 2).await;
    first.signal("-STOP");
    sleep(Duration::from_millis(300)).await;
    let stock = get(&service, "/inventory/sku-1").await["stock"].as_i64();
    let acknowledged = |worker: &Process| worker.stdout().matches(DONE).count() as i64;
    let acknowledged = acknowledged(&first) + acknowledged(&second);
    // A worker may have been stopped between its write and its print.
    let fell = STOCK - stock.unwrap();
    assert!(
        (acknowledged..=acknowledged + 2).contains(&fell),
        "{fell} {acknowledged}"
    );
}
