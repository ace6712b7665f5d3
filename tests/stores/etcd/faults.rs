//! Faults of a cluster of three etcd nodes: nodes are killed or frozen, and revisions are
//! compacted. Also a client that is paused.

use std::{
    error::Error,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use axum::Router;
use serde_json::json;
use sqlx::Sqlite;
use tokio::{
    sync::watch,
    time::{Instant, sleep},
};
use tower_fence::{
    Fence, Resource, issuer,
    lease::{Acquire, LeaseError, Leases, Renew},
};
use tower_fence_etcd::EtcdLeasesBuilder;

use crate::grant_load::{Issuer, Load, are_in_order_where_ours};
use crate::support::{
    PATIENCE,
    database::TestDatabase,
    etcd::{self, EtcdCluster},
    http::{Answer, Server},
    lease::{
        LONG, grant, grant_and_release, granted, highest_epoch, is_lost, is_unavailable,
        keeps_its_token, next_grant, sku, wait,
    },
    proxy::{Link, Passage, Proxy, Sender, contains},
    soon,
};

const CALL_WAIT: Duration = Duration::from_secs(2);

/// A fault of a node does not change the incarnation: leases continue, no epoch begins, and tokens
/// increase.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_or_frozen_leader_loses_no_lease() {
    let db = Sqlite::fresh(2).await;
    let mut cluster = EtcdCluster::start(3).await;
    let issuer = Issuer::in_etcd(&cluster, &db).await;
    let Issuer::InEtcd(leases) = &issuer else {
        unreachable!()
    };
    // The load uses other resources.
    let resource = Resource::new("held").unwrap();
    let held = grant(leases, &resource, LONG).await;
    let load = Load::start(&issuer);
    load.more(20).await;
    let epochs = highest_epoch(&db).await;

    let leader = cluster.leader().await;
    cluster.kill(leader);
    load.more(10).await;
    keeps_its_token(leases, &held).await;
    cluster.start_node(leader);
    load.more(10).await;

    // Once the first node has caught up, another one may fail.
    cluster.is_up().await;
    sleep(Duration::from_secs(1)).await;
    let leader = cluster.leader().await;
    cluster.signal(leader, "-STOP");
    load.more(10).await;
    let refused = leases.acquire(&resource, Acquire::new(LONG)).await;
    assert_matches!(refused, Err(LeaseError::Held { .. }));
    cluster.signal(leader, "-CONT");
    load.more(10).await;

    are_in_order_where_ours(true, &load.stop().await);
    assert_eq!(highest_epoch(&db).await, epochs);
}

/// The first endpoint does not answer, and the next one answers within the timeout of a call.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frozen_follower_delays_only_one_call() {
    let db = Sqlite::fresh(2).await;
    let cluster = EtcdCluster::start(3).await;
    let follower = (cluster.leader().await + 1) % 3;
    let mut urls = cluster.urls();
    urls.rotate_left(follower);
    // A third of this timeout is the share of each endpoint.
    let leases = EtcdLeasesBuilder::new(db.fence()).call_timeout(3 * CALL_WAIT);
    let leases = leases.connect(&urls).await.unwrap();
    let held = grant(&leases, &sku(), LONG).await;
    cluster.signal(follower, "-STOP");
    let mut times = vec![Instant::now()];
    keeps_its_token(&leases, &held).await;
    times.push(Instant::now());
    leases.release(&sku(), &held.id).await.unwrap();
    times.push(Instant::now());
    let second = grant(&leases, &sku(), LONG).await;
    times.push(Instant::now());
    let renewal = Renew::new(LONG).with_new_token();
    let renewed = leases.renew(&sku(), &second.id, renewal).await.unwrap();
    times.push(Instant::now());
    let waits = |pair: &&[Instant]| pair[1] - pair[0] >= CALL_WAIT;
    let slow = times.windows(2).filter(waits);
    assert!(slow.count() <= 2, "several calls wait for the frozen node");
    assert!(second.token > held.token && renewed.token > second.token);
    // The resumed node answers the requests that it has missed.
    cluster.signal(follower, "-CONT");
    let back = EtcdLeasesBuilder::new(db.fence()).call_timeout(3 * CALL_WAIT);
    let back = back.connect(&urls[..1]).await.unwrap();
    let found = back.inspect(&sku()).await.unwrap().unwrap();
    assert_eq!(found.token, renewed.token);
    assert_eq!(highest_epoch(&db).await, 1);
}

