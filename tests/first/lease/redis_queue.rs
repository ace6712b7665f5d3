//! Queues in Redis: the cost of passing a lease to the next waiter, the remaining keys, and the
//! limit of waiters.

use std::time::Duration;

use futures_util::FutureExt;
use sqlx::Sqlite;
use tokio::{
    task::JoinHandle,
    time::{Instant, sleep, timeout},
};
use tower_fence::lease::{Acquire, LeaseError, LeaseId, Leases, RedisLeases};

use crate::support::{
    database::TestDatabase,
    eventually,
    fence::resource,
    lease::{LONG, SHORT, grant, grant_and_release, is_held, join, join_on, renew_for, sku, wait},
    redis::{COUNTER, LEASE, RedisServer, connect, with_leases},
    soon,
};

async fn only_the_counter_is_left(server: &RedisServer) {
    soon!(
        "only the token counter is left",
        server.read::<Vec<String>>("KEYS *").await == [COUNTER]
    );
}

#[tokio::test]
async fn ended_queues_leave_nothing_behind() {
    let (server, _db, leases) = with_leases().await;
    let first = grant(&leases, &sku(), LONG).await;
    let served = wait(&leases, LONG).await;
    let gone = wait(&leases, LONG).await;
    let late = join(&leases, Acquire::new(LONG).wait(Duration::from_millis(200))).await;
    gone.abort();
    late.await.unwrap().unwrap_err();
    leases.release(&sku(), &first.id).await.unwrap();
    let served = served.await.unwrap().unwrap();
    leases.release(&sku(), &served.id).await.unwrap();
    only_the_counter_is_left(&server).await;
}

/// The processes of the waiters may have ended.
#[tokio::test]
async fn queue_is_kept_until_its_last_waiter_leaves() {
    let (server, _db, leases) = with_leases().await;
    grant(&leases, &sku(), LONG).await;
    let waiting = wait(&leases, LONG).await;
    let shorter = Acquire::new(LONG).wait(Duration::from_secs(20));
    let shorter = join(&leases, shorter).await;
    for key in ["queue", "waiters"] {
        let left = format!("PTTL tower-fence:{{110}}:{key}:sku-1");
        let left = server.read::<i64>(&left).await;
        // The longer wait, the time for a retry, and 30 s.
        assert!((30_001..=93_000).contains(&left), "{key}: {left} ms");
    }
    waiting.abort();
    shorter.abort();
}

#[tokio::test]
async fn grant_after_an_abandoned_queue_uses_a_valid_counter() {
    let (server, _db, leases) = with_leases().await;
    grant_and_release(&leases).await;
    let [queue, waiters] =
        ["queue", "waiters"].map(|key| format!("tower-fence:{{110}}:{key}:sku-1"));
    server.command(&["ZADD", &queue, "1", "gone"]).await;
    let of_no_listener = ["HSET", &waiters, "gone", "1\nnobody-listens\n"];
    server.command(&of_no_listener).await;
    server.command(&["DEL", COUNTER]).await;
    let next = grant(&leases, &sku(), LONG).await;
    assert_eq!(next.token.get(), 2_000_000_001);
    is_held(leases.acquire(&sku(), Acquire::new(LONG)).await);
    leases.release(&sku(), &next.id).await.unwrap();
    only_the_counter_is_left(&server).await;
}

/// Returns the number of commands that the server has run, including those of scripts.
async fn commands(server: &RedisServer) -> i64 {
    let stats = server.info("INFO commandstats").await;
    let calls = |line: &str| {
        let (name, rest) = line.strip_prefix("cmdstat_")?.split_once(":calls=")?;
        // The commands of the measurement are not counted.
        let looking = matches!(name, "info" | "hello" | "client|setinfo" | "ping");
        // An issuer sends `subscribe` as the heartbeat of its only connection, whatever the number
        // of waiters.
        let ours = !looking && name != "subscribe";
        ours.then(|| rest.split(',').next().unwrap().parse::<i64>().unwrap())
    };
    stats.lines().filter_map(calls).sum()
}

