//! Many clients that acquire and release over several resources, and the order of their tokens.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use futures_util::future::join_all;
use redis::{aio::ConnectionLike, cluster_async::ClusterConnection};
use serde_json::{Value, json};
use sqlx::Sqlite;
use tokio::time::{Instant, sleep};
use tower_fence::{
    Resource,
    lease::{Acquire, Leases, RedisLeases},
};
use tower_fence_etcd::EtcdLeases;

use crate::support::{
    database::Fresh,
    etcd::{self, EtcdCluster, base64},
    eventually,
    redis::RedisServer,
};

pub const RESOURCES: usize = 3;

/// An issuer of tokens.
#[derive(Clone)]
pub enum Issuer {
    Ours(RedisLeases),
    /// `SET NX PX` and `INCR`: tokens from a counter in Redis, without protection against a loss.
    Naive(redis::aio::ConnectionManager),
    NaiveInCluster(ClusterConnection),
    InEtcd(EtcdLeases),
    /// A key with a lease, and the revision of etcd as the token.
    NaiveInEtcd(String, reqwest::Client),
}

impl Issuer {
    pub async fn ours(server: &RedisServer, db: &Fresh<Sqlite>) -> Self {
        let builder = RedisLeases::builder(db.fence()).command_timeout(Duration::from_millis(500));
        Self::Ours(builder.connect(&server.url()).await.unwrap())
    }

    pub async fn naive(server: &RedisServer) -> Self {
        let client = redis::Client::open(server.url()).unwrap();
        let config = redis::aio::ConnectionManagerConfig::new().set_number_of_retries(1);
        let connection = client.get_connection_manager_with_config(config).await;
        Self::Naive(connection.unwrap())
    }

    pub async fn in_etcd(cluster: &EtcdCluster, db: &Fresh<Sqlite>) -> Self {
        Self::InEtcd(etcd::connect(&cluster.urls(), db.fence()).await.unwrap())
    }

    pub fn naive_in_etcd(cluster: &EtcdCluster) -> Self {
        Self::NaiveInEtcd(cluster.urls().remove(0), crate::support::http::client())
    }

    /// Acquires and releases. Returns `None` if a call fails, or if another client holds the lease.
    pub async fn grant(&self, resource: usize) -> Option<i64> {
        let ttl = Duration::from_millis(500);
        match self {
            Self::Ours(leases) => our_grant(leases, resource, ttl).await,
            Self::InEtcd(leases) => our_grant(leases, resource, ttl).await,
            Self::NaiveInEtcd(url, http) => naive_grant_in_etcd(url, http, resource).await,
            Self::Naive(connection) => naive_grant(connection.clone(), resource).await,
            Self::NaiveInCluster(connection) => naive_grant(connection.clone(), resource).await,
        }
    }
}

async fn our_grant<L: Leases>(leases: &L, resource: usize, ttl: Duration) -> Option<i64> {
    let resource = Resource::new(format!("sku-{resource}")).unwrap();
    let lease = leases.acquire(&resource, Acquire::new(ttl)).await.ok()?;
    let _ = leases.release(&resource, &lease.id).await;
    Some(lease.token.get())
}

async fn naive_grant_in_etcd(url: &str, http: &reqwest::Client, resource: usize) -> Option<i64> {
    let call = async |path: &str, body: Value| -> Option<Value> {
        let request = http.post(format!("{url}{path}")).json(&body);
        let answer = request.timeout(Duration::from_millis(500)).send().await;
        answer.ok()?.json().await.ok()
    };
    let lease = call("/v3/lease/grant", json!({ "TTL": 1 })).await?;
    let key = base64(format!("lock-{resource}"));
    let compare = json!({ "key": key, "target": "CREATE", "create_revision": "0" });
    let put = json!({ "request_put": { "key": key, "lease": lease["ID"] } });
    let put = json!({ "compare": [compare], "success": [put] });
    let granted = call("/v3/kv/txn", put).await?;
    call("/v3/lease/revoke", json!({ "ID": lease["ID"] })).await?;
    let token = granted["header"]["revision"].as_str()?.parse().ok()?;
    (granted["succeeded"] == true).then_some(token)
}

pub async fn naive_grant(mut connection: impl ConnectionLike, resource: usize) -> Option<i64> {
    let [lock, counter] = ["lock", "counter"].map(|key| format!("{{{resource}}}{key}"));
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
    pub resource: usize,
    pub token: i64,
    pub began: Instant,
    pub ended: Instant,
}

/// Eight clients that run until they are stopped.
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
                        grants.lock().unwrap().push(Grant {
                            resource,
                            token,
                            began,
                            ended: Instant::now(),
                        });
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

    /// Waits for this number of further grants of each resource.
    pub async fn more(&self, count: usize) {
        let counts = || {
            let grants = self.grants.lock().unwrap();
            let count = |resource| grants.iter().filter(|g| g.resource == resource).count();
            (0..RESOURCES).map(count).collect::<Vec<_>>()
        };
        let before = counts();
        eventually("grants continue", async || {
            let counts = counts();
            let mut pairs = counts.iter().zip(&before);
            pairs.all(|(now, before)| *now >= before + count)
        })
        .await;
    }

    pub async fn stop(self) -> Vec<Grant> {
        self.stop.store(true, Relaxed);
        for client in join_all(self.clients).await {
            client.unwrap();
        }
        std::mem::take(&mut *self.grants.lock().unwrap())
    }
}

/// Checks that the grants of our issuers are in order, and that those of the naive ones are not.
/// Otherwise the load would not detect a loss.
#[track_caller]
pub fn are_in_order_where_ours(ours: bool, grants: &[Grant]) {
    let found = out_of_order(grants);
    if ours {
        assert_eq!(found.map(|pair| format!("{pair:?}")), None);
    } else {
        assert!(found.is_some(), "the load does not detect lost tokens");
    }
}

/// Returns the first pair of grants that are not in order, or that share a token.
pub fn out_of_order(grants: &[Grant]) -> Option<(Grant, Grant)> {
    for resource in 0..RESOURCES {
        let mut of_resource: Vec<_> = grants.iter().filter(|g| g.resource == resource).collect();
        of_resource.sort_by_key(|grant| grant.token);
        for pair in of_resource.windows(2) {
            if pair[0].token == pair[1].token {
                return Some((*pair[0], *pair[1]));
            }
        }
        // In the order of the tokens, no grant may end before an earlier grant in that order
        // begins.
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
