//! The queue of waiters in etcd: positions that end with their process, and the remaining keys.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicI64, AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use futures_util::future::join_all;
use sqlx::Sqlite;
use tokio::{
    sync::watch,
    task::JoinHandle,
    time::{Instant, sleep, timeout},
};
use tower_fence::{
    Resource,
    lease::{Acquire, Lease, LeaseAdmin, LeaseError, LeaseId, Leases},
};
use tower_fence_etcd::{EtcdLeases, EtcdLeasesBuilder};

use crate::support::{
    database::{Fresh, TestDatabase},
    etcd::{self, EtcdCluster, base64},
    eventually,
    lease::{
        LONG, grant, granted, granted_within, is_held, is_unavailable, join, join_on, sku,
        spawn_acquire, wait, waiters,
    },
    proxy::{Link, Passage, Proxy, Sender, contains},
    soon,
};

async fn connect(url: &str, db: &Fresh<Sqlite>) -> EtcdLeases {
    etcd::connect(&[url], db.fence()).await.unwrap()
}

const PLACES: &str = "tower-fence:queue:";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_of_a_partitioned_process_are_skipped() {
    let (cluster, db, near) = etcd::with_leases().await;
    let proxy = Proxy::to(cluster.addr()).await;
    let far = cluster.connect_through(&proxy, db.fence()).await;
    let first = grant(&near, &sku(), LONG).await;
    let cut_off = wait(&far, LONG).await;
    let next = wait(&near, LONG).await;
    proxy.set(Link::Silent);
    near.release(&sku(), &first.id).await.unwrap();
    let cut_off_at = Instant::now();
    // While the cut-off waiter holds its position, no request overtakes it: neither a newcomer, nor
    // a request that times out.
    is_held(near.acquire(&sku(), Acquire::new(LONG)).await);
    let short_wait = Acquire::new(LONG).wait(Duration::from_millis(500));
    is_held(near.acquire(&sku(), short_wait).await);
    let second = granted_within(10, next).await;
    // The position ends when its etcd lease expires.
    assert!(cut_off_at.elapsed() > Duration::from_secs(1));
    // When its connection is back, the cut-off waiter gets its turn, unless one of its calls timed
    // out in the meantime.
    proxy.set(Link::Whole);
    near.release(&sku(), &second.id).await.unwrap();
    let cut_off = timeout(Duration::from_secs(20), cut_off).await;
    let cut_off = cut_off.expect("the cut-off waiter waits forever");
    match cut_off.unwrap() {
        Ok(lease) => assert!(lease.token > second.token),
        Err(LeaseError::Unavailable(_)) => {}
        Err(error) => panic!("{error:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ended_queues_leave_nothing_behind() {
    let (cluster, _db, leases) = etcd::with_leases().await;
    let first = grant(&leases, &sku(), LONG).await;
    let mut line = vec![];
    for _ in 0..30 {
        line.push(wait(&leases, LONG).await);
    }
    for gone in line.split_off(20) {
        gone.abort();
    }
    // The requests are dropped at random moments.
    join_all((0..30).map(async |n| {
        let resource = sku();
        let asking = leases.acquire(&resource, Acquire::new(LONG).wait(LONG));
        let _ = timeout(Duration::from_micros(300 * n), asking).await;
    }))
    .await;
    leases.release(&sku(), &first.id).await.unwrap();
    for waiting in line {
        let lease = granted(waiting).await;
        leases.release(&sku(), &lease.id).await.unwrap();
    }
    eventually("only counters and the incarnation are left", async || {
        let keys = cluster.keys("tower-fence:").await;
        let stays =
            |key: &str| key.starts_with("tower-fence:counter:") || key == "tower-fence:incarnation";
        keys.iter().all(|(key, _)| stays(key)) && cluster.leases().await == 0
    })
    .await;
}

/// The cost of a hand-off does not depend on the length of the queue.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_the_first_waiter_sends_requests() {
    let (cluster, db, near) = etcd::with_leases().await;
    let asked = Arc::<AtomicUsize>::default();
    let counted = Arc::clone(&asked);
    let proxy = Proxy::judging(cluster.addr(), move |sender, message| {
        let is_txn = contains(message, "POST /v3/kv/txn");
        counted.fetch_add(usize::from(sender == Sender::Client && is_txn), Relaxed);
        Passage::Whole
    })
    .await;
    let far = cluster.connect_through(&proxy, db.fence()).await;
    let mut last = grant(&near, &sku(), LONG).await;
    let mut line = vec![];
    for _ in 0..50 {
        line.push(wait(&far, LONG).await);
    }
    sleep(Duration::from_millis(300)).await;
    let before = asked.swap(0, Relaxed);
    assert!(before >= 100, "the proxy saw only {before} requests");
    for waiting in line.drain(..10) {
        near.release(&sku(), &last.id).await.unwrap();
        last = granted(waiting).await;
    }
    let asked = asked.load(Relaxed);
    // Each waiter needs a read and a grant, and another read if two watches report the release one
    // after the other.
    assert!(asked <= 10 * 6, "{asked} transactions for 10 grants");
}

/// etcd executes the writes of all clients one after the other, so a slow write delays them all.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grant_to_a_waiter_sorts_the_queue_only_after_a_conflict() {
    let (cluster, db, near) = etcd::with_leases().await;
    let sent = Arc::<Mutex<Vec<serde_json::Value>>>::default();
    let seen = Arc::clone(&sent);
    let proxy = Proxy::judging(cluster.addr(), move |sender, message| {
        let text = String::from_utf8_lossy(message);
        if sender == Sender::Client
            && text.starts_with("POST /v3/kv/txn")
            && let Some((_, body)) = text.split_once("\r\n\r\n")
        {
            seen.lock().unwrap().extend(serde_json::from_str(body).ok());
        }
        Passage::Whole
    })
    .await;
    let far = cluster.connect_through(&proxy, db.fence()).await;
    let first = grant(&near, &sku(), LONG).await;
    let waiting = wait(&far, LONG).await;
    near.release(&sku(), &first.id).await.unwrap();
    granted(waiting).await;
    let sent = sent.lock().unwrap();
    let branches = |sent: &serde_json::Value| ["success", "failure"].map(|of| sent[of].to_string());
    // Only the transaction that grants the lease removes the position.
    let grants: Vec<_> = sent
        .iter()
        .map(branches)
        .filter(|[success, _]| success.contains("request_delete_range"))
        .map(|branches| branches.map(|branch| branch.contains("sort_order")))
        .collect();
    assert_eq!(grants, [[false, true]]);
}