#[tokio::test]
async fn a_hand_off_costs_the_same_in_any_queue() {
    let mut costs = vec![];
    for length in [5, 300] {
        let (server, _db, leases) = with_leases().await;
        let mut held = grant(&leases, &sku(), LONG).await;
        let mut line = vec![];
        for _ in 0..length {
            line.push(wait(&leases, LONG).await);
        }
        eventually("no waiter polls", async || {
            let before = commands(&server).await;
            sleep(Duration::from_millis(1_500)).await;
            commands(&server).await == before
        })
        .await;
        let mut cost = i64::MAX;
        for _ in 0..3 {
            let before = commands(&server).await;
            leases.release(&sku(), &held.id).await.unwrap();
            // When the waiter returns, its claim has ended and its announcement is counted.
            held = line.remove(0).await.unwrap().unwrap();
            // An issuer also inspects each queue every few seconds.
            cost = cost.min(commands(&server).await - before);
        }
        costs.push(cost);
        line.iter().for_each(JoinHandle::abort);
    }
    println!("commands per hand-off, with 5 and with 300 waiters: {costs:?}");
    assert_eq!(costs[0], costs[1]);
}

#[tokio::test]
async fn expiry_is_noticed_immediately() {
    let (server, db) = (RedisServer::start(&[]).await, Sqlite::fresh(2).await);
    let (one, two) = (connect(&server, &db).await, connect(&server, &db).await);
    let mut late = vec![];
    for n in 0..5 {
        let ttl = Duration::from_millis(300);
        let asked_at = Instant::now();
        let first = grant([&one, &two][n % 2], &sku(), ttl).await;
        let waiting = wait(&two, LONG).await;
        let second = waiting.await.unwrap().unwrap();
        late.push(asked_at.elapsed().saturating_sub(ttl));
        assert!(second.token > first.token);
        two.release(&sku(), &second.id).await.unwrap();
    }
    println!("noticed late by {late:?}");
    // No other event wakes the waiter within the next seconds.
    let brief = Duration::from_millis(500);
    assert!(late.iter().all(|late| *late < brief), "{late:?}");
}

#[tokio::test]
async fn request_after_expiry_grants_to_the_first_waiter() {
    let (server, _db, leases) = with_leases().await;
    let first = grant(&leases, &sku(), LONG).await;
    let waiting = wait(&leases, LONG).await;
    // The lease is deleted, as by an eviction, and no issuer is notified.
    server.command(&["DEL", LEASE]).await;
    is_held(leases.acquire(&sku(), Acquire::new(LONG)).await);
    let second = timeout(Duration::from_secs(5), waiting).await.unwrap();
    assert!(second.unwrap().unwrap().token > first.token);
}

/// The lease expires before the client receives it, and then the client disconnects.
#[tokio::test]
async fn cancelled_request_does_not_end_its_lock_delay() {
    let (_server, _db, leases) = with_leases().await;
    // After this lease, the first poll of a request sends it.
    grant_and_release(&leases).await;
    let sku = sku();
    let request = Acquire::new(Duration::from_secs(2)).lock_delay(LONG);
    let mut gone = Box::pin(leases.acquire(&sku, request));
    assert!(gone.as_mut().now_or_never().is_none());
    let is_held_now = async || leases.inspect(&sku).await.unwrap().is_some();
    eventually("the lease is granted", &is_held_now).await;
    eventually!("the lease has expired", !is_held_now().await);
    drop(gone);
    // The request is abandoned in the background.
    sleep(SHORT).await;
    is_held(leases.acquire(&sku, Acquire::new(LONG)).await);
}

