//! Lost updates over two processes of the example, which share a Postgres and nothing else: a holder at each of
//! them reads, thinks and writes, under leases that run out in between.

use std::{
    sync::atomic::{AtomicI64, Ordering::Relaxed},
    time::Duration,
};

use futures_util::future::join_all;
use reqwest::Client;
use serde_json::json;
use sqlx::Postgres;
use tokio::time::sleep;

use crate::support::{database::TestDatabase, http::Answer, process::Inventory};

/// The shortest that the issuer grants. Thinking takes up to twice as long.
const TTL_MS: u64 = 100;
/// Acknowledged increments, of all SKUs together.
const ROUNDS: i64 = 500;
/// Each has a holder at each process.
const SKUS: usize = 20;

/// When a holder reads what its write is based on.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Read {
    UnderTheLease,
    BeforeIt,
}

struct Holder<'a> {
    client: &'a Client,
    service: &'a Inventory,
    sku: String,
}

impl Holder<'_> {
    async fn stock(&self) -> i64 {
        let url = self.service.url(&format!("/inventory/{}", self.sku));
        loop {
            // A busy machine may have no connection in time.
            let answer = Answer::to(self.client.get(&url)).await;
            match answer.status {
                200 => return answer.json()["stock"].as_i64().unwrap(),
                503 => {}
                _ => panic!("{answer:?}"),
            }
        }
    }

    /// One read, some thought, one write; whether the write was acknowledged, or refused. Nothing where the
    /// machine is too busy for it.
    async fn increment(&self, read: Read) -> Option<bool> {
        let lock = self.service.url(&format!("/locks/{}", self.sku));
        let mut stock = self.stock().await;
        let body = json!({ "ttl_ms": TTL_MS, "wait_ms": 30_000 });
        let lease = Answer::to(self.client.post(&lock).json(&body)).await;
        if lease.is_busy() {
            return None;
        }
        assert_eq!(lease.status, 201, "{lease:?}");
        let lease = lease.json();
        if read == Read::UnderTheLease {
            stock = self.stock().await;
        }
        sleep(Duration::from_millis(rand::random_range(0..2 * TTL_MS))).await;
        let write = self
            .client
            .put(self.service.url(&format!("/inventory/{}", self.sku)));
        let write = write.header("Fencing-Token", lease["fencing_token"].as_str().unwrap());
        let answer = Answer::to(write.json(&json!({ "stock": stock + 1 }))).await;
        let release = self.client.delete(&lock);
        let id = lease["lease_id"].as_str().unwrap();
        Answer::to(release.header("Lease-Id", id)).await;
        if answer.status == 200 {
            return Some(true);
        } else if answer.is_busy() {
            return None;
        }
        answer.is_problem(412, "stale-token");
        Some(false)
    }
}

/// How many acknowledged increments are missing.
async fn lost_updates(read: Read) -> i64 {
    let db = Postgres::fresh(2).await;
    let variables = [("DATABASE_URL", db.url.as_str())];
    let one = Inventory::start(&variables).await;
    let mut two = Inventory::start(&variables).await;
    two.prints("leases:          Postgres", 1).await;
    db.execute(&format!(
        "INSERT INTO inventory SELECT 'sku-' || n, 0 FROM generate_series(1, {SKUS}) AS n"
    ))
    .await;
    let client = Client::new();
    let (acknowledged, refused) = (AtomicI64::new(0), AtomicI64::new(0));
    let hold = async |holder: Holder<'_>| {
        while acknowledged.load(Relaxed) < ROUNDS {
            let done = holder.increment(read).await;
            let count = match done {
                Some(true) => &acknowledged,
                Some(false) => &refused,
                None => continue,
            };
            count.fetch_add(1, Relaxed);
        }
    };
    let holders = (1..=SKUS).flat_map(|n| {
        [&one, &two].map(|service| {
            hold(Holder {
                client: &client,
                service,
                sku: format!("sku-{n}"),
            })
        })
    });
    join_all(holders).await;
    let value = db.number("SELECT sum(stock)::bigint FROM inventory").await;
    let lost = acknowledged.load(Relaxed) - value;
    println!("{read:?}: lost {lost}, refused {refused:?}");
    assert!(refused.load(Relaxed) > 20, "no lease ran out in between");
    lost
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_read_under_a_lease_in_postgres_is_lost_by_neither_process() {
    assert_eq!(lost_updates(Read::UnderTheLease).await, 0);
}

/// The same holders, broken: what they have read may be older than what they write over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_read_before_the_lease_is_caught() {
    assert!(lost_updates(Read::BeforeIt).await > 0);
}
