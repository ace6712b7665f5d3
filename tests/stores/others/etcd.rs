//! Tokens of etcd with its own clients: `etcdctl lock`, and the lock API of its gateway.

use serde_json::{Value, json};
use tower_fence::lease::MemoryLeases;

use super::{Inventory, refuses_the_paused_holder, write_to};
use crate::support::{
    etcd::base64,
    eventually,
    lease::{LONG, grant, sku},
    lock_servers::Etcd,
};

/// `sku-1` in base64, as the gateway expects it.
const SKU: &str = "c2t1LTE=";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_paused_holder_of_a_lock_in_etcd_is_refused() {
    let etcd = Etcd::start().await;
    refuses_the_paused_holder(
        |sku, url| etcd.holder(sku, url, 1.0),
        async |sku| etcd.end_session(sku).await,
        |sku, url| etcd.holder(sku, url, 0.0),
    )
    .await;
}

/// Two revisions increase from holder to holder: the revision at which the lock was acquired, which
/// `etcdctl` and `Mutex.Header()` report, and the create revision of its key. A holder that has
/// waited may have a key that is older than the previous grant, so the two kinds of revision must
/// not be mixed.
#[tokio::test]
async fn etcd_revisions_increase_if_all_holders_send_one_kind() {
    let etcd = Etcd::start().await;
    let client = crate::support::http::client();
    let call = async |path: &str, body: Value| -> Value {
        let url = format!("{}/v3/{path}", etcd.url());
        let answer = client.post(url).body(body.to_string()).send().await;
        answer.unwrap().json().await.unwrap()
    };
    let number = |value: &Value| value.as_str().unwrap().parse::<i64>().unwrap();
    let locked = async || {
        let lease = call("lease/grant", json!({ "TTL": 60 })).await;
        let request = json!({ "name": SKU, "lease": lease["ID"] });
        call("lock/lock", request).await
    };
    let lock = async || {
        let locked = locked().await;
        let key = call("kv/range", json!({ "key": locked["key"] })).await;
        let made = number(&key["kvs"][0]["create_revision"]);
        let had = number(&locked["header"]["revision"]);
        call("lock/unlock", json!({ "key": locked["key"] })).await;
        (had, made)
    };
    // The first of these requests waits for this lock, and each later one waits for the request
    // before it.
    let held = locked().await;
    let unlocks = async {
        eventually("all requests wait", async || {
            let range = json!({ "key": base64("sku-1/"), "range_end": base64("sku-10") });
            call("kv/range", range).await["count"] == "4"
        })
        .await;
        call("lock/unlock", json!({ "key": held["key"] })).await
    };
    let (one, two, three, _) = tokio::join!(lock(), lock(), lock(), unlocks);
    let mut holders = [one, two, three];
    holders.sort_unstable();
    let increase = |one: &(i64, i64), next: &(i64, i64)| one.0 < next.0 && one.1 < next.1;
    assert!(holders.is_sorted_by(increase));
    let [(first_had, _), (_, second_made), _] = holders;
    // The two kinds would mix.
    assert!(second_made < first_had, "{holders:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restored_etcd_is_refused_until_its_tokens_begin_above() {
    let mut etcd = Etcd::start().await;
    let inventory = Inventory::start().await;
    let url = inventory.url();
    let before = etcd.holder("sku-1", &url, 0.0).finish().await;
    assert_eq!(before.1, 200);
    etcd.snapshot();
    let mut highest = before.0;
    for _ in 0..3 {
        let (token, status) = etcd.holder("sku-1", &url, 0.0).finish().await;
        assert!(token > highest && status == 200);
        highest = token;
    }
    etcd.restore().await;
    let (token, status) = etcd.holder("sku-1", &url, 0.0).finish().await;
    // The restored etcd grants a token again.
    assert!(token > before.0 && token <= highest);
    assert_eq!(status, 412);
    // A fence that has admitted no token cannot detect the restore: it admits a token from after
    // the restore, and then a higher one from before it.
    assert_eq!(inventory.write("sku-2", token).await.status, 200);
    assert_eq!(inventory.write("sku-2", highest).await.status, 200);
    let stock = inventory.stock("sku-1").await;
    // After the restore, the operator must make etcd's tokens begin above the highest token that
    // etcd granted before.
    let again = etcd.holder_above(highest, "sku-1", &url, 0.0);
    let again = again.finish().await;
    assert!(again.0 > highest && again.1 == 200);
    assert_eq!(inventory.stock("sku-1").await, stock - 1);
    assert_eq!(inventory.write("sku-3", again.0).await.status, 200);
    for sku in ["sku-1", "sku-3"] {
        let answer = inventory.write(sku, highest).await;
        answer.is_problem(412, "stale-token");
    }
}

/// A service first accepts tokens of etcd, and then those of this crate's issuer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn change_from_etcd_refuses_older_holders_without_a_step() {
    let etcd = Etcd::start().await;
    let inventory = Inventory::start().await;
    let (_, status) = etcd.holder("sku-1", &inventory.url(), 0.0).finish().await;
    assert_eq!(status, 200);
    let leases = MemoryLeases::new(inventory.fence.clone());
    let leases = leases.announced_to(inventory.fence.clone());
    let mut older = etcd.holder("sku-1", &inventory.url(), 30.0);
    let older = older.token().await;

    let changed = inventory.accepting_only_its_own_tokens().await;
    let lease = grant(&leases, &sku(), LONG).await;
    let written = write_to(&changed, "sku-1", lease.token.get()).await;
    assert_eq!(written.status, 200);
    let refused = write_to(&changed, "sku-1", older).await;
    refused.is_problem(403, "unknown-epoch");
    let refused = inventory.write("sku-1", older).await;
    refused.is_problem(412, "stale-token");
}
