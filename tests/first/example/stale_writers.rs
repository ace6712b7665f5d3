//! Stale writers at the example service, which runs as a process on both pairs of stores.

use std::time::Duration;

use serde_json::json;
use sqlx::Postgres;

use super::caller::{Caller, on_servers};
use crate::support::{database::TestDatabase, process::Inventory};

/// Returns the lines of the log that report stale writers.
fn stale_writers(log: &str) -> impl Iterator<Item = &str> {
    log.lines().filter(|line| line.contains("stale writer"))
}

/// A lease expires while its holder is paused. The successor writes, and then the holder resumes.
async fn a_stale_writer_bounces(service: &Inventory) {
    let caller = Caller::of(service);
    caller.set("sku-1", 10).await;
    let first = caller.acquire("sku-1", 150).await;
    // Here the first holder is paused until its lease has expired and the second holder has
    // acquired the lease.
    let second = caller.acquire("sku-1", 30_000).await;

    let order = json!({ "quantity": 1 });
    let answer = caller.decrement("sku-1", &second, order.clone()).await;
    assert_eq!(answer.status, 200);
    assert_eq!(answer.json(), json!({ "sku": "sku-1", "stock": 9 }));

    let refused = caller.decrement("sku-1", &first, order).await;
    let problem = refused.is_problem(412, "stale-token");
    let number = |token: &str| token.split(';').next().unwrap().parse::<i64>().unwrap();
    assert!(number(&first) < number(&second));
    assert_eq!(problem["presented_token"], number(&first));
    assert_eq!(problem["max_token"], number(&second));
    assert_eq!(caller.get("/inventory/sku-1").await.json()["stock"], 9);

    // A single log line names the resource and both tokens.
    let log = service.log();
    let lines: Vec<_> = stale_writers(&log).collect();
    assert_eq!(lines.len(), 1, "{log}");
    assert_contains!(lines[0], "resource=\"sku-1\"");
    assert_contains!(lines[0], &format!("presented_token={}", number(&first)));
    assert_contains!(lines[0], &format!("max_token={}", number(&second)));
}

#[tokio::test]
async fn stale_writer_is_refused_without_any_server() {
    let service = Inventory::start(&[]).await;
    a_stale_writer_bounces(&service).await;
    let stdout = service.stdout();
    assert_contains!(stdout, "SQLite in ");
    assert_contains!(stdout, "in this process");
    assert!(stdout.matches("curl ").count() >= 4, "{stdout}");
}

#[tokio::test]
async fn many_stale_writers_are_logged_in_few_lines() {
    let service = Inventory::start(&[]).await;
    let caller = Caller::of(&service);
    let stale = caller.acquire("sku-1", 100).await;
    caller.set("sku-1", 10).await;
    let storm = async || {
        let body = json!({ "quantity": 1 });
        let refused = caller.decrement("sku-1", &stale, body).await;
        refused.is_problem(412, "stale-token");
    };
    let began = std::time::Instant::now();
    for _ in 0..100 {
        futures_util::future::join_all((0..10).map(|_| storm())).await;
    }
    // The next line counts the refusals since the previous line.
    tokio::time::sleep(Duration::from_millis(1_100)).await;
    storm().await;
    let seconds = began.elapsed().as_secs();
    let log = service.log();
    let suppressed = stale_writers(&log).map(|line| {
        let (_, behind) = line.split_once("suppressed=").unwrap();
        let digits = behind.split(|c: char| !c.is_ascii_digit()).next();
        digits.unwrap().parse::<u64>().unwrap()
    });
    let suppressed: Vec<_> = suppressed.collect();
    let lines = suppressed.len() as u64;
    assert!((2..=seconds + 2).contains(&lines), "{lines} in {seconds} s");
    assert_eq!(lines + suppressed.iter().sum::<u64>(), 1_001, "{log}");
}

#[tokio::test]
async fn stale_writer_is_refused_on_postgres_and_redis() {
    let (service, db, _redis) = on_servers().await;
    a_stale_writer_bounces(&service).await;
    let stdout = service.stdout();
    assert_contains!(stdout, "Postgres");
    assert_contains!(stdout, "Redis");
    if let Some(password) = reqwest::Url::parse(&db.url).unwrap().password() {
        assert!(!stdout.contains(password) && !service.log().contains(password));
    }
}

/// The processes share only the database, and see each other's leases.
#[tokio::test]
async fn stale_writer_is_refused_across_two_processes_on_postgres() {
    let db = Postgres::fresh(2).await;
    let variables = [("DATABASE_URL", db.url.as_str())];
    let mut one = Inventory::start(&variables).await;
    one.prints("leases:          Postgres", 1).await;
    let two = Inventory::start(&variables).await;
    let (at_one, at_two) = (Caller::of(&one), Caller::of(&two));
    at_one.set("sku-1", 10).await;
    let first = at_one.acquire("sku-1", 150).await;
    let second = at_two.acquire("sku-1", 30_000).await;
    let order = json!({ "quantity": 1 });
    let written = at_one.decrement("sku-1", &second, order.clone()).await;
    assert_eq!(written.status, 200);
    let refused = at_two.decrement("sku-1", &first, order).await;
    refused.is_problem(412, "stale-token");
    assert_eq!(at_two.get("/inventory/sku-1").await.json()["stock"], 9);
}
