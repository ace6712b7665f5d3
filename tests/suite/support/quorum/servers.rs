//! The servers of a quorum.

use std::path::PathBuf;

use futures_util::future::join_all;

use crate::support::{
    eventually,
    redis::{RedisServer, shared_node_urls},
};

/// A node is one of these, counted from 1.
pub enum Servers {
    /// Three that all tests share. Nothing can be lost there but keys.
    Shared(Vec<String>),
    Own(Vec<RedisServer>),
}

/// The files of a server.
pub type Snapshot = Vec<(PathBuf, Vec<u8>)>;

impl Servers {
    pub fn shared() -> Self {
        Self::Shared(shared_node_urls())
    }

    /// Servers that come back empty. A replica does not wait for others.
    pub async fn own(count: usize) -> Self {
        Self::start(count, &["--repl-diskless-sync-delay", "0"]).await
    }

    /// Three servers that have written to their files what they have answered. (By default they put that off while the
    /// disk is busy.)
    pub async fn with_files() -> Self {
        Self::start(3, &["--appendonly", "yes", "--appendfsync", "no"]).await
    }

    async fn start(count: usize, options: &[&str]) -> Self {
        let servers = (0..count).map(|_| RedisServer::start(options));
        Self::Own(join_all(servers).await)
    }

    pub(super) fn server(&mut self, node: usize) -> &mut RedisServer {
        match self {
            Self::Shared(_) => panic!("a node that all tests share stays as it is"),
            Self::Own(servers) => &mut servers[node - 1],
        }
    }

    pub(super) async fn command(&mut self, node: usize, words: &[&str]) -> redis::Value {
        let url = match self {
            Self::Shared(urls) => urls[node - 1].clone(),
            Self::Own(servers) => servers[node - 1].url(),
        };
        let client = redis::Client::open(url).unwrap();
        let mut connection = client.get_multiplexed_async_connection().await.unwrap();
        let mut command = redis::cmd(words[0]);
        let answer = command.arg(&words[1..]).query_async(&mut connection).await;
        answer.unwrap()
    }

    pub(super) async fn replicate(&mut self, server: usize, master: usize) {
        let port = self.server(master).addr().port().to_string();
        let words = ["REPLICAOF", "127.0.0.1", &port];
        self.command(server, &words).await;
        let master = &*self.server(master);
        eventually("the replica has all", async || {
            let info = master.info("INFO replication").await;
            info.contains("state=online")
        })
        .await;
    }

    pub(super) async fn promote(&mut self, server: usize, master: usize) {
        self.command(server, &["REPLICAOF", "NO", "ONE"]).await;
        let master = &*self.server(master);
        eventually("the master stands alone again", async || {
            let info = master.info("INFO replication").await;
            info.contains("connected_slaves:0")
        })
        .await;
    }
}
