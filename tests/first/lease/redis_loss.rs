//! Data that Redis loses, and the effect on tokens. Each test has its own server.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use sqlx::Sqlite;
use tokio::time::timeout;
use tower_fence::{
    Token,
    lease::{Acquire, LeaseError, Leases, RedisLeases, Renew},
};

use crate::support::{
    database::TestDatabase,
    epochs::Away,
    eventually,
    fence::resource,
    lease::{
        LONG, grant, grant_and_release, is_held, is_lost, is_misconfigured, is_unavailable,
        make_each_call, renew_for, sku,
    },
    proxy::{Passage, Proxy, Sender},
    redis::{COUNTER, LEASE, RedisServer, connect, with_leases},
    soon,
};

#[tokio::test]
async fn grant_after_flushall_exceeds_all_earlier_tokens() {
    let (server, _db, leases) = with_leases().await;
    let mut last = grant_and_release(&leases).await.token;
    for _ in 0..3 {
        let held = grant(&leases, &sku(), LONG).await;
        server.command(&["FLUSHALL"]).await;
        is_lost(leases.renew(&sku(), &held.id, Renew::new(LONG)).await);
        is_lost(leases.release(&sku(), &held.id).await);
        last = last.max(held.token);
        let next = grant_and_release(&leases).await.token;
        assert!(next > last, "{next} is not above {last}");
        last = next;
    }
}

#[tokio::test]
async fn grant_after_a_restart_exceeds_all_earlier_tokens() {
    for (options, is_persistent) in [(&[][..], false), (&["--appendonly", "yes"][..], true)] {
        let (mut server, db) = (RedisServer::start(options).await, Sqlite::fresh(2).await);
        let leases = connect(&server, &db).await;
        grant_and_release(&leases).await;
        let held = grant(&leases, &sku(), LONG).await;
        // Writes to the file survive in the kernel, because only the process is killed.
        server.kill();
        is_unavailable(leases.acquire(&sku(), Acquire::new(LONG)).await);
        server.start_again().await;
        // The same store object continues without intervention.
        eventually!(
            "the store answers again",
            leases.inspect(&sku()).await.is_ok()
        );
        // A lease that was restored from a file may be of any age. Its holder has lost it, but may
        // still use it, so the resource stays blocked.
        assert_eq!(leases.inspect(&sku()).await.unwrap(), None);
        is_lost(leases.renew(&sku(), &held.id, Renew::new(LONG)).await);
        if is_persistent {
            is_held(leases.acquire(&sku(), Acquire::new(LONG)).await);
            leases.release(&sku(), &held.id).await.unwrap();
        }
        let next = grant_and_release(&leases).await.token;
        assert!(next > held.token, "{next} is not above {}", held.token);
    }
}

#[tokio::test]
async fn flushed_scripts_are_loaded_again() {
    let (server, _db, leases) = with_leases().await;
    let flush = async || drop(server.command(&["SCRIPT", "FLUSH"]).await);
    make_each_call(&leases, flush).await;
}

#[tokio::test]
async fn redis_uses_memory_only_for_held_leases() {
    let (server, _db, leases) = with_leases().await;
    for n in 0..600 {
        let resource = resource(&format!("sku-{n}"));
        let lease = grant(&leases, &resource, LONG).await;
        leases.release(&resource, &lease.id).await.unwrap();
    }
    let keys: Vec<String> = server.read("KEYS *").await;
    assert!(keys.len() <= 256, "{} keys", keys.len());
    assert!(keys.iter().all(|key| key.ends_with(":clock")), "{keys:?}");
}

#[tokio::test]
async fn unreachable_redis_is_unavailable_within_the_timeout() {
    let (mut server, db, leases) = with_leases().await;
    let lease = grant(&leases, &sku(), LONG).await;
    server.kill();
    let calls = async {
        is_unavailable(leases.acquire(&sku(), Acquire::new(LONG)).await);
        is_unavailable(leases.renew(&sku(), &lease.id, Renew::new(LONG)).await);
        is_unavailable(leases.release(&sku(), &lease.id).await);
        is_unavailable(leases.inspect(&sku()).await);
    };
    let calls = timeout(Duration::from_secs(10), calls).await;
    calls.expect("a call hangs");
    let url = server.url().replace("//", "//user:sesame@");
    let hasty = RedisLeases::builder(db.fence()).command_timeout(Duration::from_millis(200));
    let refused = timeout(Duration::from_secs(10), hasty.connect(&url)).await;
    let refused = refused.expect("connecting hangs").unwrap_err();
    let text = format!("{refused:?}");
    assert!(!text.contains("sesame"), "no password in an error");
}

