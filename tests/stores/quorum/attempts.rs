//! Attempts for one lease that have the same number, because two processes requested its lease id
//! in the same millisecond.

use crate::support::redis::{fresh_prefix, open, shared_node_urls};

const TAKE: &str = concat!(
    include_str!("../../../crates/redlock/src/lua/node.lua"),
    include_str!("../../../crates/redlock/src/lua/take.lua"),
);

struct Node {
    prefix: String,
}

impl Node {
    /// Returns the answer to the attempt with this number and ticket, without the counter.
    async fn take(&self, number: &str, ticket: &str) -> Vec<String> {
        let [counter, lease] =
            ["counter", "lease:sku-1"].map(|key| format!("{}:quorum:{{110}}:{key}", self.prefix));
        let mut connection = open(&shared_node_urls()[0]).await.unwrap();
        let mut take = redis::cmd("EVAL");
        take.arg(TAKE).arg(2).arg(&[counter, lease]);
        take.arg(&["the-source", "a b c", "f00d", "1000000000", "the-lease"]);
        take.arg(&[number, ticket, "60000", "0", "", "", ""]);
        let answer: Vec<String> = take.query_async(&mut connection).await.unwrap();
        let words = answer.iter().flat_map(|text| text.split(' '));
        words.take(4).map(str::to_owned).collect()
    }
}

#[tokio::test]
async fn attempt_with_the_later_ticket_is_the_newer_one() {
    let prefix = fresh_prefix();
    let node = Node { prefix };
    let first = node.take("7", "20").await;
    assert_eq!(first[0], "taken");
    assert_eq!(node.take("7", "20").await, first, "repeated");
    let older = ["older", "7"];
    assert_eq!(node.take("7", "19").await, older);
    let newer = node.take("7", "3").await;
    assert_eq!(newer[0], "taken");
    assert_ne!(newer, first, "the newer attempt has its own stamp");
    assert_eq!(node.take("7", "20").await, older);
    // A higher number supersedes a lower one, whatever the tickets are.
    let last = node.take("8", "1").await;
    assert_eq!(last[0], "taken");
    assert_ne!(last, newer);
    assert_eq!(node.take("7", "3").await, ["older", "8"]);
    assert_eq!(node.take("8", "1").await, last);
}
