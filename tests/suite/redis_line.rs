//! Lines in Redis: who dies while waiting, what a hand-off costs, and what is left behind.

use std::time::Duration;

use futures_util::future::join_all;
use serde_json::json;
use sqlx::{Postgres, Sqlite};
use tokio::{
    task::JoinHandle,
    time::{Instant, sleep, timeout},
};
use tower_fence::lease::{Acquire, Lease, LeaseError, Leases, RedisLeases};

use crate::{
    leases::{grant, sku},
    support::{
        database::{Fresh, TestDatabase},
        eventually,
        http::Answer,
        process::Inventory,
        redis::RedisServer,
    },
};

const LONG: Duration = Duration::from_secs(60);

async fn connect(server: &RedisServer, db: &Fresh<Sqlite>) -> RedisLeases {
    RedisLeases::connect(&server.url(), db.fence())
        .await
        .unwrap()
}

async fn waiters(leases: &RedisLeases) -> u64 {
    leases
        .inspect(&sku())
        .await
        .unwrap()
        .map_or(0, |held| held.waiters)
}

/// Joins the line, and returns when that is done.
async fn wait(leases: &RedisLeases, wait: Duration) -> JoinHandle<Result<Lease, LeaseError>> {
    let before = waiters(leases).await;
    let waiting = tokio::spawn({
        let leases = leases.clone();
        async move { leases.acquire(&sku(), Acquire::new(LONG).wait(wait)).await }
    });
    eventually("it is in line", async || waiters(leases).await > before).await;
    waiting
}

#[tokio::test]
async fn waiters_of_an_issuer_that_died_are_skipped_at_once() {
    let (server, db) = (RedisServer::start(&[]).await, Sqlite::fresh(2).await);
    let leases = connect(&server, &db).await;
    let first = grant(&leases, &sku(), LONG).await;
    // An issuer with a runtime of its own. Its connections end with it, and its waiters do not
    // get to leave the line.
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
    assert_eq!(waiters(&leases).await, 51, "the dead must be in line");
    let released_at = Instant::now();
    leases.release(&sku(), &first.id).await.unwrap();
    let survivor = timeout(Duration::from_secs(5), survivor).await;
    survivor.expect("it waits for the dead").unwrap().unwrap();
    println!(
        "behind 50 dead waiters, it took {:?}",
        released_at.elapsed()
    );
}

#[tokio::test]
async fn a_waiter_of_a_frozen_process_delays_the_next_by_a_moment() {
    let (db, redis) = (Postgres::fresh(2).await, RedisServer::start(&[]).await);
    let variables = [
        ("DATABASE_URL", db.url.as_str()),
        ("REDIS_URL", &redis.url()),
    ];
    let (frozen, other) = (
        Inventory::start(&variables).await,
        Inventory::start(&variables).await,
    );
    let client = reqwest::Client::new();
    let acquire = |service: &Inventory, body: serde_json::Value| {
        Answer::to(client.post(service.url("/locks/sku-1")).json(&body))
    };
    let line = async |length: u64| {
        eventually("it is in line", async || {
            let state = Answer::to(client.get(other.url("/locks/sku-1")))
                .await
                .json();
            state["waiters"] == length
        })
        .await;
    };
    let first = acquire(&other, json!({})).await.json();
    let doomed = tokio::spawn(acquire(&frozen, json!({ "wait_ms": 60_000 })));
    line(1).await;
    let next = tokio::spawn(acquire(&other, json!({ "wait_ms": 60_000 })));
    line(2).await;
    frozen.signal("-STOP");
    let release = client.delete(other.url("/locks/sku-1"));
    let release = release.header("Lease-Id", first["lease_id"].as_str().unwrap());
    assert_eq!(Answer::to(release).await.status, 204);
    let next = timeout(Duration::from_secs(10), next)
        .await
        .expect("it waits for the frozen one");
    let next = next.unwrap();
    assert_eq!(next.status, 201);
    // When it wakes up, the frozen one finds that its turn is over, and stands in line again.
    frozen.signal("-CONT");
    line(1).await;
    let release = client.delete(other.url("/locks/sku-1"));
    let id = next.json()["lease_id"].as_str().unwrap().to_owned();
    assert_eq!(Answer::to(release.header("Lease-Id", id)).await.status, 204);
    let woken = doomed.await.unwrap();
    assert_eq!(woken.status, 201);
    assert!(woken.json()["token"].as_i64() > next.json()["token"].as_i64());
}

#[tokio::test]
async fn a_restart_in_the_middle_leaves_nobody_hanging() {
    for options in [&[][..], &["--appendonly", "yes"][..]] {
        let (mut server, db) = (RedisServer::start(options).await, Sqlite::fresh(2).await);
        let (one, two) = (connect(&server, &db).await, connect(&server, &db).await);
        let before = grant(&one, &sku(), LONG).await;
        let limit = Duration::from_secs(4);
        let started_at = Instant::now();
        let mut line = vec![];
        for n in 0..40 {
            line.push(wait([&one, &two][n % 2], limit).await);
        }
        server.kill();
        sleep(Duration::from_millis(300)).await;
        server.start_again().await;
        let outcomes = timeout(limit + Duration::from_secs(3), join_all(line)).await;
        let outcomes = outcomes.expect("somebody hangs");
        println!("after {:?}", started_at.elapsed());
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
        assert!(
            tokens.is_sorted_by(|a, b| a < b),
            "a token was repeated: {tokens:?}"
        );
        // And the line works again.
        eventually("the store is back", async || {
            one.inspect(&sku()).await.is_ok()
        })
        .await;
        server.command(&["FLUSHALL"]).await;
        let first = grant(&two, &sku(), LONG).await;
        let waiting = wait(&one, LONG).await;
        two.release(&sku(), &first.id).await.unwrap();
        timeout(Duration::from_secs(5), waiting)
            .await
            .unwrap()
            .unwrap()
            .unwrap();
    }
}

