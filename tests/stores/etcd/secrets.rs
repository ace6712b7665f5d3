//! Users with etcd authentication, and secrets that neither the keys in etcd nor errors reveal.

use sqlx::Sqlite;
use tower_fence::lease::{Acquire, LeaseAdmin, LeaseError, LeaseId, Leases, Renew};
use tower_fence_etcd::EtcdLeasesBuilder;

use crate::support::{
    database::TestDatabase,
    etcd::{self, EtcdCluster},
    eventually,
    lease::{LONG, granted, is_lost, join, keeps_its_token, messages_of, sku},
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcd_receives_and_stores_no_lease_id() {
    let (cluster, _db, leases) = etcd::with_leases().await;
    let ids = [LeaseId::random(), LeaseId::random()];
    let request = |id: &LeaseId| Acquire::new(LONG).lease_id(id.clone()).wait(LONG);
    leases.acquire(&sku(), request(&ids[0])).await.unwrap();
    let waiting = join(&leases, request(&ids[1])).await;
    let stored = cluster.keys("tower-fence:").await;
    // An incarnation, a counter, a lease and a position.
    assert_eq!(stored.len(), 4, "{stored:?}");
    for id in &ids {
        assert!(!format!("{stored:?}").contains(id.expose()));
    }
    let lease = stored.iter().find(|(key, _)| key.contains(":lease:"));
    let lease: serde_json::Value = serde_json::from_str(&lease.unwrap().1).unwrap();
    let found = lease["id"].as_str().unwrap();
    assert!(LeaseId::new(found).is_err());
    let digits = LeaseId::new(found.trim_start_matches('#')).unwrap();
    is_lost(leases.renew(&sku(), &digits, Renew::new(LONG)).await);
    is_lost(leases.release(&sku(), &digits).await);
    leases.release(&sku(), &ids[0]).await.unwrap();
    granted(waiting).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn user_needs_only_its_prefix_and_renews_its_token() {
    let (mut cluster, db) = (EtcdCluster::start(1).await, Sqlite::fresh(2).await);
    cluster.add_user("locks", "p4ssw0rd").await;
    let build =
        |name: &str, password: &str| EtcdLeasesBuilder::new(db.fence()).user(name, password);
    let refused = async |builder: EtcdLeasesBuilder| {
        assert!(!format!("{builder:?}").contains("p4ssw0rd"));
        let leases = builder.connect_lazy(&cluster.urls()).unwrap();
        let refused = leases.acquire(&sku(), Acquire::new(LONG)).await;
        let refused = refused.unwrap_err();
        assert_matches!(refused, LeaseError::Misconfigured(_));
        messages_of(&refused)
    };
    let without_name = refused(EtcdLeasesBuilder::new(db.fence())).await;
    assert_contains!(without_name, "user name is empty");
    let wrong = refused(build("locks", "p4ssw0rd-not")).await;
    assert_contains!(wrong, "authentication failed");
    assert!(!wrong.contains("p4ssw0rd"), "{wrong}");
    let elsewhere = refused(build("locks", "p4ssw0rd").key_prefix("elsewhere")).await;
    assert_contains!(elsewhere, "permission denied");

    let leases = build("locks", "p4ssw0rd").connect(&cluster.urls()).await;
    let leases = leases.unwrap();
    assert!(!format!("{leases:?}").contains("p4ssw0rd"));
    let first = leases.acquire(&sku(), Acquire::new(LONG)).await.unwrap();
    let waiting = join(&leases, Acquire::new(LONG).wait(LONG)).await;
    assert_eq!(leases.list(10, None).await.unwrap().leases.len(), 1);
    // Earlier auth tokens are invalid, so the client needs a new one.
    cluster.change_password("locks", "p4ssw0rd").await;
    keeps_its_token(&leases, &first).await;
    // The client also continues after a restart of the members.
    cluster.kill_all();
    cluster.start_all();
    let renewed = async || leases.renew(&sku(), &first.id, Renew::new(LONG)).await;
    eventually!("etcd answers again", renewed().await.is_ok());
    cluster.change_password("locks", "p4ssw0rd").await;
    leases.release(&sku(), &first.id).await.unwrap();
    granted(waiting).await;
}
