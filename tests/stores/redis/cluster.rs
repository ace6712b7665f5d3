//! Redis Cluster: six real nodes, whose masters are killed, frozen and replaced.

use std::time::Duration;

use sqlx::Sqlite;
use tokio::{
    task::JoinHandle,
    time::{Instant, timeout},
};
use tower_fence::{
    Resource,
    lease::{Acquire, Lease, LeaseAdmin, LeaseError, Leases, RedisLeases},
};

use crate::grant_load::{Issuer, Load, are_in_order_where_ours};
use crate::support::{
    PATIENCE,
    cluster::RedisCluster,
    database::{Fresh, TestDatabase},
    eventually,
    lease::{
        LONG, grant, grant_and_release, granted, granted_within, is_misconfigured, join_on, listed,
        make_each_call, messages_of, next_grant, renew_for, sku,
    },
    proxy::{Link, Proxy},
    redis::{RedisServer, fresh_prefix, keys, shared_cluster_url},
};

/// The partition of `sku-1`.
const TAG: &str = "{110}";

fn connect(cluster: &RedisCluster, db: &Fresh<Sqlite>) -> RedisLeases {
    let urls = cluster.urls();
    let urls: Vec<&str> = urls.iter().map(String::as_str).collect();
    let builder = RedisLeases::builder(db.fence());
    builder.with_cluster(&urls, |client| client).unwrap()
}

async fn wait(leases: &RedisLeases, sku: &Resource) -> JoinHandle<Result<Lease, LeaseError>> {
    join_on(leases, sku, Acquire::new(LONG).wait(LONG)).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leases_are_spread_over_and_listed_from_all_masters() {
    let (cluster, db) = (RedisCluster::start().await, Sqlite::fresh(2).await);
    let leases = connect(&cluster, &db);
    let names: Vec<String> = (0..100).map(|n| format!("{{a}}-{n:02}")).collect();
    for name in &names {
        let resource = Resource::new(name).unwrap();
        let lease = grant(&leases, &resource, LONG).await;
        leases.release(&resource, &lease.id).await.unwrap();
        grant(&leases, &resource, LONG).await;
    }
    let mut with_leases = 0;
    for node in &cluster.nodes {
        let keys = keys(&node.url(), "*:lease:*").await;
        with_leases += usize::from(!keys.is_empty());
    }
    assert_eq!(with_leases, 6, "three masters, and a replica of each");

    let mut listed = listed(&leases, 7).await;
    listed.dedup();
    assert_eq!(listed, names);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_call_survives_closed_connections() {
    let (cluster, db) = (RedisCluster::start().await, Sqlite::fresh(2).await);
    let close = async || {
        for node in &cluster.nodes {
            node.send("CLIENT KILL TYPE normal").await;
        }
    };
    make_each_call(&connect(&cluster, &db), close).await;
}

/// One master owns several ranges of slots after slots were moved between masters.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_master_of_several_ranges_of_slots_is_listed_once() {
    let (cluster, db) = (RedisCluster::start().await, Sqlite::fresh(2).await);
    let (from, _) = cluster.shard_of(TAG).await;
    let (to, _) = cluster.shard_of("{212}").await;
    assert_ne!(from, to, "the test needs two shards");
    let (from, to) = (&cluster.nodes[from], &cluster.nodes[to]);
    let slot = to.info(&format!("CLUSTER KEYSLOT {TAG}")).await;
    let from_id = from.info("CLUSTER MYID").await;
    let to_id = to.info("CLUSTER MYID").await;
    to.send(&format!("CLUSTER SETSLOT {slot} IMPORTING {from_id}"))
        .await;
    for node in [to, from] {
        node.send(&format!("CLUSTER SETSLOT {slot} NODE {to_id}"))
            .await;
    }
    eventually("all nodes agree on the slot", async || {
        for node in &cluster.nodes {
            let nodes = node.info("CLUSTER NODES").await;
            let mut of_master = nodes.lines().filter(|line| line.starts_with(&to_id));
            if !of_master.any(|line| line.split(' ').any(|range| range == slot)) {
                return false;
            }
        }
        true
    })
    .await;

    let leases = connect(&cluster, &db);
    let names = ["sku-1", "sku-2"];
    for name in names {
        grant(&leases, &Resource::new(name).unwrap(), LONG).await;
    }
    assert_eq!(listed(&leases, 7).await, names);
}

/// A master is killed under load, and its replica, which lags, takes over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replica_of_a_killed_master_grants_higher_tokens() {
    let db = Sqlite::fresh(2).await;
    for ours in [true, false] {
        let mut cluster = RedisCluster::start().await;
        let (issuer, key) = if ours {
            (Issuer::Ours(connect(&cluster, &db)), TAG)
        } else {
            let client = redis::cluster::ClusterClient::builder(cluster.urls())
                .retries(1)
                .response_timeout(Duration::from_millis(500));
            let connection = client.build().unwrap().get_async_connection().await;
            (Issuer::NaiveInCluster(connection.unwrap()), "{1}")
        };
        let load = Load::start(&issuer);
        load.more(60).await;
        let (master, replica) = cluster.shard_of(key).await;
        // From here on, the replica cannot authenticate to the master, so it falls behind.
        let replica = &cluster.nodes[replica];
        replica.send("CONFIG SET masteruser nobody").await;
        replica.send("CONFIG SET masterauth x").await;
        cluster.nodes[master].send("CLIENT KILL TYPE replica").await;
        load.more(60).await;
        cluster.nodes[master].kill();
        load.more(60).await;
        are_in_order_where_ours(ours, &load.stop().await);
    }
}

