//! What leases cost etcd, in calls to its gateway.

use std::sync::{Arc, Mutex};

use sqlx::Sqlite;
use tower_fence::lease::{Acquire, EtcdLeases, Leases, Renew};

use crate::support::{
    database::TestDatabase,
    etcd::EtcdCluster,
    eventually,
    lease::{LONG, grant, is_held, sku},
    proxy::{Passage, Proxy, Sender},
};

/// The paths of the requests in a message.
fn paths(message: &[u8]) -> Vec<String> {
    let text = String::from_utf8_lossy(message).into_owned();
    let requests = text.split("POST /v3/").skip(1);
    let paths = requests.filter_map(|rest| rest.split(' ').next());
    paths.map(ToOwned::to_owned).collect()
}

#[tokio::test]
async fn an_acquire_and_a_release_take_seven_calls() {
    let (cluster, db) = (EtcdCluster::start(1).await, Sqlite::fresh(2).await);
    let calls: Arc<Mutex<Vec<String>>> = Arc::default();
    let proxy = Proxy::judging(cluster.addr(), {
        let calls = Arc::clone(&calls);
        move || {
            let calls = Arc::clone(&calls);
            move |sender, message: &[u8]| {
                if sender == Sender::Client {
                    calls.lock().unwrap().extend(paths(message));
                }
                Passage::Whole
            }
        }
    })
    .await;
    let url = format!("http://{}", proxy.addr);
    let leases = EtcdLeases::connect(&[url], db.fence()).await.unwrap();
    let made = || std::mem::take(&mut *calls.lock().unwrap());
    // The first one begins an epoch.
    let lease = grant(&leases, &sku(), LONG).await;
    leases.release(&sku(), &lease.id).await.unwrap();
    made();

    let lease = grant(&leases, &sku(), LONG).await;
    assert_eq!(
        made(),
        ["kv/txn", "lease/grant", "kv/txn", "maintenance/status"]
    );
    let renewed = leases.renew(&sku(), &lease.id, Renew::new(LONG)).await;
    renewed.unwrap();
    assert_eq!(made(), ["kv/txn", "maintenance/status", "lease/keepalive"]);
    is_held(leases.acquire(&sku(), Acquire::new(LONG)).await);
    assert_eq!(made(), ["kv/txn", "lease/timetolive"]);
    leases.release(&sku(), &lease.id).await.unwrap();
    assert_eq!(made(), ["kv/txn", "kv/txn", "lease/revoke"]);
}

/// Each grant, each repeated request, and each new token or time has an etcd lease of its own, which takes the place
/// of the one before.
#[tokio::test]
async fn a_lease_leaves_no_etcd_lease_behind() {
    let (cluster, db) = (EtcdCluster::start(1).await, Sqlite::fresh(2).await);
    let leases = EtcdLeases::connect(&cluster.urls(), db.fence()).await;
    let leases = leases.unwrap();
    let held = grant(&leases, &sku(), LONG).await;
    let has = async |count| {
        eventually("the others have ended", async || {
            cluster.leases().await == count
        })
        .await;
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
