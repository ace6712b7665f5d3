//! Queues in Redis after a loss: of waiters, of their process, of a connection, of the server, or
//! of the queue itself.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use futures_util::future::{join_all, select_all};
use sqlx::{Postgres, Sqlite};
use tokio::time::{sleep, timeout};
use tower_fence::lease::{Acquire, LeaseError, Leases, RedisLeases};

use crate::support::{
    PATIENCE,
    database::TestDatabase,
    eventually,
    lease::{LONG, grant, granted, granted_within, join, sku, wait, waiters},
    process::{Inventory, frozen_process_delays_the_next_waiter},
    proxy::{Passage, Proxy, Sender, contains},
    redis::{RedisServer, connect, with_leases},
};

#[tokio::test]
async fn waiters_of_an_ended_issuer_are_skipped_immediately() {
    let (server, db, leases) = with_leases().await;
    let first = grant(&leases, &sku(), LONG).await;
    // This issuer has its own runtime. Its connections end with the runtime, and its waiters do not
    // leave the queue.
    let (url, fence) = (server.url(), db.fence());
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        runtime.block_on(async {
            let leases = RedisLeases::connect(&url, fence).await.unwrap();
            for _ in 0..50 {
                wait(&leases, LONG).await;
            }
        });
        runtime.shutdown_background();
    })
    .join()
    .unwrap();
    let survivor = wait(&leases, LONG).await;
    // The waiters of the ended process are in the queue.
    assert_eq!(waiters(&leases).await, 51);
    leases.release(&sku(), &first.id).await.unwrap();
    // The turns of all ended waiters would take longer.
    granted(survivor).await;
}

#[tokio::test]
async fn frozen_process_delays_the_next_waiter_briefly() {
    let (db, redis) = (Postgres::fresh(2).await, RedisServer::start(&[]).await);
    let variables = [
        ("DATABASE_URL", db.url.as_str()),
        ("REDIS_URL", &redis.url()),
    ];
    let frozen = Inventory::start(&variables).await;
    let other = Inventory::start(&variables).await;
    frozen_process_delays_the_next_waiter(&frozen, &other, Duration::from_secs(1)).await;
}

#[tokio::test]
async fn restart_during_a_wait_leaves_no_waiter_hanging() {
    for options in [&[][..], &["--appendonly", "yes"][..]] {
        let (mut server, db) = (RedisServer::start(options).await, Sqlite::fresh(2).await);
        let (one, two) = (connect(&server, &db).await, connect(&server, &db).await);
        let before = grant(&one, &sku(), LONG).await;
        let limit = Duration::from_secs(4);
        let mut line = vec![];
        for n in 0..40 {
            line.push(join([&one, &two][n % 2], Acquire::new(LONG).wait(limit)).await);
        }
        server.kill();
        sleep(Duration::from_millis(300)).await;
        server.start_again().await;
        let outcomes = timeout(limit + PATIENCE, join_all(line)).await;
        let outcomes = outcomes.expect("a waiter hangs");
        let mut tokens = vec![before.token];
        for outcome in outcomes {
            match outcome.unwrap() {
                Ok(lease) => {
                    assert!(lease.token > before.token);
                    tokens.push(lease.token);
                }
                Err(LeaseError::Unavailable(_) | LeaseError::Held { .. }) => {}
                Err(error) => panic!("{error:?}"),
            }
        }
        tokens.sort_unstable();
        assert!(tokens.is_sorted_by(|a, b| a < b), "{tokens:?}");
        // The queue works again.
        eventually!("the store answers again", one.inspect(&sku()).await.is_ok());
        server.command(&["FLUSHALL"]).await;
        let first = grant(&two, &sku(), LONG).await;
        let waiting = wait(&one, LONG).await;
        two.release(&sku(), &first.id).await.unwrap();
        granted_within(5, waiting).await;
    }
}

#[tokio::test]
async fn flushed_queue_forms_again() {
    let (server, _db, leases) = with_leases().await;
    let first = grant(&leases, &sku(), Duration::from_secs(1)).await;
    let (one, two) = (wait(&leases, LONG).await, wait(&leases, LONG).await);
    server.command(&["FLUSHALL"]).await;
    // The loss is detected when the lease would have expired.
    let (served, ..) = timeout(Duration::from_secs(10), select_all([one, two]))
        .await
        .expect("neither waiter was served");
    assert!(served.unwrap().unwrap().token > first.token);
}

#[tokio::test]
async fn queue_lost_during_a_wait_forms_again() {
    let (server, db) = (RedisServer::start(&[]).await, Sqlite::fresh(2).await);
    let (one, two) = (connect(&server, &db).await, connect(&server, &db).await);
    grant(&one, &sku(), LONG).await;
    let forgotten = wait(&two, LONG).await;
    server.command(&["FLUSHALL"]).await;
    // Other waiters join first, and their queue hides the loss.
    let stranger = grant(&one, &sku(), LONG).await;
    let other = wait(&one, LONG).await;
    eventually!("the waiter is in the queue again", waiters(&one).await == 2);
    one.release(&sku(), &stranger.id).await.unwrap();
    let other = granted_within(5, other).await;
    one.release(&sku(), &other.id).await.unwrap();
    granted_within(5, forgotten).await;
}

/// A timeout in seconds that is shorter than the polling interval of ten seconds.
const HEARD_AGAIN: u64 = 8;

/// A connection that fails silently: it stays open, and delivers nothing.
#[tokio::test]
async fn silent_subscription_is_detected() {
    let (server, db) = (RedisServer::start(&[]).await, Sqlite::fresh(2).await);
    let is_silent = Arc::new(AtomicBool::new(false));
    let shared = is_silent.clone();
    let proxy = Proxy::judging_each(server.addr(), move || {
        let is_silent = shared.clone();
        // A connection that is opened afterwards works.
        let was_silent = is_silent.load(Relaxed);
        let mut subscribed = false;
        move |sender, message: &[u8]| {
            subscribed |= sender == Sender::Client && contains(message, "SUBSCRIBE");
            let hears_nothing = is_silent.load(Relaxed) && subscribed && !was_silent;
            Passage::Dropped.when(sender == Sender::Server && hears_nothing)
        }
    });
    let proxy = proxy.await;
    let url = proxy.url(&server.url());
    let leases = RedisLeases::builder(db.fence()).command_timeout(Duration::from_millis(500));
    let leases = leases.connect(&url).await.unwrap();
    let first = grant(&leases, &sku(), LONG).await;
    let line = [wait(&leases, LONG).await, wait(&leases, LONG).await];
    is_silent.store(true, Relaxed);
    leases.release(&sku(), &first.id).await.unwrap();
    // The waiters return in any order.
    let (lease, _, mut rest) = timeout(Duration::from_secs(HEARD_AGAIN), select_all(line))
        .await
        .expect("no waiter received a notification");
    let lease = lease.unwrap().unwrap();
    leases.release(&sku(), &lease.id).await.unwrap();
    granted_within(HEARD_AGAIN, rest.remove(0)).await;
}
