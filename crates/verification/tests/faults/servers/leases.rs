//! The servers of a lease store.

use futures_util::future::join_all;
use std::time::Duration;

use tokio::{sync::Mutex, time::timeout};

use crate::support::{
    cluster::RedisCluster,
    etcd::EtcdCluster,
    eventually,
    proxy::Proxy,
    redis::{RedisServer, Sentinel},
    wall_clock::WallClock,
};

/// The lease stores.
pub const STORES: [&str; 6] = ["postgres", "redis", "sentinel", "cluster", "quorum", "etcd"];

pub struct LeaseServers {
    /// The Redis servers; empty if the store is not in Redis.
    pub nodes: Vec<Mutex<RedisServer>>,
    /// The three nodes of etcd, if the store is etcd.
    pub etcd: Option<Mutex<EtcdCluster>>,
    /// A proxy for each node; empty if clients discover the nodes themselves.
    pub links: Vec<Proxy>,
    /// The wall clock of the first node, for the stores `redis` and `quorum`.
    pub clock: WallClock,
    /// The sentinel, which names the master.
    sentinel: Option<Sentinel>,
    urls: Vec<String>,
}

impl LeaseServers {
    pub async fn start(store: &'static str) -> Self {
        let clock = WallClock::right();
        let (mut sentinel, mut etcd) = (None, None);
        let nodes = match store {
            "postgres" => vec![],
            "etcd" => {
                etcd = Some(EtcdCluster::start(3).await);
                vec![]
            }
            "redis" => vec![RedisServer::start_with(&[], &clock.variables()).await],
            "quorum" => {
                let mut nodes = vec![RedisServer::start_with(&[], &clock.variables()).await];
                nodes.extend(join_all((1..5).map(|_| RedisServer::start(&[]))).await);
                nodes
            }
            "sentinel" => {
                let announced = [
                    "--replica-announce-ip",
                    "127.0.0.1",
                    "--repl-diskless-sync-delay",
                    "0",
                ];
                let master = RedisServer::start(&announced).await;
                let replica = RedisServer::start(&announced).await;
                let port = master.addr().port().to_string();
                replica.command(&["REPLICAOF", "127.0.0.1", &port]).await;
                sentinel = Some(watch(&master, &replica).await);
                vec![master, replica]
            }
            "cluster" => RedisCluster::start().await.nodes,
            other => panic!("no store {other:?}: {STORES:?}"),
        };
        let mut links = vec![];
        if matches!(store, "redis" | "quorum") {
            links = join_all(nodes.iter().map(|node| Proxy::to(node.addr()))).await;
        }
        if let Some(etcd) = &etcd {
            links = join_all(etcd.addrs().into_iter().map(Proxy::to)).await;
        }
        let urls = match &sentinel {
            Some(sentinel) => vec![sentinel.url()],
            None if etcd.is_some() => links
                .iter()
                .map(|link| link.url("http://127.0.0.1:1"))
                .collect(),
            None if links.is_empty() => nodes.iter().map(RedisServer::url).collect(),
            None => nodes
                .iter()
                .zip(&links)
                .map(|(node, link)| link.url(&node.url()))
                .collect(),
        };
        let nodes = nodes.into_iter().map(Mutex::new).collect();
        Self {
            nodes,
            etcd: etcd.map(Mutex::new),
            links,
            clock,
            sentinel,
            urls,
        }
    }

    pub fn urls(&self) -> Vec<String> {
        self.urls.clone()
    }

    /// Reads the clock of the first node, in seconds.
    pub async fn time(&self) -> Option<i64> {
        let url = self.nodes[0].try_lock().ok()?.url();
        let time = ["EVAL", "return redis.call('TIME')[1]", "0"];
        try_command(url, &time).await?.parse().ok()
    }

    /// Finds a node with this role. The search starts at the chosen node.
    pub async fn find(&self, choice: usize, role: &str) -> Option<usize> {
        let count = self.nodes.len();
        for n in (0..count).map(|n| (choice + n) % count) {
            let node = self.nodes[n].lock().await;
            let answer = try_command(node.url(), &["INFO", "replication"]).await;
            if answer.is_some_and(|answer| answer.contains(&format!("role:{role}"))) {
                return Some(n);
            }
        }
        None
    }

    /// Promotes a replica while its master is still running.
    pub async fn promote(&self, choice: usize) -> bool {
        if let Some(sentinel) = &self.sentinel {
            let failover = ["SENTINEL", "FAILOVER", "the-master"];
            return try_command(sentinel.url(), &failover).await.is_some();
        }
        let Some(replica) = self.find(choice, "slave").await else {
            return false;
        };
        let replica = self.nodes[replica].lock().await;
        // TAKEOVER does not involve the master, so writes that the master confirms in the meantime
        // are lost.
        let failover = ["CLUSTER", "FAILOVER", "TAKEOVER"];
        try_command(replica.url(), &failover).await.is_some()
    }
}

/// Tries to run a command.
pub async fn try_command(url: String, words: &[&str]) -> Option<String> {
    let run = async {
        let client = redis::Client::open(url)?;
        let mut connection = client.get_multiplexed_async_connection().await?;
        let mut command = redis::cmd(words[0]);
        command.arg(&words[1..]).query_async(&mut connection).await
    };
    let answer: redis::Value = timeout(Duration::from_secs(5), run).await.ok()?.ok()?;
    redis::from_redis_value(answer).ok()
}

/// Starts a sentinel that knows the master and the replica.
async fn watch(master: &RedisServer, replica: &RedisServer) -> Sentinel {
    eventually("the replica has all writes", async || {
        replica
            .info("INFO replication")
            .await
            .contains("master_link_status:up")
    })
    .await;
    let sentinel = Sentinel::start(master);
    eventually("the sentinel knows the replica", async || {
        let client = redis::Client::open(sentinel.url()).unwrap();
        let Ok(mut connection) = client.get_multiplexed_async_connection().await else {
            return false;
        };
        let mut replicas = redis::cmd("SENTINEL");
        replicas.arg("replicas").arg("the-master");
        let known: redis::RedisResult<Vec<redis::Value>> =
            replicas.query_async(&mut connection).await;
        known.is_ok_and(|known| known.len() == 1)
    })
    .await;
    sentinel
}
