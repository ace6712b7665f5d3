//! A quorum of Redis nodes, and clients that are played step by step: what they send arrives late, twice or never, as
//! a test says. They send the scripts of the crate, and do with the answers what its store does; one rule can be left
//! out.

mod client;
mod rules;
mod servers;
mod verdict;

pub use self::{
    client::Request,
    rules::Rule,
    servers::Servers,
    verdict::{Violation, holds, is_caught},
};

use self::{rules::Script, verdict::Event};
use super::redis::fresh_prefix;

/// The nodes, the database, and what the clients were answered.
pub struct Quorum<'a> {
    servers: &'a mut Servers,
    without: Option<Rule>,
    prefix: String,
    /// The epoch that the database has handed out last.
    epoch: i64,
    /// The attempt that was begun last.
    attempt: u64,
    step: usize,
    events: Vec<Event>,
}

/// Of three nodes. Another server that stands behind one of them has a higher number.
const MAJORITY: usize = 2;

/// The resource that is meant where none is named.
const RESOURCE: &str = "sku-1";

impl<'a> Quorum<'a> {
    fn new(servers: &'a mut Servers, without: Option<Rule>) -> Self {
        Self {
            servers,
            without,
            prefix: fresh_prefix(),
            epoch: 0,
            attempt: 0,
            step: 0,
            events: vec![],
        }
    }

    fn lacks(&self, rule: Rule) -> bool {
        self.without == Some(rule)
    }

    fn clock_key(&self) -> String {
        format!("{}:quorum:{{110}}:clock", self.prefix)
    }

    /// All resources are in the partition of `sku-1`.
    fn lease_key(&self, resource: &str) -> String {
        format!("{}:quorum:{{110}}:lease:{resource}", self.prefix)
    }

    async fn run(
        &mut self,
        node: usize,
        script: Script,
        (resource, lease): (&str, &str),
        more: &[String],
    ) -> Vec<String> {
        self.step += 1;
        let text = script.without(self.without);
        let (clock, key) = (self.clock_key(), self.lease_key(resource));
        let fresh = format!("{:032x}", rand::random::<u128>());
        let mut words = vec!["EVAL", &text, "2", &clock, &key];
        words.extend(["the-source", "a b c", &fresh, lease]);
        words.extend(more.iter().map(String::as_str));
        let answer = self.servers.command(node, &words).await;
        redis::from_redis_value(answer).unwrap()
    }

    fn next_epoch(&mut self, known: i64) -> i64 {
        self.epoch = self.epoch.max(known) + 1;
        self.epoch
    }

    /// What nodes answer to the first contact of the store.
    pub async fn check(&mut self, nodes: &[usize]) -> Vec<String> {
        let mut answers = vec![];
        for &node in nodes {
            let answer = self.run(node, rules::CHECK, ("", ""), &[]).await;
            answers.push(answer[0].clone());
        }
        answers
    }

    /// Keys of the lease end on these nodes, by their time or before it.
    pub async fn expire(&mut self, nodes: &[usize]) {
        let key = self.lease_key(RESOURCE);
        for &node in nodes {
            self.servers.command(node, &["DEL", &key]).await;
        }
    }

    /// A node runs out of memory, and gives up its clock.
    pub async fn evict_clock(&mut self, node: usize) {
        let key = self.clock_key();
        self.servers.command(node, &["DEL", &key]).await;
    }

    /// Leaves no clock behind where others have theirs; leases end by themselves.
    async fn finish(&mut self) {
        if let Servers::Shared(urls) = &*self.servers {
            for node in 1..=urls.len() {
                self.evict_clock(node).await;
            }
        }
    }

    pub async fn flush(&mut self, node: usize) {
        self.servers.command(node, &["FLUSHALL"]).await;
    }

    /// A node without files is started again, and has nothing any more.
    pub async fn restart_empty(&mut self, node: usize) {
        let server = self.servers.server(node);
        server.kill();
        server.start_again().await;
    }

    /// What a node has in its files now.
    pub fn snapshot(&mut self, node: usize) -> servers::Snapshot {
        self.servers.server(node).append_only_files()
    }

    /// A node is started again, from files of an earlier moment.
    pub async fn restart_from(&mut self, node: usize, snapshot: servers::Snapshot) {
        let server = self.servers.server(node);
        server.kill();
        server.restore(snapshot);
        server.start_again().await;
    }

    /// A server becomes the replica of another one, and has all that it has.
    pub async fn replicate(&mut self, server: usize, master: usize) {
        self.servers.replicate(server, master).await;
    }

    /// A replica of this one becomes a master, too.
    pub async fn promote(&mut self, server: usize, master: usize) {
        self.servers.promote(server, master).await;
    }
}
