//! A worker of the example whose wall clock jumps.

use serde_json::Value;

use crate::support::{
    http::{Answer, client},
    process::{Inventory, Process},
    wall_clock::WallClock,
};

const DONE: &str = "200 OK {\"sku\"";

async fn holder(service: &Inventory) -> Value {
    let lease = Answer::to(client().get(service.url("/locks/sku-1"))).await;
    lease.json()["owner"].clone()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wall_clock_that_jumps_changes_nothing() {
    let clock = WallClock::right();
    let service = Inventory::start(&[]).await;
    let mut variables = vec![
        ("INVENTORY_URL", service.url.as_str()),
        ("TTL_MS", "1000"),
        ("PACE_MS", "100"),
    ];
    let wrong = clock.variables();
    variables.extend(wrong.iter().copied());
    let mut jumping = Process::start("worker", &["sku-1"], &variables);
    jumping.prints(DONE, 3).await;
    let owner = holder(&service).await;
    assert!(owner.is_string());
    let mut done = 3;
    for jump in ["+1d", "-1d", "+10y", "-30y"] {
        clock.jump_to(jump);
        // The steps take longer than the TTL of a lease.
        done += 15;
        jumping.prints(DONE, done).await;
        assert_eq!(holder(&service).await, owner);
    }
    let stdout = jumping.stdout();
    assert!(!stdout.contains("lost"), "{stdout}");
    assert_eq!(stdout.matches("holds the lease").count(), 1, "{stdout}");
}
