//! How the fence uses the pool's connections.

use std::{
    collections::HashSet,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use futures_util::future::{join, join_all};
use sqlx::{PgPool, Postgres, postgres::PgPoolOptions};
use tower_fence::{AdmitError, Fence, FenceBuilder, PgFencedTx, Resource, TokenUse};

use crate::support::{
    PATIENCE, SOON,
    database::{Fresh, TestDatabase, counting_pool, pool_of},
    eventually,
    fence::{token, write_at_once},
    proxy::{Passage, Proxy, Sender},
};

const POOL: u32 = 4;

fn resource(n: usize) -> Resource {
    Resource::new(format!("r-{n}")).unwrap()
}

async fn begin(fence: &Fence<Postgres>, resource: &Resource, value: i64) -> PgFencedTx {
    let tx = fence.begin(resource, token(value), TokenUse::SingleUse);
    tx.await.unwrap()
}

/// Writes in a transaction.
async fn write(fence: &Fence<Postgres>, resource: &Resource, value: i64) {
    begin(fence, resource, value).await.commit().await.unwrap();
}

/// Writes in a transaction that the fence begins, or in one statement.
async fn write_either_way(fence: &Fence<Postgres>, resource: &Resource, value: i64, at_once: bool) {
    match at_once {
        true => write_at_once(fence, resource, value).await,
        false => write(fence, resource, value).await,
    }
}

/// The time of a transaction in microseconds.
async fn time_of(tx: &mut PgFencedTx) -> i64 {
    let time = "SELECT CAST(extract(epoch FROM now()) * 1000000 AS bigint)";
    Postgres::number(tx, time).await.unwrap()
}

async fn all_are_in_the_pool(pool: &PgPool) {
    eventually!(
        "all connections are back in the pool",
        pool.num_idle() == pool.size() as usize
    );
}

/// Ends all other connections to the database, and returns their number.
async fn end_others(db: &Fresh<Postgres>) -> i64 {
    let end = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity \
        WHERE datname = current_database() AND pid <> pg_backend_pid()";
    db.number(end).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn broken_pooled_connections_cost_no_write() {
    let db = Postgres::fresh(POOL).await;
    let (plain, reusing) = (db.fence(), db.reusing_fence());
    let rounds = [
        (&plain, false),
        (&plain, true),
        (&reusing, false),
        (&reusing, true),
    ];
    for (round, (fence, at_once)) in (1..).zip(rounds) {
        let held: Vec<_> = join_all((0..POOL).map(|_| db.pool.acquire())).await;
        drop(held);
        all_are_in_the_pool(&db.pool).await;
        assert!(end_others(&db).await >= i64::from(POOL) - 1);
        all_are_in_the_pool(&db.pool).await;
        for n in 0..2 * POOL as usize {
            let value = round * 100 + n as i64;
            write_either_way(fence, &resource(n), value, at_once).await;
        }
    }
}

/// Returns a pool of one connection, which it does not test.
async fn one_connection(url: &str) -> PgPool {
    let options = PgPoolOptions::new().max_connections(1);
    options
        .test_before_acquire(false)
        .connect(url)
        .await
        .unwrap()
}

/// The request that finds the broken connection frees its pool slot before it requests another
/// connection.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn broken_connection_frees_its_pool_slot() {
    let db = Postgres::fresh(1).await;
    let pool = one_connection(&db.url).await;
    let fence = Fence::new(pool.clone());
    write_at_once(&fence, &resource(0), 1).await;
    for (value, at_once) in [(2, true), (3, false)] {
        all_are_in_the_pool(&pool).await;
        assert_eq!(end_others(&db).await, 1);
        write_either_way(&fence, &resource(0), value, at_once).await;
    }
}

/// The connection is silent, as if a firewall had lost its record of the connection.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_connection_frees_its_pool_slot() {
    let db = Postgres::fresh(1).await;
    let silent = Arc::new(AtomicBool::new(false));
    let opened = AtomicUsize::new(0);
    let falls_silent = Arc::clone(&silent);
    let proxy = Proxy::judging_each(db.addr(), move || {
        let is_first = opened.fetch_add(1, SeqCst) == 0;
        let silent = Arc::clone(&falls_silent);
        move |_: Sender, _: &[u8]| Passage::Dropped.when(is_first && silent.load(SeqCst))
    })
    .await;
    let pool = one_connection(&proxy.url(&db.url)).await;
    let fence = Fence::new(pool.clone());
    for value in [1, 2] {
        write_at_once(&fence, &resource(0), value).await;
    }
    all_are_in_the_pool(&pool).await;
    silent.store(true, SeqCst);
    write_at_once(&fence, &resource(0), 3).await;
}

