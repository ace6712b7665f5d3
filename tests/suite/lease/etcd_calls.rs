//! What leases cost etcd, in calls to its gateway.

use std::sync::{Arc, Mutex};

use sqlx::Sqlite;
use tower_fence::lease::{Acquire, EtcdLeases, Leases, Renew};

use crate::support::{
    database::TestDatabase,
    etcd::EtcdCluster,
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
