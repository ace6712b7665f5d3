//! Nodes with a wrong name, and nodes of another quorum: the error names the node and the remedy.

use std::time::Duration;

use sqlx::Sqlite;
use tower_fence::{
    Resource,
    epochs::partition_of,
    lease::{Acquire, LeaseError, Leases, Renew},
};
use tower_fence_redlock::{QuorumLeases, QuorumLeasesBuilder};

use crate::support::{
    database::{Fresh, TestDatabase},
    lease::{LONG, grant, is_misconfigured, messages_of, renew_for, sku},
    proxy::Proxy,
    redis::{RedisServer, delete_keys, fresh_prefix, keys, shared_node_urls},
};

fn connect(db: &Fresh<Sqlite>, prefix: &str, urls: &[String]) -> Result<QuorumLeases, LeaseError> {
    let urls: Vec<_> = urls.iter().map(String::as_str).collect();
    let builder = QuorumLeasesBuilder::new(db.fence()).key_prefix(prefix);
    let builder = builder.node_timeout(Duration::from_secs(2));
    builder.connect_lazy(&urls)
}

#[tokio::test]
async fn invalid_url_is_named_by_index_without_its_text() {
    let (db, urls) = (Sqlite::fresh(1).await, shared_node_urls());
    let secrets =
        ["", "a:port", "a/first", "a:99999"].map(|rest| format!("redis://:s3cret@{rest}"));
    let others = ["", "s3cret", "http://:s3cret@a"].map(str::to_owned);
    for wrong in others.into_iter().chain(secrets) {
        let urls = [urls[0].clone(), wrong, urls[2].clone()];
        let refused = connect(&db, &fresh_prefix(), &urls).unwrap_err();
        let messages = messages_of(&refused);
        assert_matches!(refused, LeaseError::Misconfigured(_));
        assert_contains!(messages, "node 2 of 3");
        assert!(!messages.contains("s3cret"), "{messages}");
    }
}

#[tokio::test]
async fn a_quorum_has_fifteen_nodes_at_most() {
    let db = Sqlite::fresh(1).await;
    let urls = |count| -> Vec<_> { (0..count).map(|n| format!("redis://node-{n}")).collect() };
    for count in [3, 5, 15] {
        connect(&db, "a", &urls(count)).unwrap();
    }
    for count in [0, 1, 2, 4, 14, 16, 17, 65] {
        let refused = connect(&db, "a", &urls(count));
        assert_matches!(&refused, Err(LeaseError::Invalid { field, .. }) if field == "nodes");
    }
}

/// A resource in a partition in which no lease has been granted.
fn unused() -> Resource {
    Resource::new("sku-2").unwrap()
}

#[tokio::test]
async fn refused_issuer_does_not_take_a_restarted_node() {
    let (db, other) = (Sqlite::fresh(4).await, Sqlite::fresh(4).await);
    let mut third = RedisServer::start(&[]).await;
    // The other nodes reply late, so an issuer without a check could take this node before they
    // refuse.
    let (mut proxies, mut urls) = (vec![], vec![]);
    for url in &shared_node_urls()[..2] {
        let addr = url.replace("redis://", "").parse().unwrap();
        let proxy = Proxy::delaying(addr, Duration::from_millis(100)).await;
        urls.push(proxy.url(url));
        proxies.push(proxy);
    }
    urls.push(third.url());
    let prefix = fresh_prefix();
    let of_prefix = format!("{prefix}:*");
    let leases = connect(&db, &prefix, &urls).unwrap();
    let lease = grant(&leases, &sku(), LONG).await;
    // The second issuer has another name for the third node.
    let mut renamed = urls.clone();
    renamed[2] = urls[2].replace("127.0.0.1", "localhost");
    let refused = [
        connect(&other, &prefix, &urls),
        connect(&db, &prefix, &renamed),
    ];
    let refused = refused.map(Result::unwrap);
    let stay_refused = async || {
        for leases in &refused {
            for resource in [&sku(), &unused()] {
                is_misconfigured(leases.acquire(resource, Acquire::new(LONG)).await);
            }
        }
    };
    stay_refused().await;
    third.kill();
    third.start_again().await;
    stay_refused().await;
    assert_eq!(keys(&urls[2], &of_prefix).await, [""; 0]);
    renew_for(&leases, &lease, LONG).await;
    grant(&leases, &unused(), LONG).await;
    assert_ne!(keys(&urls[2], &of_prefix).await, [""; 0]);
    stay_refused().await;
}

