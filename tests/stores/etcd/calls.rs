//! The cost of leases in calls to the gateway of etcd.

use std::{
    sync::{Arc, Mutex, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

use sqlx::Sqlite;
use tower_fence::lease::{Acquire, Leases, Renew};
use tower_fence_etcd::EtcdLeasesBuilder;

use super::faults::meddling;
use crate::support::{
    database::TestDatabase,
    etcd::{self, EtcdCluster},
    eventually,
    lease::{
        LONG, grant, grant_and_release, is_held, is_lost, is_unavailable, renew_for, sku, wait,
    },
    proxy::{Link, Passage, Proxy, Sender},
};

/// Returns the paths of the requests in a message.
fn paths(message: &[u8]) -> Vec<String> {
    let text = String::from_utf8_lossy(message).into_owned();
    let requests = text.split("POST /v3/").skip(1);
    let paths = requests.filter_map(|rest| rest.split(' ').next());
    paths.map(ToOwned::to_owned).collect()
}

/// The calls that went through a proxy.
#[derive(Clone, Default)]
struct Calls(Arc<Mutex<Vec<String>>>);

impl Calls {
    /// Returns the calls that were made since the previous call to this method.
    fn made(&self) -> Vec<String> {
        std::mem::take(&mut *self.0.lock().unwrap())
    }
}

async fn counting(cluster: &EtcdCluster) -> (Proxy, Calls) {
    let calls = Calls::default();
    let counted = calls.clone();
    let proxy = Proxy::judging(cluster.addr(), move |sender, message| {
        if sender == Sender::Client {
            counted.0.lock().unwrap().extend(paths(message));
        }
        Passage::Whole
    });
    (proxy.await, calls)
}

#[tokio::test]
async fn an_acquire_takes_three_calls_and_a_release_one() {
    let (cluster, db) = (EtcdCluster::start(1).await, Sqlite::fresh(2).await);
    let (proxy, calls) = counting(&cluster).await;
    let leases = cluster.connect_through(&proxy, db.fence()).await;
    let other = cluster.connect_through(&proxy, db.fence()).await;
    let made = || calls.made();
    // The first grant begins an epoch.
    grant_and_release(&leases).await;
    made();

    let lease = grant(&leases, &sku(), LONG).await;
    assert_eq!(made(), ["lease/grant", "kv/txn", "maintenance/status"]);
    renew_for(&leases, &lease, LONG).await;
    assert_eq!(made(), ["lease/keepalive", "kv/txn", "maintenance/status"]);
    // A process that has not cached the etcd lease reads it first.
    renew_for(&other, &lease, LONG).await;
    let expected = ["kv/txn", "lease/keepalive", "kv/txn", "maintenance/status"];
    assert_eq!(made(), expected);
    leases.release(&sku(), &lease.id).await.unwrap();
    assert_eq!(made(), ["lease/revoke"]);

    // The other process had cached only the etcd lease of the previous lease, so it reads first.
    let lease = grant(&leases, &sku(), LONG).await;
    made();
    other.release(&sku(), &lease.id).await.unwrap();
    assert_eq!(made(), ["kv/txn", "lease/revoke"]);
    // The lease has been released, which the etcd lease alone does not show.
    is_lost(leases.release(&sku(), &lease.id).await);
    assert_eq!(made(), ["lease/revoke", "kv/txn"]);
}

/// A refused request leaves an etcd lease that has to be revoked. The next request reads the key
/// first, so it creates no etcd lease if it is refused.
#[tokio::test]
async fn a_refusal_costs_no_further_etcd_lease() {
    let (cluster, db) = (EtcdCluster::start(1).await, Sqlite::fresh(2).await);
    let (proxy, calls) = counting(&cluster).await;
    let leases = cluster.connect_through(&proxy, db.fence()).await;
    grant(&leases, &sku(), LONG).await;
    is_held(leases.acquire(&sku(), Acquire::new(LONG)).await);
    eventually!("the unused one has ended", cluster.leases().await == 1);
    calls.made();
    for _ in 0..3 {
        is_held(leases.acquire(&sku(), Acquire::new(LONG)).await);
        assert_eq!(calls.made(), ["kv/txn", "lease/timetolive"]);
    }
}

/// Each grant, each repeated request, and each new token or TTL has its own etcd lease, which
/// replaces the previous one.
#[tokio::test]
async fn a_lease_leaves_no_etcd_lease_behind() {
    let (cluster, _db, leases) = etcd::with_leases().await;
    let held = grant(&leases, &sku(), LONG).await;
    let has = async |count| {
        eventually!("the others have ended", cluster.leases().await == count);
    };
    for renewal in [
        Renew::new(LONG).with_new_token(),
        Renew::new(LONG / 2),
        Renew::new(LONG),
    ] {
        leases.renew(&sku(), &held.id, renewal).await.unwrap();
        has(1).await;
    }
    for _ in 0..2 {
        let repeated = Acquire::new(LONG).lease_id(held.id.clone());
        leases.acquire(&sku(), repeated).await.unwrap();
        has(1).await;
    }
    leases.release(&sku(), &held.id).await.unwrap();
    has(0).await;
}

/// A waiter does not poll, because the watch notifies it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiter_sends_no_requests() {
    const KEPT: &str = "lease/keepalive";
    let (cluster, db) = (EtcdCluster::start(1).await, Sqlite::fresh(2).await);
    let (proxy, calls) = counting(&cluster).await;
    let leases = cluster.connect_through(&proxy, db.fence()).await;
    grant(&leases, &sku(), LONG).await;
    let waiting = wait(&leases, LONG).await;
    let places_are_kept = async |times| {
        eventually("the queue position is kept alive", async || {
            let calls = calls.0.lock().unwrap();
            calls.iter().filter(|call| *call == KEPT).count() >= times
        })
        .await;
        calls.made()
    };
    // The watch starts before the position is first kept alive.
    assert!(places_are_kept(1).await.iter().any(|call| call == "watch"));
    let made = places_are_kept(2).await;
    assert!(made.iter().all(|call| call == KEPT), "{made:?}");
    waiting.abort();
}

/// An etcd that is unreachable, or that ends each watch immediately, is not called continuously.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unusable_etcd_is_retried_with_pauses() {
    let (cluster, db) = (EtcdCluster::start(1).await, Sqlite::fresh(2).await);
    let cut = Passage::CutLater(Duration::ZERO);
    let (proxy, ended) = meddling(&cluster, "POST /v3/watch", cut).await;
    let leases = EtcdLeasesBuilder::new(db.fence()).call_timeout(Duration::from_millis(500));
    let url = proxy.url(&cluster.urls()[0]);
    let leases = leases.connect(&[url]).await.unwrap();
    let held = grant(&leases, &sku(), LONG).await;
    let waiting = wait(&leases, LONG).await;
    eventually!("the waiter watches", ended.load(Relaxed) > 0);
    let (begun, watches) = (Instant::now(), || ended.load(Relaxed));
    let before = watches();
    eventually!("the waiter watches again", watches() >= before + 20);
    // Each answer has at most two messages, so there are at least ten pauses.
    assert!(begun.elapsed() >= Duration::from_millis(400));
    waiting.abort();

    proxy.set(Link::Cut);
    let before = proxy.connections();
    is_unavailable(leases.renew(&sku(), &held.id, Renew::new(LONG)).await);
    let asked = proxy.connections() - before;
    assert!((1..=50).contains(&asked), "{asked} in half a second");
}
