//! The servers of a lease store.

use std::time::Duration;

use futures_util::future::join_all;
use tokio::{
    sync::Mutex,
    time::{sleep, timeout},
};

use super::{disturb, freeze, jumps};
use crate::{
    plan::{Fault, Planned},
    support::{
        cluster::RedisCluster,
        etcd::EtcdCluster,
        eventually,
        proxy::Proxy,
        redis::{RedisServer, Sentinel},
        wall_clock::WallClock,
    },
};

/// The lease stores.
pub const STORES: [&str; 6] = ["postgres", "redis", "sentinel", "cluster", "quorum", "etcd"];

pub struct LeaseServers {
    pub store: &'static str,
    /// The URLs by which the services reach the store.
    pub urls: Vec<String>,
    /// The Redis servers; empty if the store is not in Redis.
    pub nodes: Vec<Mutex<RedisServer>>,
    /// The three nodes of etcd, if the store is etcd.
    pub etcd: Option<Mutex<EtcdCluster>>,
    /// A proxy for each node; empty if clients discover the nodes themselves.
    pub links: Vec<Proxy>,
    /// The wall clock of the first node, for the stores `redis` and `quorum`.
    clock: WallClock,
    /// The sentinel, which names the master.
    sentinel: Option<Sentinel>,
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
                let announced = "--replica-announce-ip 127.0.0.1 --repl-diskless-sync-delay 0";
                let announced: Vec<_> = announced.split(' ').collect();
                let master = RedisServer::start(&announced).await;
                let replica = RedisServer::start(&announced).await;
                replica.follow(master.addr()).await;
                sentinel = Some(watch(&master).await);
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
        let urls: Vec<_> = match &sentinel {
            Some(sentinel) => vec![sentinel.url()],
            None if links.is_empty() => nodes.iter().map(RedisServer::url).collect(),
            None => {
                let scheme = if store == "etcd" { "http" } else { "redis" };
                let url = |link: &Proxy| format!("{scheme}://{}", link.addr);
                links.iter().map(url).collect()
            }
        };
        let nodes = nodes.into_iter().map(Mutex::new).collect();
        Self {
            store,
            urls,
            nodes,
            etcd: etcd.map(Mutex::new),
            links,
            clock,
            sentinel,
        }
    }

    /// Executes a fault. Returns false if it did not happen.
    pub async fn suffer(&self, planned: Planned) -> bool {
        let Planned {
            fault,
            lasts,
            choice,
        } = planned;
        if let Some(etcd) = &self.etcd {
            return self.at_etcd(etcd, planned).await;
        }
        let mut n = choice % self.nodes.len();
        if fault == Fault::NodePromoted {
            return self.promote(choice).await;
        }
        if fault == Fault::NodeClockJumps {
            let jump = ["+1d", "-1h", "+30y", "-3s"][choice % 4];
            let jumped = jumps(&self.clock, jump, self.time(), lasts).await;
            if jump.starts_with('+') {
                // Leases that were granted while the clock was ahead expire only after a day or
                // thirty years.
                let node = self.nodes[0].lock().await;
                try_command(node.url(), &["FLUSHALL"]).await;
            }
            return jumped;
        }
        if matches!(fault, Fault::NodeFlushed | Fault::NodeEvicts) {
            let Some(master) = self.find(choice, "master").await else {
                return false;
            };
            n = master;
        }
        let mut node = self.nodes[n].lock().await;
        match fault {
            Fault::NodeFrozen => freeze(|signal| node.signal(signal), lasts).await,
            // The node restarts empty, or with the last file that was saved.
            Fault::NodeKilled => {
                node.kill();
                sleep(lasts).await;
                node.start_again().await;
            }
            Fault::NodeFromOldFile => {
                if try_command(node.url(), &["SAVE"]).await.is_none() {
                    return false;
                }
                sleep(lasts).await;
                node.kill();
                node.start_again().await;
            }
            Fault::NodeFlushed => return try_command(node.url(), &["FLUSHALL"]).await.is_some(),
            Fault::NodeEvicts => {
                let policy = ["CONFIG", "SET", "maxmemory-policy", "allkeys-random"];
                try_command(node.url(), &policy).await;
                let little = try_command(node.url(), &["CONFIG", "SET", "maxmemory", "1"]).await;
                sleep(lasts).await;
                try_command(node.url(), &["CONFIG", "SET", "maxmemory", "0"]).await;
                return little.is_some();
            }
            _ => disturb(&self.links[n], planned).await,
        }
        true
    }

    async fn at_etcd(&self, etcd: &Mutex<EtcdCluster>, planned: Planned) -> bool {
        let Planned {
            fault,
            lasts,
            choice,
        } = planned;
        let n = choice % self.links.len();
        match fault {
            Fault::NodeFrozen => {
                let etcd = etcd.lock().await;
                freeze(|signal| etcd.signal(n, signal), lasts).await;
            }
            Fault::NodeKilled => {
                let mut etcd = etcd.lock().await;
                etcd.kill(n);
                sleep(lasts).await;
                etcd.start_node(n);
                etcd.is_up().await;
            }
            // The restored cluster keeps its name, so etcd treats it as the same cluster.
            Fault::NodeFromOldFile => {
                let mut etcd = etcd.lock().await;
                etcd.is_up().await;
                let snapshot = etcd.save(&format!("snapshot-{choice}-{}", lasts.as_millis()));
                sleep(lasts).await;
                etcd.restore(&snapshot, "the-cluster").await;
            }
            Fault::NodeFlushed => {
                let etcd = etcd.lock().await;
                etcd.is_up().await;
                etcd.delete_all().await;
            }
            _ => disturb(&self.links[n], planned).await,
        }
        true
    }

    /// Reads the clock of the first node, in seconds.
    async fn time(&self) -> Option<i64> {
        let url = self.nodes[0].try_lock().ok()?.url();
        let time = ["EVAL", "return redis.call('TIME')[1]", "0"];
        try_command(url, &time).await?.parse().ok()
    }

    /// Finds a node with this role. The search starts at the chosen node.
    async fn find(&self, choice: usize, role: &str) -> Option<usize> {
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
    async fn promote(&self, choice: usize) -> bool {
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
async fn try_command(url: String, words: &[&str]) -> Option<String> {
    let run = async {
        let client = redis::Client::open(url)?;
        let mut connection = client.get_multiplexed_async_connection().await?;
        let mut command = redis::cmd(words[0]);
        command.arg(&words[1..]).query_async(&mut connection).await
    };
    let answer: redis::Value = timeout(Duration::from_secs(5), run).await.ok()?.ok()?;
    redis::from_redis_value(answer).ok()
}

/// Starts a sentinel that knows the replica of the master.
async fn watch(master: &RedisServer) -> Sentinel {
    let sentinel = Sentinel::start(master);
    eventually("the sentinel knows the replica", async || {
        let info = try_command(sentinel.url(), &["INFO", "sentinel"]).await;
        info.is_some_and(|info| info.contains("slaves=1"))
    })
    .await;
    sentinel
}
