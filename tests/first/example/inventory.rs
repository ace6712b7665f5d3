//! The example service as a process, on both pairs of stores.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::caller::{Caller, on_servers};
use crate::support::{
    eventually,
    http::Answer,
    process::{Inventory, Process},
};

#[tokio::test]
async fn each_call_answers_as_documented() {
    let service = Inventory::start(&[]).await;
    let caller = Caller::of(&service);
    assert_eq!(caller.get("/healthz").await.status, 200);
    let missing = caller.get("/inventory/sku-1").await;
    missing.is_problem(404, "not-found");
    for path in ["/inventory/%00", "/inventory/%FF"] {
        let problem = caller.get(path).await.is_problem(422, "invalid-request");
        assert_eq!(problem["field"], "resource");
    }
    let token = caller.acquire("sku-1", 30_000).await;
    let decrement = async |body: Value| caller.decrement("sku-1", &token, body).await;
    let missing = decrement(json!({ "quantity": 1 })).await;
    missing.is_problem(404, "not-found");

    let put = caller.client.put(service.url("/inventory/sku-1"));
    let put = put.header("Fencing-Token", &token);
    let put = Answer::to(put.json(&json!({ "stock": 3 }))).await;
    assert_eq!(put.status, 200);
    // The single-use token is used up.
    let again = decrement(json!({ "quantity": 1 })).await;
    again.is_problem(412, "stale-token");

    caller.set("sku-2", 3).await;
    let token = caller.acquire("sku-2", 30_000).await;
    let decrement = async |body: Value| caller.decrement("sku-2", &token, body).await;
    let refused = decrement(json!({ "quantity": 4 })).await;
    assert_eq!(refused.is_problem(409, "out-of-stock")["stock"], 3);
    for body in [
        json!({ "quantity": 0 }),
        json!({ "quantity": -1 }),
        json!({ "quantity": 1.5 }),
        json!({ "quantity": 4_294_967_296_u64 }),
        json!({}),
        json!(7),
        json!({ "quantity": "1" }),
        json!({ "quantity": 1, "price": 2 }),
    ] {
        decrement(body).await.is_problem(422, "invalid-request");
    }
    // None of the failures has used up the token.
    assert_eq!(decrement(json!({ "quantity": 3 })).await.json()["stock"], 0);
}

#[tokio::test]
async fn transfer_changes_both_items_or_neither() {
    let service = Inventory::start(&[]).await;
    let caller = Caller::of(&service);
    let transfer = async |path: &str, tokens: &[&str], quantity: i64| {
        let request = caller.client.post(service.url(path));
        let request = request.header("Fencing-Token", tokens.join(", "));
        Answer::to(request.json(&json!({ "quantity": quantity }))).await
    };
    caller.set("sku-1", 5).await;
    let one = caller.acquire("sku-1", 30_000).await;
    let two = caller.acquire("sku-2", 30_000).await;
    let there = "/inventory/sku-1/transfer/sku-2";
    let answer = transfer(there, &[&one, &two], 2).await;
    answer.is_problem(404, "not-found");
    let put = caller.client.put(service.url("/inventory/sku-2"));
    let put = put
        .header("Fencing-Token", &two)
        .json(&json!({ "stock": 1 }));
    assert_eq!(Answer::to(put).await.status, 200);

    // The token of sku-2 is used up. The whole transfer is refused, and the problem names sku-2.
    let answer = transfer(there, &[&one, &two], 2).await;
    let problem = answer.is_problem(412, "stale-token");
    assert_eq!(problem["resource"], "sku-2");

    let same = "/inventory/sku-1/transfer/sku-1";
    let refused = transfer(same, &[&one], 2).await;
    assert_eq!(refused.is_problem(422, "invalid-request")["field"], "to");
    let refused = transfer(there, &[&one], 2).await;
    refused.is_problem(428, "token-required");

    // This is a new token for sku-2 from another issuer. Any higher integer is admitted.
    let two = r#"999000000000;resource="sku-2""#;
    let answer = transfer(there, &[&one, two], 6).await;
    assert_eq!(answer.is_problem(409, "out-of-stock")["stock"], 5);
    let answer = transfer(there, &[two, &one], 2).await;
    let expected = json!({
        "from": { "sku": "sku-1", "stock": 3 },
        "to": { "sku": "sku-2", "stock": 3 },
    });
    assert_eq!(answer.json(), expected);
}

#[tokio::test]
async fn metrics_report_each_outcome() {
    let service = Inventory::start(&[]).await;
    let caller = Caller::of(&service);
    let first = caller.acquire("a", 100).await;
    caller.set("a", 10).await;
    let stale = caller.decrement("a", &first, json!({ "quantity": 1 }));
    stale.await.is_problem(412, "stale-token");
    let metrics = caller.get("/metrics").await.text;
    for line in [
        "tower_fence_admitted_total{kind=\"write\"} 1",
        "tower_fence_refused_total{problem=\"stale-token\",reason=\"superseded\"} 1",
        "tower_fence_leases_granted_total 2",
        "tower_fence_epochs_begun_total 1",
        "tower_fence_missing_layer_total 0",
        "tower_fence_hold_seconds_count 1",
        "tower_fence_admission_seconds_count 2",
        "tower_fence_lease_wait_seconds_count 2",
    ] {
        assert!(metrics.contains(line), "{line} is not in\n{metrics}");
    }
    // No metric has the resource as a label.
    assert!(!metrics.contains("\"a\""), "{metrics}");
}