/// All databases of a Redis server share its channels, so messages about a resource of the same
/// name in another database must be ignored.
#[tokio::test]
async fn messages_of_another_database_are_ignored() {
    let (server, db) = (RedisServer::start(&[]).await, Sqlite::fresh(2).await);
    let there = connect(&server, &db).await;
    let url = format!("{}/1", server.url());
    let here = RedisLeases::connect(&url, db.fence()).await.unwrap();
    let short = Duration::from_secs(1);
    grant(&here, &sku(), short).await;
    let waiting = wait(&here, LONG).await;
    // Another client waits in the other database, too, so each renewal there is published.
    let held = grant(&there, &sku(), LONG).await;
    let waiting_there = wait(&there, LONG).await;
    let renewing = async {
        loop {
            renew_for(&there, &held, LONG).await;
            sleep(Duration::from_millis(50)).await;
        }
    };
    // Every waiter polls after ten seconds, which is much later.
    let served = tokio::select! {
        () = renewing => unreachable!(),
        served = timeout(Duration::from_secs(6), waiting) => served,
    };
    served.expect("the waiter was not served").unwrap().unwrap();
    waiting_there.abort();
}

/// Redis may evict one of the two keys of a queue.
#[tokio::test]
async fn waiter_survives_the_loss_of_one_of_its_keys() {
    let (server, _db, leases) = with_leases().await;
    for lost in ["queue", "waiters"] {
        let lost = format!("tower-fence:{{110}}:{lost}:sku-1");
        let first = grant(&leases, &sku(), LONG).await;
        let waiting = wait(&leases, LONG).await;
        server.command(&["DEL", &lost]).await;
        leases.release(&sku(), &first.id).await.unwrap();
        // Every waiter polls after ten seconds, which is much later.
        let served = timeout(Duration::from_secs(6), waiting).await;
        let served = served.expect("the waiter was not served").unwrap().unwrap();

        let waiting = wait(&leases, LONG).await;
        server.command(&["DEL", &lost]).await;
        // After a lost connection, the waiters retry.
        server.command(&["CLIENT", "KILL", "TYPE", "pubsub"]).await;
        soon!(
            "both keys of the queue exist",
            server.read::<Vec<String>>("KEYS *:sku-1").await.len() == 3
        );
        let left = server.read::<i64>(&format!("PTTL {lost}")).await;
        assert!(left > 0, "{lost} never expires");
        leases.release(&sku(), &served.id).await.unwrap();
        let served = waiting.await.unwrap().unwrap();
        leases.release(&sku(), &served.id).await.unwrap();
    }
}

fn is_full<T: std::fmt::Debug>(outcome: Result<T, LeaseError>) {
    assert_matches!(outcome, Err(LeaseError::TooManyWaiters { resource }) if resource == sku());
}

#[tokio::test]
async fn total_number_of_waiters_is_limited() {
    let (server, db) = (RedisServer::start(&[]).await, Sqlite::fresh(2).await);
    let leases = connect(&server, &db).await.max_waiters(2);
    let other = resource("sku-2");
    grant(&leases, &other, LONG).await;
    let first = grant(&leases, &sku(), LONG).await;
    let elsewhere = join_on(&leases, &other, Acquire::new(LONG).wait(LONG)).await;
    // Two requests with one lease id count as two.
    let id = LeaseId::random();
    let request = Acquire::new(LONG).wait(LONG).lease_id(id);
    let waiting = join(&leases, request.clone()).await;
    is_full(leases.acquire(&sku(), request).await);
    is_full(leases.acquire(&sku(), Acquire::new(LONG).wait(LONG)).await);
    leases.release(&sku(), &first.id).await.unwrap();
    waiting.await.unwrap().unwrap();
    elsewhere.abort();
    let _ = elsewhere.await;
    soon("the queue has room again", async || {
        let short = Duration::from_millis(10);
        let asked = leases.acquire(&sku(), Acquire::new(LONG).wait(short)).await;
        matches!(asked, Err(LeaseError::Held { .. }))
    })
    .await;
}
