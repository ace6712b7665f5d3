//! The worker as a real process: stopped, continued, and with a clock that jumps.

use std::time::Duration;

use serde_json::Value;
use tokio::time::sleep;

use crate::support::{
    http::Answer,
    process::{Inventory, Process},
    wall_clock::WallClock,
};

const DONE: &str = "200 OK {\"sku\"";

fn worker(service: &Inventory, more: &[(&str, &str)]) -> Process {
    let variables = [
        ("INVENTORY_URL", service.url.as_str()),
        ("TTL_MS", "1000"),
        ("PACE_MS", "100"),
    ];
    Process::start("worker", &["sku-1"], &[&variables, more].concat())
}

async fn get(service: &Inventory, path: &str) -> Value {
    Answer::to(reqwest::Client::new().get(service.url(path)))
        .await
        .json()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopped_worker_sees_its_loss_and_its_successors_writes_stand() {
    let service = Inventory::start(&[]).await;
    let mut first = worker(&service, &[]);
    first.prints(DONE, 3).await;
    let mut second = worker(&service, &[]);
    second.prints("waits for the lease", 1).await;
    first.signal("-STOP");
    // The lease runs out, and the other one works.
    second.prints(DONE, 3).await;
    first.signal("-CONT");
    first.prints("lost its lease", 1).await;
    first.prints("writes all the same: 412", 1).await;
    assert!(first.stdout().contains("The fencing token is stale"));
    second.prints(DONE, 5).await;
    second.signal("-STOP");
    // What was acknowledged is what is missing in stock: nobody wrote over anybody.
    first.prints("holds the lease", 2).await;
    first.signal("-STOP");
    sleep(Duration::from_millis(300)).await;
    let stock = get(&service, "/inventory/sku-1").await["stock"].as_i64();
    let acknowledged = |worker: &Process| worker.stdout().matches(DONE).count() as i64;
    let acknowledged = acknowledged(&first) + acknowledged(&second);
    // A worker may have been stopped between its write and its print.
    let fell = 100 - stock.unwrap();
    assert!(
        (acknowledged..=acknowledged + 2).contains(&fell),
        "{fell} {acknowledged}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wall_clock_that_jumps_changes_nothing() {
    let clock = WallClock::right();
    let service = Inventory::start(&[]).await;
    let mut jumping = worker(&service, &clock.variables());
    jumping.prints(DONE, 3).await;
    let holder = get(&service, "/locks/sku-1").await["owner"].clone();
    assert!(holder.is_string());
    let mut done = 3;
    for jump in ["+1d", "-1d", "+10y", "-30y"] {
        clock.jump_to(jump);
        // Over more than the time of a lease.
        done += 15;
        jumping.prints(DONE, done).await;
        assert_eq!(get(&service, "/locks/sku-1").await["owner"], holder);
    }
    let stdout = jumping.stdout();
    assert!(!stdout.contains("lost"), "{stdout}");
    assert_eq!(stdout.matches("holds the lease").count(), 1, "{stdout}");
}
