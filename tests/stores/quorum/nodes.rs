//! Which servers can be the nodes of a quorum, and the effect of a node that fails or answers late.

use std::{net::SocketAddr, time::Duration};

use futures_util::future::join_all;
use sqlx::Sqlite;
use tokio::time::Instant;
use tower_fence::{
    Resource,
    epochs::partition_of,
    lease::{Acquire, LeaseAdmin, LeaseError, Leases, Renew},
};
use tower_fence_redlock::{QuorumLeases, QuorumLeasesBuilder};

use crate::support::{
    cluster::RedisCluster,
    database::{Fresh, TestDatabase},
    eventually,
    lease::{
        LONG, SHORT, grant, grant_and_release, is_unavailable, keeps_its_token, listed,
        messages_of, renew_for, sku,
    },
    proxy::{Link, Proxy},
    redis::{RedisServer, delete_keys, fresh_prefix, open, shared_cluster_url, shared_node_urls},
};

/// Returns settings with which no answer is late, even on a busy machine.
fn builder(db: &Fresh<Sqlite>) -> QuorumLeasesBuilder {
    let builder = QuorumLeasesBuilder::new(db.fence()).key_prefix(fresh_prefix());
    builder.node_timeout(Duration::from_secs(2))
}

async fn connect(
    builder: QuorumLeasesBuilder,
    urls: &[String],
) -> Result<QuorumLeases, LeaseError> {
    let urls: Vec<_> = urls.iter().map(String::as_str).collect();
    builder.connect(&urls).await
}

#[tokio::test]
async fn a_quorum_has_three_different_nodes_or_five() {
    let (db, urls) = (Sqlite::fresh(2).await, shared_node_urls());
    let [a, b, c] = [0, 1, 2].map(|n| urls[n].clone());
    let repeated = [a.clone(), b.clone(), b.clone()];
    let refused = connect(builder(&db), &repeated).await;
    assert_matches!(&refused, Err(LeaseError::Invalid { field, .. }) if field == "nodes");
    for prefix in ["", "{a}", "a ", "a:b", "a*", "a\u{200b}"] {
        let refused = connect(builder(&db).key_prefix(prefix), &urls).await;
        assert_matches!(&refused, Err(LeaseError::Invalid { field, .. }) if field == "key_prefix");
    }
    // These URLs lead to the same server under another name.
    let other_name = b.replace("127.0.0.1", "localhost");
    for twin in [other_name, format!("{b}/3")] {
        let refused = connect(builder(&db), &[a.clone(), b.clone(), twin]).await;
        let text = messages_of(&refused.unwrap_err());
        assert_contains!(text, "another node is the same server");
    }
    let absent = [1, 2].map(|port| format!("redis://127.0.0.1:{port}"));
    let five = [&[a, b, c], &absent[..]].concat();
    let leases = connect(builder(&db), &five).await.unwrap();
    grant(&leases, &sku(), LONG).await;
}

#[tokio::test]
async fn replaceable_server_is_refused_as_a_node() {
    let (db, urls) = (Sqlite::fresh(2).await, shared_node_urls());
    let with = |third: String| [urls[0].clone(), urls[1].clone(), third];
    let in_cluster = async |url: String, says: &str| {
        let refused = connect(builder(&db), &with(url)).await;
        assert_contains!(messages_of(&refused.unwrap_err()), says);
    };
    in_cluster(shared_cluster_url(), "part of a cluster").await;
    // A master of a cluster that has the slot of a key reports its replica instead.
    for url in RedisCluster::start().await.urls() {
        in_cluster(url.clone(), "cannot be a node of a quorum").await;
        in_cluster(format!("{url}/3"), "part of a cluster").await;
    }

    let (master, replica) = (RedisServer::start(&[]).await, RedisServer::start(&[]).await);
    // The master had no replica when it was checked.
    let leases = connect(builder(&db), &with(master.url())).await.unwrap();
    let lease = grant(&leases, &sku(), LONG).await;
    replica.follow(master.addr()).await;
    for third in [master.url(), replica.url()] {
        let refused = connect(builder(&db), &with(third)).await;
        let said = messages_of(&refused.unwrap_err());
        assert_contains!(said, "must be standalone servers");
    }
    // The other nodes are a majority. This server is no longer counted.
    renew_for(&leases, &lease, LONG).await;
}

#[tokio::test]
async fn other_nodes_are_refused() {
    let (db, urls) = (Sqlite::fresh(4).await, shared_node_urls());
    let fourth = RedisServer::start(&[]).await;
    let prefix = fresh_prefix();
    let builder_of = |db: &Fresh<Sqlite>| builder(db).key_prefix(&prefix);
    let leases = connect(builder_of(&db), &urls).await.unwrap();
    grant(&leases, &sku(), LONG).await;
    // In another order, these URLs name the same quorum.
    let reversed: Vec<_> = urls.iter().rev().cloned().collect();
    let same = connect(builder_of(&db), &reversed).await.unwrap();
    assert!(same.inspect(&sku()).await.unwrap().is_some());

    // The partition that the check reads first has no counter.
    let changed = [urls[0].clone(), urls[1].clone(), fourth.url()];
    let refused = connect(builder_of(&db), &changed).await;
    let said = messages_of(&refused.unwrap_err());
    assert_contains!(said, "stop all issuers, delete the keys");
    for url in &urls {
        assert_contains!(said, &url.replace("redis://", ""));
    }
}