/// A frozen master keeps its connections open, and does not answer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frozen_master_is_replaced_by_its_replica() {
    let (cluster, db) = (RedisCluster::start().await, Sqlite::fresh(2).await);
    let leases = connect(&cluster, &db);
    let before = grant_and_release(&leases).await;
    let (master, _) = cluster.shard_of(TAG).await;
    cluster.nodes[master].signal("-STOP");
    let asked_at = Instant::now();
    let refused = leases.acquire(&sku(), Acquire::new(LONG)).await;
    if let Err(error) = refused {
        assert_matches!(error, LeaseError::Unavailable(_));
    }
    assert!(asked_at.elapsed() < PATIENCE, "the call hangs");
    let after = next_grant(&leases, LONG).await;
    assert!(after.token > before.token);
    // The replaced master resumes, and becomes a replica.
    cluster.nodes[master].signal("-CONT");
    leases.release(&sku(), &after.id).await.unwrap();
    assert!(next_grant(&leases, LONG).await.token > after.token);
}

/// A whole shard is silent. Waiters on the other shards continue, but more slowly.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_shard_costs_no_waiter_of_the_others() {
    let (cluster, db) = (RedisCluster::start().await, Sqlite::fresh(2).await);
    let (one, two) = (connect(&cluster, &db), connect(&cluster, &db));
    let healthy = Resource::new("sku-2").unwrap();
    grant(&one, &sku(), LONG).await;
    let mut last = grant(&one, &healthy, LONG).await;
    let (master, replica) = cluster.shard_of(TAG).await;
    let (other, _) = cluster.shard_of("{212}").await;
    assert!(other != master && other != replica);
    for (n, node) in cluster.nodes.iter().enumerate() {
        if n != master && n != replica {
            node.send("CONFIG SET cluster-require-full-coverage no")
                .await;
        }
    }
    let silent = wait(&two, &sku()).await;
    let mut waiting = vec![];
    for _ in 0..4 {
        waiting.push(wait(&two, &healthy).await);
    }
    cluster.nodes[replica].signal("-STOP");
    cluster.nodes[master].signal("-STOP");
    // A reload of a missing script on one server must not depend on the silent nodes.
    cluster.nodes[other].send("SCRIPT FLUSH").await;
    while !waiting.is_empty() {
        tokio::time::sleep(Duration::from_millis(500)).await;
        let has_ended = async || {
            let held = one.inspect(&healthy).await;
            held.is_ok_and(|held| held.is_none_or(|held| held.token != last.token))
        };
        eventually!(
            "the lease is released",
            one.release(&healthy, &last.id).await.is_ok() || has_ended().await
        );
        let next = futures_util::future::select_all(waiting);
        let (next, _, rest) = timeout(Duration::from_secs(20), next).await.unwrap();
        last = next.unwrap().expect("a waiter of another shard failed");
        waiting = rest;
    }
    silent.abort();
    cluster.nodes[master].signal("-CONT");
    cluster.nodes[replica].signal("-CONT");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_outlive_their_master() {
    for killed in [true, false] {
        let (mut cluster, db) = (RedisCluster::start().await, Sqlite::fresh(2).await);
        let (one, two) = (connect(&cluster, &db), connect(&cluster, &db));
        let first = grant(&one, &sku(), LONG).await;
        // This queue is on a master that keeps running.
        let elsewhere = Resource::new("sku-2").unwrap();
        let other_tag = "{212}";
        let other_first = grant(&one, &elsewhere, LONG).await;
        let waiting = wait(&two, &sku()).await;
        let other_waiting = wait(&two, &elsewhere).await;
        let (master, replica) = cluster.shard_of(TAG).await;
        let (other_master, _) = cluster.shard_of(other_tag).await;
        assert_ne!(master, other_master, "the test needs two shards");
        if killed {
            cluster.nodes[master].kill();
        } else {
            cluster.nodes[replica].send("CLUSTER FAILOVER").await;
        }
        eventually("the replica takes over", async || {
            let info = cluster.nodes[replica].info("INFO replication").await;
            info.contains("role:master")
        })
        .await;
        // Waiters on the other master are not affected.
        eventually!(
            "the other master answers",
            one.release(&elsewhere, &other_first.id).await.is_ok()
        );
        let other = granted_within(8, other_waiting).await;
        assert!(other.token > other_first.token);

        // The grant may have been lost with the master, but the queue was not.
        eventually!(
            "the lease ends",
            one.release(&sku(), &first.id).await.is_ok()
                || one.inspect(&sku()).await.is_ok_and(|held| held.is_none())
                || waiting.is_finished()
        );
        let second = timeout(Duration::from_secs(8), waiting).await;
        match second.expect("a waiter hangs").unwrap() {
            Ok(second) => assert!(second.token > first.token),
            // The request was cut off while no master had the slot.
            Err(LeaseError::Unavailable(_)) if killed => {}
            Err(error) => panic!("{error:?}"),
        }
    }
}