/// The position of a request expires while its process is cut off, and the request takes another
/// position.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_that_lost_its_position_takes_another() {
    let (cluster, _db, leases) = etcd::with_leases().await;
    let first = grant(&leases, &sku(), LONG).await;
    let id = LeaseId::random();
    let request = Acquire::new(LONG).wait(LONG).lease_id(id.clone());
    let waiting = join(&leases, request).await;
    cluster.delete(PLACES).await;
    eventually!("the waiter joins again", waiters(&leases).await == 1);
    // The etcd lease of the position has ended, too, as after an outage of the process.
    cluster.revoke(PLACES).await;
    eventually!("the waiter joins again", waiters(&leases).await == 1);
    leases.release(&sku(), &first.id).await.unwrap();
    assert_eq!(granted(waiting).await.id, id);
}

/// The lease is free, but an earlier waiter has not taken it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn early_request_continues_to_wait() {
    let (cluster, db, near) = etcd::with_leases().await;
    let proxy = Proxy::to(cluster.addr()).await;
    let far = cluster.connect_through(&proxy, db.fence()).await;
    let first = grant(&near, &sku(), LONG).await;
    let cut_off = wait(&far, LONG).await;
    let places = cluster.keys(PLACES).await;
    let id = LeaseId::random();
    let request = Acquire::new(LONG).wait(LONG).lease_id(id.clone());
    let waiting = join(&near, request.clone()).await;
    proxy.set(Link::Silent);
    near.release(&sku(), &first.id).await.unwrap();
    // The request is repeated, and takes over the position.
    let repeated = connect(&cluster.urls()[0], &db).await;
    let repeated = spawn_acquire(&repeated, &sku(), request);
    sleep(Duration::from_millis(500)).await;
    assert!(!repeated.is_finished());
    let body = serde_json::json!({ "key": base64(&places[0].0) });
    cluster.call("/v3/kv/deleterange", &body).await;
    assert_eq!(granted(repeated).await.id, id);
    is_held(waiting.await.unwrap());
    cut_off.abort();
}