/// In the partition that a check reads first, an issuer with other nodes has written the counters.
#[tokio::test]
async fn node_with_counters_of_two_quorums_serves_both() {
    let (db, urls) = (Sqlite::fresh(4).await, shared_node_urls());
    let prefix = fresh_prefix();
    let builder = || builder(&db).key_prefix(&prefix);
    let leases = connect(builder(), &urls).await.unwrap();
    grant_and_release(&leases).await;
    let mut names = (2..).map(|n| Resource::new(format!("sku-{n}")).unwrap());
    let theirs = names.find(|name| partition_of(name) == 0).unwrap();
    let key = format!("{prefix}:quorum:{{{}}}:counter", partition_of(&theirs));
    for url in &urls {
        let mut connection = open(url).await.unwrap();
        let mut set = redis::cmd("HSET");
        set.arg(&key).arg("nodes").arg("other");
        set.exec_async(&mut connection).await.unwrap();
    }
    let leases = connect(builder(), &urls).await.unwrap();
    grant_and_release(&leases).await;
    grant(&leases, &Resource::new("sku-3").unwrap(), LONG).await;
    let refused = leases.acquire(&theirs, Acquire::new(LONG)).await;
    let said = messages_of(&refused.unwrap_err());
    assert_contains!(said, "delete only the counters");
    for url in &urls {
        delete_keys(url, &key.replace(['{', '}'], "?")).await;
    }
    grant(&leases, &theirs, LONG).await;
}

/// Runs the documented steps for a change of nodes.
#[tokio::test]
async fn nodes_can_be_changed_while_all_is_stopped() {
    let db = Sqlite::fresh(4).await;
    let servers = join_all((0..4).map(|_| RedisServer::start(&[]))).await;
    let urls: Vec<_> = servers.iter().map(RedisServer::url).collect();
    let prefix = fresh_prefix();
    let connect = async |urls| {
        let leases = connect(builder(&db).key_prefix(&prefix), urls).await;
        leases.unwrap()
    };
    let before = grant(&connect(&urls[..3]).await, &sku(), SHORT).await;
    for server in &servers {
        delete_keys(&server.url(), &format!("{prefix}:quorum:*")).await;
    }
    let after = grant(&connect(&urls[1..]).await, &sku(), LONG).await;
    assert!(after.token > before.token);
}

#[tokio::test]
async fn absent_minority_is_tolerated_and_absent_majority_is_not() {
    let db = Sqlite::fresh(4).await;
    let (proxies, urls) = behind_proxies(Duration::ZERO).await;
    let settings = || builder(&db).node_timeout(Duration::from_secs(1));
    let leases = connect(settings(), &urls).await.unwrap();
    let lease = grant(&leases, &sku(), LONG).await;
    for away in [Link::Cut, Link::Silent] {
        proxies[0].set(away);
        // A new issuer can connect as well.
        connect(settings(), &urls).await.unwrap();
        keeps_its_token(&leases, &lease).await;
        let other = Resource::new("sku-2").unwrap();
        let other_lease = grant(&leases, &other, LONG).await;
        assert_eq!(listed(&leases, 1).await, ["sku-1", "sku-2"]);
        leases.release(&other, &other_lease.id).await.unwrap();

        // Two of three nodes are now unreachable.
        proxies[1].set(away);
        let asked_at = Instant::now();
        is_unavailable(leases.renew(&sku(), &lease.id, Renew::new(LONG)).await);
        is_unavailable(leases.acquire(&sku(), Acquire::new(LONG)).await);
        is_unavailable(leases.inspect(&sku()).await);
        is_unavailable(leases.break_lease(&sku(), None).await);
        is_unavailable(connect(settings(), &urls).await);
        leases.list(10, None).await.unwrap_err();
        assert!(asked_at.elapsed() < Duration::from_secs(40));
        for proxy in &proxies[..2] {
            proxy.set(Link::Whole);
        }
        let renew = async || leases.renew(&sku(), &lease.id, Renew::new(LONG)).await;
        eventually!("the nodes answer again", renew().await.is_ok());
    }
    leases.release(&sku(), &lease.id).await.unwrap();
    grant(&leases, &sku(), LONG).await;
}

/// The connection and the first call together take longer than the timeout of a node.
#[tokio::test]
async fn connection_is_opened_although_calls_time_out() {
    let (db, urls) = (Sqlite::fresh(2).await, shared_node_urls());
    // The nodes know the scripts.
    grant_and_release(&connect(builder(&db), &urls).await.unwrap()).await;
    let (_proxies, through) = behind_proxies(Duration::from_millis(200)).await;
    let names: Vec<_> = through.iter().map(String::as_str).collect();
    let builder = builder(&db).node_timeout(Duration::from_millis(700));
    let leases = builder.connect_lazy(&names).unwrap();
    is_granted(&leases, LONG).await;
}