/// A waiter for another resource keeps open the connection that receives grants, which leads only
/// to the old master. The old master would accept the subscription of a new waiter. The new master
/// would not count this subscription, and would skip the waiter.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiter_that_joins_after_a_failover_is_not_skipped() {
    let (cluster, db) = (RedisCluster::start().await, Sqlite::fresh(2).await);
    let (one, two) = (connect(&cluster, &db), connect(&cluster, &db));
    let elsewhere = Resource::new("sku-2").unwrap();
    grant(&one, &elsewhere, LONG).await;
    let other_waiting = wait(&two, &elsewhere).await;
    let (master, replica) = cluster.shard_of(TAG).await;
    let (other_master, _) = cluster.shard_of("{212}").await;
    assert_ne!(master, other_master, "the test needs two shards");
    cluster.nodes[replica].send("CLUSTER FAILOVER").await;
    eventually("the replica takes over", async || {
        let old = cluster.nodes[master].info("INFO replication").await;
        old.contains("role:slave")
    })
    .await;

    let first = grant(&one, &sku(), LONG).await;
    let waiting = wait(&two, &sku()).await;
    let behind = wait(&connect(&cluster, &db), &sku()).await;
    one.release(&sku(), &first.id).await.unwrap();
    let second = granted_within(6, waiting).await;
    assert!(second.token > first.token);
    two.release(&sku(), &second.id).await.unwrap();
    assert!(granted(behind).await.token > second.token);
    assert!(!other_waiting.is_finished());
    other_waiting.abort();
}