/// The lease ends while the process of the waiter receives nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reconnected_waiter_learns_of_its_turn() {
    let (cluster, db, near) = etcd::with_leases().await;
    let proxy = Proxy::to(cluster.addr()).await;
    let far = cluster.connect_through(&proxy, db.fence()).await;
    let first = grant(&near, &sku(), LONG).await;
    let waiting = wait(&far, LONG).await;
    proxy.set(Link::Cut);
    near.release(&sku(), &first.id).await.unwrap();
    proxy.set(Link::Whole);
    granted_within(5, waiting).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiter_learns_that_etcd_is_unreachable() {
    let (cluster, db, near) = etcd::with_leases().await;
    let proxy = Proxy::to(cluster.addr()).await;
    let far = cluster.connect_through(&proxy, db.fence()).await;
    grant(&near, &sku(), LONG).await;
    let waiting = join(&far, Acquire::new(LONG).wait(Duration::from_secs(3))).await;
    proxy.set(Link::Cut);
    let refused = timeout(LONG / 2, waiting).await;
    is_unavailable(refused.expect("the waiter was not refused").unwrap());
}

/// The position is renewed for a waiter that waits a long time, and for one that joins after the
/// queue became empty.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queue_positions_are_kept_alive() {
    let (cluster, _db, leases) = etcd::with_leases().await;
    grant(&leases, &sku(), LONG).await;
    for _ in 0..2 {
        let waiting = wait(&leases, LONG).await;
        let before = AtomicI64::new(i64::MAX);
        eventually("the lease of the queue position is renewed", async || {
            let left = cluster.time_left(PLACES).await;
            left > before.swap(left, Relaxed)
        })
        .await;
        waiting.abort();
        soon!("the waiter has left the queue", waiters(&leases).await == 0);
    }
}

/// Without a limit, the calls of many requests delay each other beyond their timeout.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_requests_for_one_resource_share_connections() {
    /// The number of acquisitions that may call etcd at the same time.
    const LIMIT: usize = 64;
    const REQUESTS: usize = 90;
    let (cluster, db, near) = etcd::with_leases().await;
    let (called, open) = (Arc::<AtomicUsize>::default(), watch::Sender::new(true));
    let proxy = Proxy::judging(cluster.addr(), {
        let (called, open) = (Arc::clone(&called), open.subscribe());
        move |sender, message| {
            let calls = sender == Sender::Client && message.starts_with(b"POST /v3/kv/");
            called.fetch_add(usize::from(calls && !*open.borrow()), Relaxed);
            Passage::Until(open.clone()).when(calls)
        }
    })
    .await;
    let far = EtcdLeasesBuilder::new(db.fence()).call_timeout(LONG);
    let far = far.connect(&[proxy.url(&cluster.urls()[0])]).await.unwrap();
    let held = grant(&near, &sku(), LONG).await;
    open.send_replace(false);
    let requests: Vec<_> = (0..REQUESTS)
        .map(|_| spawn_acquire(&far, &sku(), Acquire::new(LONG).wait(LONG)))
        .collect();
    eventually!("requests call etcd", called.load(Relaxed) >= LIMIT);
    // Meanwhile, further requests would call etcd.
    sleep(Duration::from_millis(100)).await;
    assert_eq!(called.load(Relaxed), LIMIT);
    assert!(proxy.connections() < REQUESTS as u64);
    open.send_replace(true);
    eventually!("all requests wait", waiters(&near).await == REQUESTS as u64);
    requests.iter().for_each(JoinHandle::abort);
    near.release(&sku(), &held.id).await.unwrap();
}