#[tokio::test]
async fn without_epochs_new_incarnations_are_refused_and_leases_continue() {
    let (server, db, leases) = with_leases().await;
    let held = grant(&leases, &sku(), LONG).await;
    let epochs = Away::of(&db);
    epochs.set(true);
    let cut_off = RedisLeases::connect(&server.url(), epochs).await.unwrap();
    renew_for(&cut_off, &held, LONG).await;
    server.command(&["FLUSHALL"]).await;
    is_unavailable(cut_off.acquire(&sku(), Acquire::new(LONG)).await);
    assert_eq!(cut_off.inspect(&sku()).await.unwrap(), None);
    assert!(grant(&leases, &sku(), LONG).await.token > held.token);
}

#[tokio::test]
async fn unrelated_keys_do_no_harm() {
    let (server, _db, leases) = with_leases().await;
    server.command(&["SET", LEASE, "gibberish"]).await;
    is_held(leases.acquire(&sku(), Acquire::new(LONG)).await);
    assert_eq!(leases.inspect(&sku()).await.unwrap(), None);
    server.command(&["DEL", LEASE]).await;
    server.command(&["LPUSH", LEASE, "gibberish"]).await;
    is_misconfigured(leases.acquire(&sku(), Acquire::new(LONG)).await);
    server.command(&["DEL", LEASE]).await;
    server
        .command(&["HSET", COUNTER, "epoch", "x", "n", "y"])
        .await;
    grant_and_release(&leases).await;
}

#[tokio::test]
async fn server_without_a_replication_id_is_refused() {
    let server = RedisServer::start(&["--rename-command", "INFO", ""]).await;
    let db = Sqlite::fresh(2).await;
    let refused = RedisLeases::connect(&server.url(), db.fence()).await;
    assert_matches!(
        refused,
        Err(LeaseError::Misconfigured(cause)) if cause.to_string().contains("master_replid")
    );
}

/// The connection is cut after the server has executed the request.
#[tokio::test]
async fn acquire_with_a_lost_answer_keeps_the_lease() {
    let (server, db) = (RedisServer::start(&[]).await, Sqlite::fresh(2).await);
    let cut = Arc::new(AtomicBool::new(false));
    let shared = cut.clone();
    let proxy = Proxy::judging(server.addr(), move |sender, _| {
        Passage::CutAfter(0).when(sender == Sender::Server && shared.swap(false, Relaxed))
    });
    let proxy = proxy.await;
    let url = proxy.url(&server.url());
    let leases = RedisLeases::connect(&url, db.fence()).await.unwrap();
    let first = grant_and_release(&leases).await.token;
    cut.store(true, Relaxed);
    let lease = grant(&leases, &sku(), LONG).await;
    assert!(!cut.load(Relaxed), "no connection was cut");
    // The lease was granted once, and the repetition found its own grant.
    assert_eq!(lease.token.get(), first.get() + 1);
    leases.release(&sku(), &lease.id).await.unwrap();
}

/// A client that has chosen the lease id may retry. Without a chosen id, the lease is released.
#[tokio::test]
async fn unanswered_grant_is_kept_only_with_a_chosen_id() {
    let (server, db) = (RedisServer::start(&[]).await, Sqlite::fresh(2).await);
    // The proxy recognizes the answers by this TTL.
    let time = Duration::from_millis(54_321);
    let cuts = Arc::new(AtomicBool::new(false));
    let shared = cuts.clone();
    let mut acquires = false;
    let proxy = Proxy::judging(server.addr(), move |sender, message| match sender {
        Sender::Client => {
            acquires = message.windows(5).any(|part| part == b"54321");
            Passage::Whole
        }
        Sender::Server if acquires && shared.load(Relaxed) => Passage::CutAfter(0),
        Sender::Server => Passage::Whole,
    });
    let proxy = proxy.await;
    let near = connect(&server, &db).await;
    let url = proxy.url(&server.url());
    let far = RedisLeases::connect(&url, db.fence()).await.unwrap();
    // Both resources share a counter.
    let (resource, other) = (sku(), resource("sku-124"));
    let last = grant(&far, &resource, time).await;
    far.release(&resource, &last.id).await.unwrap();

    cuts.store(true, Relaxed);
    is_unavailable(far.acquire(&other, Acquire::new(time)).await);
    soon!(
        "the lease is released",
        near.inspect(&other).await.unwrap().is_none()
    );
    let chosen = Acquire::new(time).lease_id(last.id);
    is_unavailable(far.acquire(&resource, chosen.clone()).await);
    // These calls use the same connection, so a release would arrive before the second one.
    for _ in 0..2 {
        far.inspect(&resource).await.unwrap();
    }
    let kept = near.acquire(&resource, chosen).await.unwrap();
    let next = grant(&near, &other, LONG).await;
    let counted = |token: Token| token.get() - last.token.get();
    assert_eq!((counted(kept.token), counted(next.token)), (2, 3));
}