/// A silent node costs its timeout once, and not for each request.
#[tokio::test]
async fn silent_node_is_skipped_until_it_answers() {
    let db = Sqlite::fresh(4).await;
    let mut urls = shared_node_urls();
    let proxy = Proxy::to(addr_of(&urls[2])).await;
    urls[2] = format!("redis://{}", proxy.addr);
    let wait = Duration::from_secs(1);
    let prefix = fresh_prefix();
    let builder = builder(&db).key_prefix(&prefix).node_timeout(wait);
    let leases = connect(builder, &urls).await.unwrap();
    let lease = grant(&leases, &sku(), LONG).await;
    proxy.set(Link::Silent);
    let asked_at = Instant::now();
    for _ in 0..50 {
        renew_for(&leases, &lease, LONG).await;
    }
    // Fifty times the timeout would be much longer.
    assert!(asked_at.elapsed() < 20 * wait, "{:?}", asked_at.elapsed());
    proxy.set(Link::Whole);
    // After a while, the node stores the leases that are granted.
    eventually("the node stores leases again", async || {
        leases.break_lease(&sku(), None).await.unwrap();
        grant(&leases, &sku(), LONG).await;
        let mut connection = open(&urls[2]).await.unwrap();
        let mut exists = redis::cmd("EXISTS");
        exists.arg(format!("{prefix}:quorum:{{110}}:lease:sku-1"));
        exists.query_async::<bool>(&mut connection).await.unwrap()
    })
    .await;
}

/// Two host names resolve to one server when the issuer starts, and later to two servers.
#[tokio::test]
async fn twins_are_nodes_after_an_address_is_corrected() {
    let (db, urls) = (Sqlite::fresh(2).await, shared_node_urls());
    let (proxy, through) = second_behind_proxy(&urls, 0).await;
    let names: Vec<_> = through.iter().map(String::as_str).collect();
    let leases = builder(&db).connect_lazy(&names).unwrap();
    is_refused_as_twin(&leases).await;
    proxy.switch_new_to(addr_of(&urls[1]));
    is_granted(&leases, LONG).await;
}

/// After the check, a host name resolves to another server.
#[tokio::test]
async fn node_replaced_by_another_node_counts_once() {
    let (db, urls) = (Sqlite::fresh(2).await, shared_node_urls());
    let (proxy, through) = second_behind_proxy(&urls, 1).await;
    let leases = connect(builder(&db), &through).await.unwrap();
    grant_and_release(&leases).await;
    proxy.switch_to(addr_of(&urls[0]));
    is_refused_as_twin(&leases).await;
    proxy.switch_new_to(addr_of(&urls[1]));
    is_granted(&leases, LONG).await;
}

/// A host name resolves to the server of another node, and then to a server that is down.
#[tokio::test]
async fn former_twin_that_is_down_disables_no_other_node() {
    let (db, urls) = (Sqlite::fresh(2).await, shared_node_urls());
    let (proxy, through) = second_behind_proxy(&urls, 1).await;
    let leases = connect(builder(&db), &through).await.unwrap();
    grant_and_release(&leases).await;
    // After a failure, the second node is checked before it is used.
    proxy.set(Link::Cut);
    grant_and_release(&leases).await;
    proxy.switch_to(addr_of(&urls[0]));
    is_refused_as_twin(&leases).await;
    proxy.set(Link::Cut);
    is_granted(&leases, SHORT).await;
    proxy.set(Link::Whole);
    is_refused_as_twin(&leases).await;
}

/// Waits until a lease is granted, because the nodes are usable. Each attempt has its own lease id.
async fn is_granted(leases: &QuorumLeases, ttl: Duration) {
    eventually!(
        "a lease is granted",
        leases.acquire(&sku(), Acquire::new(ttl)).await.is_ok()
    );
}

/// Starts a proxy for each node, which delays its messages, and returns the URLs.
async fn behind_proxies(delay: Duration) -> (Vec<Proxy>, Vec<String>) {
    let urls = shared_node_urls();
    let proxies = urls.iter().map(|url| Proxy::delaying(addr_of(url), delay));
    let proxies = join_all(proxies).await;
    let urls = proxies
        .iter()
        .zip(&urls)
        .map(|(proxy, url)| proxy.url(url))
        .collect();
    (proxies, urls)
}

fn addr_of(url: &str) -> SocketAddr {
    url.replace("redis://", "").parse().unwrap()
}

/// Returns the URLs of three nodes, of which the second leads to the server with this index.
async fn second_behind_proxy(urls: &[String], server: usize) -> (Proxy, [String; 3]) {
    let proxy = Proxy::to(addr_of(&urls[server])).await;
    let second = format!("redis://{}", proxy.addr);
    (proxy, [urls[0].clone(), second, urls[2].clone()])
}

async fn is_refused_as_twin(leases: &QuorumLeases) {
    eventually("two nodes are the same server", async || {
        match leases.acquire(&sku(), Acquire::new(SHORT)).await {
            Ok(_) => false,
            Err(error) => messages_of(&error).contains("another node is the same server"),
        }
    })
    .await;
}
