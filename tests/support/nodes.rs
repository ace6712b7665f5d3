//! Five independent Redis servers for a quorum, each behind a proxy.

use std::time::Duration;

use futures_util::future::join_all;
use sqlx::Sqlite;
use tower_fence_redlock::{QuorumLeases, QuorumLeasesBuilder};

use super::{
    database::Fresh,
    proxy::{Link, Passage, Proxy, Sender},
    redis::RedisServer,
};

pub const NODES: usize = 5;
/// The timeout for each node. It is long, because a busy machine may answer late.
pub const NODE_WAIT: Duration = Duration::from_secs(1);

/// The nodes. Issuers connect to the proxies.
pub struct Nodes {
    pub servers: Vec<RedisServer>,
    pub proxies: Vec<Proxy>,
}

impl Nodes {
    pub async fn start(options: &[&str]) -> Self {
        let servers = join_all((0..NODES).map(|_| RedisServer::start(options))).await;
        Self::of(servers).await
    }

    pub async fn of(servers: Vec<RedisServer>) -> Self {
        let proxies = servers.iter().map(|server| Proxy::to(server.addr()));
        let proxies = join_all(proxies).await;
        Self { servers, proxies }
    }

    /// Starts nodes whose proxies apply a rule to each message. `rule(n)` creates the rule of each
    /// new connection to node `n`.
    pub async fn judging<R>(rule: impl Fn(usize) -> R + Clone + Send + Sync + 'static) -> Self
    where
        R: FnMut(Sender, &[u8]) -> Passage + Send + 'static,
    {
        let servers = join_all((0..NODES).map(|_| RedisServer::start(&[]))).await;
        let proxies = servers.iter().enumerate().map(|(n, server)| {
            let rule = rule.clone();
            Proxy::judging_each(server.addr(), move || rule(n))
        });
        let proxies = join_all(proxies).await;
        Self { servers, proxies }
    }

    pub fn urls(&self) -> Vec<String> {
        let servers = self.servers.iter().zip(&self.proxies);
        let urls = servers.map(|(server, proxy)| proxy.url(&server.url()));
        urls.collect()
    }

    /// Cuts off all nodes except these.
    pub fn reach_only(&self, reachable: &[usize]) {
        for (n, proxy) in self.proxies.iter().enumerate() {
            proxy.set(match reachable.contains(&n) {
                true => Link::Whole,
                false => Link::Cut,
            });
        }
    }

    pub fn reach_all(&self) {
        self.reach_only(&[0, 1, 2, 3, 4]);
    }

    /// Returns an issuer without any cached state.
    pub fn leases(&self, epochs: &Fresh<Sqlite>) -> QuorumLeases {
        leases_on(&self.urls(), epochs, NODE_WAIT)
    }
}

/// Returns an issuer without any cached state, with this timeout for each node.
pub fn leases_on(urls: &[String], epochs: &Fresh<Sqlite>, node_timeout: Duration) -> QuorumLeases {
    let urls: Vec<_> = urls.iter().map(String::as_str).collect();
    let builder = QuorumLeasesBuilder::new(epochs.fence()).node_timeout(node_timeout);
    builder.connect_lazy(&urls).unwrap()
}
