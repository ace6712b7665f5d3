//! Requests that wait for a connection when none is available: the database is unreachable, a
//! connection is never opened, a runtime ends, or the pool is closed.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::SeqCst},
        mpsc,
    },
    thread,
    time::Duration,
};

use futures_util::{FutureExt, future::join_all};
use sqlx::{
    PgPool, Postgres,
    postgres::{PgConnectOptions, PgPoolOptions},
};
use tokio::{net::TcpListener, runtime::Runtime, sync::Barrier, time::timeout};
use tower_fence::{AdmitError, Fence, FenceBuilder, Resource, Token, TokenUse};

use crate::support::{
    database::{Fresh, TestDatabase, counting_pool},
    eventually,
    proxy::{Link, Proxy},
};

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap()
}

async fn write(fence: &Fence<Postgres>, n: u64) -> Result<(), AdmitError> {
    let resource = Resource::new(format!("r-{n}")).unwrap();
    let token = Token::new(1).unwrap();
    let tx = fence.begin(&resource, token, TokenUse::Reusable).await?;
    tx.commit().await.unwrap();
    Ok(())
}

/// Returns a proxy that accepts connections for the database, and forwards nothing.
async fn silent_proxy(db: &Fresh<Postgres>) -> Proxy {
    let proxy = Proxy::to(db.addr()).await;
    proxy.set(Link::Silent);
    proxy
}

/// Returns settings of a fence with this timeout, and with or without reuse of connections.
fn settings(reuse: bool, pool_timeout: Duration) -> FenceBuilder<Postgres> {
    let settings = Fence::builder().reuse_connections(reuse);
    settings.pool_timeout(pool_timeout)
}

fn pool(port: u16) -> PgPool {
    let options = PgPoolOptions::new().max_connections(2);
    let url = format!("postgres://nobody:secret@127.0.0.1:{port}/nothing");
    options.connect_lazy(&url).unwrap()
}

#[tokio::test]
async fn unreachable_database_is_not_reported_as_busy() {
    let port = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = port.local_addr().unwrap().port();
    for reuse in [false, true] {
        let fence = settings(reuse, Duration::from_millis(300)).build(pool(port));
        for error in join_all((0..4).map(|n| write(&fence, n))).await {
            let error = error.unwrap_err();
            assert_matches!(error, AdmitError::Unavailable(_));
        }
    }
}

#[tokio::test]
async fn exhausted_pool_is_reported_as_busy() {
    let db = Postgres::fresh(1).await;
    let held = db.pool.acquire().await.unwrap();
    for reuse in [false, true] {
        let fence = settings(reuse, Duration::from_millis(300)).build(db.pool.clone());
        let waiting = join_all((0..4).map(|n| write(&fence, n)));
        // The timeout of the pool is much longer.
        let refused = timeout(Duration::from_secs(15), waiting).await;
        for error in refused.expect("the timeout of the fence was ignored") {
            let error = error.unwrap_err();
            assert_matches!(error, AdmitError::Busy(_));
        }
    }
    // Here the timeout of the pool is the shorter one.
    let options = PgPoolOptions::new().max_connections(1);
    let hasty = options.acquire_timeout(Duration::from_millis(300));
    let hasty = hasty.connect_lazy(&db.url).unwrap();
    // On a busy machine, opening a connection takes longer than this timeout.
    let mut all = None;
    eventually("the pool has a connection", async || {
        all = hasty.acquire().await.ok();
        all.is_some()
    })
    .await;
    for reuse in [false, true] {
        let fence = Fence::builder()
            .reuse_connections(reuse)
            .build(hasty.clone());
        let error = write(&fence, 0).await.unwrap_err();
        assert_matches!(error, AdmitError::Busy(_));
    }
    drop((held, all));
}

/// The fence has opened the connection before, but now another user of the pool holds it.
#[tokio::test]
async fn pool_filled_by_the_fence_is_reported_as_busy() {
    let db = Postgres::fresh(1).await;
    for reuse in [false, true] {
        let pool = PgPoolOptions::new().max_connections(1);
        let pool = pool.connect_lazy(&db.url).unwrap();
        // The timeout is long enough to open a connection on a busy machine.
        let fence = settings(reuse, Duration::from_secs(3)).build(pool.clone());
        write(&fence, 0).await.unwrap();
        let held = pool.acquire().await.unwrap();
        let error = write(&fence, 0).await.unwrap_err();
        assert_matches!(error, AdmitError::Busy(_));
        drop(held);
    }
}

/// If the pool is full, one task requests connections on behalf of the waiters. Once the pool has
/// room, connections for several waiters are opened concurrently.
#[tokio::test]
async fn connections_for_waiters_are_opened_concurrently() {
    const SIZE: u32 = 3;
    let db = Postgres::fresh(1).await;
    let (opened, both) = (Arc::new(AtomicU32::new(0)), Arc::new(Barrier::new(2)));
    let options = PgPoolOptions::new().max_connections(SIZE);
    let options = options.after_connect(move |_, _| {
        // The initial connections, and the one that is opened next, do not wait for another one.
        let alone = opened.fetch_add(1, SeqCst) <= SIZE;
        let both = Arc::clone(&both);
        Box::pin(async move {
            if !alone {
                both.wait().await;
            }
            Ok(())
        })
    });
    let pool = options.connect_lazy(&db.url).unwrap();
    let fence = Fence::builder().reuse_connections(true).build(pool.clone());
    let held = join_all((0..SIZE).map(|_| pool.acquire())).await;
    let begin = async |n| {
        let resource = Resource::new(format!("r-{n}")).unwrap();
        let token = Token::new(1).unwrap();
        fence.begin(&resource, token, TokenUse::Reusable).await
    };
    let mut waiting = Box::pin(join_all((0..SIZE).map(begin)));
    let queued = timeout(Duration::from_millis(200), &mut waiting).await;
    assert!(queued.is_err(), "the pool is not full");
    for conn in held {
        conn.unwrap().close().await.unwrap();
    }
    let begun = timeout(Duration::from_secs(15), waiting).await;
    for tx in begun.expect("the connections are opened one after the other") {
        tx.unwrap().commit().await.unwrap();
    }
}

