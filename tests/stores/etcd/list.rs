//! Leases in etcd with keys of other programs between them.

use std::{sync::atomic::Ordering::Relaxed, time::Duration};

use serde_json::json;
use sqlx::Sqlite;
use tower_fence::{
    Resource,
    lease::{Acquire, LeaseAdmin, Leases},
};

use super::faults::meddling;
use crate::support::{
    database::TestDatabase,
    etcd::{self, EtcdCluster, base64},
    lease::{LONG, grant, is_held, sku},
    proxy::Passage,
};

#[tokio::test]
async fn unrelated_keys_between_leases_do_not_end_a_list() {
    let (cluster, _db, leases) = etcd::with_leases().await;
    let names = ["a", "m", "é", "z"];
    for name in names {
        grant(&leases, &Resource::new(name).unwrap(), LONG).await;
    }
    // These keys sort before, between and after the leases. They have no name, a name that no
    // resource can have, or a name without a lease.
    let foreign: [&[u8]; 6] = [b"", b"\x01", b"b\0", b"m\xff", b"n", b"z\xff\xfe"];
    for name in foreign {
        let key = [b"tower-fence:lease:", name].concat();
        cluster.put(key, "foreign").await;
    }
    for limit in [1, 2, 3, 100] {
        let (mut listed, mut cursor) = (vec![], None);
        for _ in 0..=names.len() + foreign.len() {
            let page = leases.list(limit, cursor.as_deref()).await.unwrap();
            assert!(page.leases.len() <= limit);
            let names = page.leases.into_iter();
            listed.extend(names.map(|(resource, _)| resource.to_string()));
            cursor = page.cursor;
            assert!(limit < 100 || cursor.is_none(), "all are on one page");
            if cursor.is_none() {
                break;
            }
        }
        assert_eq!(cursor, None, "the list does not end");
        listed.sort_unstable();
        assert_eq!(listed, ["a", "m", "z", "é"], "{limit} at a time");
    }
}

/// etcd deletes the keys of an expired lease some time later. In this test, a proxy reports that
/// the lease has expired.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn expired_lease_with_a_key_is_not_held() {
    let (cluster, db) = (EtcdCluster::start(1).await, Sqlite::fresh(2).await);
    let ended = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 12\r\n\r\n{\"TTL\":\"-1\"}";
    let ended = Passage::Instead(ended.as_bytes().to_vec());
    let (proxy, reads) = meddling(&cluster, "POST /v3/lease/timetolive", ended).await;
    let leases = cluster.connect_through(&proxy, db.fence()).await;
    grant(&leases, &sku(), LONG).await;
    assert!(leases.inspect(&sku()).await.unwrap().is_none());
    assert_eq!(reads.load(Relaxed), 1);
    assert!(leases.list(10, None).await.unwrap().leases.is_empty());
    assert_eq!(reads.load(Relaxed), 3);
}

/// The issuer cannot know when another program will remove its key. A client that retries without a
/// pause would keep etcd busy.
#[tokio::test]
async fn unrelated_key_returns_a_retry_after_of_one_second() {
    let (cluster, _db, leases) = etcd::with_leases().await;
    cluster.put("tower-fence:lease:sku-1", "foreign").await;
    let retry_after = is_held(leases.acquire(&sku(), Acquire::new(LONG)).await);
    assert_eq!(retry_after, Duration::from_secs(1));
}

/// The key of another program blocks a resource. Further keys of that program have the same etcd
/// lease.
#[tokio::test]
async fn break_of_a_foreign_key_deletes_no_other_key() {
    let (cluster, _db, leases) = etcd::with_leases().await;
    let body = json!({ "TTL": "60" });
    let made = cluster.call("/v3/lease/grant", &body).await;
    for key in ["tower-fence:lease:sku-1", "other:leader"] {
        let put = json!({ "key": base64(key), "value": base64("x"), "lease": made["ID"] });
        cluster.call("/v3/kv/put", &put).await;
    }
    assert!(leases.break_lease(&sku(), None).await.unwrap());
    grant(&leases, &sku(), LONG).await;
    assert_eq!(cluster.keys("other:").await.len(), 1);
}
