//! Tokens after a loss of data in Redis, under load: many clients acquire and release over several
//! resources. If a grant began after another one had ended, it has the higher token, whichever data
//! was lost.
//!
//! In each case, the tokens of a naive counter decrease, which the same load detects.

use std::time::Duration;

use redis::sentinel::{SentinelClient, SentinelServerType};
use sqlx::Sqlite;
use tokio::time::Instant;
use tower_fence::{
    Resource,
    lease::{Acquire, LeaseError, Leases, RedisLeases, Renew},
};

use crate::grant_load::{Grant, Issuer, Load, RESOURCES, are_in_order_where_ours, out_of_order};
use crate::support::{
    database::TestDatabase,
    eventually,
    lease::{LONG, grant, granted, is_unavailable, next_grant, sku, wait},
    proxy::{Link, Proxy},
    redis::{RedisServer, Sentinel, connect, open},
};

/// Runs the load during `lose`, for our issuer and for the naive one.
async fn survives(options: &[&str], lose: impl AsyncFn(&mut RedisServer, &Load)) {
    let db = Sqlite::fresh(2).await;
    for ours in [true, false] {
        let mut server = RedisServer::start(options).await;
        let issuer = match ours {
            true => Issuer::ours(&server, &db).await,
            false => Issuer::naive(&server).await,
        };
        let load = Load::start(&issuer);
        load.more(60).await;
        lose(&mut server, &load).await;
        load.more(60).await;
        are_in_order_where_ours(ours, &load.stop().await);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn truncated_append_only_file_repeats_no_token() {
    let options = ["--appendonly", "yes", "--auto-aof-rewrite-percentage", "0"];
    survives(&options, async |server, load| {
        let half = server.append_only_files();
        load.more(60).await;
        server.kill();
        server.restore(half);
        server.start_again().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn eviction_repeats_no_token() {
    let options = ["--maxmemory-policy", "allkeys-lru"];
    survives(&options, async |server, _| {
        server.command(&["CONFIG", "SET", "maxmemory", "1"]).await;
        eventually("all keys are evicted", async || {
            let refused = server.try_command(&["SET", "junk", "x"]).await;
            let size = server.command(&["DBSIZE"]).await;
            refused.is_err() && size == redis::Value::Int(0)
        })
        .await;
        server.command(&["CONFIG", "SET", "maxmemory", "0"]).await;
    })
    .await;
}

/// A lagging replica is promoted, while the old master still answers for a while.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failover_to_a_lagging_replica_repeats_no_token() {
    let db = Sqlite::fresh(2).await;
    for ours in [true, false] {
        let (master, replica) = (RedisServer::start(&[]).await, RedisServer::start(&[]).await);
        let proxy = Proxy::to(master.addr()).await;
        replica.follow(proxy.addr).await;
        let issuer = async |server: &RedisServer| match ours {
            true => Issuer::ours(server, &db).await,
            false => Issuer::naive(server).await,
        };
        let old = Load::start(&issuer(&master).await);
        old.more(90).await;
        proxy.set(Link::Silent);
        old.more(60).await;
        replica.send("REPLICAOF NO ONE").await;
        let promoted_at = Instant::now();
        let new = Load::start(&issuer(&replica).await);
        old.more(30).await;
        new.more(30).await;
        let (old, new) = (old.stop().await, new.stop().await);
        // The replaced master grants only tokens that are already superseded.
        let superseded = (0..RESOURCES).all(|resource| {
            let tokens = |grants: &[Grant]| -> Vec<i64> {
                let of_resource = grants.iter().filter(|grant| grant.resource == resource);
                of_resource.map(|grant| grant.token).collect()
            };
            tokens(&old).iter().max() < tokens(&new).iter().min()
        });
        // The old master has answered after the promotion.
        assert!(old.iter().any(|grant| grant.began > promoted_at));
        assert_eq!(superseded, ours);
        if ours {
            assert!(out_of_order(&new).is_none() && out_of_order(&old).is_none());
        }
    }
}

/// A replica has the replication id and the token counter of its master.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replica_that_accepts_writes_grants_no_lease() {
    let db = Sqlite::fresh(2).await;
    let (master, replica) = (
        RedisServer::start(&[]).await,
        RedisServer::start(&["--replica-read-only", "no"]).await,
    );
    let at_master = connect(&master, &db).await;
    let sku = Resource::new("sku-9").unwrap();
    let lease = grant(&at_master, &sku, LONG).await;
    replica.follow(master.addr()).await;
    let at_replica = RedisLeases::connect_lazy(&replica.url(), db.fence()).unwrap();
    for renew in [Renew::new(LONG), Renew::new(LONG).with_new_token()] {
        is_unavailable(at_replica.renew(&sku, &lease.id, renew).await);
    }
    at_master.release(&sku, &lease.id).await.unwrap();
    master.send("WAIT 1 5000").await;
    is_unavailable(at_replica.acquire(&sku, Acquire::new(LONG)).await);
    grant(&at_master, &sku, LONG).await;
}

/// A master behind sentinels is killed. Its replica is promoted, and the issuer finds the replica.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failover_by_sentinels_repeats_no_token() {
    let db = Sqlite::fresh(2).await;
    let (mut master, replica) = (
        RedisServer::start(&[]).await,
        RedisServer::start(&["--replica-announce-ip", "127.0.0.1"]).await,
    );
    replica.follow(master.addr()).await;
    let sentinel = Sentinel::start(&master);
    let behind_sentinel = |name: &str, database| {
        let master = SentinelServerType::Master;
        let urls = vec![sentinel.url()];
        let client = SentinelClient::build(urls, String::from(name), None, master);
        let builder = RedisLeases::builder(db.fence()).command_timeout(Duration::from_millis(500));
        let leases = builder.with_sentinels(client.unwrap(), database, name);
        leases.unwrap()
    };
    let leases = behind_sentinel("the-master", 0);
    eventually("the sentinel knows master and replica", async || {
        let Ok(mut connection) = open(&sentinel.url()).await else {
            return false;
        };
        let replicas = redis::cmd("SENTINEL")
            .arg(&["replicas", "the-master"])
            .take();
        let known = replicas.query_async::<Vec<redis::Value>>(&mut connection);
        let is_known = known.await.is_ok_and(|known| known.len() == 1);
        is_known && leases.inspect(&sku()).await.is_ok()
    })
    .await;
    let load = Load::start(&Issuer::Ours(leases.clone()));
    load.more(60).await;
    master.kill();
    load.more(60).await;
    let grants = load.stop().await;
    assert_eq!(out_of_order(&grants).map(|pair| format!("{pair:?}")), None);

    // Waiting works on the new master, too.
    let first = next_grant(&leases, LONG).await;
    let waiting = wait(&leases, LONG).await;
    leases.release(&sku(), &first.id).await.unwrap();
    assert!(granted(waiting).await.token > first.token);

    let unknown = behind_sentinel("nobody", 0);
    unknown.inspect(&sku()).await.unwrap_err();
    // The client uses database 0. On a busy machine, it may not find the new master immediately.
    let other = behind_sentinel("the-master", 1);
    eventually("the other database is refused", async || {
        let inspected = other.inspect(&sku()).await;
        matches!(inspected, Err(LeaseError::Misconfigured(_)))
    })
    .await;
}
