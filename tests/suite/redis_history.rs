//! Tokens against loss, under load: many clients acquire and release over several resources while
//! Redis loses something. Whatever it is, a grant that began after another one had ended has the
//! higher token.
//!
//! Beside each case stands the counter that a user would write by hand, which the same load finds
//! to go back.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use futures_util::future::join_all;
use redis::{aio::ConnectionLike, cluster_async::ClusterConnection};
use sqlx::Sqlite;
use tokio::time::{Instant, sleep};
use tower_fence::{
    Resource,
    lease::{Acquire, Leases, RedisLeases},
};

use crate::support::{
    database::{Fresh, TestDatabase},
    eventually,
    proxy::{Link, Proxy},
    redis::{RedisServer, Sentinel},
};

const RESOURCES: usize = 3;

/// Something that grants tokens.
#[derive(Clone)]
pub enum Issuer {
    Ours(RedisLeases),
    /// `SET NX PX` and `INCR`: a clock that trusts its key.
    Naive(redis::aio::ConnectionManager),
    NaiveInCluster(ClusterConnection),
}

impl Issuer {
    async fn ours(server: &RedisServer, db: &Fresh<Sqlite>) -> Self {
        let builder = RedisLeases::builder(db.fence()).command_wait(Duration::from_millis(500));
        Self::Ours(builder.connect(&server.url()).await.unwrap())
    }

    async fn naive(server: &RedisServer) -> Self {
        let client = redis::Client::open(server.url()).unwrap();
        let config = redis::aio::ConnectionManagerConfig::new().set_number_of_retries(1);
        Self::Naive(
            client
                .get_connection_manager_with_config(config)
                .await
                .unwrap(),
        )
    }

    /// Acquires and releases; no token where that fails, or somebody else holds the lease.
    async fn grant(&self, resource: usize) -> Option<i64> {
        let ttl = Duration::from_millis(500);
        match self {
            Self::Ours(leases) => {
                let resource = Resource::new(format!("sku-{resource}")).unwrap();
                let lease = leases.acquire(&resource, Acquire::new(ttl)).await.ok()?;
                let _ = leases.release(&resource, &lease.id).await;
                Some(lease.token.get())
            }
            Self::Naive(connection) => naive_grant(connection.clone(), resource).await,
            Self::NaiveInCluster(connection) => naive_grant(connection.clone(), resource).await,
        }
    }
}

async fn naive_grant(mut connection: impl ConnectionLike, resource: usize) -> Option<i64> {
    let (lock, counter) = (
        format!("{{{resource}}}lock"),
        format!("{{{resource}}}counter"),
    );
    let script = "if redis.call('SET', KEYS[1], 1, 'NX', 'PX', 500) \
                  then return redis.call('INCR', KEYS[2]) end";
    let mut grant = redis::cmd("EVAL");
    grant.arg(script).arg(2).arg(&lock).arg(counter);
    let token: Option<i64> = grant.query_async(&mut connection).await.ok()?;
    let release = redis::cmd("DEL").arg(lock).take();
    let _: redis::RedisResult<()> = release.query_async(&mut connection).await;
    token
}

#[derive(Clone, Copy, Debug)]
pub struct Grant {
    resource: usize,
    token: i64,
    began: Instant,
    ended: Instant,
}

/// Eight clients, until they are stopped.
pub struct Load {
    grants: Arc<Mutex<Vec<Grant>>>,
    stop: Arc<AtomicBool>,
    clients: Vec<tokio::task::JoinHandle<()>>,
}

impl Load {
    pub fn start(issuer: &Issuer) -> Self {
        let (grants, stop) = (Arc::default(), Arc::<AtomicBool>::default());
        let client = |n: usize| {
            let (issuer, stop) = (issuer.clone(), stop.clone());
            let grants: Arc<Mutex<Vec<Grant>>> = Arc::clone(&grants);
            tokio::spawn(async move {
                for turn in n.. {
                    let (resource, began) = (turn % RESOURCES, Instant::now());
                    if let Some(token) = issuer.grant(resource).await {
                        let ended = Instant::now();
                        let grant = Grant {
                            resource,
                            token,
                            began,
                            ended,
                        };
                        grants.lock().unwrap().push(grant);
                    } else {
                        sleep(Duration::from_millis(1)).await;
                    }
                    if stop.load(Relaxed) {
                        return;
                    }
                }
            })
        };
        let clients = (0..8).map(client).collect();
        Self {
            grants,
            stop,
            clients,
        }
    }