#[tokio::test]
async fn a_line_that_was_flushed_forms_again() {
    let (server, db) = (RedisServer::start(&[]).await, Sqlite::fresh(2).await);
    let leases = connect(&server, &db).await;
    let first = leases
        .acquire(&sku(), Acquire::new(Duration::from_secs(1)))
        .await
        .unwrap();
    let (one, two) = (wait(&leases, LONG).await, wait(&leases, LONG).await);
    server.command(&["FLUSHALL"]).await;
    // Noticed when the lease would have ended.
    let (one, two) = (timeout(LONG, one), timeout(LONG, two));
    let served = async {
        tokio::select! {
            served = one => served,
            served = two => served,
        }
    };
    let served = timeout(Duration::from_secs(10), served)
        .await
        .expect("both hang");
    assert!(served.unwrap().unwrap().unwrap().token > first.token);
}

#[tokio::test]
async fn lines_leave_nothing_behind() {
    let (server, db) = (RedisServer::start(&[]).await, Sqlite::fresh(2).await);
    let leases = connect(&server, &db).await;
    let first = grant(&leases, &sku(), LONG).await;
    let served = wait(&leases, LONG).await;
    let gone = wait(&leases, LONG).await;
    let late = wait(&leases, Duration::from_millis(200)).await;
    gone.abort();
    late.await.unwrap().unwrap_err();
    leases.release(&sku(), &first.id).await.unwrap();
    let served = served.await.unwrap().unwrap();
    leases.release(&sku(), &served.id).await.unwrap();
    eventually("only the clock is left", async || {
        let keys = server.command(&["KEYS", "*"]).await;
        let keys: Vec<String> = redis::from_redis_value(keys).unwrap();
        keys == ["tower-fence:{110}:clock"]
    })
    .await;
}

/// How many commands the server has run, those of scripts included.
async fn commands(server: &RedisServer) -> i64 {
    let stats = server.command(&["INFO", "commandstats"]).await;
    let stats: String = redis::from_redis_value(stats).unwrap();
    let calls = |line: &str| {
        let (name, rest) = line.strip_prefix("cmdstat_")?.split_once(":calls=")?;
        // What looking costs does not count.
        let ours = !matches!(name, "info" | "hello" | "client|setinfo" | "ping");
        ours.then(|| rest.split(',').next().unwrap().parse::<i64>().unwrap())
    };
    stats.lines().filter_map(calls).sum()
}

#[tokio::test]
async fn a_hand_off_costs_the_same_in_any_line_and_waiting_costs_nothing() {
    let mut costs = vec![];
    for length in [3, 300] {
        let (server, db) = (RedisServer::start(&[]).await, Sqlite::fresh(2).await);
        let leases = connect(&server, &db).await;
        let first = grant(&leases, &sku(), LONG).await;
        let mut line = vec![];
        for _ in 0..length {
            line.push(wait(&leases, LONG).await);
        }
        let before = commands(&server).await;
        sleep(Duration::from_millis(1_500)).await;
        assert_eq!(commands(&server).await, before, "somebody polls");
        leases.release(&sku(), &first.id).await.unwrap();
        let next = line.remove(0).await.unwrap().unwrap();
        // The claim is over once the waiter has it; its announcement was part of it.
        costs.push(commands(&server).await - before);
        drop(next);
        line.iter().for_each(JoinHandle::abort);
    }
    println!("commands per hand-off, with 3 and with 300 in line: {costs:?}");
    assert_eq!(costs[0], costs[1]);
}

#[tokio::test]
async fn an_end_by_time_is_noticed_at_once() {
    let (server, db) = (RedisServer::start(&[]).await, Sqlite::fresh(2).await);
    let (one, two) = (connect(&server, &db).await, connect(&server, &db).await);
    let mut late = vec![];
    for n in 0..5 {
        let ttl = Duration::from_millis(300);
        let asked_at = Instant::now();
        let first = [&one, &two][n % 2]
            .acquire(&sku(), Acquire::new(ttl))
            .await
            .unwrap();
        let waiting = wait(&two, LONG).await;
        let second = waiting.await.unwrap().unwrap();
        late.push(asked_at.elapsed().saturating_sub(ttl));
        assert!(second.token > first.token);
        two.release(&sku(), &second.id).await.unwrap();
    }
    println!("noticed late by {late:?}");
    // Well below the next thing that could wake it up, which is seconds away.
    assert!(
        late.iter().all(|late| *late < Duration::from_millis(500)),
        "{late:?}"
    );
}

#[tokio::test]
async fn who_finds_the_lease_ended_hands_it_to_the_first_in_line() {
    let (server, db) = (RedisServer::start(&[]).await, Sqlite::fresh(2).await);
    let leases = connect(&server, &db).await;
    let first = grant(&leases, &sku(), LONG).await;
    let waiting = wait(&leases, LONG).await;
    // Ended, as by eviction, and nobody has noticed yet.
    server
        .command(&["DEL", "tower-fence:{110}:lease:sku-1"])
        .await;
    let newcomer = leases.acquire(&sku(), Acquire::new(LONG)).await;
    assert!(
        matches!(newcomer, Err(LeaseError::Held { .. })),
        "{newcomer:?}"
    );
    let second = timeout(Duration::from_secs(5), waiting).await.unwrap();
    assert!(second.unwrap().unwrap().token > first.token);
}
