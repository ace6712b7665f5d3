//! Lines in Redis: who dies while waiting, what a hand-off costs, and what is left behind.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use futures_util::future::join_all;
use serde_json::json;
use sqlx::{Postgres, Sqlite};
use tokio::{
    task::JoinHandle,
    time::{Instant, sleep, timeout},
};
use tower_fence::{
    Resource,
    lease::{Acquire, Lease, LeaseError, LeaseId, Leases, RedisLeases, Renew},
};

use crate::{
    leases::{grant, sku},
    support::{
        database::{Fresh, TestDatabase},
        eventually,
        http::Answer,
        process::Inventory,
        proxy::{Passage, Proxy, Sender},
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
async fn the_waiters_of_a_frozen_process_delay_the_next_by_a_moment() {
    const DOOMED: u64 = 6;
    let (db, redis) = (Postgres::fresh(2).await, RedisServer::start(&[]).await);
    let variables = [
        ("DATABASE_URL", db.url.as_str()),
        ("REDIS_URL", &redis.url()),
    ];
    let frozen = Inventory::start(&variables).await;
    let other = Inventory::start(&variables).await;
    let client = reqwest::Client::new();
    let acquire = |service: &Inventory, body: serde_json::Value| {
        Answer::to(client.post(service.url("/locks/sku-1")).json(&body))
    };
    let release = async |lease: &serde_json::Value| {
        let release = client.delete(other.url("/locks/sku-1"));
        let release = release.header("Lease-Id", lease["lease_id"].as_str().unwrap());
        assert_eq!(Answer::to(release).await.status, 204);
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
    let mut doomed = vec![];
    for n in 1..=DOOMED {
        doomed.push(tokio::spawn(acquire(&frozen, json!({ "wait_ms": 60_000 }))));
        line(n).await;
    }
    let next = tokio::spawn(acquire(&other, json!({ "wait_ms": 60_000 })));
    line(DOOMED + 1).await;
    frozen.signal("-STOP");
    release(&first).await;
    let released_at = Instant::now();
    let next = timeout(Duration::from_secs(10), next)
        .await
        .expect("it waits for the frozen");
    let next = next.unwrap();
    assert_eq!(next.status, 201);
    // One of them delays by a second; each of them would by six.
    assert!(
        released_at.elapsed() < Duration::from_secs(4),
        "{:?}",
        released_at.elapsed()
    );
    // When they wake up, they find that their turn is over, and stand in line again.
    frozen.signal("-CONT");
    line(DOOMED).await;
    let mut last = next.json();
    release(&last).await;
    for _ in 0..DOOMED {
        let (woken, _, rest) = futures_util::future::select_all(doomed).await;
        let woken = woken.unwrap();
        assert_eq!(woken.status, 201);
        assert!(woken.json()["token"].as_i64() > last["token"].as_i64());
        last = woken.json();
        release(&last).await;
        doomed = rest;
        if doomed.is_empty() {
            break;
        }
    }
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
        let looking = matches!(name, "info" | "hello" | "client|setinfo" | "ping");
        // The heartbeat of an issuer's one connection, however many wait.
        let ours = !looking && name != "subscribe";
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

#[tokio::test]
async fn a_line_that_was_lost_while_others_wait_forms_again() {
    let (server, db) = (RedisServer::start(&[]).await, Sqlite::fresh(2).await);
    let (one, two) = (connect(&server, &db).await, connect(&server, &db).await);
    grant(&one, &sku(), LONG).await;
    let forgotten = wait(&two, LONG).await;
    server.command(&["FLUSHALL"]).await;
    // Others come first, and their line hides the loss.
    let stranger = grant(&one, &sku(), LONG).await;
    let other = wait(&one, LONG).await;
    eventually("it is in line again", async || waiters(&one).await == 2).await;
    one.release(&sku(), &stranger.id).await.unwrap();
    let other = timeout(Duration::from_secs(5), other).await.unwrap();
    one.release(&sku(), &other.unwrap().unwrap().id)
        .await
        .unwrap();
    let forgotten = timeout(Duration::from_secs(5), forgotten).await;
    forgotten.expect("it was forgotten").unwrap().unwrap();
}

#[tokio::test]
async fn a_grant_whose_client_has_gone_is_given_back() {
    let (server, db) = (RedisServer::start(&[]).await, Sqlite::fresh(2).await);
    let leases = connect(&server, &db).await;
    grant(&leases, &sku(), Duration::from_millis(1)).await;
    for request in [Acquire::new(LONG), Acquire::new(LONG).wait(LONG)] {
        server.command(&["CLIENT", "PAUSE", "400", "ALL"]).await;
        let sku = sku();
        let gone = timeout(Duration::from_millis(100), leases.acquire(&sku, request));
        gone.await.unwrap_err();
        // Granted when the pause is over, to nobody.
        sleep(Duration::from_millis(500)).await;
        eventually("it is given back", async || {
            leases.inspect(&sku).await.unwrap().is_none()
        })
        .await;
    }
}

#[tokio::test]
async fn a_repetition_whose_client_has_gone_takes_nothing_from_the_first() {
    let (server, db) = (RedisServer::start(&[]).await, Sqlite::fresh(2).await);
    let leases = connect(&server, &db).await;
    let id = LeaseId::random();
    let request = Acquire::new(LONG).lease_id(id.clone());
    let lease = leases.acquire(&sku(), request.clone()).await.unwrap();
    server.command(&["CLIENT", "PAUSE", "400", "ALL"]).await;
    let sku = sku();
    let gone = timeout(Duration::from_millis(100), leases.acquire(&sku, request));
    gone.await.unwrap_err();
    // Done when the pause is over, and given up right after.
    sleep(Duration::from_millis(800)).await;
    let held = leases.inspect(&sku).await.unwrap().expect("it is lost");
    assert_eq!(held.token, lease.token);
    leases.release(&sku, &id).await.unwrap();
}

/// Sooner than by the look of every ten seconds.
const HEARD_AGAIN: Duration = Duration::from_secs(8);

/// A connection that is cut without a word: it goes on, and brings nothing.
#[tokio::test]
async fn a_connection_that_hears_nothing_is_noticed() {
    let (server, db) = (RedisServer::start(&[]).await, Sqlite::fresh(2).await);
    let deaf = Arc::new(AtomicBool::new(false));
    let told = deaf.clone();
    let proxy = Proxy::judging(server.addr(), move || {
        let deaf = told.clone();
        // A connection that is opened afterwards hears again.
        let was_deaf = deaf.load(Relaxed);
        let mut subscribed = false;
        move |sender, message: &[u8]| {
            subscribed |=
                sender == Sender::Client && message.windows(9).any(|word| word == b"SUBSCRIBE");
            let hears_nothing = deaf.load(Relaxed) && subscribed && !was_deaf;
            match sender == Sender::Server && hears_nothing {
                true => Passage::Dropped,
                false => Passage::Whole,
            }
        }
    });
    let proxy = proxy.await;
    let url = proxy.url(&server.url());
    let leases = RedisLeases::builder(db.fence()).command_wait(Duration::from_millis(500));
    let leases = leases.connect(&url).await.unwrap();
    let first = grant(&leases, &sku(), LONG).await;
    let line = [wait(&leases, LONG).await, wait(&leases, LONG).await];
    deaf.store(true, Relaxed);
    leases.release(&sku(), &first.id).await.unwrap();
    // In whatever order they come back.
    let (lease, _, rest) = timeout(HEARD_AGAIN, futures_util::future::select_all(line))
        .await
        .expect("they hear nothing");
    leases
        .release(&sku(), &lease.unwrap().unwrap().id)
        .await
        .unwrap();
    let rest = timeout(HEARD_AGAIN, join_all(rest)).await;
    rest.expect("one hears nothing").remove(0).unwrap().unwrap();
}

/// Publications do not know databases: whoever has the same name elsewhere must not be heard.
#[tokio::test]
async fn a_namesake_in_another_database_is_not_heard() {
    let (server, db) = (RedisServer::start(&[]).await, Sqlite::fresh(2).await);
    let there = connect(&server, &db).await;
    let url = format!("{}/1", server.url());
    let here = RedisLeases::connect(&url, db.fence()).await.unwrap();
    let short = Duration::from_secs(1);
    here.acquire(&sku(), Acquire::new(short)).await.unwrap();
    let waiting = wait(&here, LONG).await;
    // Somebody waits there, too, so that each renewal is told to those who listen.
    let held = grant(&there, &sku(), LONG).await;
    let waiting_there = wait(&there, LONG).await;
    let renewing = async {
        loop {
            let renew = Renew::new(LONG);
            there.renew(&sku(), &held.id, renew).await.unwrap();
            sleep(Duration::from_millis(50)).await;
        }
    };
    // Well below the ten seconds after which everybody looks.
    let served = tokio::select! {
        () = renewing => unreachable!(),
        served = timeout(Duration::from_secs(6), waiting) => served,
    };
    served.expect("it sleeps").unwrap().unwrap();
    waiting_there.abort();
}

fn is_full<T: std::fmt::Debug>(outcome: Result<T, LeaseError>) {
    match outcome {
        Err(LeaseError::TooManyWaiters { resource }) if resource == sku() => {}
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn waiters_are_bounded_for_each_resource_over_all_issuers() {
    let (server, db) = (RedisServer::start(&[]).await, Sqlite::fresh(2).await);
    let connect = async || {
        let builder = RedisLeases::builder(db.fence()).max_waiters_per_resource(3);
        builder.connect(&server.url()).await.unwrap()
    };
    let (one, two) = (connect().await, connect().await);
    let first = grant(&one, &sku(), LONG).await;
    let mut line = vec![wait(&one, LONG).await, wait(&one, LONG).await];
    line.push(wait(&two, LONG).await);
    for leases in [&one, &two] {
        is_full(leases.acquire(&sku(), Acquire::new(LONG).wait(LONG)).await);
    }
    assert_eq!(waiters(&one).await, 3);
    // Who waits already may ask again; who does not want to wait is told that it is held.
    let unwilling = two.acquire(&sku(), Acquire::new(LONG)).await;
    assert!(
        matches!(unwilling, Err(LeaseError::Held { .. })),
        "{unwilling:?}"
    );
    // A place that becomes free is free.
    one.release(&sku(), &first.id).await.unwrap();
    let second = line.remove(0).await.unwrap().unwrap();
    line.push(wait(&two, LONG).await);
    line.iter().for_each(JoinHandle::abort);
    one.release(&sku(), &second.id).await.unwrap();
    eventually("only the clock is left", async || {
        let keys = server.command(&["KEYS", "*"]).await;
        let keys: Vec<String> = redis::from_redis_value(keys).unwrap();
        keys == ["tower-fence:{110}:clock"]
    })
    .await;
}

#[tokio::test]
async fn waiters_are_bounded_in_all() {
    let (server, db) = (RedisServer::start(&[]).await, Sqlite::fresh(2).await);
    let builder = RedisLeases::builder(db.fence()).max_waiters(2);
    let leases = builder.connect(&server.url()).await.unwrap();
    let other = Resource::new("sku-2").unwrap();
    grant(&leases, &other, LONG).await;
    let first = grant(&leases, &sku(), LONG).await;
    let elsewhere = tokio::spawn({
        let (leases, other) = (leases.clone(), other.clone());
        async move { leases.acquire(&other, Acquire::new(LONG).wait(LONG)).await }
    });
    eventually("it is in line", async || {
        let held = leases.inspect(&other).await.unwrap();
        held.is_some_and(|held| held.waiters == 1)
    })
    .await;
    // Two under one id are two.
    let id = LeaseId::random();
    let request = Acquire::new(LONG).wait(LONG).lease_id(id);
    let waiting = tokio::spawn({
        let (leases, request) = (leases.clone(), request.clone());
        async move { leases.acquire(&sku(), request).await }
    });
    eventually("it is in line", async || waiters(&leases).await == 1).await;
    is_full(leases.acquire(&sku(), request).await);
    is_full(leases.acquire(&sku(), Acquire::new(LONG).wait(LONG)).await);
    leases.release(&sku(), &first.id).await.unwrap();
    waiting.await.unwrap().unwrap();
    elsewhere.abort();
    let _ = elsewhere.await;
    eventually("there is room again", async || {
        let short = Duration::from_millis(10);
        let asked = leases.acquire(&sku(), Acquire::new(LONG).wait(short)).await;
        matches!(asked, Err(LeaseError::Held { .. }))
    })
    .await;
}
