//! Many concurrent requests for one resource and for many resources: which of them wait, which are
//! refused, and at what cost.

use std::{
    sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    time::Duration,
};

use axum::{
    Router,
    routing::{get, post},
};
use futures_util::future::join_all;
use sqlx::{PgPool, Postgres};
use tokio::time::sleep;
use tower_fence::{
    AdmitError, Fence, FenceLayer, PathParam, PgFencedTx, Resource, Token, TokenUse,
    fence::WriteError,
};

use crate::support::{
    database::TestDatabase,
    eventually,
    http::{Answer, Server},
};

const POOL: u32 = 10;

/// Returns the number of sessions that wait for the lock of a row. The observer has its own
/// connections, because the pool under test may have none left.
async fn waiting_for_row(observer: &PgPool) -> i64 {
    let waiting = sqlx::query_scalar(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() \
         AND wait_event_type = 'Lock' AND wait_event IN ('transactionid', 'tuple')",
    );
    waiting.fetch_one(observer).await.unwrap()
}

async fn hold_for_a_moment(mut tx: PgFencedTx) {
    sqlx::query("SELECT 1").execute(&mut *tx).await.unwrap();
    sleep(Duration::from_millis(20)).await;
}

async fn app(fence: Fence<Postgres>) -> Server {
    let app = Router::new()
        .route("/hot/{r}", post(hold_for_a_moment))
        .route("/other/{r}", post(async |_tx: PgFencedTx| {}))
        .route_layer(FenceLayer::new(fence, PathParam("r")));
    Server::start(app).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_hundred_writers_of_one_resource_starve_no_other() {
    const CROWD: usize = 200;
    let db = Postgres::fresh(POOL).await;
    let fence = db.fence_with(|fence| fence.lock_timeout(Duration::from_secs(20)));
    let server = app(fence).await;
    let observer = PgPool::connect(&db.url).await.unwrap();
    let (over, hot) = (AtomicBool::new(false), AtomicU64::new(1));
    let crowd = join_all((0..CROWD).map(|_| async {
        while !over.load(Relaxed) {
            server.write("/hot/hot", hot.fetch_add(1, Relaxed)).await;
        }
    }));
    let others = async {
        sleep(Duration::from_millis(300)).await;
        for n in 1..=200 {
            let other = server.write(&format!("/other/r-{}", n % 20), n).await;
            assert_eq!(other.status, 200, "a write to another resource failed");
        }
        over.store(true, Relaxed);
    };
    let sampling = async {
        let mut samples = vec![];
        while !over.load(Relaxed) {
            samples.push(waiting_for_row(&observer).await);
            sleep(Duration::from_millis(5)).await;
        }
        samples
    };
    let (_, (), samples) = tokio::join!(crowd, others, sampling);
    // Only the first writer of the queue in the process has a connection, so no second connection
    // waits for the row lock.
    assert!(samples.len() > 20, "{samples:?}");
    assert!(samples.iter().all(|waiting| *waiting <= 1), "{samples:?}");
}

/// Each writer has its own queue, and none is shared. The waiters for the row lock therefore take
/// the whole pool.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_shared_queue_the_hot_resource_takes_the_pool() {
    let db = Postgres::fresh(POOL).await;
    let resource = Resource::new("hot").unwrap();
    let (one, holder) = (Token::new(1).unwrap(), db.fence());
    let first = holder.begin(&resource, one, TokenUse::SingleUse).await;
    let first = first.unwrap();
    let alone: Vec<_> = (2..20).map(|n| (n, db.fence())).collect();
    let common = db.fence();
    let together: Vec<_> = (2..20).map(|n| (n, common.clone())).collect();
    let observer = PgPool::connect(&db.url).await.unwrap();
    for (fences, starved) in [(together, false), (alone, true)] {
        let waiting = fences.into_iter().map(|(n, fence)| {
            let resource = resource.clone();
            tokio::spawn(async move {
                let token = Token::new(n).unwrap();
                let begun = fence.begin(&resource, token, TokenUse::SingleUse);
                begun.await.map(drop)
            })
        });
        let waiting: Vec<_> = waiting.collect();
        if starved {
            eventually!(
                "all connections are in use",
                db.pool.size() == POOL && db.pool.num_idle() == 0
            );
            eventually!(
                "connections wait for the row lock",
                waiting_for_row(&observer).await > 1
            );
        }
        sleep(Duration::from_millis(200)).await;
        let waits = waiting_for_row(&observer).await;
        assert_eq!(waits > 1, starved, "{waits}");
        let wait = if starved { 500 } else { 10_000 };
        let hasty = db.fence_with(|fence| fence.pool_timeout(Duration::from_millis(wait)));
        let other = Resource::new("other").unwrap();
        let outcome = hasty.begin(&other, one, TokenUse::Reusable).await;
        match outcome {
            Ok(_) => assert!(!starved),
            Err(AdmitError::Busy(_)) => assert!(starved, "other resources are starved"),
            Err(error) => panic!("{error:?}"),
        }
        waiting.iter().for_each(tokio::task::JoinHandle::abort);
        eventually!(
            "the connections are back",
            db.pool.num_idle() >= POOL as usize - 1 || db.pool.size() < POOL
        );
    }
    drop(first);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_stale_writers_query_the_database_once() {
    let db = Postgres::fresh(2).await;
    // This timeout is long enough for a write, and short enough for a test in which it expires.
    let process = || db.fence_with(|fence| fence.pool_timeout(Duration::from_secs(1)));
    let (fence, other_process) = (process(), process());
    let resource = Resource::new("r").unwrap();
    let token = |n| Token::new(n).unwrap();
    let write = async |fence: &Fence<Postgres>, n| {
        let begun = fence.begin(&resource, token(n), TokenUse::SingleUse);
        begun.await?.commit().await.unwrap();
        Ok::<_, AdmitError>(())
    };
    write(&fence, 10).await.unwrap();
    for process in [&fence, &other_process] {
        assert_matches!(write(process, 9).await, Err(AdmitError::Stale(_)));
    }
    // If no connection is available, stale tokens are still refused as stale. Other tokens are
    // refused as busy.
    let all = join_all([(); 2].map(|()| db.pool.acquire())).await;
    for process in [&fence, &other_process] {
        for n in 1..=10 {
            match write(process, n).await {
                Err(AdmitError::Stale(stale)) => assert_eq!(stale.max_token, 10),
                other => panic!("{other:?}"),
            }
        }
        let stale = process.raise(&resource, token(10)).await;
        assert_matches!(stale, Err(AdmitError::Stale(_)));
        let insert = "INSERT INTO ledger SELECT 1 FROM fence RETURNING entry";
        let stale = process.write::<(i64,)>(&resource, token(10), TokenUse::SingleUse, insert);
        let stale = stale.await;
        assert_matches!(stale, Err(WriteError::Admit(AdmitError::Stale(_))));
        let layer = FenceLayer::new(process.clone(), PathParam("r"));
        let reads = Router::new().route("/{r}", get("read")).route_layer(layer);
        let reads = Server::start(reads).await;
        let stale = reads.get("/r").header("Fencing-Token", "10");
        Answer::to(stale).await.is_problem(412, "stale-token");
        assert_matches!(write(process, 11).await, Err(AdmitError::Busy(_)));
    }
    drop(all);
    // The other process reads the write from the database, because only refusals are cached.
    write(&fence, 20).await.unwrap();
    let stale = write(&other_process, 15).await;
    assert_matches!(stale, Err(AdmitError::Stale(stale)) if stale.max_token == 20);
    write(&other_process, 21).await.unwrap();
}
