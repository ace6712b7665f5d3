//! The obvious protocol: Redlock with a counter. The tests show that they detect the faults of this
//! protocol, which [`QuorumLeases`](tower_fence_redlock::QuorumLeases) does not have.

use std::{sync::Arc, time::Duration};

use futures_util::future::join_all;
use redis::{AsyncConnectionConfig, Client, RedisResult, Script, aio::MultiplexedConnection};
use tokio::{sync::Mutex, time::timeout};

use crate::support::nodes::NODE_WAIT;

/// A script that takes the lease if it is free, and returns the value that a token has to exceed.
const TAKE: &str = "
    local holder = redis.call('GET', KEYS[1])
    if holder and holder ~= ARGV[1] then
        return {'held'}
    end
    redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
    if ARGV[3] == 'time' then
        local time = redis.call('TIME')
        return {'taken', time[1] .. string.format('%05d', time[2] / 10)}
    end
    return {'taken', redis.call('GET', KEYS[2]) or '0'}";

/// A script that writes the counter back if the lease still exists.
const SEAL: &str = "
    if redis.call('GET', KEYS[1]) ~= ARGV[1] then
        return {'refused'}
    end
    redis.call('SET', KEYS[2], ARGV[2])
    return {'sealed'}";

const RELEASE: &str = "
    if redis.call('GET', KEYS[1]) == ARGV[1] then
        redis.call('DEL', KEYS[1])
    end
    return {}";

/// A client of the naive protocol. Its token is one above the highest counter of the nodes that
/// granted the lease.
#[derive(Clone)]
pub struct Naive {
    nodes: Vec<Node>,
    /// The number of nodes that a grant needs.
    needs: usize,
    /// The value that a token has to exceed: a `counter`, or the `time` of the nodes.
    by: &'static str,
}

impl Naive {
    pub fn new(urls: &[String], needs: usize) -> Self {
        Self {
            nodes: urls.iter().map(|url| Node::new(url, NODE_WAIT)).collect(),
            needs,
            by: "counter",
        }
    }

    /// Uses the clocks of the nodes instead of a counter.
    pub fn by_time(urls: &[String]) -> Self {
        Self {
            by: "time",
            ..Self::new(urls, urls.len() / 2 + 1)
        }
    }

    /// Returns the same store with other connections to its nodes, in the opposite order.
    pub fn reversed(&self) -> Self {
        let reversed = |node: &Node| Node {
            connection: Arc::default(),
            ..node.clone()
        };
        Self {
            nodes: self.nodes.iter().rev().map(reversed).collect(),
            ..*self
        }
    }

    pub fn patient(mut self, wait: Duration) -> Self {
        for node in &mut self.nodes {
            node.wait = wait;
        }
        self
    }

    /// Returns a token if enough nodes grant the lease.
    pub async fn acquire(&self, resource: &str, id: &str, ttl: Duration) -> Option<i64> {
        let take = self.call(TAKE, resource, &[id, &ttl.as_millis().to_string(), self.by]);
        let answers = join_all(self.nodes.iter().map(|node| node.run(&take))).await;
        let counted = |answer: &Option<Vec<String>>| match answer.as_deref() {
            Some([word, counted]) if word == "taken" => counted.parse::<i64>().ok(),
            _ => None,
        };
        let counted: Vec<_> = answers.iter().map(counted).collect();
        if counted.iter().flatten().count() < self.needs {
            self.release(resource, id).await;
            return None;
        }
        let token = counted.iter().flatten().max()? + 1;
        let seal = self.call(SEAL, resource, &[id, &token.to_string()]);
        let nodes = self.nodes.iter().zip(&counted);
        let taken = nodes.filter(|(_, counted)| counted.is_some());
        let answers = join_all(taken.map(|(node, _)| node.run(&seal))).await;
        let sealed = answers.iter().flatten();
        let sealed = sealed.filter(|words| *words == &["sealed"]);
        if sealed.count() < self.needs {
            self.release(resource, id).await;
            return None;
        }
        Some(token)
    }

    pub async fn release(&self, resource: &str, id: &str) {
        let release = self.call(RELEASE, resource, &[id]);
        join_all(self.nodes.iter().map(|node| node.run(&release))).await;
    }

    fn call(&self, script: &str, resource: &str, arguments: &[&str]) -> Call {
        // Protocols that need more or fewer nodes have separate keys.
        let prefix = format!("naive-{}-{}", self.needs, self.by);
        let keys = ["lease", "counter"].map(|key| format!("{prefix}:{key}:{resource}"));
        Call {
            script: Script::new(script),
            keys,
            arguments: arguments.iter().map(|text| (*text).to_owned()).collect(),
        }
    }
}

struct Call {
    script: Script,
    keys: [String; 2],
    arguments: Vec<String>,
}

#[derive(Clone)]
struct Node {
    client: Client,
    wait: Duration,
    connection: Arc<Mutex<Option<MultiplexedConnection>>>,
}

impl Node {
    fn new(url: &str, wait: Duration) -> Self {
        Self {
            client: Client::open(url).unwrap(),
            wait,
            connection: Arc::default(),
        }
    }

    async fn run(&self, call: &Call) -> Option<Vec<String>> {
        let run = async {
            let mut connection = self.connection().await?;
            let mut script = call.script.key(&call.keys[..]);
            script.arg(&call.arguments[..]);
            script.invoke_async(&mut connection).await
        };
        let answer = timeout(self.wait, run).await.ok().and_then(Result::ok);
        if answer.is_none()
            && let Ok(mut connection) = self.connection.try_lock()
        {
            connection.take();
        }
        answer
    }

    async fn connection(&self) -> RedisResult<MultiplexedConnection> {
        let mut current = self.connection.lock().await;
        if let Some(connection) = &*current {
            return Ok(connection.clone());
        }
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(self.wait))
            .set_response_timeout(Some(self.wait));
        let client = &self.client;
        let connection = client.get_multiplexed_async_connection_with_config(&config);
        Ok(current.insert(connection.await?).clone())
    }
}
