//! Tokens after a loss of data in etcd, under load, as in `redis::data_loss`. The same load also
//! runs with the revisions of etcd as tokens, which a naive user might choose.

use sqlx::Sqlite;
use tower_fence::{
    Resource,
    lease::{Acquire, LeaseAdmin, Leases, Renew},
};

use crate::grant_load::{Issuer, Load, are_in_order_where_ours};
use crate::support::{
    database::TestDatabase,
    etcd::{self, EtcdCluster},
    lease::{
        LONG, grant, grant_and_release, highest_epoch, is_held, is_lost, keeps_its_token,
        renew_for, sku,
    },
};

/// Restores a snapshot under load with this cluster token, for our issuer and for the naive one.
async fn restored_as(name: &str) {
    let db = Sqlite::fresh(2).await;
    for ours in [true, false] {
        let mut cluster = EtcdCluster::start(1).await;
        let issuer = match ours {
            true => Issuer::in_etcd(&cluster, &db).await,
            false => Issuer::naive_in_etcd(&cluster),
        };
        let load = Load::start(&issuer);
        load.more(30).await;
        let snapshot = cluster.save("snapshot");
        load.more(60).await;
        cluster.restore(&snapshot, name).await;
        load.more(10).await;
        are_in_order_where_ours(ours, &load.stop().await);
    }
}

/// Under the same name, the cluster id, the term and the member ids are the same as before.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restored_snapshot_repeats_no_token() {
    for name in ["another-cluster", "the-cluster"] {
        restored_as(name).await;
    }
}

/// The nodes are restored as a new cluster, and under the same names. An issuer at any node detects
/// the restore.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_of_three_restored_nodes_exceed_earlier_grants() {
    let db = Sqlite::fresh(2).await;
    let mut cluster = EtcdCluster::start(3).await;
    cluster.write_foreign(50).await;
    for is_new_name in [true, false] {
        let before = etcd::connect(&cluster.urls(), db.fence()).await.unwrap();
        grant_and_release(&before).await;
        let epoch = highest_epoch(&db).await;
        let snapshot = cluster.save(&format!("snapshot-{epoch}"));
        for _ in 0..10 {
            grant_and_release(&before).await;
        }
        let mut highest = grant_and_release(&before).await.token;
        cluster.restore(&snapshot, "another-cluster").await;
        if is_new_name {
            // These log entries do not create revisions. By the length of its log alone, the
            // restored cluster could be the earlier one.
            cluster.grant_foreign(100).await;
        }
        for url in cluster.urls() {
            // None of these processes has any cached state.
            let after = etcd::connect(&[url], db.fence()).await.unwrap();
            let token = grant_and_release(&after).await.token;
            assert!(token > highest, "{token} after {highest}");
            highest = token;
        }
        assert_eq!(highest_epoch(&db).await, epoch + 1);
    }
}

/// The cached state of one process does not help processes that start later.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn process_started_after_a_restore_exceeds_earlier_grants() {
    let db = Sqlite::fresh(2).await;
    let mut cluster = EtcdCluster::start(1).await;
    // The loss must be larger than the number of log entries that create no revision. A new cluster
    // begins with a few of them.
    cluster.write_foreign(50).await;
    let before = etcd::connect(&cluster.urls(), db.fence()).await.unwrap();
    let kept = grant(&before, &sku(), LONG).await;
    let snapshot = cluster.save("snapshot");
    before.release(&sku(), &kept.id).await.unwrap();
    let mut highest = kept.token;
    for _ in 0..5 {
        highest = grant_and_release(&before).await.token;
    }
    let epoch = highest_epoch(&db).await;
    cluster.restore(&snapshot, "the-cluster").await;
    // The restored cluster now has a higher revision than at the snapshot, and than before the
    // restore.
    let counted = cluster.revision().await;
    cluster.write_foreign(200).await;
    assert!(cluster.revision().await >= counted + 200);

    let after = etcd::connect(&cluster.urls(), db.fence()).await.unwrap();
    // The snapshot has restored the lease. Its holder has lost it, and no other client can acquire
    // it yet.
    is_lost(after.renew(&sku(), &kept.id, Renew::new(LONG)).await);
    assert_eq!(after.inspect(&sku()).await.unwrap(), None);
    is_held(after.acquire(&sku(), Acquire::new(LONG)).await);
    is_lost(before.renew(&sku(), &kept.id, Renew::new(LONG)).await);
    assert!(after.break_lease(&sku(), None).await.unwrap());
    let next = grant(&after, &sku(), LONG).await;
    assert!(next.token > highest, "{} {highest}", next.token);
    assert_eq!(highest_epoch(&db).await, epoch + 1);
    // The issuer that has existed since before the restore accepts the new lease.
    renew_for(&before, &next, LONG).await;
}

