//! A Redis Cluster of three masters with one replica each.

use std::process::Command;

use super::{eventually, redis::RedisServer};

pub struct RedisCluster {
    pub nodes: Vec<RedisServer>,
}

impl RedisCluster {
    pub async fn start() -> Self {
        let mut nodes = vec![];
        for _ in 0..6 {
            // A replica may be promoted even if it lags behind.
            let options = "--cluster-enabled yes --cluster-node-timeout 500 \
                           --cluster-replica-validity-factor 0 --repl-ping-replica-period 1";
            let options: Vec<_> = options.split(' ').collect();
            nodes.push(RedisServer::start(&options).await);
        }
        let addresses = nodes.iter().map(|node| node.addr().to_string());
        let created = Command::new("redis-cli")
            .args(["--cluster", "create"])
            .args(addresses)
            .args(["--cluster-replicas", "1", "--cluster-yes"])
            .output()
            .expect("redis-cli is not installed: use tests/run");
        assert!(created.status.success(), "{created:?}");
        let cluster = Self { nodes };
        eventually("all nodes agree and have their data", async || {
            for node in &cluster.nodes {
                let replication = node.info("INFO replication").await;
                let in_step = replication.contains("connected_slaves:1")
                    || replication.contains("master_link_status:up");
                let info = node.info("CLUSTER INFO").await;
                if !in_step || !info.contains("cluster_state:ok") {
                    return false;
                }
            }
            true
        })
        .await;
        cluster
    }

    pub fn urls(&self) -> Vec<String> {
        self.nodes.iter().map(RedisServer::url).collect()
    }

    /// Returns the master and the replica of the slot of a key.
    pub async fn shard_of(&self, key: &str) -> (usize, usize) {
        let slot = self.nodes[0].command(&["CLUSTER", "KEYSLOT", key]).await;
        let slot: i64 = redis::from_redis_value(slot).unwrap();
        let (mut master, mut master_id) = (None, String::new());
        for (n, node) in self.nodes.iter().enumerate() {
            // The fields are: ID address flags master … slots.
            for line in node.info("CLUSTER NODES").await.lines() {
                let fields: Vec<&str> = line.split(' ').collect();
                let serves = fields[8..].iter().any(|range| {
                    let (first, last) = range.split_once('-').unwrap_or((range, range));
                    let bounds = (first.parse::<i64>(), last.parse::<i64>());
                    matches!(bounds, (Ok(first), Ok(last)) if (first..=last).contains(&slot))
                });
                if fields[2] == "myself,master" && serves {
                    master = Some(n);
                    master_id = fields[0].to_owned();
                }
            }
        }
        let master = master.expect("no master has the slot");
        for (n, node) in self.nodes.iter().enumerate() {
            for line in node.info("CLUSTER NODES").await.lines() {
                let fields: Vec<&str> = line.split(' ').collect();
                if fields[2] == "myself,slave" && fields[3] == master_id {
                    return (master, n);
                }
            }
        }
        panic!("the master has no replica");
    }
}
