//! Counters in etcd and the epochs of a database: a counter of another source, a source that has
//! lost an epoch, and a counter that is ahead of its source.

use std::sync::{
    Arc,
    atomic::{AtomicI64, Ordering::SeqCst},
};

use sqlx::Sqlite;
use tower_fence::{
    Resource,
    epochs::{Epoch, EpochFuture, Epochs, SourceId},
    lease::{Acquire, Lease, LeaseAdmin, LeaseError, Leases, Renew},
};
use tower_fence_etcd::{EtcdLeases, EtcdLeasesBuilder};

use crate::support::{
    database::{Fresh, TestDatabase},
    etcd::{self, EtcdCluster},
    eventually,
    lease::{LONG, grant, grant_and_release, highest_epoch, is_lost, renew_for, sku},
    proxy::{Passage, Proxy, Sender},
    redis::fresh_prefix,
    soon,
};

async fn connect(db: &Fresh<Sqlite>, prefix: &str) -> EtcdLeases {
    let builder = EtcdLeasesBuilder::new(db.fence()).key_prefix(prefix);
    builder.connect(&[etcd::shared_url()]).await.unwrap()
}

#[tokio::test]
async fn counter_of_another_epoch_source_is_refused() {
    let (ours, theirs) = (Sqlite::fresh(2).await, Sqlite::fresh(2).await);
    let prefix = fresh_prefix();
    let leases = connect(&ours, &prefix).await;
    let first = grant_and_release(&leases).await;
    let strangers = || connect(&theirs, &prefix);
    let is_refused = |refused: Result<Lease, LeaseError>| {
        let Err(LeaseError::Misconfigured(cause)) = refused else {
            panic!("{refused:?}");
        };
        let text = cause.to_string();
        assert_contains!(text, &format!("`{prefix}`"));
        assert_contains!(text, "a key prefix for each database");
        assert_contains!(text, &format!("`{prefix}:counter:N`"));
    };
    let unused = Resource::new("sku-2").unwrap();
    for resource in [&sku(), &unused] {
        let strangers = strangers().await;
        is_refused(strangers.acquire(resource, Acquire::new(LONG)).await);
    }
    grant(&leases, &unused, LONG).await;
    let second = grant(&leases, &sku(), LONG).await;
    assert!(second.token > first.token);
    let renewal = Renew::new(LONG).with_new_token();
    let renewed = strangers().await.renew(&sku(), &second.id, renewal).await;
    is_lost(renewed);
    renew_for(&leases, &second, LONG).await;
    assert_eq!(highest_epoch(&theirs).await, 0);
    // With a separate key prefix, grants succeed.
    grant_and_release(&connect(&theirs, &fresh_prefix()).await).await;
}

#[tokio::test]
async fn lost_epoch_is_re_reported_to_the_database() {
    let (cluster, db) = (EtcdCluster::start(1).await, Sqlite::fresh(2).await);
    let new_process = async || {
        let leases = etcd::connect(&cluster.urls(), db.fence()).await.unwrap();
        grant_and_release(&leases).await
    };
    let lose_counters = async || cluster.delete("tower-fence:counter:").await;
    new_process().await;
    lose_counters().await;
    new_process().await;
    assert_eq!(highest_epoch(&db).await, 2);
    db.execute("UPDATE tower_fence.epochs SET epoch = 1").await;
    // The issuer continues in the epoch of the counter.
    let last = new_process().await;
    assert_eq!(highest_epoch(&db).await, 2);
    // The counters are lost much later, and another process grants.
    lose_counters().await;
    let next = new_process().await;
    assert!(next.token > last.token, "{} {}", next.token, last.token);
}

/// A source that regards epochs below this one as ended.
#[derive(Clone)]
struct Source(Arc<AtomicI64>);

impl Source {
    fn at_least(&self, epoch: Epoch) -> EpochFuture<'_> {
        let alive = self.0.load(SeqCst).max(epoch.get());
        Box::pin(async move { Ok(Epoch::new(alive).unwrap()) })
    }
}

impl Epochs for Source {
    fn next_epoch(&self, _: u8, at_least: Epoch) -> EpochFuture<'_> {
        self.at_least(at_least)
    }

    fn report_epoch(&self, _: u8, seen: Epoch) -> EpochFuture<'_> {
        self.at_least(seen)
    }

    fn source_id(&self) -> EpochFuture<'_, SourceId> {
        Box::pin(async { Ok(SourceId::new("counting").unwrap()) })
    }
}

/// The database has failed over, so a grant in the epoch of the counter would be stale.
#[tokio::test]
async fn no_lease_is_granted_in_an_ended_epoch() {
    let source = Source(Arc::new(AtomicI64::new(1)));
    let prefix = fresh_prefix();
    let new_process = async || {
        let builder = EtcdLeasesBuilder::new(source.clone()).key_prefix(&prefix);
        builder.connect(&[etcd::shared_url()]).await.unwrap()
    };
    let first = grant(&new_process().await, &sku(), LONG).await;
    source.0.store(5, SeqCst);
    let renewal = Renew::new(LONG).with_new_token();
    is_lost(new_process().await.renew(&sku(), &first.id, renewal).await);
    let leases = new_process().await;
    leases.break_lease(&sku(), None).await.unwrap();
    let next = grant_and_release(&leases).await;
    assert_eq!(next.token.get() / 1_000_000_000, 5, "{}", next.token);
}

/// The request has already stored the lease, and is creating another etcd lease for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_in_an_ended_epoch_leaves_nothing_behind() {
    let (cluster, source) = (
        EtcdCluster::start(1).await,
        Source(Arc::new(AtomicI64::new(1))),
    );
    let near = etcd::connect(&cluster.urls(), source.clone()).await;
    grant_and_release(&near.unwrap()).await;
    source.0.store(5, SeqCst);
    let made = Arc::new(AtomicI64::new(0));
    let counted = Arc::clone(&made);
    let proxy = Proxy::judging(cluster.addr(), move |sender, message| {
        let makes_lease = sender == Sender::Client && message.starts_with(b"POST /v3/lease/grant");
        Passage::Dropped.when(makes_lease && counted.fetch_add(1, SeqCst) == 1)
    })
    .await;
    let far = etcd::connect(&[format!("http://{}", proxy.addr)], source).await;
    let asked = tokio::spawn(async move { far.unwrap().acquire(&sku(), Acquire::new(LONG)).await });
    eventually!("it creates another one", made.load(SeqCst) == 2);
    assert_eq!(cluster.keys("tower-fence:lease:").await.len(), 1);
    asked.abort();
    soon!(
        "no key is left",
        cluster.keys("tower-fence:lease:").await.is_empty() && cluster.leases().await == 0
    );
}
