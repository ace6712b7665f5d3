//! How the counters of nodes, and nodes that return, affect a renewal in a quorum.

use futures_util::future::join_all;
use redis::from_redis_value;
use sqlx::Sqlite;
use tokio::time::sleep;
use tower_fence::{
    Resource,
    lease::{LeaseAdmin, LeaseError, Leases, Renew},
};

use super::epochs::Site;
use crate::support::{
    database::TestDatabase,
    eventually,
    lease::{LONG, grant, is_lost, sku},
    nodes::{NODE_WAIT, Nodes},
    redis::{RedisServer, dump, restore},
};

/// Returns other resources in the partition of `sku-1`.
fn in_the_same_partition() -> impl Iterator<Item = Resource> {
    let partition = |name: &str| crc32fast::hash(name.as_bytes()).to_le_bytes()[0];
    let names = (2..).map(|n| format!("sku-{n}"));
    let same = names.filter(move |name| partition(name) == partition(sku().as_str()));
    same.map(|name| Resource::new(name).unwrap())
}

async fn dump_counters(server: &RedisServer) -> Vec<(String, Vec<u8>)> {
    let keys = server.command(&["KEYS", "*:counter"]).await;
    let keys: Vec<String> = from_redis_value(keys).unwrap();
    let keys: Vec<_> = keys.iter().map(String::as_str).collect();
    dump(server, &keys).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lease_is_renewed_although_most_counters_missed_its_grant() {
    let (nodes, db) = (Nodes::start(&[]).await, Sqlite::fresh(2).await);
    let leases = nodes.leases(&db);
    let held = grant(&leases, &sku(), LONG).await;
    nodes.reach_only(&[0, 1, 2]);
    let other = in_the_same_partition().next().unwrap();
    assert!(grant(&leases, &other, LONG).await.token > held.token);
    // Two of these nodes have not received that grant.
    nodes.reach_only(&[2, 3, 4]);
    eventually("the nodes are reachable", async || {
        match leases.renew(&sku(), &held.id, Renew::new(LONG)).await {
            Ok(renewed) => renewed.token == held.token,
            Err(LeaseError::Unavailable(_)) => false,
            Err(error) => panic!("{error}"),
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn renewing_issuer_detects_restored_counters() {
    let (nodes, db) = (Nodes::start(&[]).await, Sqlite::fresh(2).await);
    let mut others = in_the_same_partition();
    let [second, third] = [(); 2].map(|()| others.next().unwrap());
    grant(&nodes.leases(&db), &sku(), LONG).await;
    let before = join_all(nodes.servers.iter().map(dump_counters)).await;
    let held = grant(&nodes.leases(&db), &second, LONG).await;
    let renewing = nodes.leases(&db);
    let renewed = renewing.renew(&second, &held.id, Renew::new(LONG)).await;
    assert_eq!(renewed.unwrap().token, held.token);
    for (server, counters) in nodes.servers.iter().zip(&before) {
        assert_eq!(counters.len(), 1);
        restore(server, counters).await;
    }
    assert!(grant(&renewing, &third, LONG).await.token > held.token);
}

/// The node was already unreachable for a call and for a background check.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn node_rejoins_after_a_long_absence() {
    let (nodes, db) = (Nodes::start(&[]).await, Sqlite::fresh(2).await);
    let leases = nodes.leases(&db);
    nodes.reach_only(&[0, 1, 2, 3]);
    let mut others = in_the_same_partition();
    for _ in 0..3 {
        grant(&leases, &others.next().unwrap(), LONG).await;
        sleep(2 * NODE_WAIT).await;
    }
    nodes.reach_all();
    eventually("the node stores leases", async || {
        grant(&leases, &others.next().unwrap(), LONG).await;
        let keys = nodes.servers[4].command(&["KEYS", "*:lease:*"]).await;
        !from_redis_value::<Vec<String>>(keys).unwrap().is_empty()
    })
    .await;
}

/// A late script of the lease's own request seals a token that was never granted.
#[tokio::test]
async fn issuer_with_a_cached_grant_renews_no_late_one() {
    let site = Site::new().await;
    let leases = site.issuer().await;
    let lost = grant(&leases, &sku(), LONG).await;
    let mut values = vec![];
    for node in &site.nodes {
        let value = node.command(&["GETDEL", &site.lease()]).await;
        values.push(from_redis_value::<String>(value).unwrap());
    }
    let next = grant(&leases, &sku(), LONG).await;
    leases.release(&sku(), &next.id).await.unwrap();
    for (node, value) in site.nodes.iter().zip(&values) {
        // `id:number:ticket:history:incarnation:serial:token:mark:…`
        let mut parts: Vec<_> = value.split(':').map(str::to_owned).collect();
        assert_eq!(parts[6], lost.token.to_string());
        parts[6] = (next.token.get() + 1).to_string();
        let late = parts.join(":");
        node.command(&["SET", &site.lease(), &late, "PX", "60000"])
            .await;
    }
    is_lost(leases.renew(&sku(), &lost.id, Renew::new(LONG)).await);
    assert!(leases.break_lease(&sku(), None).await.unwrap());
}
