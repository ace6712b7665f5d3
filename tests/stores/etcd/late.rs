//! Writes to etcd that arrive late: a proxy holds back the writes of one issuer until another
//! issuer has continued.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use serde_json::{Value, json};
use sqlx::Sqlite;
use tokio::{sync::watch, task::JoinHandle};
use tower_fence::{
    Resource,
    epochs::Epoch,
    lease::{Acquire, Lease, LeaseAdmin, LeaseError, LeaseId, Leases, Renew},
};
use tower_fence_etcd::{EtcdLeases, EtcdLeasesBuilder};

use crate::support::{
    database::{Fresh, TestDatabase},
    etcd::{self, EtcdCluster, base64},
    eventually,
    lease::{
        LONG, grant, grant_and_release, granted_within, highest_epoch, is_held, is_lost,
        is_unavailable, keeps_its_token, sku, spawn_acquire,
    },
    proxy::{Passage, Proxy, Sender, contains},
};

const COUNTER: &str = "tower-fence:counter:110";
const LEASE: &str = "tower-fence:lease:sku-1";
/// The beginning of a request that revokes an etcd lease.
const REVOKES: &str = "POST /v3/lease/revoke";
/// A resource that shares the counter of `sku-1`.
const OTHER: &str = "sku-124";

/// An issuer behind a proxy that holds back the issuer's messages, beginning with the nth write to
/// a key.
struct Late {
    leases: EtcdLeases,
    first: Arc<Gate>,
    rest: Arc<Gate>,
    _proxy: Proxy,
}

/// A gate that holds back messages until it is opened.
struct Gate {
    held: AtomicUsize,
    open: watch::Sender<bool>,
}

impl Gate {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            held: AtomicUsize::new(0),
            open: watch::Sender::new(false),
        })
    }

    fn hold(&self) -> Passage {
        self.held.fetch_add(1, SeqCst);
        Passage::Until(self.open.subscribe())
    }

    async fn holds_one(&self) {
        eventually!("a message is held back", self.held.load(SeqCst) > 0);
    }
}