/// The watch begins after the revision of the read, which etcd has compacted in the meantime.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watch_behind_a_compaction_restarts() {
    let (cluster, db, near) = etcd::with_leases().await;
    let (held, open) = (Arc::<AtomicUsize>::default(), watch::Sender::new(false));
    let proxy = Proxy::judging(cluster.addr(), {
        let (held, open) = (Arc::clone(&held), open.subscribe());
        move |sender, message| {
            let watches = sender == Sender::Client && message.starts_with(b"POST /v3/watch");
            Passage::Until(open.clone()).when(watches && held.fetch_add(1, Relaxed) == 0)
        }
    })
    .await;
    let far = cluster.connect_through(&proxy, db.fence()).await;
    let first = grant(&near, &sku(), LONG).await;
    let waiting = wait(&far, LONG).await;
    eventually!("the waiter watches", held.load(Relaxed) > 0);
    near.release(&sku(), &first.id).await.unwrap();
    cluster.put("foreign", "").await;
    cluster.compact().await;
    open.send_replace(true);
    granted_within(5, waiting).await;
}

/// The request leaves the queue, and its position returns with a snapshot. Another request of its
/// process waits for another resource, so the process still renews positions.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_position_that_returns_with_a_snapshot_ends() {
    let (mut cluster, db) = (EtcdCluster::start(1).await, Sqlite::fresh(2).await);
    let leases = connect(&cluster.urls()[0], &db).await;
    let other = waits_for_another(&leases).await;
    grant(&leases, &sku(), LONG).await;
    let gone = wait(&leases, LONG).await;
    let snapshot = cluster.save("snapshot");
    gone.abort();
    soon!("the waiter has left the queue", waiters(&leases).await == 0);
    cluster.restore(&snapshot, "the-cluster").await;
    // The snapshot contains the position.
    let its = cluster.keys("tower-fence:queue:sku-1\0").await;
    assert_eq!(its.len(), 1);
    leases.break_lease(&sku(), None).await.unwrap();
    let next = spawn_acquire(&leases, &sku(), Acquire::new(LONG).wait(LONG));
    granted(next).await;
    other.abort();
}

/// etcd does not receive the request that removes the position.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_position_that_could_not_be_removed_ends() {
    let (cluster, db, near) = etcd::with_leases().await;
    let is_lost = Arc::<AtomicBool>::default();
    let lost = Arc::clone(&is_lost);
    let key = base64("tower-fence:lease:sku-1");
    let proxy = Proxy::judging(cluster.addr(), move |_, message| {
        Passage::CutAfter(0).when(lost.load(Relaxed) && contains(message, &key))
    })
    .await;
    let hasty = EtcdLeasesBuilder::new(db.fence()).call_timeout(Duration::from_millis(500));
    let far = hasty
        .connect(&[proxy.url(&cluster.urls()[0])])
        .await
        .unwrap();
    let first = grant(&near, &sku(), LONG).await;
    let other = waits_for_another(&far).await;
    let gone = wait(&far, LONG).await;
    is_lost.store(true, Relaxed);
    gone.abort();
    sleep(Duration::from_secs(1)).await;
    is_lost.store(false, Relaxed);
    assert_eq!(waiters(&near).await, 1, "the position has already ended");
    near.release(&sku(), &first.id).await.unwrap();
    let next = spawn_acquire(&near, &sku(), Acquire::new(LONG).wait(LONG));
    granted(next).await;
    assert!(!other.is_finished());
    other.abort();
}

/// Starts a request that waits for another, held resource.
async fn waits_for_another(leases: &EtcdLeases) -> JoinHandle<Result<Lease, LeaseError>> {
    let another = Resource::new("another").unwrap();
    grant(leases, &another, LONG).await;
    join_on(leases, &another, Acquire::new(LONG).wait(2 * LONG)).await
}