/// Each etcd lease adds an entry to the log without raising the revision. A partition that is used
/// late therefore cannot detect the restore from the length of the log. It detects the restore from
/// the incarnation of etcd, which the first grant in any partition ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn partition_used_long_after_a_restore_exceeds_earlier_grants() {
    let db = Sqlite::fresh(2).await;
    let mut cluster = EtcdCluster::start(1).await;
    cluster.write_foreign(50).await;
    let before = etcd::connect(&cluster.urls(), db.fence()).await.unwrap();
    let other = Resource::new("sku-2").unwrap();
    grant(&before, &other, LONG).await;
    grant_and_release(&before).await;
    let snapshot = cluster.save("snapshot");
    let mut highest = grant_and_release(&before).await.token;
    for _ in 0..5 {
        highest = grant_and_release(&before).await.token;
    }
    let epoch = highest_epoch(&db).await;
    cluster.restore(&snapshot, "the-cluster").await;

    let after = etcd::connect(&cluster.urls(), db.fence()).await.unwrap();
    after.break_lease(&other, None).await.unwrap();
    grant(&after, &other, LONG).await;
    cluster.grant_foreign(200).await;
    let late = etcd::connect(&cluster.urls(), db.fence()).await.unwrap();
    let token = grant_and_release(&late).await.token;
    assert!(token > highest, "{token} after {highest}");
    assert_eq!(highest_epoch(&db).await, epoch + 1);
}

/// A repeated request with the lease id of a restored lease gets a new token.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn repeated_request_after_a_restore_returns_a_higher_token() {
    let (mut cluster, _db, leases) = etcd::with_leases().await;
    let first = grant(&leases, &sku(), LONG).await;
    let snapshot = cluster.save("snapshot");
    cluster.restore(&snapshot, "another-cluster").await;
    let again = Acquire::new(LONG).lease_id(first.id.clone());
    let again = leases.acquire(&sku(), again).await.unwrap();
    assert!(again.token > first.token);
    assert_eq!(renew_for(&leases, &first, LONG).await.token, again.token);
}

/// A majority keeps the data, so there is no loss: no epoch begins, and leases continue.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_loses_nothing() {
    let (mut cluster, db, leases) = etcd::with_leases().await;
    let lease = grant(&leases, &sku(), LONG).await;
    cluster.kill_all();
    cluster.start_all();
    cluster.is_up().await;
    let other = etcd::connect(&cluster.urls(), db.fence()).await.unwrap();
    for leases in [&leases, &other] {
        keeps_its_token(leases, &lease).await;
    }
    assert_eq!(highest_epoch(&db).await, 1);
}

/// The log is restored together with the state, so etcd does not reveal the restore. A process that
/// has cached a later state detects it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn process_detects_a_data_folder_older_than_its_state() {
    let db = Sqlite::fresh(2).await;
    let mut cluster = EtcdCluster::start(1).await;
    let connect = async |cluster: &EtcdCluster| {
        let connected = etcd::connect(&cluster.urls(), db.fence()).await;
        connected.unwrap()
    };
    for (n, only_renews) in (1..).zip([false, true]) {
        let leases = connect(&cluster).await;
        grant(&leases, &sku(), LONG).await;
        cluster.kill_all();
        let copy = cluster.copy_data();
        cluster.start_all();
        cluster.is_up().await;
        leases.break_lease(&sku(), None).await.unwrap();
        let last = grant(&leases, &sku(), LONG).await;
        let who = match only_renews {
            true => connect(&cluster).await,
            false => leases,
        };
        renew_for(&who, &last, LONG).await;
        cluster.kill_all();
        cluster.put_back(&copy);
        cluster.start_all();
        cluster.is_up().await;
        is_lost(who.renew(&sku(), &last.id, Renew::new(LONG)).await);
        who.break_lease(&sku(), None).await.unwrap();
        let next = grant(&who, &sku(), LONG).await;
        assert!(next.token > last.token, "only renews: {only_renews}");
        assert_eq!(highest_epoch(&db).await, 1 + n);
        who.release(&sku(), &next.id).await.unwrap();
    }
}
