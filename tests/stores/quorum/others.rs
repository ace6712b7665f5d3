//! Nodes with a wrong name, and nodes of another quorum: the error names the node and the remedy.

use sqlx::Sqlite;
use tower_fence::lease::{Acquire, LeaseError, Leases};
use tower_fence_redlock::{QuorumLeases, QuorumLeasesBuilder};

use crate::support::{
    database::{Fresh, TestDatabase},
    lease::{LONG, grant, messages_of, sku},
    redis::{RedisServer, delete_keys, fresh_prefix, shared_node_urls},
};

fn connect(db: &Fresh<Sqlite>, prefix: &str, urls: &[String]) -> Result<QuorumLeases, LeaseError> {
    let urls: Vec<_> = urls.iter().map(String::as_str).collect();
    let builder = QuorumLeasesBuilder::new(db.fence()).key_prefix(prefix);
    let builder = builder.node_timeout(std::time::Duration::from_secs(2));
    builder.connect_lazy(&urls)
}

#[tokio::test]
async fn invalid_url_is_named_by_index_without_its_text() {
    let (db, urls) = (Sqlite::fresh(1).await, shared_node_urls());
    for wrong in [
        "",
        "s3cret",
        "http://:s3cret@a",
        "redis://:s3cret@",
        "redis://:s3cret@a:port",
        "redis://:s3cret@a/first",
        "redis://:s3cret@a:99999",
    ] {
        let urls = [urls[0].clone(), wrong.into(), urls[2].clone()];
        let refused = connect(&db, &fresh_prefix(), &urls).unwrap_err();
        let messages = messages_of(&refused);
        assert!(
            matches!(refused, LeaseError::Misconfigured(_)),
            "{messages}"
        );
        assert_contains!(messages, "node 2 of 3");
        assert!(!messages.contains("s3cret"), "{messages}");
    }
}

#[tokio::test]
async fn a_quorum_has_fifteen_nodes_at_most() {
    let db = Sqlite::fresh(1).await;
    let urls = |count| -> Vec<_> { (0..count).map(|n| format!("redis://node-{n}")).collect() };
    for count in [3, 5, 15] {
        connect(&db, "a", &urls(count)).unwrap();
    }
    for count in [0, 1, 2, 4, 14, 16, 17, 65] {
        let refused = connect(&db, "a", &urls(count));
        assert!(
            matches!(&refused, Err(LeaseError::Invalid { field, .. }) if field == "nodes"),
            "{count}: {refused:?}"
        );
    }
}

/// A node with the counter of another quorum blocks its partition, until its keys are deleted.
#[tokio::test]
async fn a_node_of_another_quorum_is_named_without_secrets() {
    let (db, theirs) = (Sqlite::fresh(4).await, shared_node_urls());
    let fresh = [RedisServer::start(&[]).await, RedisServer::start(&[]).await];
    for server in &fresh {
        let password = ["CONFIG", "SET", "requirepass", "s3cret"];
        server.command(&password).await;
    }
    let prefix = fresh_prefix();
    let their_leases = connect(&db, &prefix, &theirs).unwrap();
    let before = grant(&their_leases, &sku(), LONG).await;
    let mut ours = vec![theirs[0].clone()];
    ours.extend(
        fresh
            .iter()
            .map(|server| server.url().replace("redis://", "redis://:s3cret@")),
    );
    let our_leases = connect(&db, &prefix, &ours).unwrap();
    let refused = our_leases.acquire(&sku(), Acquire::new(LONG)).await;
    let messages = messages_of(&refused.unwrap_err());
    let address = theirs[0].replace("redis://", "");
    assert_contains!(messages, &format!("on the node `{address}/0`"));
    assert_contains!(messages, "delete the keys");
    assert!(!messages.contains("s3cret"), "{messages}");

    delete_keys(&theirs[0], &format!("{prefix}:quorum:*")).await;
    assert!(grant(&our_leases, &sku(), LONG).await.token > before.token);
}