/// Connects with the URL of one node, which no longer answers when this function returns.
async fn without_configured_node(cluster: &RedisCluster, db: &Fresh<Sqlite>) -> RedisLeases {
    let configured = Proxy::to(cluster.nodes[0].addr()).await;
    let url = configured.url(&cluster.nodes[0].url());
    let builder = RedisLeases::builder(db.fence()).command_timeout(Duration::from_millis(500));
    let leases = builder.with_cluster(&[&url], |client| client).unwrap();
    let lease = next_grant(&leases, LONG).await;
    leases.release(&sku(), &lease.id).await.unwrap();
    configured.set(Link::Cut);
    leases
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn new_master_is_found_without_the_configured_node() {
    let (cluster, db) = (RedisCluster::start().await, Sqlite::fresh(2).await);
    let leases = without_configured_node(&cluster, &db).await;
    let (master, _) = cluster.shard_of(TAG).await;
    cluster.nodes[master].signal("-STOP");
    let acquired = leases.acquire(&sku(), Acquire::new(LONG)).await;
    assert_matches!(acquired, Err(LeaseError::Unavailable(_)));
    next_grant(&leases, LONG).await;
    cluster.nodes[master].signal("-CONT");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn notifications_need_no_configured_node() {
    let (cluster, db) = (RedisCluster::start().await, Sqlite::fresh(2).await);
    let leases = without_configured_node(&cluster, &db).await;
    let first = next_grant(&leases, LONG).await;
    // Without notifications, the request would not wait in the queue.
    let waiting = wait(&leases, &sku()).await;
    leases.release(&sku(), &first.id).await.unwrap();
    assert!(granted(waiting).await.token > first.token);
}

/// Each answer takes longer than an eighth of the command timeout.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn new_master_is_found_over_a_slow_network() {
    let (cluster, db) = (RedisCluster::start().await, Sqlite::fresh(2).await);
    let (mut proxies, mut urls) = (vec![], vec![]);
    for node in &cluster.nodes {
        let proxy = Proxy::to(node.addr()).await;
        let port = proxy.addr.port();
        node.send(&format!("CONFIG SET cluster-announce-port {port}"))
            .await;
        urls.push(proxy.url(&node.url()));
        proxies.push(proxy);
    }
    eventually("all nodes announce the proxies", async || {
        for node in &cluster.nodes {
            let nodes = node.info("CLUSTER NODES").await;
            let announced = |proxy: &Proxy| nodes.contains(&format!(":{}@", proxy.addr.port()));
            if !proxies.iter().all(announced) {
                return false;
            }
        }
        true
    })
    .await;
    let urls: Vec<&str> = urls.iter().map(String::as_str).collect();
    let builder = RedisLeases::builder(db.fence());
    let leases = builder.with_cluster(&urls, |client| client).unwrap();
    let lease = next_grant(&leases, LONG).await;
    leases.release(&sku(), &lease.id).await.unwrap();
    for proxy in &proxies {
        proxy.slow_down(Duration::from_millis(140));
    }
    let (master, _) = cluster.shard_of(TAG).await;
    cluster.nodes[master].signal("-STOP");
    next_grant(&leases, LONG).await;
    cluster.nodes[master].signal("-CONT");
}

#[tokio::test]
async fn member_of_a_cluster_is_no_single_server() {
    let (cluster, db) = (RedisCluster::start().await, Sqlite::fresh(2).await);
    // Only one of the masters has the slot of the first partition.
    for url in cluster.urls() {
        is_misconfigured(RedisLeases::connect(&url, db.fence()).await);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn documented_rights_suffice() {
    let (cluster, db) = (RedisCluster::start().await, Sqlite::fresh(2).await);
    let page = include_str!("../../../src/deployment.md");
    let (_, page) = page.split_once("For a cluster, add `").unwrap();
    let (of_cluster, page) = page.split_once('`').unwrap();
    let (_, page) = page.split_once("ACL SETUSER locks ").unwrap();
    let (rights, _) = page.split_once("```").unwrap();
    let set_user = async |rights: &str| {
        let rights = Vec::from_iter(rights.split_whitespace()).join(" ");
        for node in &cluster.nodes {
            node.send(&format!("ACL SETUSER locks {rights}")).await;
        }
    };
    set_user(rights).await;
    set_user("+cluster|slots").await;
    let urls = cluster.urls();
    let urls = urls.iter().map(|url| url.replace("//", "//locks:SECRET@"));
    let urls: Vec<String> = urls.collect();
    let urls: Vec<&str> = urls.iter().map(String::as_str).collect();
    let builder = RedisLeases::builder(db.fence());
    let leases = builder.with_cluster(&urls, |client| client).unwrap();
    let refused = leases.inspect(&sku()).await.unwrap_err();
    assert_contains!(
        messages_of(&refused),
        "SPUBLISH and SSUBSCRIBE on `tower-fence:*`"
    );

    set_user(of_cluster).await;
    let first = grant(&leases, &sku(), LONG).await;
    let waiting = wait(&leases, &sku()).await;
    assert_eq!(listed(&leases, 7).await, ["sku-1"]);
    leases.release(&sku(), &first.id).await.unwrap();
    let second = granted(waiting).await;
    renew_for(&leases, &second, LONG).await;
    assert!(leases.break_lease(&sku(), None).await.unwrap());
}

#[tokio::test]
async fn server_without_cluster_mode_is_refused() {
    let (server, db) = (RedisServer::start(&[]).await, Sqlite::fresh(2).await);
    let inspect = async |url: &str| {
        let builder = RedisLeases::builder(db.fence());
        let leases = builder.with_cluster(&[url], |client| client).unwrap();
        leases.inspect(&sku()).await
    };
    is_misconfigured(inspect(&server.url()).await);
    // The server has no password.
    let url = server.url().replace("//", "//:sesame@");
    let refused = inspect(&url).await.unwrap_err();
    assert_matches!(refused, LeaseError::Unavailable(_));
    let text = format!("{refused:?} {refused}");
    assert!(!text.contains("sesame"), "{text}");
    is_misconfigured(RedisLeases::builder(db.fence()).with_cluster(&[], |client| client));
}

#[tokio::test]
async fn database_of_a_cluster_is_refused_in_a_url_and_overridden_in_settings() {
    let db = Sqlite::fresh(2).await;
    let urls = [shared_cluster_url(), format!("{}/3", shared_cluster_url())];
    let urls = [&*urls[0], &*urls[1]];
    let builder = || RedisLeases::builder(db.fence()).key_prefix(fresh_prefix());
    let refused = builder().with_cluster(&urls, |client| client).unwrap_err();
    assert_matches!(refused, LeaseError::Misconfigured(_));
    let reason = "must not name a database other than 0";
    assert_contains!(messages_of(&refused), reason);
    let leases = builder().with_cluster(&urls[..1], |client| client.database_id(3));
    grant(&leases.unwrap(), &sku(), LONG).await;
}