    /// Waits for so many more grants of each resource.
    pub async fn more(&self, count: usize) {
        let counts = || {
            let grants = self.grants.lock().unwrap();
            let count = |resource| grants.iter().filter(|g| g.resource == resource).count();
            (0..RESOURCES).map(count).collect::<Vec<_>>()
        };
        let before = counts();
        eventually("grants go on", async || {
            counts()
                .iter()
                .zip(&before)
                .all(|(now, before)| *now >= before + count)
        })
        .await;
    }

    pub async fn stop(self) -> Vec<Grant> {
        self.stop.store(true, Relaxed);
        join_all(self.clients).await;
        std::mem::take(&mut *self.grants.lock().unwrap())
    }
}

/// The first pair of grants that are not in order, or share a token.
pub fn out_of_order(grants: &[Grant]) -> Option<(Grant, Grant)> {
    for resource in 0..RESOURCES {
        let mut of_resource: Vec<_> = grants.iter().filter(|g| g.resource == resource).collect();
        of_resource.sort_by_key(|grant| grant.token);
        for pair in of_resource.windows(2) {
            if pair[0].token == pair[1].token {
                return Some((*pair[0], *pair[1]));
            }
        }
        // In the order of the tokens, none may have ended before the latest beginning so far.
        let mut latest: Option<&Grant> = None;
        for grant in of_resource {
            if let Some(latest) = latest.filter(|latest| grant.ended < latest.began) {
                return Some((*grant, *latest));
            }
            if latest.is_none_or(|latest| latest.began < grant.began) {
                latest = Some(grant);
            }
        }
    }
    None
}

