//! The server ends the statement of a disconnected client within seconds, even if the statement
//! waits, and unlocks the row.

use std::time::Duration;

use futures_util::future::join_all;
use sqlx::{
    Executor, PgPool, Postgres,
    postgres::{PgConnectOptions, PgPoolOptions},
};
use tokio::{
    task::JoinHandle,
    time::{Instant, sleep, timeout},
};
use tower_fence::{Fence, Resource, Token, TokenUse};

use crate::support::{
    database::{Fresh, TestDatabase},
    disconnect::{BOUND, leaves_no_lock_and_no_session},
    eventually,
};

const POOL: u32 = 8;

fn resource(n: u32) -> Resource {
    Resource::new(format!("r-{n}")).unwrap()
}

fn one() -> Token {
    Token::new(1).unwrap()
}

fn two() -> Token {
    Token::new(2).unwrap()
}

/// Returns the pool of the application under test.
async fn pool_under_test(db: &Fresh<Postgres>) -> PgPool {
    let options: PgConnectOptions = db.url.parse().unwrap();
    PgPoolOptions::new()
        .max_connections(POOL)
        .connect_with(options.application_name("under-test"))
        .await
        .unwrap()
}

async fn sessions(db: &Fresh<Postgres>, condition: &str) -> i64 {
    db.number(&format!(
        "SELECT count(*) FROM pg_stat_activity \
         WHERE datname = current_database() AND application_name = 'under-test' AND {condition}"
    ))
    .await
}

const ASLEEP: &str = "wait_event = 'PgSleep'";

/// Sends a request whose statement takes twelve seconds, in a transaction or as a single statement.
fn slow_request(fence: &Fence<Postgres>, n: u32, at_once: bool) -> JoinHandle<()> {
    let (fence, resource) = (fence.clone(), resource(n));
    tokio::spawn(async move {
        if at_once {
            let query = "INSERT INTO ledger SELECT 1 FROM fence, pg_sleep(60) RETURNING entry";
            let _ = fence
                .write::<(i64,)>(&resource, one(), TokenUse::Reusable, query)
                .await;
        } else {
            let tx = fence.begin(&resource, one(), TokenUse::Reusable);
            let mut tx = tx.await.unwrap();
            let _ = tx.execute("SELECT pg_sleep(60)").await;
        }
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn abandoned_statements_are_ended_although_the_pool_is_exhausted() {
    let db = Postgres::fresh(3).await;
    for (at_once, reuses) in [(false, false), (false, true), (true, false), (true, true)] {
        let fence = Fence::builder()
            .reuse_connections(reuses)
            .build(pool_under_test(&db).await);
        // The first write to a resource is never a single statement.
        for n in 0..POOL {
            fence.raise(&resource(n), one()).await.unwrap();
        }
        let requests: Vec<_> = (0..POOL)
            .map(|n| slow_request(&fence, n, at_once))
            .collect();
        eventually!(
            "all connections are in use",
            sessions(&db, ASLEEP).await == i64::from(POOL)
        );
        // These requests are not abandoned. One of them waits for a row that an abandoned request
        // has locked.
        let bystanders = db.fence();
        let free = resource(POOL);
        let other = bystanders.begin(&free, one(), TokenUse::Reusable);
        let other = other.await.unwrap();
        let waiting = tokio::spawn(async move {
            bystanders
                .begin(&resource(0), two(), TokenUse::Reusable)
                .await
        });
        db.waits_for_lock().await;
        let began = Instant::now();
        for request in &requests {
            request.abort();
        }
        join_all(requests).await;
        let ended = async {
            while sessions(&db, ASLEEP).await > 0 {
                sleep(Duration::from_millis(5)).await;
            }
        };
        let ended = timeout(Duration::from_secs(20), ended).await;
        ended.expect("the statements were not ended");
        let took = began.elapsed();
        println!("at once: {at_once}, reused: {reuses}: ended after {took:?}");
        assert!(took < BOUND, "the statements ended after {took:?}");
        other.commit().await.unwrap();
        drop(waiting.await.unwrap().unwrap());
        // All connections of the pool are available.
        for n in 0..2 * POOL {
            fence.raise(&resource(n), one()).await.unwrap();
        }
        fence.pool().close().await;
        eventually!("all sessions are closed", sessions(&db, "true").await == 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disconnected_client_leaves_no_lock_and_no_session() {
    let db = Postgres::fresh(3).await;
    for reuses in [false, true] {
        for exhausted in [false, true] {
            let settings = Fence::builder().reuse_connections(reuses);
            let pool = pool_under_test(&db).await;
            leaves_no_lock_and_no_session(&db, settings, pool, exhausted).await;
        }
    }
}

/// The client disconnects while its request waits for the row of the resource, which another
/// process has locked.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_abandoned_admission_leaves_no_session() {
    let db = Postgres::fresh(3).await;
    for reuses in [false, true] {
        // The timeout is too long to end the wait during the test.
        let fence = Fence::builder()
            .lock_timeout(Duration::from_secs(120))
            .reuse_connections(reuses)
            .build(pool_under_test(&db).await);
        // A single statement would set the interval of the check for the whole session.
        let (contended, other) = (resource(0), db.fence());
        let _ = other.raise(&contended, one()).await;
        let holder = other.begin(&contended, two(), TokenUse::Reusable);
        let holder = holder.await.unwrap();
        let request = tokio::spawn({
            let fence = fence.clone();
            async move { fence.begin(&contended, two(), TokenUse::Reusable).await }
        });
        db.waits_for_lock().await;
        let began = Instant::now();
        request.abort();
        eventually!(
            "no session waits for the row",
            sessions(&db, "wait_event_type = 'Lock'").await == 0
        );
        assert!(began.elapsed() < BOUND, "it took {:?}", began.elapsed());
        holder.commit().await.unwrap();
    }
}
