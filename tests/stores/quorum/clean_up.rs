//! What the store on a quorum takes back when an attempt fails: what that attempt has stored, and nothing of an earlier
//! one.

use std::sync::Mutex;

use tower_fence::{
    epochs::{Epoch, EpochFuture, Epochs, SourceId},
    lease::QuorumLeases,
};

use crate::support::{
    lease::{LONG, grant, sku},
    redis::{fresh_prefix, shared_node_urls},
};

/// A source that is asked while an attempt has its keys, and has not chosen its token. The first time, it makes the nodes
/// such that the attempt fails.
struct Meanwhile {
    nodes: Vec<redis::Client>,
    key: String,
    /// The tokens on the nodes whenever it was asked again.
    tokens: Mutex<Vec<Vec<String>>>,
}

/// `id:number:nonce:history:incarnation:serial:token:delay:owner`.
const TOKEN: usize = 6;

impl Meanwhile {
    async fn command(&self, node: usize, words: &[&str]) -> Option<String> {
        let client = &self.nodes[node];
        let mut connection = client.get_multiplexed_async_connection().await.unwrap();
        let mut command = redis::cmd(words[0]);
        command.arg(&words[1..]);
        command.query_async(&mut connection).await.unwrap()
    }

    async fn set(&self, node: usize, value: &str) {
        self.command(node, &["SET", &self.key, value, "PX", "60000"])
            .await;
    }

    async fn value(&self, node: usize) -> Vec<String> {
        let value = self.command(node, &["GET", &self.key]).await.unwrap();
        value.split(':').map(str::to_owned).collect()
    }

    /// The first node got its key late: it has the token that this attempt is going to choose, from an earlier one. The last
    /// one has lost its key.
    async fn make_it_fail(&self, epoch: Epoch) {
        let mut late = self.value(1).await;
        let info = self.command(0, &["INFO", "replication"]).await.unwrap();
        let (_, history) = info.split_once("master_replid:").unwrap();
        late[3] = history.split_whitespace().next().unwrap().to_owned();
        late[TOKEN] = epoch.token(1).unwrap().to_string();
        self.set(0, &late.join(":")).await;
        self.command(2, &["GETDEL", &self.key]).await;
    }
}

impl Epochs for &'static Meanwhile {
    fn next_epoch(&self, _: u8, at_least: Epoch) -> EpochFuture<'_> {
        Box::pin(async move {
            if self.tokens.lock().unwrap().is_empty() {
                self.make_it_fail(at_least).await;
            }
            let mut tokens = vec![];
            for node in 0..self.nodes.len() - 1 {
                tokens.push(self.value(node).await.swap_remove(TOKEN));
            }
            self.tokens.lock().unwrap().push(tokens);
            Ok(at_least)
        })
    }

    fn bring_back(&self, _: u8, seen: Epoch) -> EpochFuture<'_> {
        Box::pin(async move { Ok(seen) })
    }

    fn source_id(&self) -> EpochFuture<'_, SourceId> {
        Box::pin(async { Ok(SourceId::new("meanwhile").unwrap()) })
    }
}

#[tokio::test]
async fn an_attempt_that_fails_leaves_the_token_of_an_earlier_one_where_it_is() {
    let (prefix, urls) = (fresh_prefix(), shared_node_urls());
    let urls: Vec<_> = urls.iter().map(String::as_str).collect();
    let open = |url: &&str| redis::Client::open(*url).unwrap();
    let source: &_ = Box::leak(Box::new(Meanwhile {
        nodes: urls.iter().map(open).collect(),
        key: format!("{prefix}:quorum:{{110}}:lease:sku-1"),
        tokens: Mutex::default(),
    }));
    // Another lease has the first node at first, so that its clock is not counted.
    source.set(0, "other:1:1:aa:aa:1:7:0:").await;
    let builder = QuorumLeases::builder(source).key_prefix(&prefix);
    let builder = builder.node_wait(LONG).command_wait(LONG);
    let leases = builder.connect(&urls).await.unwrap();
    let lease = grant(&leases, &sku(), LONG).await;
    assert_eq!(lease.token.get(), 2_000_000_001);
    let tokens = source.tokens.lock().unwrap();
    // On the first node what was there is there still; what the attempt had stored on the second one is gone.
    assert_eq!(*tokens, [["1000000001", ""], ["1000000001", ""]]);
}
