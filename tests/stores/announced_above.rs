//! Announced grants of a resource whose fence has admitted a token above the grant.

use sqlx::Sqlite;
use tower_fence_etcd::EtcdLeasesBuilder;

use crate::support::{
    announced::{
        a_forged_token_concerns_its_resource_alone, a_lease_whose_token_is_the_last_has_no_other,
    },
    database::TestDatabase,
    etcd::{self, EtcdCluster},
    redis::fresh_prefix,
    store::Quorum,
};

#[tokio::test]
async fn forged_token_affects_only_its_resource_on_a_quorum() {
    let (store, _, db) = Quorum::of(Sqlite::fresh(2).await).await;
    a_forged_token_concerns_its_resource_alone(store, db).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forged_token_affects_only_its_resource_on_etcd() {
    let (cluster, db) = (EtcdCluster::start(1).await, Sqlite::fresh(2).await);
    let store = etcd::connect(&cluster.urls(), db.fence()).await;
    a_forged_token_concerns_its_resource_alone(store.unwrap(), db).await;
}

#[tokio::test]
async fn lease_with_the_last_token_gets_no_other_on_quorum() {
    let (store, _, db) = Quorum::of(Sqlite::fresh(2).await).await;
    let leases = store.announced_to(db.fence());
    a_lease_whose_token_is_the_last_has_no_other(&leases, &db.fence()).await;
}

#[tokio::test]
async fn lease_with_the_last_token_gets_no_other_in_etcd() {
    let db = Sqlite::fresh(2).await;
    let builder = EtcdLeasesBuilder::new(db.fence()).key_prefix(fresh_prefix());
    let store = builder.connect(&[etcd::shared_url()]).await.unwrap();
    let leases = store.announced_to(db.fence());
    a_lease_whose_token_is_the_last_has_no_other(&leases, &db.fence()).await;
}
