//! Lost updates: two holders read, think and write, under leases that run out in between.
//!
//! Checks at the writes alone do not prevent them: the old holder may still write after the new
//! one has read. Announced grants do, and so do fenced reads.

use std::{
    sync::atomic::{AtomicI64, Ordering::Relaxed},
    time::Duration,
};

use axum::{
    Router,
    extract::{Path, State},
    routing::get,
};
use futures_util::future::join_all;
use sqlx::{PgPool, Postgres};
use tokio::time::sleep;
use tower_fence::{
    Fence, FenceLayer, PathParam, PgFencedTx, Resource,
    lease::{Acquire, LeaseError, Leases, PostgresLeases, RedisLeases},
};

use crate::support::{
    database::TestDatabase,
    http::{Answer, Server},
    redis::{fresh_prefix, shared_url},
};

/// So long a lease lasts; thinking takes up to twice as long.
const TTL: Duration = Duration::from_millis(20);
/// Acknowledged increments, of all counters together.
const ROUNDS: i64 = 1_000;
/// Each has two holders. They mostly think, so that many can do so at once.
const COUNTERS: usize = 12;

async fn read(State(pool): State<PgPool>, Path(sku): Path<String>) -> String {
    let value: Option<i64> = sqlx::query_scalar("SELECT value FROM counters WHERE sku = $1")
        .bind(sku)
        .fetch_optional(&pool)
        .await
        .unwrap();
    value.unwrap_or(0).to_string()
}

async fn write(mut tx: PgFencedTx, Path(sku): Path<String>, value: String) {
    sqlx::query(
        "INSERT INTO counters VALUES ($1, $2) ON CONFLICT (sku) DO UPDATE SET value = excluded.value",
    )
    .bind(sku)
    .bind(value.parse::<i64>().unwrap())
    .execute(&mut *tx)
    .await
    .unwrap();
}

/// One read, some thought, one write; whether the write was acknowledged, or refused. Nothing where the machine is
/// too busy for it.
async fn increment<L: Leases>(
    leases: &L,
    server: &Server,
    counter: &Resource,
    fenced_read: bool,
) -> Option<bool> {
    let request = Acquire::new(TTL).wait(Duration::from_secs(30));
    let lease = match leases.acquire(counter, request).await {
        Ok(lease) => lease,
        // Its announcement took longer than the lease.
        Err(LeaseError::Unavailable(_)) => return None,
        Err(error) => panic!("{error:?}"),
    };
    let token = lease.fencing_token().to_string();
    let path = format!("/{counter}");
    let mut get = server.get(&path);
    if fenced_read {
        get = get.header("Fencing-Token", &token);
    }
    let answer = Answer::to(get).await;
    if answer.status == 412 {
        return Some(false);
    } else if answer.is_busy() {
        return None;
    }
    assert_eq!(answer.status, 200, "{answer:?}");
    let value: i64 = answer.text.parse().unwrap();
    sleep(TTL.mul_f64(rand::random::<f64>() * 2.0)).await;
    let put = server.client.put(server.url(&path));
    let put = put.header("Fencing-Token", &token);
    let answer = Answer::to(put.body((value + 1).to_string())).await;
    let _ = leases.release(counter, &lease.id).await;
    match answer.status {
        200 => Some(true),
        412 => Some(false),
        _ if answer.is_busy() => None,
        _ => panic!("{answer:?}"),
    }
}

/// What keeps the old holder from writing behind the new one's read.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Guard {
    Nothing,
    AnnouncedGrants,
    FencedReads,
    /// Of which each grant is its own announcement, from two pools.
    LeasesInPostgres,
}

/// How many acknowledged increments are missing, of a thousand.
async fn lost_updates(guard: Guard) -> i64 {
    let db = Postgres::fresh(16).await;
    sqlx::raw_sql("CREATE TABLE counters (sku TEXT PRIMARY KEY, value BIGINT NOT NULL)")
        .execute(db.fence().get_pool())
        .await
        .unwrap();
    let app = Router::new()
        .route("/{sku}", get(read).put(write))
        .route_layer(FenceLayer::new(db.fence(), PathParam("sku")))
        .with_state(db.fence().get_pool().clone());
    let server = Server::start(app).await;
    let builder = RedisLeases::builder(db.fence()).key_prefix(fresh_prefix());
    let leases = builder.connect(&shared_url()).await.unwrap();
    let with_a_word = leases.clone().announced_to(db.fence());
    let other_pool = PgPool::connect(&db.url).await.unwrap();
    let in_postgres = [
        PostgresLeases::new(db.fence()),
        PostgresLeases::new(Fence::new(other_pool)),
    ];
    let (acknowledged, refused) = (AtomicI64::new(0), AtomicI64::new(0));
    let holder = async |counter: &Resource, in_postgres: &PostgresLeases| {
        while acknowledged.load(Relaxed) < ROUNDS {
            let done = match guard {
                Guard::Nothing => increment(&leases, &server, counter, false).await,
                Guard::AnnouncedGrants => increment(&with_a_word, &server, counter, false).await,
                Guard::FencedReads => increment(&leases, &server, counter, true).await,
                Guard::LeasesInPostgres => increment(in_postgres, &server, counter, false).await,
            };
            let count = match done {
                Some(true) => &acknowledged,
                Some(false) => &refused,
                None => continue,
            };
            count.fetch_add(1, Relaxed);
        }
    };
    let counters = (0..COUNTERS).map(|n| Resource::new(format!("counter-{n}")).unwrap());
    let counters: Vec<_> = counters.collect();
    let holders = counters.iter().flat_map(|counter| {
        let two = in_postgres.iter();
        two.map(|in_postgres| holder(counter, in_postgres))
    });
    join_all(holders).await;
    let value = db.number("SELECT sum(value)::bigint FROM counters").await;
    let lost = acknowledged.load(Relaxed) - value;
    println!("{guard:?}: lost {lost}, refused {refused:?}");
    assert!(refused.load(Relaxed) > 20, "no lease ran out in between");
    lost
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn checks_at_the_writes_alone_lose_updates() {
    assert!(lost_updates(Guard::Nothing).await > 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn announced_grants_lose_none() {
    assert_eq!(lost_updates(Guard::AnnouncedGrants).await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fenced_reads_lose_none() {
    assert_eq!(lost_updates(Guard::FencedReads).await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leases_in_postgres_lose_none() {
    assert_eq!(lost_updates(Guard::LeasesInPostgres).await, 0);
}