/// A waiter that times out in the queue uses no connection of the pool.
#[tokio::test]
async fn timed_out_waiters_take_no_connection_later() {
    let db = Postgres::fresh(1).await;
    let (pool, [taken, _]) = counting_pool(&db.url, 1).await;
    let fence = Fence::new(pool.clone());
    let held = pool.acquire().await.unwrap();
    let before = taken.load(SeqCst);
    for n in 0..50 {
        let gone = timeout(Duration::from_millis(1), write(&fence, n)).await;
        assert!(gone.is_err());
    }
    drop(held);
    write(&fence, 50).await.unwrap();
    assert_eq!(taken.load(SeqCst) - before, 1);
}

#[tokio::test]
async fn stalled_connect_does_not_block_a_returned_connection() {
    let db = Postgres::fresh(1).await;
    let good: PgConnectOptions = db.url.parse().unwrap();
    let pool = PgPoolOptions::new().max_connections(2);
    let pool = pool.connect_with(good.clone()).await.unwrap();
    let fence = settings(true, Duration::from_secs(3)).build(pool.clone());
    write(&fence, 0).await.unwrap();
    eventually!("the connection is back in the pool", pool.num_idle() == 1);
    let silent = silent_proxy(&db).await;
    pool.set_connect_options(good.port(silent.addr.port()));
    let held = pool.acquire().await.unwrap();
    let first = fence.clone();
    let first = tokio::spawn(async move { write(&first, 1).await });
    eventually!("another connection is being opened", pool.size() == 2);
    drop(held);
    for n in 2..20 {
        write(&fence, n).await.unwrap();
    }
    first.await.unwrap().unwrap();
}

#[tokio::test]
async fn pool_closes_while_an_unwanted_connection_is_opening() {
    let db = Postgres::fresh(1).await;
    let silent = silent_proxy(&db).await;
    for reuse in [false, true] {
        let pool = pool(silent.addr.port());
        let fence = settings(reuse, Duration::from_millis(100)).build(pool.clone());
        write(&fence, 0).await.unwrap_err();
        // sqlx would continue for 30 s.
        let closed = timeout(Duration::from_secs(5), pool.close());
        closed.await.expect("the pool was not closed");
    }
}

/// The task that requested both connections from the pool belongs to the runtime that has ended.
#[test]
fn waiter_continues_when_another_runtime_ends() {
    waiter_continues(false);
    waiter_continues(true);
}

fn waiter_continues(reuse: bool) {
    let lasting = runtime();
    let db = lasting.block_on(Postgres::fresh(1));
    let fence = settings(reuse, Duration::from_secs(10)).build(db.pool.clone());
    let held = lasting.block_on(db.pool.acquire()).unwrap();
    let ending = runtime();
    let waits_in = |runtime: &Runtime, n| {
        let fence = fence.clone();
        let waiting = runtime.spawn(async move { write(&fence, n).await });
        thread::sleep(Duration::from_millis(50));
        waiting
    };
    waits_in(&ending, 1);
    let waiting = waits_in(&lasting, 2);
    drop(ending);
    lasting.block_on(async {
        drop(held);
        let written = timeout(Duration::from_secs(5), waiting).await;
        let written = written.expect("the waiter was not given the connection");
        written.unwrap().unwrap();
    });
    lasting.block_on(async { drop((fence, db)) });
}

/// A task that is polled while its runtime ends waits for a connection, or returns one.
#[test]
fn runtime_shuts_down_while_tasks_use_the_pool() {
    let lasting = runtime();
    let db = lasting.block_on(Postgres::fresh(2));
    for (commits, reuse) in [(false, false), (true, false), (false, true), (true, true)] {
        let fence = db.fence_with(|fence| fence.reuse_connections(reuse));
        let (done, is_done) = mpsc::channel();
        thread::spawn(move || {
            let ending = runtime();
            ending.spawn(async move {
                let resource = Resource::new("r").unwrap();
                let token = Token::new(1).unwrap();
                let begin = || fence.begin(&resource, token, TokenUse::Reusable);
                if commits {
                    let tx = begin().await.unwrap();
                    let mut commit = Box::pin(tx.commit());
                    // The COMMIT was sent, but not yet answered.
                    let sent = (&mut commit).now_or_never();
                    assert!(sent.is_none());
                    thread::sleep(Duration::from_millis(500));
                    let _ = commit.await;
                } else {
                    thread::sleep(Duration::from_millis(500));
                    let held = (fence.pool().try_acquire(), fence.pool().try_acquire());
                    let _ = begin().await;
                    drop(held);
                }
            });
            thread::sleep(Duration::from_millis(250));
            drop(ending);
            done.send(()).unwrap();
        });
        let ended = is_done.recv_timeout(Duration::from_secs(10));
        assert!(ended.is_ok(), "it does not end, commits: {commits}");
    }
    lasting.block_on(async { drop(db) });
}
