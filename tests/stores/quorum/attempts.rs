//! Attempts of one lease that have the same number, since two processes have asked under its id in one millisecond.

use crate::support::redis::{fresh_prefix, shared_node_urls};

const TAKE: &str = concat!(
    include_str!("../../../src/lease/quorum/lua/node.lua"),
    include_str!("../../../src/lease/quorum/lua/take.lua"),
);

/// A node, and the lease that is taken there.
struct Node {
    prefix: String,
}

impl Node {
    /// What the attempt with this number and nonce is answered, but for the clock.
    async fn take(&self, number: &str, nonce: &str) -> Vec<String> {
        let [clock, lease] =
            ["clock", "lease:sku-1"].map(|key| format!("{}:quorum:{{110}}:{key}", self.prefix));
        let client = redis::Client::open(&*shared_node_urls()[0]).unwrap();
        let mut connection = client.get_multiplexed_async_connection().await.unwrap();
        let mut take = redis::cmd("EVAL");
        take.arg(TAKE).arg(2).arg(&[clock, lease]);
        take.arg(&["the-source", "a b c", "f00d", "the-lease"]);
        take.arg(&[number, nonce, "60000", "0", "", "0"]);
        let mut answer: Vec<String> = take.query_async(&mut connection).await.unwrap();
        answer.truncate(4);
        answer
    }
}

#[tokio::test]
async fn the_one_with_the_higher_nonce_is_the_newer_one() {
    let prefix = fresh_prefix();
    let node = Node { prefix };
    let first = node.take("7", "20").await;
    assert_eq!(first[0], "taken");
    assert_eq!(node.take("7", "20").await, first, "repeated");
    let older = ["older", "7"];
    assert_eq!(node.take("7", "9").await, older);
    let newer = node.take("7", "100").await;
    assert_eq!(newer[0], "taken");
    assert_ne!(newer, first, "a stamp of its own");
    assert_eq!(node.take("7", "20").await, older);
    // A higher number goes before any nonce.
    let last = node.take("8", "1").await;
    assert_eq!(last[0], "taken");
    assert_ne!(last, newer);
    assert_eq!(node.take("7", "100").await, ["older", "8"]);
    assert_eq!(node.take("8", "1").await, last);
}
