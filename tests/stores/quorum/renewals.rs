//! How the counters of nodes, and nodes that return, affect a renewal in a quorum.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::Relaxed},
};

use futures_util::future::join_all;
use redis::from_redis_value;
use sqlx::Sqlite;
use tokio::time::sleep;
use tower_fence::{
    Resource,
    epochs::Epoch,
    lease::{LeaseAdmin, LeaseError, Leases, Renew},
};

use super::epochs::Site;
use crate::support::{
    database::TestDatabase,
    eventually,
    lease::{LONG, grant, grant_and_release, is_lost, is_unavailable, keeps_its_token, sku},
    nodes::{NODE_WAIT, NODES, Nodes},
    proxy::{Passage, Sender},
    redis::{RedisServer, dump, keys, restore},
};

/// Returns other resources in the partition of `sku-1`.
fn in_the_same_partition() -> impl Iterator<Item = Resource> {
    let partition = |name: &str| crc32fast::hash(name.as_bytes()).to_le_bytes()[0];
    let names = (2..).map(|n| format!("sku-{n}"));
    let same = names.filter(move |name| partition(name) == partition(sku().as_str()));
    same.map(|name| Resource::new(name).unwrap())
}

async fn dump_counters(server: &RedisServer) -> Vec<(String, Vec<u8>)> {
    let keys = keys(&server.url(), "*:counter").await;
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
    keeps_its_token(&renewing, &held).await;
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
        !keys(&nodes.servers[4].url(), "*:lease:*").await.is_empty()
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
    let next = grant_and_release(&leases).await;
    for (node, value) in site.nodes.iter().zip(&values) {
        // `id:number:ticket:history:incarnation:serial:token:mark:…`
        let mut parts: Vec<_> = value.split(':').map(str::to_owned).collect();
        assert_eq!(parts[6], lost.token.to_string());
        parts[6] = (next.token.get() + 1).to_string();
        let late = parts.join(":");
        let set = ["SET", &site.lease(), &late, "PX", "60000"];
        node.command(&set).await;
    }
    is_lost(leases.renew(&sku(), &lost.id, Renew::new(LONG)).await);
    assert!(leases.break_lease(&sku(), None).await.unwrap());
}

/// A renewal asked for a token of a later epoch, and one node has not stored that token.
#[tokio::test]
async fn renewal_counts_no_token_that_was_only_asked_for() {
    let site = Site::new().await;
    let held = grant(&site.issuer().await, &sku(), LONG).await;
    let asked = held.token.get() + 5 * Epoch::SIZE;
    for node in &site.nodes[1..] {
        let value = node.info(&format!("GET {}", site.lease())).await;
        let value = value.replace(&format!(":{}:", held.token), &format!(":{asked}:"));
        let set = ["SET", &site.lease(), &value, "KEEPTTL"];
        node.command(&set).await;
    }
    // This issuer reads the token from the nodes.
    let leases = site.issuer().await;
    let renewed = leases.renew(&sku(), &held.id, Renew::new(LONG)).await;
    assert_eq!(renewed.unwrap().token.get(), asked);
    let epoch = ["HGET", &site.counter(), "epoch"];
    for node in &site.nodes {
        let epoch: i64 = from_redis_value(node.command(&epoch).await).unwrap();
        assert_eq!(epoch, held.token.get() / Epoch::SIZE);
    }
}

/// Starts nodes, each behind a proxy. After the test sets the returned flag, each proxy applies
/// `fault` once. It applies the fault to the message that `by` sends: request number `request` on
/// its connection, or the answer to that request.
async fn with_one_fault(request: usize, by: Sender, fault: Passage) -> (Nodes, Arc<AtomicBool>) {
    let is_due = Arc::new(AtomicBool::new(false));
    let begins = Arc::clone(&is_due);
    let done = Arc::new([(); NODES].map(|()| AtomicBool::new(false)));
    let nodes = Nodes::judging(move |node| {
        let (is_due, done, fault) = (Arc::clone(&is_due), Arc::clone(&done), fault.clone());
        let mut requests = 0;
        move |sender, _: &[u8]| {
            if !is_due.load(Relaxed) {
                return Passage::Whole;
            }
            requests += usize::from(sender == Sender::Client);
            let is_it = sender == by && requests == request;
            fault.clone().when(is_it && !done[node].swap(true, Relaxed))
        }
    })
    .await;
    (nodes, begins)
}

/// The connections of the issuer that has granted the lease are closed when it sends the release.
/// Each node gets the release a second time, and does not have that issuer's token any more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn issuer_releases_a_lease_that_another_one_has_renewed() {
    let db = Sqlite::fresh(2).await;
    let (nodes, is_due) = with_one_fault(1, Sender::Client, Passage::CutAfter(0)).await;
    let [first, second] = [(); 2].map(|()| nodes.leases(&db));
    let held = grant(&first, &sku(), LONG).await;
    let renewal = Renew::new(LONG).with_new_token();
    second.renew(&sku(), &held.id, renewal).await.unwrap();
    is_due.store(true, Relaxed);
    first.release(&sku(), &held.id).await.unwrap();
    is_lost(second.renew(&sku(), &held.id, Renew::new(LONG)).await);
}

/// All nodes execute the release, but none of their answers arrives.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn release_without_answers_is_not_reported_as_a_loss() {
    let db = Sqlite::fresh(2).await;
    let (nodes, is_due) = with_one_fault(1, Sender::Server, Passage::Dropped).await;
    let leases = nodes.leases(&db);
    // After this release, the nodes have cached the scripts.
    grant_and_release(&leases).await;
    let held = grant(&leases, &sku(), LONG).await;
    is_due.store(true, Relaxed);
    is_unavailable(leases.release(&sku(), &held.id).await);
    assert!(leases.inspect(&sku()).await.unwrap().is_none());
    // A repetition finds no lease.
    is_lost(leases.release(&sku(), &held.id).await);
}

/// All nodes remove the lease, but none of their answers arrives.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lease_is_broken_although_the_answers_are_lost() {
    let db = Sqlite::fresh(2).await;
    // The first request reads the lease, and the second one removes it.
    let (nodes, is_due) = with_one_fault(2, Sender::Server, Passage::Dropped).await;
    let leases = nodes.leases(&db);
    // After this lease, the nodes have cached the scripts.
    grant(&leases, &sku(), LONG).await;
    assert!(leases.break_lease(&sku(), None).await.unwrap());
    let held = grant(&leases, &sku(), LONG).await;
    is_due.store(true, Relaxed);
    assert!(leases.break_lease(&sku(), Some(held.token)).await.unwrap());
    assert!(leases.inspect(&sku()).await.unwrap().is_none());
}