fn writes(key: &str) -> String {
    format!(r#""request_put":{{"key":"{}""#, base64(key))
}

/// The part of a request that writes a position in the queue of `sku-1`. The rest of the key
/// depends on the lease id.
fn takes_position() -> String {
    let key = base64("tower-fence:queue:sku");
    format!(r#""request_put":{{"key":"{key}"#)
}

/// Returns the body of a request.
fn body(message: &[u8]) -> Value {
    let text = str::from_utf8(message).unwrap();
    serde_json::from_str(&text[text.find('{').unwrap()..]).unwrap()
}

impl Late {
    async fn from_write(nth: usize, key: &str, cluster: &EtcdCluster, db: &Fresh<Sqlite>) -> Self {
        Self::from_request(nth, writes(key), cluster, db).await
    }

    /// Holds back the nth request that contains this text, and all later ones.
    async fn from_request(
        nth: usize,
        sent: String,
        cluster: &EtcdCluster,
        db: &Fresh<Sqlite>,
    ) -> Self {
        let (first, rest) = (Gate::new(), Gate::new());
        let written = Arc::new(AtomicUsize::new(0));
        let gates = (Arc::clone(&first), Arc::clone(&rest));
        let proxy = Proxy::judging(cluster.addr(), move |sender, message| {
            if sender == Sender::Server {
                return Passage::Whole;
            }
            if written.load(SeqCst) >= nth {
                return gates.1.hold();
            }
            if contains(message, &sent) && written.fetch_add(1, SeqCst) + 1 == nth {
                return gates.0.hold();
            }
            Passage::Whole
        })
        .await;
        Self {
            leases: through(&proxy, cluster, db, Duration::from_secs(20)).await,
            first,
            rest,
            _proxy: proxy,
        }
    }

    /// Acquires in a separate task, and returns when its write is held back.
    async fn acquire(&self, request: Acquire) -> JoinHandle<Result<Lease, LeaseError>> {
        let asked = spawn_acquire(&self.leases, &sku(), request);
        self.first.holds_one().await;
        asked
    }

    /// Renews with a new token in a separate task, and returns when the write is held back.
    async fn renew(&self, id: LeaseId) -> JoinHandle<Result<Lease, LeaseError>> {
        let (leases, renewal) = (self.leases.clone(), Renew::new(LONG).with_new_token());
        let renewing = tokio::spawn(async move { leases.renew(&sku(), &id, renewal).await });
        self.first.holds_one().await;
        renewing
    }

    /// Forwards the write, and waits until the issuer has received the answer and sent its next
    /// write.
    async fn arrives(&self) {
        self.first.open.send_replace(true);
        self.rest.holds_one().await;
    }

    /// Forwards everything.
    fn goes_on(&self) {
        self.first.open.send_replace(true);
        self.rest.open.send_replace(true);
    }
}

async fn connect(cluster: &EtcdCluster, db: &Fresh<Sqlite>) -> EtcdLeases {
    let connected = etcd::connect(&cluster.urls(), db.fence()).await;
    connected.unwrap()
}

/// Connects through a proxy, with this timeout of calls.
async fn through(
    proxy: &Proxy,
    cluster: &EtcdCluster,
    db: &Fresh<Sqlite>,
    call_timeout: Duration,
) -> EtcdLeases {
    let builder = EtcdLeasesBuilder::new(db.fence()).call_timeout(call_timeout);
    let url = proxy.url(&cluster.urls()[0]);
    builder.connect(&[url]).await.unwrap()
}

async fn start() -> (EtcdCluster, Fresh<Sqlite>) {
    (EtcdCluster::start(1).await, Sqlite::fresh(2).await)
}

async fn delete_counter(cluster: &EtcdCluster) {
    let body = json!({ "key": base64(COUNTER) });
    let deleted = cluster.call("/v3/kv/deleterange", &body).await;
    assert_eq!(deleted["deleted"], "1");
}

/// Returns a key with its value and revisions, or null if the key is missing.
async fn read(cluster: &EtcdCluster, key: &str) -> Value {
    let body = json!({ "key": base64(key) });
    cluster.call("/v3/kv/range", &body).await["kvs"][0].clone()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grant_with_a_deleted_counter_has_no_effect() {
    let (cluster, db, near) = etcd::with_leases().await;
    grant_and_release(&near).await;
    let late = Late::from_write(1, LEASE, &cluster, &db).await;
    let asked = late.acquire(Acquire::new(LONG)).await;
    delete_counter(&cluster).await;
    let last = grant_and_release(&near).await;
    late.arrives().await;
    let effect = read(&cluster, LEASE).await;
    late.goes_on();
    let lease = asked.await.unwrap().unwrap();
    assert!(lease.token > last.token, "{lease:?} after {last:?}");
    assert_eq!(effect, Value::Null);
    assert_eq!(highest_epoch(&db).await, 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn renewal_with_a_deleted_counter_is_lost() {
    let (cluster, db, near) = etcd::with_leases().await;
    let late = Late::from_write(2, LEASE, &cluster, &db).await;
    let held = grant(&late.leases, &sku(), LONG).await;
    let stored = read(&cluster, LEASE).await;
    let renewing = late.renew(held.id.clone()).await;
    delete_counter(&cluster).await;
    let other = Resource::new(OTHER).unwrap();
    let granted = grant(&near, &other, LONG).await;
    assert_eq!(granted.token.get() / Epoch::SIZE, 2);
    late.arrives().await;
    assert_eq!(read(&cluster, LEASE).await, stored);
    late.goes_on();
    is_lost(renewing.await.unwrap());
    eventually!("its etcd lease has ended", cluster.leases().await == 2);
}

/// The etcd lease of a key expires while the write is in transit, so another etcd lease is created.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grant_that_expired_in_transit_is_retried() {
    let (cluster, db) = start().await;
    let late = Late::from_write(1, LEASE, &cluster, &db).await;
    let asked = late.acquire(Acquire::new(LONG)).await;
    cluster.revoke_unused().await;
    late.goes_on();
    let lease = asked.await.unwrap().unwrap();
    let held = late.leases.inspect(&sku()).await.unwrap().unwrap();
    assert_eq!(held.token, lease.token);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn renewal_that_expired_in_transit_is_retried() {
    let (cluster, db) = start().await;
    let late = Late::from_write(2, LEASE, &cluster, &db).await;
    let held = grant(&late.leases, &sku(), LONG).await;
    let renewing = late.renew(held.id.clone()).await;
    cluster.revoke_unused().await;
    late.goes_on();
    assert!(renewing.await.unwrap().unwrap().token > held.token);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queue_position_that_expired_in_transit_is_retaken() {
    let (cluster, db, near) = etcd::with_leases().await;
    let held = grant(&near, &sku(), LONG).await;
    let late = Late::from_request(1, takes_position(), &cluster, &db).await;
    let waiting = late.acquire(Acquire::new(LONG).wait(LONG)).await;
    cluster.revoke_unused().await;
    late.goes_on();
    eventually("the waiter is in the queue", async || {
        let held = near.inspect(&sku()).await.unwrap();
        waiting.is_finished() || held.is_some_and(|held| held.waiters == 1)
    })
    .await;
    near.release(&sku(), &held.id).await.unwrap();
    assert!(waiting.await.unwrap().unwrap().token > held.token);
}

/// An issuer behind a proxy that drops the first `count` writes of positions.
struct Losing {
    leases: EtcdLeases,
    lost: Arc<Mutex<Vec<Value>>>,
    _proxy: Proxy,
}

impl Losing {
    async fn start(count: usize, cluster: &EtcdCluster, db: &Fresh<Sqlite>) -> Self {
        let lost: Arc<Mutex<Vec<Value>>> = Arc::default();
        let proxy = Proxy::judging(cluster.addr(), {
            let lost = Arc::clone(&lost);
            move |_, message| {
                let mut lost = lost.lock().unwrap();
                if lost.len() == count || !contains(message, &takes_position()) {
                    return Passage::Whole;
                }
                lost.push(body(message));
                Passage::Dropped
            }
        })
        .await;
        Self {
            leases: through(&proxy, cluster, db, Duration::from_secs(1)).await,
            lost,
            _proxy: proxy,
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wait_ends_if_each_write_of_a_position_is_lost() {
    let (cluster, db) = start().await;
    let losing = Losing::start(usize::MAX, &cluster, &db).await;
    grant(&losing.leases, &sku(), LONG).await;
    let request = Acquire::new(LONG).wait(Duration::from_secs(1));
    let resource = sku();
    let waiting = losing.leases.acquire(&resource, request);
    let refused = tokio::time::timeout(LONG / 2, waiting).await;
    is_unavailable(refused.expect("the wait does not end"));
    assert_eq!(losing.lost.lock().unwrap().len(), 2);
}

/// The proxy drops the write of a position, and the test sends the write to etcd after the request
/// has ended. Another request of the process keeps the process's positions alive.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn late_position_of_an_ended_request_expires() {
    let (cluster, db) = start().await;
    let Losing { leases, lost, .. } = &Losing::start(1, &cluster, &db).await;
    let near = connect(&cluster, &db).await;
    let wait_for =
        |resource: &Resource| spawn_acquire(leases, resource, Acquire::new(LONG).wait(LONG));
    let have_waiters = async |resource: &Resource, count| {
        eventually("the queue has that many waiters", async || {
            let held = near.inspect(resource).await.unwrap();
            held.is_some_and(|held| held.waiters == count)
        })
        .await;
    };
    let elsewhere = Resource::new("elsewhere").unwrap();
    grant(&near, &elsewhere, LONG).await;
    let _waiting = wait_for(&elsewhere);
    have_waiters(&elsewhere, 1).await;

    let held = grant(&near, &sku(), LONG).await;
    let left = wait_for(&sku());
    eventually!("the write is lost", !lost.lock().unwrap().is_empty());
    // The issuer waits for the answer of the write, and then tries again.
    eventually("the issuer has continued", async || {
        let held = near.inspect(&sku()).await.unwrap();
        left.is_finished() || held.is_some_and(|held| held.waiters == 1)
    })
    .await;
    left.abort();
    have_waiters(&sku(), 0).await;
    let write = lost.lock().unwrap()[0].clone();
    cluster.call("/v3/kv/txn", &write).await;
    have_waiters(&sku(), 1).await;
    near.release(&sku(), &held.id).await.unwrap();
    // A position without a request does not block the queue.
    let granted = granted_within(30, wait_for(&sku())).await;
    assert!(granted.token > held.token);
}

/// Before the release arrives, another issuer renews the lease with the same etcd lease, or the
/// lease ends, so that the release has nothing left to do.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn late_release_succeeds_after_a_renewal_or_an_end() {
    for is_renewed in [true, false] {
        let (cluster, db, near) = etcd::with_leases().await;
        let held = grant(&near, &sku(), LONG).await;
        let late = Late::from_request(1, REVOKES.into(), &cluster, &db).await;
        let releasing = tokio::spawn({
            let (leases, id) = (late.leases.clone(), held.id.clone());
            async move { leases.release(&sku(), &id).await }
        });
        late.first.holds_one().await;
        if is_renewed {
            let renewal = Renew::new(LONG).with_new_token();
            near.renew(&sku(), &held.id, renewal).await.unwrap();
        } else {
            cluster.revoke(LEASE).await;
        }
        late.goes_on();
        releasing.await.unwrap().unwrap();
        assert_eq!(near.inspect(&sku()).await.unwrap(), None);
    }
}

/// The TTL of an etcd lease cannot be changed, so the key moves to another etcd lease, and the
/// first one is revoked.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn release_finds_a_lease_that_was_moved() {
    let (cluster, db) = start().await;
    let (near, other) = (connect(&cluster, &db).await, connect(&cluster, &db).await);
    let held = grant(&near, &sku(), LONG).await;
    let longer = Renew::new(2 * LONG);
    other.renew(&sku(), &held.id, longer).await.unwrap();
    near.release(&sku(), &held.id).await.unwrap();
    assert_eq!(near.inspect(&sku()).await.unwrap(), None);
    assert_eq!(cluster.leases().await, 0);
}

/// A repeated request moves the key, and the connection breaks before its write is answered. In the
/// second round, a renewal moves the key once more before the request sends its write again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn release_finds_a_lease_whose_move_was_not_answered() {
    for is_moved_again in [false, true] {
        let (cluster, db, near) = etcd::with_leases().await;
        let held = grant(&near, &sku(), LONG).await;
        let (is_cut, after_cut) = (Arc::new(AtomicBool::new(false)), Gate::new());
        let (cuts, gate) = (Arc::clone(&is_cut), Arc::clone(&after_cut));
        let mut is_write = false;
        let proxy = Proxy::judging(cluster.addr(), move |sender, message| match sender {
            Sender::Client if cuts.load(SeqCst) => gate.hold(),
            Sender::Client => {
                is_write = contains(message, &writes(LEASE));
                Passage::Whole
            }
            Sender::Server if is_write && !cuts.swap(true, SeqCst) => Passage::CutAfter(0),
            Sender::Server => Passage::Whole,
        })
        .await;
        let other = through(&proxy, &cluster, &db, Duration::from_secs(20)).await;
        let repeated = Acquire::new(LONG).lease_id(held.id.clone());
        let repeating = spawn_acquire(&other, &sku(), repeated);
        after_cut.holds_one().await;
        if is_moved_again {
            let third = connect(&cluster, &db).await;
            let longer = Renew::new(2 * LONG);
            third.renew(&sku(), &held.id, longer).await.unwrap();
        }
        after_cut.open.send_replace(true);
        repeating.await.unwrap().unwrap();
        assert!(is_cut.load(SeqCst));
        near.release(&sku(), &held.id).await.unwrap();
        assert_eq!(near.inspect(&sku()).await.unwrap(), None);
        // A background task may still have to revoke an unused etcd lease.
        eventually!("all etcd leases have ended", cluster.leases().await == 0);
    }
}

/// The lease is broken in two steps: its key is deleted, and its etcd lease is revoked.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broken_lease_is_not_renewed_between_the_steps() {
    let (cluster, db, near) = etcd::with_leases().await;
    let held = grant(&near, &sku(), LONG).await;
    let late = Late::from_request(1, REVOKES.into(), &cluster, &db).await;
    let breaking = tokio::spawn({
        let leases = late.leases.clone();
        async move { leases.break_lease(&sku(), Some(held.token)).await }
    });
    late.first.holds_one().await;
    for renewal in [Renew::new(LONG), Renew::new(LONG).with_new_token()] {
        is_lost(near.renew(&sku(), &held.id, renewal).await);
    }
    late.goes_on();
    assert!(breaking.await.unwrap().unwrap());
}

/// An earlier request with the same lease id was answered, and its holder continues.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ended_repetition_leaves_the_lease_to_its_holder() {
    let (cluster, db, near) = etcd::with_leases().await;
    let held = grant(&near, &sku(), LONG).await;
    let late = Late::from_write(1, LEASE, &cluster, &db).await;
    let repeated = Acquire::new(LONG).lease_id(held.id.clone());
    let repeated = late.acquire(repeated).await;
    late.arrives().await;
    repeated.abort();
    assert!(repeated.await.unwrap_err().is_cancelled());
    late.goes_on();
    // By now, the client would have sent a release of the dropped request.
    tokio::time::sleep(Duration::from_millis(300)).await;
    keeps_its_token(&near, &held).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn late_blank_counter_ends_no_epoch() {
    let (cluster, db, near) = etcd::with_leases().await;
    let late = Late::from_write(1, COUNTER, &cluster, &db).await;
    let asked = late.acquire(Acquire::new(LONG)).await;
    let held = grant(&near, &sku(), LONG).await;
    let counter = read(&cluster, COUNTER).await;
    late.goes_on();
    is_held(asked.await.unwrap());
    assert_eq!(read(&cluster, COUNTER).await, counter);
    keeps_its_token(&near, &held).await;
    assert_eq!(highest_epoch(&db).await, 1);
}

/// Another incarnation of the cluster also has a blank counter, with the same revision.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn late_epoch_begins_on_no_other_counter() {
    let (mut cluster, db, near) = etcd::with_leases().await;
    let snapshot = cluster.save("snapshot");
    let late = Late::from_write(2, COUNTER, &cluster, &db).await;
    let asked = late.acquire(Acquire::new(LONG)).await;
    let blank = read(&cluster, COUNTER).await;
    // The issuer begins a higher epoch on the same counter.
    let last = grant_and_release(&near).await;
    assert_eq!(last.token.get() / Epoch::SIZE, 2);
    cluster.restore(&snapshot, "the-cluster").await;
    let other = Late::from_write(2, COUNTER, &cluster, &db).await;
    let other_asked = other.acquire(Acquire::new(LONG)).await;
    let other_blank = read(&cluster, COUNTER).await;
    assert_eq!(other_blank["mod_revision"], blank["mod_revision"]);
    late.goes_on();
    let lease = asked.await.unwrap().unwrap();
    assert!(lease.token > last.token, "{lease:?} after {last:?}");
    other.goes_on();
    is_held(other_asked.await.unwrap());
    keeps_its_token(&other.leases, &lease).await;
}

/// A request may reach etcd twice if the first endpoint forwarded it late.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn epoch_cannot_begin_twice_on_one_counter() {
    let (cluster, db) = start().await;
    let sent: Arc<Mutex<Vec<Value>>> = Arc::default();
    let proxy = Proxy::judging(cluster.addr(), {
        let sent = Arc::clone(&sent);
        move |_, message| {
            if contains(message, &writes(COUNTER)) {
                sent.lock().unwrap().push(body(message));
            }
            Passage::Whole
        }
    })
    .await;
    let leases = cluster.connect_through(&proxy, db.fence()).await;
    for _ in 0..10 {
        grant_and_release(&leases).await;
    }
    let last = grant_and_release(&leases).await;
    delete_counter(&cluster).await;
    let sent = std::mem::take(&mut *sent.lock().unwrap());
    assert_eq!(sent.len(), 2, "one blank counter and one epoch are sent");
    for body in sent {
        cluster.call("/v3/kv/txn", &body).await;
    }
    let lease = grant(&connect(&cluster, &db).await, &sku(), LONG).await;
    assert!(lease.token > last.token, "{lease:?} after {last:?}");
}

/// The conditions of the write hold again in a restored cluster, but the answer comes from a
/// different incarnation than the one that the issuer has read.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grant_in_another_incarnation_is_not_returned() {
    let (mut cluster, db) = start().await;
    // The loss must be larger than the number of log entries that create no revision. A new cluster
    // begins with a few of them.
    cluster.write_foreign(50).await;
    let near = connect(&cluster, &db).await;
    grant_and_release(&near).await;
    let late = Late::from_write(1, LEASE, &cluster, &db).await;
    let asked = late.acquire(Acquire::new(LONG)).await;
    // The snapshot contains the etcd lease of the grant.
    let snapshot = cluster.save("snapshot");
    let mut last = grant_and_release(&near).await;
    for _ in 0..10 {
        last = grant_and_release(&near).await;
    }
    cluster.restore(&snapshot, "the-cluster").await;
    late.goes_on();
    let lease = asked.await.unwrap().unwrap();
    assert!(lease.token > last.token, "{lease:?} after {last:?}");
    assert_eq!(highest_epoch(&db).await, 2);
}
