//! Users with etcd authentication, and secrets that neither the keys in etcd nor errors reveal.

use sqlx::Sqlite;
use tower_fence::lease::{Acquire, LeaseAdmin, LeaseError, LeaseId, Leases, Renew};
use tower_fence_etcd::EtcdLeasesBuilder;

use crate::support::{
    database::TestDatabase,
    etcd::{self, EtcdCluster},
    lease::{LONG, granted, is_lost, join, messages_of, sku},
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcd_receives_and_stores_no_lease_id() {
    let (cluster, db) = (EtcdCluster::start(1).await, Sqlite::fresh(2).await);
    let leases = etcd::connect(&cluster.urls(), db.fence()).await.unwrap();
    let ids = [LeaseId::random(), LeaseId::random()];
    let request = |id: &LeaseId| Acquire::new(LONG).lease_id(id.clone()).wait(LONG);
    leases.acquire(&sku(), request(&ids[0])).await.unwrap();
    let waiting = join(&leases, request(&ids[1])).await;
    let stored = cluster.keys("tower-fence:").await;
    assert_eq!(
        stored.len(),
        4,
        "an incarnation, a counter, a lease and a position: {stored:?}"
    );
    for id in &ids {
        assert!(!format!("{stored:?}").contains(id.expose()));
    }
    let (_, lease) = stored
        .iter()
        .find(|(key, _)| key.contains(":lease:"))
        .unwrap();
    let lease: serde_json::Value = serde_json::from_str(lease).unwrap();
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
        let refused = leases
            .acquire(&sku(), Acquire::new(LONG))
            .await
            .unwrap_err();
        let messages = messages_of(&refused);
        assert!(
            matches!(refused, LeaseError::Misconfigured(_)),
            "{messages}"
        );
        messages
    };
    let without_name = refused(EtcdLeasesBuilder::new(db.fence())).await;
    assert_contains!(without_name, "user name is empty");
    let wrong = refused(build("locks", "p4ssw0rd-not")).await;
    assert!(
        wrong.contains("authentication failed") && !wrong.contains("p4ssw0rd"),
        "{wrong}"
    );
    let elsewhere = refused(build("locks", "p4ssw0rd").key_prefix("elsewhere")).await;
    assert_contains!(elsewhere, "permission denied");

    let leases = build("locks", "p4ssw0rd")
        .connect(&cluster.urls())
        .await
        .unwrap();
    assert!(!format!("{leases:?}").contains("p4ssw0rd"));
    let first = leases.acquire(&sku(), Acquire::new(LONG)).await.unwrap();
    let waiting = join(&leases, Acquire::new(LONG).wait(LONG)).await;
    assert_eq!(leases.list(10, None).await.unwrap().leases.len(), 1);
    // Earlier auth tokens are invalid, so the client needs a new one.
    cluster.change_password("locks", "p4ssw0rd").await;
    let renewed = leases.renew(&sku(), &first.id, Renew::new(LONG)).await;
    assert_eq!(renewed.unwrap().token, first.token);
    // The client also continues after a restart of the members.
    cluster.kill_all();
    cluster.start_all();
    let renewed = async || leases.renew(&sku(), &first.id, Renew::new(LONG)).await;
    crate::support::eventually!("etcd answers again", renewed().await.is_ok());
    cluster.change_password("locks", "p4ssw0rd").await;
    leases.release(&sku(), &first.id).await.unwrap();
    granted(waiting).await;
}