/// The waiter's process has its watch at this member.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frozen_follower_does_not_stop_a_queue() {
    let db = Sqlite::fresh(2).await;
    let cluster = EtcdCluster::start(3).await;
    let follower = (cluster.leader().await + 1) % 3;
    let mut urls = cluster.urls();
    urls.rotate_left(follower);
    let far = etcd::connect(&urls, db.fence()).await.unwrap();
    let near = etcd::connect(&urls[1..], db.fence()).await.unwrap();
    let first = grant(&near, &sku(), LONG).await;
    let next = wait(&far, LONG).await;
    cluster.signal(follower, "-STOP");
    near.release(&sku(), &first.id).await.unwrap();
    let released_at = Instant::now();
    granted(next).await;
    let took = released_at.elapsed();
    // After ten seconds of silence, the queue would be read again.
    assert!(took < Duration::from_secs(8), "{took:?}");
    cluster.signal(follower, "-CONT");
}

/// Without the source of epochs, no new counter can begin, but a request that keeps its token needs
/// no epoch.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_epochs_new_incarnations_are_refused_and_leases_continue() {
    let db = Sqlite::fresh(2).await;
    let cluster = EtcdCluster::start(1).await;
    let connect = async |epochs: Fence<Sqlite>| {
        let connected = etcd::connect(&cluster.urls(), epochs).await;
        connected.unwrap()
    };
    let leases = connect(db.fence()).await;
    let held = grant(&leases, &sku(), LONG).await;
    let cut_off = {
        let away = Sqlite::fresh(1).await;
        away.pool.close().await;
        connect(away.fence()).await
    };
    let (same, shorter) = (Renew::new(LONG), Renew::new(LONG / 2));
    for keeps in [same, shorter] {
        let renewed = cut_off.renew(&sku(), &held.id, keeps).await.unwrap();
        assert_eq!(renewed.token, held.token);
    }
    let renewal = Renew::new(LONG).with_new_token();
    is_unavailable(cut_off.renew(&sku(), &held.id, renewal).await);
    cut_off.release(&sku(), &held.id).await.unwrap();
    cluster.delete("tower-fence:counter:").await;
    is_unavailable(cut_off.acquire(&sku(), Acquire::new(LONG)).await);
    let left = cluster.keys("tower-fence:").await;
    let is_incarnation = |(key, _): &(String, String)| key == "tower-fence:incarnation";
    assert!(left.iter().all(is_incarnation), "{left:?}");
    assert!(grant(&leases, &sku(), LONG).await.token > held.token);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_majority_nothing_is_granted_and_leases_survive_it() {
    let db = Sqlite::fresh(2).await;
    let mut cluster = EtcdCluster::start(3).await;
    let leases = etcd::connect(&cluster.urls(), db.fence()).await.unwrap();
    let held = grant(&leases, &sku(), LONG).await;
    let server = Server::start(Router::new().nest("/locks", issuer::router(leases.clone()))).await;
    cluster.kill(1);
    cluster.kill(2);
    let asked_at = Instant::now();
    let answer = Answer::to(server.post("/locks/other").json(&json!({}))).await;
    answer.is_problem(503, "store-unavailable");
    is_unavailable(leases.renew(&sku(), &held.id, Renew::new(LONG)).await);
    is_unavailable(leases.release(&sku(), &held.id).await);
    is_unavailable(leases.inspect(&sku()).await);
    assert!(asked_at.elapsed() < PATIENCE, "{:?}", asked_at.elapsed());
    cluster.start_node(1);
    cluster.is_up().await;
    keeps_its_token(&leases, &held).await;
    assert_eq!(highest_epoch(&db).await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn compaction_loses_nothing() {
    let (cluster, db, leases) = etcd::with_leases().await;
    let mut last = grant(&leases, &sku(), LONG).await;
    let mut line = vec![];
    for _ in 0..10 {
        line.push(wait(&leases, LONG).await);
    }
    let compact = async || {
        // The key at the start revision of the watch must be overwritten, because otherwise
        // compaction would not affect the watch.
        cluster.put("foreign", "x").await;
        let revision = cluster.revision().await.to_string();
        let body = json!({ "revision": revision, "physical": true });
        cluster.call("/v3/kv/compaction", &body).await;
    };
    for waiting in line {
        compact().await;
        leases.release(&sku(), &last.id).await.unwrap();
        compact().await;
        let lease = granted(waiting).await;
        assert!(lease.token > last.token);
        last = lease;
    }
    assert_eq!(highest_epoch(&db).await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lease_that_expires_before_its_renewal_is_lost() {
    let (db, cluster) = (Sqlite::fresh(2).await, EtcdCluster::start(1).await);
    let (holds, held) = watch::channel(false);
    let proxy = Proxy::judging(cluster.addr(), move |sender, message| {
        let renews = sender == Sender::Client && contains(message, "/v3/lease/keepalive");
        Passage::Held(held.clone()).when(renews)
    })
    .await;
    let leases = cluster.connect_through(&proxy, db.fence()).await;
    let first = grant(&leases, &sku(), LONG).await;
    holds.send_replace(true);
    let (sku, renewal) = (sku(), Renew::new(LONG));
    let end = async {
        sleep(Duration::from_millis(500)).await;
        cluster.revoke("tower-fence").await;
        holds.send_replace(false);
    };
    let (renewed, ()) = tokio::join!(leases.renew(&sku, &first.id, renewal), end);
    is_lost(renewed);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lease_expired_during_a_partition_is_lost() {
    let (cluster, db, near) = etcd::with_leases().await;
    let proxy = Proxy::to(cluster.addr()).await;
    let far = cluster.connect_through(&proxy, db.fence()).await;
    let first = grant(&far, &sku(), Duration::from_secs(1)).await;
    proxy.set(Link::Silent);
    is_unavailable(far.renew(&sku(), &first.id, Renew::new(LONG)).await);
    let second = next_grant(&near, LONG).await;
    assert!(second.token > first.token);
    proxy.set(Link::Whole);
    is_lost(far.renew(&sku(), &first.id, Renew::new(LONG)).await);
    is_lost(far.release(&sku(), &first.id).await);
    let held = far.inspect(&sku()).await.unwrap().unwrap();
    assert_eq!(held.token, second.token);
}

/// etcd executes the writes, but their answers are lost. The issuer recognizes its writes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grant_with_a_lost_answer_is_found_again() {
    let db = Sqlite::fresh(2).await;
    let cluster = EtcdCluster::start(1).await;
    let proxy = Proxy::to(cluster.addr()).await;
    // The first endpoint accepts connections and never answers. The second one answers.
    let urls = [format!("http://{}", proxy.addr), cluster.urls().remove(0)];
    let leases = etcd::connect(&urls, db.fence()).await.unwrap();
    for _ in 0..5 {
        proxy.set(Link::Whole);
        let lease = grant(&leases, &sku(), LONG).await;
        proxy.set(Link::NoAnswer);
        leases.release(&sku(), &lease.id).await.unwrap();
        let next = grant(&leases, &sku(), LONG).await;
        assert!(next.token > lease.token);
        let renewal = Renew::new(LONG).with_new_token();
        assert!(leases.renew(&sku(), &next.id, renewal).await.unwrap().token > next.token);
        leases.release(&sku(), &next.id).await.unwrap();
    }
    assert_eq!(leases.inspect(&sku()).await.unwrap(), None);
}

/// Starts a proxy that applies `passage` to the answers to one call, and counts them.
pub async fn meddling(
    cluster: &EtcdCluster,
    call: &'static str,
    passage: Passage,
) -> (Proxy, Arc<AtomicUsize>) {
    let met = Arc::<AtomicUsize>::default();
    let meeting = Arc::clone(&met);
    let mut is_called = false;
    let proxy = Proxy::judging(cluster.addr(), move |sender, message| match sender {
        Sender::Client => {
            is_called = contains(message, call);
            Passage::Whole
        }
        Sender::Server if is_called => {
            meeting.fetch_add(1, Relaxed);
            passage.clone()
        }
        Sender::Server => Passage::Whole,
    });
    (proxy.await, met)
}

/// A call creates an etcd lease, and its answer is lost. The lease of the resource uses this etcd
/// lease.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn result_of_a_call_with_a_lost_answer_is_used() {
    let (cluster, db) = (EtcdCluster::start(1).await, Sqlite::fresh(2).await);
    let (proxy, lost) = meddling(&cluster, "POST /v3/lease/grant", Passage::CutAfter(0)).await;
    let urls = [format!("http://{}", proxy.addr), cluster.urls().remove(0)];
    let leases = etcd::connect(&urls, db.fence()).await.unwrap();
    let lease = grant(&leases, &sku(), LONG).await;
    assert_eq!(lost.load(Relaxed), 1);
    let held = leases.inspect(&sku()).await.unwrap().unwrap();
    assert_eq!((held.token, cluster.leases().await), (lease.token, 1));
}

fn refusal() -> Passage {
    let body = json!({ "code": 7, "message": "permission denied" }).to_string();
    let head = "HTTP/1.1 403 Forbidden\r\ncontent-type: application/json";
    let answer = format!("{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    Passage::Instead(answer.into_bytes())
}

/// A user may lack the right to read the length of the log. A process then relies on the revisions
/// that it has cached.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grants_continue_without_permission_to_read_the_log() {
    let (cluster, db, near) = etcd::with_leases().await;
    let (proxy, refused) = meddling(&cluster, "POST /v3/maintenance/status", refusal()).await;
    let far = cluster.connect_through(&proxy, db.fence()).await;
    let first = grant(&near, &sku(), LONG).await;
    let renewal = Renew::new(LONG).with_new_token();
    let renewed = far.renew(&sku(), &first.id, renewal).await.unwrap();
    assert!(renewed.token > first.token);
    far.release(&sku(), &first.id).await.unwrap();
    let next = grant(&far, &sku(), LONG).await;
    assert!(next.token > renewed.token && refused.load(Relaxed) > 0);
    // A grant that begins an epoch succeeds as well.
    grant(&far, &Resource::new("sku-2").unwrap(), LONG).await;
}

/// Without the length of the log, the issuer cannot determine whether the counter belongs to this
/// incarnation of the cluster.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_log_length_no_lease_is_granted() {
    let (cluster, db, near) = etcd::with_leases().await;
    let (proxy, silent) = meddling(&cluster, "POST /v3/maintenance/status", Passage::Dropped).await;
    let far = EtcdLeasesBuilder::new(db.fence()).call_timeout(Duration::from_millis(500));
    let far = far.connect(&[proxy.url(&cluster.urls()[0])]).await.unwrap();
    let last = grant_and_release(&near).await;
    // A client that has chosen the lease id may retry.
    let chosen = Acquire::new(LONG).lease_id(last.id.clone());
    is_unavailable(far.acquire(&sku(), chosen.clone()).await);
    // A lease whose id no client knows is released. Both resources share the counter.
    let other = Resource::new("sku-124").unwrap();
    is_unavailable(far.acquire(&other, Acquire::new(LONG)).await);
    assert!(silent.load(Relaxed) >= 2);
    soon!(
        "the lease is released",
        near.inspect(&other).await.unwrap().is_none()
    );
    let kept = near.inspect(&sku()).await.unwrap().unwrap();
    let repeated = near.acquire(&sku(), chosen).await.unwrap();
    assert!(repeated.token > last.token && repeated.token == kept.token);
}

/// The error is permanent.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refusals_of_etcd_are_reported() {
    let (cluster, db, near) = etcd::with_leases().await;
    let (proxy, refused) = meddling(&cluster, "POST /v3/lease/grant", refusal()).await;
    let far = cluster.connect_through(&proxy, db.fence()).await;
    grant_and_release(&near).await;
    let message = match far.acquire(&sku(), Acquire::new(LONG)).await {
        Err(LeaseError::Misconfigured(cause)) => Error::source(&*cause).unwrap().to_string(),
        other => panic!("{other:?}"),
    };
    assert_contains!(message, "permission denied");
    assert_eq!(refused.load(Relaxed), 1);
}