#[tokio::test]
async fn a_write_may_be_repeated_under_its_key() {
    let service = Inventory::start(&[]).await;
    let caller = Caller::of(&service);
    caller.set("sku-1", 10).await;
    let token = caller.acquire("sku-1", 30_000).await;
    for replayed in [None, Some("true")] {
        let request = caller
            .client
            .post(service.url("/inventory/sku-1/decrement"))
            .header("Fencing-Token", &token)
            .header("Idempotency-Key", "\"order-7\"");
        let answer = Answer::to(request.json(&json!({ "quantity": 1 }))).await;
        assert_eq!(answer.json()["stock"], 9);
        let mark = answer.headers.get("idempotent-replayed");
        assert_eq!(mark.map(|value| value.to_str().unwrap()), replayed);
    }
}

#[tokio::test]
async fn without_redis_writes_continue_but_grants_fail() {
    let (service, _db, mut redis) = on_servers().await;
    let caller = Caller::of(&service);
    assert_eq!(caller.get("/healthz").await.status, 200);
    caller.set("sku-1", 10).await;
    let token = caller.acquire("sku-1", 30_000).await;
    redis.kill();
    let unhealthy = caller.get("/healthz").await;
    unhealthy.is_problem(503, "store-unavailable");
    let refused = caller.client.post(service.url("/locks/sku-2"));
    let refused = Answer::to(refused).await;
    refused.is_problem(503, "store-unavailable");
    let order = json!({ "quantity": 1 });
    let answer = caller.decrement("sku-1", &token, order).await;
    assert_eq!(answer.json()["stock"], 9);
    redis.start_again().await;
    eventually!(
        "the service is healthy",
        caller.get("/healthz").await.status == 200
    );
}

#[tokio::test]
async fn signal_lets_pending_writes_finish() {
    for signal in ["-INT", "-TERM"] {
        let mut service = Inventory::start(&[]).await;
        let caller = Caller::of(&service);
        caller.set("sku-1", 10).await;
        let token = caller.acquire("sku-1", 30_000).await;

        // Sends half of the request, then the signal to the service, and then the rest of the
        // request.
        let addr = service.url.strip_prefix("http://").unwrap();
        let mut stream = tokio::net::TcpStream::connect(addr).await.unwrap();
        let body = r#"{"quantity":1}"#;
        let head = format!(
            "POST /inventory/sku-1/decrement HTTP/1.1\r\nHost: x\r\nFencing-Token: {token}\r\n\
             Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{}",
            body.len(),
            &body[..5],
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        tokio::time::sleep(Duration::from_millis(100)).await;
        service.signal(signal);
        eventually!("the server stops", service.log().contains("stopping"));
        stream.write_all(&body.as_bytes()[5..]).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        assert!(answer.ends_with(r#"{"sku":"sku-1","stock":9}"#), "{answer}");
        assert_eq!(service.exit().await.code(), Some(0));
    }
}

/// The maximum wait of the request is longer than the timeout for requests in flight.
#[tokio::test]
async fn signal_ends_requests_that_wait_for_a_lease() {
    let mut service = Inventory::start(&[]).await;
    let caller = Caller::of(&service);
    caller.acquire("sku-1", 600_000).await;
    let request = caller.client.post(service.url("/locks/sku-1"));
    let waiting = tokio::spawn(Answer::to(request.json(&json!({ "wait_ms": 60_000 }))));
    eventually!(
        "the request waits",
        caller.get("/locks/sku-1").await.json()["waiters"] == 1
    );
    service.signal("-TERM");
    let refused = waiting.await.unwrap();
    refused.is_problem(503, "server-busy");
    assert_eq!(service.exit().await.code(), Some(0));
    assert!(!service.log().contains("did not finish"));
}

#[tokio::test]
async fn tokens_increase_after_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let url = format!("sqlite:{}", folder.path().join("inventory.db").display());
    let mut last = 0;
    for _ in 0..3 {
        let service = Inventory::start(&[("DATABASE_URL", &url)]).await;
        let token = Caller::of(&service).acquire("sku-1", 30_000).await;
        let number = token.split(';').next().unwrap().parse::<i64>().unwrap();
        assert!(number > last, "{number} is not above {last}");
        last = number;
        // The process is killed, not stopped, so the lease is still held.
    }
}

#[tokio::test]
async fn invalid_settings_are_refused() {
    for (name, value) in [("WAIT_LIMIT_MS", "5s"), ("RUST_LOG", "info,==")] {
        let variables = [("LISTEN_ADDR", "127.0.0.1:0"), (name, value)];
        let mut refused = Process::start("inventory", &[], &variables);
        assert!(!refused.exit().await.success());
        assert!(refused.log().contains(name), "{}", refused.log());
    }
}