/// An issuer with another database has written a counter on one node.
#[tokio::test]
async fn node_with_counters_of_another_source_fails_alone() {
    let (db, other) = (Sqlite::fresh(4).await, Sqlite::fresh(4).await);
    let third = RedisServer::start(&[]).await;
    let [one, two] = [0, 1].map(|n| shared_node_urls()[n].clone());
    let urls = [one, two, third.url()];
    let prefix = fresh_prefix();
    let leases = connect(&db, &prefix, &urls).unwrap();
    let lease = grant(&leases, &sku(), LONG).await;
    let counter =
        |resource: &Resource| format!("{prefix}:quorum:{{{}}}:counter", partition_of(resource));
    let ours = counter(&sku());
    let names = third.info(&format!("HGET {ours} nodes")).await;
    third.command(&["DEL", &ours]).await;
    let theirs = counter(&unused());
    let set = ["HSET", &theirs, "source", "theirs", "nodes", &names];
    third.command(&set).await;
    let more = (3..9).map(|n| Resource::new(format!("sku-{n}")).unwrap());
    for resource in more.chain([unused()]) {
        grant(&leases, &resource, LONG).await;
        renew_for(&leases, &lease, LONG).await;
    }
    let strangers = connect(&other, &prefix, &urls).unwrap();
    let refused = strangers.acquire(&unused(), Acquire::new(LONG)).await;
    let said = messages_of(&refused.unwrap_err());
    assert_contains!(said, "which is not this issuer's");
    // With other nodes, the issuers could have different majorities.
    third.command(&["HSET", &theirs, "nodes", "other"]).await;
    let refused = leases.renew(&sku(), &lease.id, Renew::new(LONG)).await;
    let said = messages_of(&refused.unwrap_err());
    assert_contains!(said, "but this issuer's nodes are");
}

/// A node with the counter of another quorum blocks its partition, until its keys are deleted.
#[tokio::test]
async fn a_node_of_another_quorum_is_named_without_secrets() {
    let (db, theirs) = (Sqlite::fresh(4).await, shared_node_urls());
    let fresh = [RedisServer::start(&[]).await, RedisServer::start(&[]).await];
    for server in &fresh {
        server.send("CONFIG SET requirepass s3cret").await;
    }
    let prefix = fresh_prefix();
    let of_prefix = format!("{prefix}:*");
    let their_leases = connect(&db, &prefix, &theirs).unwrap();
    let before = grant(&their_leases, &sku(), LONG).await;
    let [one, two] = fresh
        .each_ref()
        .map(|server| server.url().replace("//", "//:s3cret@"));
    let ours = [theirs[0].clone(), one, two];
    let our_leases = connect(&db, &prefix, &ours).unwrap();
    let address = theirs[0].replace("redis://", "");
    for resource in [&sku(), &unused()] {
        let refused = our_leases.acquire(resource, Acquire::new(LONG)).await;
        let messages = messages_of(&refused.unwrap_err());
        assert_contains!(messages, &format!("on the node `{address}/0`"));
        assert_contains!(messages, "delete the keys");
        assert!(!messages.contains("s3cret"), "{messages}");
    }
    for url in &ours[1..] {
        assert_eq!(keys(url, &of_prefix).await, [""; 0]);
    }

    delete_keys(&theirs[0], &format!("{prefix}:quorum:*")).await;
    assert!(grant(&our_leases, &sku(), LONG).await.token > before.token);
}
