//! Calls that wait in the queue over real HTTP, with every store that has a queue.

use serde_json::json;

use crate::support::{
    eventually,
    http::{Answer, Server},
    soon,
    store::TestStore,
};

on_every_store_with_a_queue!(call_waits_in_the_queue);

async fn call_waits_in_the_queue<S: TestStore>() {
    let (leases, _, _db) = S::fresh().await;
    let server = Server::issuer(leases).await;
    let first = server.acquire("/locks/a", json!({})).await.json();
    let refused = server.acquire("/locks/a", json!({ "wait_ms": 100 })).await;
    refused.is_problem(409, "lock-held");
    let waiting = server
        .post("/locks/a")
        .json(&json!({ "wait_ms": 30_000, "ttl_ms": 5_000 }));
    let waiting = tokio::spawn(Answer::to(waiting));
    eventually!(
        "the request waits",
        server.inspect("/locks/a").await["waiters"] == 1
    );
    // A client that disconnects is skipped.
    let gone = server.post("/locks/a").json(&json!({ "wait_ms": 30_000 }));
    let gone = tokio::spawn(Answer::to(gone));
    eventually!(
        "the request waits",
        server.inspect("/locks/a").await["waiters"] == 2
    );
    gone.abort();
    soon!(
        "the waiter has left the queue",
        server.inspect("/locks/a").await["waiters"] == 1
    );
    let id = first["lease_id"].as_str().unwrap();
    assert_eq!(server.release("/locks/a", id).await.status, 204);
    let second = waiting.await.unwrap();
    assert_eq!(
        (second.status, second.json()["ttl_ms"].as_u64()),
        (201, Some(5_000))
    );
    assert!(second.json()["token"].as_i64() > first["token"].as_i64());
}