/// No other request gets the connection.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connection_lost_in_a_statement_costs_no_other_write() {
    const END: &str = "INSERT INTO ledger SELECT $1 FROM fence \
        WHERE pg_terminate_backend(pg_backend_pid()) RETURNING entry";
    let db = Postgres::fresh(1).await;
    for (fence, first) in [(db.fence(), 1), (db.reusing_fence(), 101)] {
        let resource = resource(first as usize);
        for value in (first..first + 9).step_by(3) {
            write_at_once(&fence, &resource, value).await;
            let query = sqlx::query(END).bind(value + 1);
            let (token, token_use) = (token(value + 1), TokenUse::SingleUse);
            let ended = fence.write::<(i64,)>(&resource, token, token_use, query);
            ended.await.unwrap_err();
            write_at_once(&fence, &resource, value + 2).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_connections_return_unchanged_to_the_pool() {
    let db = Postgres::fresh(POOL).await;
    for (n, fence) in [db.fence(), db.reusing_fence()].iter().enumerate() {
        for value in 1..=20 {
            let value = 100 * n as i64 + 2 * value;
            write(fence, &resource(n), value).await;
            write_at_once(fence, &resource(n), value + 1).await;
        }
    }
    all_are_in_the_pool(&db.pool).await;
    // No transaction is open, and no timeout is left set.
    let open = "SELECT count(*) FROM pg_stat_activity \
        WHERE datname = current_database() AND backend_type = 'client backend' \
            AND state <> 'idle' AND pid <> pg_backend_pid()";
    let mut connections = vec![];
    for _ in 0..db.pool.size() {
        connections.push(db.pool.acquire().await.unwrap());
    }
    for conn in &mut connections {
        assert_eq!(Postgres::number(conn, open).await.unwrap(), 0);
        let limits = "SELECT count(*) FROM pg_settings WHERE setting <> '0' AND name IN \
            ('lock_timeout', 'statement_timeout', 'idle_in_transaction_session_timeout')";
        assert_eq!(Postgres::number(conn, limits).await.unwrap(), 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hooks_of_the_pool_see_each_use() {
    let db = Postgres::fresh(1).await;
    let (pool, [taken, released]) = counting_pool(&db.url, 1).await;
    all_are_in_the_pool(&pool).await;
    let fence = Fence::new(pool.clone());
    // The first write also creates the row of its resource.
    write(&fence, &resource(0), 1).await;
    all_are_in_the_pool(&pool).await;
    let before = (taken.load(SeqCst), released.load(SeqCst));
    for value in 1..=10 {
        write(&fence, &resource(0), 2 * value).await;
        write_at_once(&fence, &resource(0), 2 * value + 1).await;
    }
    all_are_in_the_pool(&pool).await;
    let after = (taken.load(SeqCst), released.load(SeqCst));
    assert_eq!((after.0 - before.0, after.1 - before.1), (20, 20));
}

/// As many writers as the pool has connections write without pauses. Other users of the pool still
/// get connections.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_users_of_the_pool_are_not_starved() {
    let db = Postgres::fresh(POOL).await;
    let fence = db.reusing_fence();
    let stop = AtomicBool::new(false);
    let writers = join_all((0..POOL as usize).map(|n| {
        let (fence, stop) = (&fence, &stop);
        async move {
            let resource = resource(n);
            for value in 1.. {
                if stop.load(SeqCst) {
                    return value;
                }
                if value % 2 == 0 {
                    write(fence, &resource, value).await;
                } else {
                    let value = token(value);
                    let query =
                        "UPDATE stock SET n = 1 WHERE EXISTS (SELECT 1 FROM fence) RETURNING n";
                    let token_use = TokenUse::Reusable;
                    let none = fence.write::<(i64,)>(&resource, value, token_use, query);
                    assert!(none.await.unwrap().is_empty());
                }
            }
            0
        }
    }));
    let others = async {
        for _ in 0..50 {
            let limit = Duration::from_secs(10);
            let read = tokio::time::timeout(limit, db.number("SELECT 1::bigint")).await;
            read.expect("a read of the application gets no connection");
        }
        stop.store(true, SeqCst);
    };
    let (written, ()) = join(writers, others).await;
    assert!(written.iter().all(|written| *written > 10), "{written:?}");
    all_are_in_the_pool(&db.pool).await;
}

/// A transaction that begins with the COMMIT of another one has the time of that COMMIT. Even so,
/// the time of the transactions on one resource must not decrease.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn transaction_times_of_a_resource_never_decrease() {
    let db = Postgres::fresh(2).await;
    let fence = db.reusing_fence();
    let begin = async |n, value| {
        let (resource, token) = (resource(n), token(value));
        let tx = fence.begin(&resource, token, TokenUse::Reusable).await;
        tx.unwrap()
    };
    for _ in 0..300 {
        let mut older = begin(0, 7).await;
        let other = begin(1, 7).await;
        // From here on, this connection is in its next transaction.
        other.commit().await.unwrap();
        let first = time_of(&mut older).await;
        older.commit().await.unwrap();
        let mut younger = begin(0, 7).await;
        let second = time_of(&mut younger).await;
        younger.commit().await.unwrap();
        let in_the_way = begin(1, 7).await;
        let mut last = begin(0, 7).await;
        let third = time_of(&mut last).await;
        last.commit().await.unwrap();
        in_the_way.commit().await.unwrap();
        let times = [first, second, third];
        assert!(times.is_sorted(), "{times:?}");
    }
}

/// The transaction time of a raise is not before the time of the row that it raises, even if the
/// raising process began its transaction early.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn transaction_times_never_decrease_despite_a_concurrent_raise() {
    let db = Postgres::fresh(1).await;
    let [one, two, three] = [
        db.reusing_fence(),
        own_pool(&db.url).await,
        own_pool(&db.url).await,
    ];
    for n in 0..3 {
        write(&one, &resource(n), 1).await;
    }
    for value in 2..200 {
        // After these writes, both processes have begun their next transactions.
        write(&three, &resource(2), value).await;
        write(&one, &resource(1), value).await;
        let hot = resource(0);
        let mut tx = begin(&two, &hot, 10 * value).await;
        let first = time_of(&mut tx).await;
        tx.commit().await.unwrap();
        three.raise(&hot, token(10 * value + 5)).await.unwrap();
        let mut tx = begin(&one, &hot, 10 * value + 6).await;
        let second = time_of(&mut tx).await;
        tx.commit().await.unwrap();
        assert!(first <= second, "{first}, {second}");
        // Transactions that were begun early are abandoned.
        tokio::time::sleep(Duration::from_millis(6)).await;
    }
}

/// Returns a fence with its own pool, as if in another process.
async fn own_pool(url: &str) -> Fence<Postgres> {
    Fence::builder()
        .reuse_connections(true)
        .build(pool_of(url, 1).await)
}

/// The next transaction begins with a COMMIT whose answer may be delayed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn transaction_time_is_close_to_its_request_despite_latency() {
    const DELAY: Duration = Duration::from_millis(20);
    let db = Postgres::fresh(1).await;
    let proxy = Proxy::delaying(db.addr(), DELAY).await;
    // The pool has more connections than the fence needs, so no connection is returned for another
    // waiter.
    let pool = pool_of(&proxy.url(&db.url), 2).await;
    let fence = Fence::builder().reuse_connections(true).build(pool);
    let resource = resource(0);
    write(&fence, &resource, 1).await;
    for value in 2..20 {
        let asked_us = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        let mut tx = begin(&fence, &resource, value).await;
        let now_us = time_of(&mut tx).await;
        tx.commit().await.unwrap();
        let age_us = asked_us.as_micros() as i64 - now_us;
        assert!(age_us <= 5_000, "it began {age_us} µs before its request");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiter_takes_over_the_connection_of_its_predecessor() {
    let db = Postgres::fresh(1).await;
    let (pool, [_, released]) = counting_pool(&db.url, 1).await;
    let fence = Fence::builder().reuse_connections(true).build(pool.clone());
    for n in 0..40 {
        write(&fence, &resource(n), 1).await;
    }
    let first = resource(0);
    let tx = begin(&fence, &first, 2).await;
    let before = released.load(SeqCst);
    let done = Arc::new(std::sync::Mutex::new(vec![]));
    let writers = (1..40).map(|n| {
        let (fence, done) = (&fence, &done);
        async move {
            let resource = resource(n);
            if n % 3 == 0 {
                // This request is cancelled.
                let gone = write_at_once(fence, &resource, 100 + n as i64);
                let waited = tokio::time::timeout(Duration::from_millis(1), gone);
                assert!(waited.await.is_err());
            } else {
                write_at_once(fence, &resource, 100 + n as i64).await;
                done.lock().unwrap().push(n);
            }
        }
    });
    let committing = async {
        tokio::time::sleep(Duration::from_millis(20)).await;
        tx.commit().await.unwrap();
    };
    let began = Instant::now();
    join(join_all(writers), committing).await;
    // Every ten milliseconds, a connection returns to the pool for other tasks.
    let for_others = began.elapsed().as_millis() / 10;
    let in_turn: Vec<_> = (1..40).filter(|n| n % 3 != 0).collect();
    assert_eq!(*done.lock().unwrap(), in_turn);
    let through_pool = (released.load(SeqCst) - before) as u128;
    assert!(through_pool < 20 + for_others, "{through_pool}");
    all_are_in_the_pool(&pool).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiter_for_a_connection_sees_the_closed_pool() {
    let db = Postgres::fresh(1).await;
    // The pool ends a wait after 20 seconds.
    let waits = |fence: FenceBuilder<Postgres>| fence.pool_timeout(PATIENCE);
    waiter_gets_an_error(&db, db.fence_with(waits)).await;
    let db = Postgres::fresh(1).await;
    let reuses = |fence| waits(fence).reuse_connections(true);
    waiter_gets_an_error(&db, db.fence_with(reuses)).await;
}

async fn waiter_gets_an_error(db: &Fresh<Postgres>, fence: Fence<Postgres>) {
    let (first, others) = (resource(0), [resource(1), resource(2), resource(3)]);
    let tx = begin(&fence, &first, 1).await;
    let waiting = join_all(others.iter().map(|other| {
        let waiting = fence.begin(other, token(1), TokenUse::SingleUse);
        async { waiting.await.unwrap_err() }
    }));
    let closing = async {
        tokio::time::sleep(Duration::from_millis(20)).await;
        // The writer waits for the connection.
        let closed = db.pool.close();
        let (committed, ()) = join(tx.commit(), closed).await;
        committed.unwrap();
    };
    let asked_at = Instant::now();
    for error in join(waiting, closing).await.0 {
        assert_matches!(error, AdmitError::Unavailable(_));
    }
    // No request waits until its own timeout.
    assert!(asked_at.elapsed() < SOON);
}

/// The server ends sessions that are idle in a transaction for longer than the hold timeout.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_short_hold_limit_costs_no_connection() {
    let db = Postgres::fresh(2).await;
    drop(db.pool.acquire().await.unwrap());
    let hold_timeout = Duration::from_millis(200);
    let fence = db.fence_with(|fence| fence.reuse_connections(true).hold_timeout(hold_timeout));
    let mut server_processes = HashSet::new();
    for value in 1..=3 {
        let first = resource(0);
        let mut tx = begin(&fence, &first, value).await;
        let server_process = "SELECT CAST(pg_backend_pid() AS bigint)";
        server_processes.insert(Postgres::number(&mut tx, server_process).await.unwrap());
        tx.commit().await.unwrap();
        tokio::time::sleep(2 * hold_timeout).await;
    }
    assert!(server_processes.len() <= 2, "{server_processes:?}");
}
