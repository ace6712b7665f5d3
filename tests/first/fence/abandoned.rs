//! The server ends the statement of a disconnected client within seconds, even if the statement
//! waits, and unlocks the row.

use std::time::Duration;

use futures_util::future::join_all;
use sqlx::{Executor, Postgres, postgres::PgPoolOptions};
use tokio::{task::JoinHandle, time::Instant};
use tower_fence::{Fence, FenceBuilder, Resource, TokenUse};

use crate::support::{
    database::{Fresh, TestDatabase},
    disconnect::{BOUND, leaves_no_lock_and_no_session},
    eventually,
    fence::{resource, token},
};

const POOL: u32 = 8;

fn name(n: u32) -> Resource {
    resource(&format!("r-{n}"))
}

/// Returns a fence of the application under test.
async fn fence(db: &Fresh<Postgres>, builder: FenceBuilder<Postgres>) -> Fence<Postgres> {
    let options = PgPoolOptions::new().max_connections(POOL);
    builder.build(db.pool_under_test(None, options).await)
}

const ASLEEP: &str = "wait_event = 'PgSleep'";

/// Sends a request whose statement takes twelve seconds, in a transaction or as a single statement.
fn slow_request(fence: &Fence<Postgres>, n: u32, at_once: bool) -> JoinHandle<()> {
    let (fence, resource) = (fence.clone(), name(n));
    tokio::spawn(async move {
        if at_once {
            let query = "INSERT INTO ledger SELECT 1 FROM fence, pg_sleep(60) RETURNING entry";
            let _ = fence
                .write::<(i64,)>(&resource, token(1), TokenUse::Reusable, query)
                .await;
        } else {
            let tx = fence.begin(&resource, token(1), TokenUse::Reusable);
            let _ = tx.await.unwrap().execute("SELECT pg_sleep(60)").await;
        }
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn abandoned_statements_are_ended_although_the_pool_is_exhausted() {
    let db = Postgres::fresh(3).await;
    for (at_once, reuses) in [(false, false), (false, true), (true, false), (true, true)] {
        let fence = fence(&db, Fence::builder().reuse_connections(reuses)).await;
        // The first write to a resource is never a single statement.
        for n in 0..POOL {
            fence.raise(&name(n), token(1)).await.unwrap();
        }
        let requests: Vec<_> = (0..POOL)
            .map(|n| slow_request(&fence, n, at_once))
            .collect();
        eventually!(
            "all connections are in use",
            db.sessions_under_test(ASLEEP).await == i64::from(POOL)
        );
        // These requests are not abandoned. One of them waits for a row that an abandoned request
        // has locked.
        let bystanders = db.fence();
        let free = name(POOL);
        let other = bystanders.begin(&free, token(1), TokenUse::Reusable);
        let other = other.await.unwrap();
        let waiting = tokio::spawn(async move {
            bystanders
                .begin(&name(0), token(2), TokenUse::Reusable)
                .await
        });
        db.waits_for_lock().await;
        let began = Instant::now();
        for request in &requests {
            request.abort();
        }
        join_all(requests).await;
        eventually!(
            "no statement runs",
            db.sessions_under_test(ASLEEP).await == 0
        );
        let took = began.elapsed();
        println!("at once: {at_once}, reused: {reuses}: ended after {took:?}");
        assert!(took < BOUND, "the statements ended after {took:?}");
        other.commit().await.unwrap();
        drop(waiting.await.unwrap().unwrap());
        // All connections of the pool are available.
        for n in 0..2 * POOL {
            fence.raise(&name(n), token(1)).await.unwrap();
        }
        fence.pool().close().await;
        eventually!(
            "all sessions are closed",
            db.sessions_under_test("true").await == 0
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disconnected_client_leaves_no_lock_and_no_session() {
    let db = Postgres::fresh(3).await;
    for reuses in [false, true] {
        for exhausted in [false, true] {
            let settings = Fence::builder().reuse_connections(reuses);
            let options = PgPoolOptions::new().max_connections(POOL);
            let pool = db.pool_under_test(None, options).await;
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
        let builder = Fence::builder().lock_timeout(Duration::from_secs(120));
        let fence = fence(&db, builder.reuse_connections(reuses)).await;
        // A single statement would set the interval of the check for the whole session.
        let (contended, other) = (name(0), db.fence());
        let _ = other.raise(&contended, token(1)).await;
        let holder = other.begin(&contended, token(2), TokenUse::Reusable);
        let holder = holder.await.unwrap();
        let request = tokio::spawn(async move {
            let begun = fence.begin(&contended, token(2), TokenUse::Reusable);
            begun.await.map(drop)
        });
        db.waits_for_lock().await;
        let began = Instant::now();
        request.abort();
        eventually!(
            "no session waits for the row",
            db.sessions_under_test("wait_event_type = 'Lock'").await == 0
        );
        assert!(began.elapsed() < BOUND, "it took {:?}", began.elapsed());
        holder.commit().await.unwrap();
    }
}