/// Runs the load while `lose` happens, for our issuer and for the naive one.
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
        let grants = load.stop().await;
        let found = out_of_order(&grants);
        if ours {
            assert_eq!(found.map(|pair| format!("{pair:?}")), None);
        } else {
            assert!(
                found.is_some(),
                "the load does not find a counter that was lost"
            );
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_without_persistence() {
    survives(&[], async |server, _| {
        server.kill();
        server.start_again().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_from_an_old_snapshot() {
    survives(&[], async |server, load| {
        server.command(&["SAVE"]).await;
        load.more(60).await;
        server.kill();
        server.start_again().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_log_that_lost_its_end() {
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
async fn flushall() {
    survives(&[], async |server, _| {
        server.command(&["FLUSHALL"]).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clocks_that_are_deleted() {
    survives(&[], async |server, _| {
        let keys = server.command(&["KEYS", "*cl*ock"]).await;
        let clocks: Vec<String> = redis::from_redis_value(keys).unwrap();
        for key in clocks
            .iter()
            .map(String::as_str)
            .chain(["{0}counter", "{1}counter"])
        {
            server.command(&["DEL", key]).await;
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn eviction() {
    let options = ["--maxmemory-policy", "allkeys-lru"];
    survives(&options, async |server, _| {
        server.command(&["CONFIG", "SET", "maxmemory", "1"]).await;
        eventually("everything is evicted", async || {
            let refused = server.try_command(&["SET", "junk", "x"]).await;
            let size = server.command(&["DBSIZE"]).await;
            refused.is_err() && size == redis::Value::Int(0)
        })
        .await;
        server.command(&["CONFIG", "SET", "maxmemory", "0"]).await;
    })
    .await;
}

/// A replica that lags is promoted, while the old master still answers for a while.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failover_to_a_replica_that_lags() {
    let db = Sqlite::fresh(2).await;
    for ours in [true, false] {
        let (master, replica) = (RedisServer::start(&[]).await, RedisServer::start(&[]).await);
        let proxy = Proxy::to(master.addr()).await;
        let port = proxy.addr.port().to_string();
        replica.command(&["REPLICAOF", "127.0.0.1", &port]).await;
        let issuer = async |server: &RedisServer| match ours {
            true => Issuer::ours(server, &db).await,
            false => Issuer::naive(server).await,
        };
        let old = Load::start(&issuer(&master).await);
        old.more(60).await;
        eventually("the replica is in step", async || {
            let info = replica.command(&["INFO", "replication"]).await;
            let info: String = redis::from_redis_value(info).unwrap();
            info.contains("master_link_status:up")
        })
        .await;
        old.more(30).await;
        proxy.set(Link::Silent);
        old.more(60).await;
        replica.command(&["REPLICAOF", "NO", "ONE"]).await;
        let promoted_at = Instant::now();
        let new = Load::start(&issuer(&replica).await);
        old.more(30).await;
        new.more(30).await;
        let (old, new) = (old.stop().await, new.stop().await);
        // The deposed master hands out only what is outranked already.
        let outranked = (0..RESOURCES).all(|resource| {
            let tokens = |grants: &[Grant]| -> Vec<i64> {
                let of_resource = grants.iter().filter(|grant| grant.resource == resource);
                of_resource.map(|grant| grant.token).collect()
            };
            tokens(&old).iter().max() < tokens(&new).iter().min()
        });
        assert!(
            old.iter().any(|grant| grant.began > promoted_at),
            "the old master fell silent"
        );
        assert_eq!(outranked, ours);
        if ours {
            assert!(out_of_order(&new).is_none() && out_of_order(&old).is_none());
        }
    }
}

/// A master behind sentinels is killed; its replica is promoted, and found.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failover_by_sentinels() {
    let db = Sqlite::fresh(2).await;
    let (mut master, replica) = (
        RedisServer::start(&[]).await,
        RedisServer::start(&["--replica-announce-ip", "127.0.0.1"]).await,
    );
    let port = master.addr().port().to_string();
    replica.command(&["REPLICAOF", "127.0.0.1", &port]).await;
    eventually("the replica is in step", async || {
        let info = replica.command(&["INFO", "replication"]).await;
        let info: String = redis::from_redis_value(info).unwrap();
        info.contains("master_link_status:up")
    })
    .await;
    let sentinel = Sentinel::start(&master);
    let connected = std::cell::RefCell::new(None);
    eventually(
        "the sentinel knows its master and the replica",
        async || {
            let client = redis::Client::open(sentinel.url()).unwrap();
            let Ok(mut connection) = client.get_multiplexed_async_connection().await else {
                return false;
            };
            let mut replicas = redis::cmd("SENTINEL");
            replicas.arg("replicas").arg("the-master");
            let known: redis::RedisResult<Vec<redis::Value>> =
                replicas.query_async(&mut connection).await;
            if known.is_ok_and(|known| known.len() == 1) {
                let builder = RedisLeases::builder(db.fence());
                let builder = builder.command_wait(Duration::from_millis(500));
                let leases = builder
                    .connect_sentinels(&[&sentinel.url()], "the-master")
                    .await;
                *connected.borrow_mut() = leases.ok();
            }
            connected.borrow().is_some()
        },
    )
    .await;
    let leases = connected.into_inner().unwrap();
    let load = Load::start(&Issuer::Ours(leases.clone()));
    load.more(60).await;
    master.kill();
    load.more(60).await;
    let grants = load.stop().await;
    assert_eq!(out_of_order(&grants).map(|pair| format!("{pair:?}")), None);

    // Waiting works on the new master, too.
    let sku = Resource::new("sku-9").unwrap();
    let long = Duration::from_secs(30);
    let first = leases.acquire(&sku, Acquire::new(long)).await.unwrap();
    let waiting = tokio::spawn({
        let (leases, sku) = (leases.clone(), sku.clone());
        async move { leases.acquire(&sku, Acquire::new(long).wait(long)).await }
    });
    eventually("it is in line", async || {
        leases
            .inspect(&sku)
            .await
            .unwrap()
            .is_some_and(|held| held.waiters == 1)
    })
    .await;
    leases.release(&sku, &first.id).await.unwrap();
    assert!(waiting.await.unwrap().unwrap().token > first.token);

    let (url, builder) = (sentinel.url(), RedisLeases::builder(db.fence()));
    builder
        .connect_sentinels(&[&url], "nobody")
        .await
        .unwrap_err();
}
