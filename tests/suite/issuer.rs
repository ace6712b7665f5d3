//! The issuer over real HTTP, over both stores.

use std::time::Duration;

use axum::Router;
use serde_json::json;
use tower_fence::issuer::{self, Issuer};

use crate::{
    leases::{TestStore, on_both_stores},
    support::http::{Answer, Server},
};

on_both_stores!(
    the_life_of_a_lease,
    a_held_lock_says_when_to_come_back,
    a_client_may_choose_the_lease_id,
    a_stranger_can_neither_renew_nor_release,
    each_wrong_request_has_its_answer,
    the_limits_can_be_set,
);

async fn start<L: TestStore>(leases: L) -> Server {
    Server::start(Router::new().nest("/locks", issuer::router(leases))).await
}

impl Server {
    async fn acquire(&self, path: &str, body: serde_json::Value) -> Answer {
        Answer::to(self.post(path).json(&body)).await
    }

    async fn renew(&self, path: &str, id: &str, body: serde_json::Value) -> Answer {
        let request = self.client.put(self.url(path)).header("Lease-Id", id);
        Answer::to(request.json(&body)).await
    }

    async fn release(&self, path: &str, id: &str) -> Answer {
        Answer::to(self.client.delete(self.url(path)).header("Lease-Id", id)).await
    }

    async fn inspect(&self, path: &str) -> serde_json::Value {
        let answer = Answer::to(self.get(path)).await;
        assert_eq!(answer.status, 200);
        assert_eq!(answer.headers["cache-control"], "no-store");
        answer.json()
    }
}

async fn the_life_of_a_lease<L: TestStore>() {
    let (leases, _, _db) = L::fresh().await;
    let server = start(leases).await;
    let path = "/locks/caf%C3%A9%2F1";
    assert_eq!(
        server.inspect(path).await,
        json!({ "resource": "café/1", "held": false })
    );

    let answer = server
        .acquire(path, json!({ "ttl_ms": 20_000, "owner": "worker-7" }))
        .await;
    assert_eq!(answer.status, 201);
    assert_eq!(answer.headers["cache-control"], "no-store");
    let lease = answer.json();
    let (id, token) = (
        lease["lease_id"].as_str().unwrap(),
        lease["token"].as_i64().unwrap(),
    );
    assert_eq!(
        lease,
        json!({
            "resource": "café/1",
            "lease_id": id,
            "token": token,
            "fencing_token": format!("{token};resource=%\"caf%c3%a9/1\""),
            "ttl_ms": 20_000,
        })
    );
    assert_eq!(
        answer.headers["fencing-token"],
        lease["fencing_token"].as_str().unwrap()
    );

    let mut held = server.inspect(path).await;
    let left = held["ttl_ms"].take().as_u64().unwrap();
    assert!((10_000..=20_000).contains(&left), "{left}");
    let expected = json!({
        "resource": "café/1", "held": true, "token": token, "owner": "worker-7", "ttl_ms": null,
    });
    assert_eq!(held, expected);

    let renewed = server.renew(path, id, json!({ "ttl_ms": 40_000 })).await;
    assert_eq!(renewed.status, 200);
    assert_eq!(
        renewed.headers["fencing-token"],
        answer.headers["fencing-token"]
    );
    let mut expected = lease.clone();
    expected["ttl_ms"] = json!(40_000);
    assert_eq!(renewed.json(), expected);

    let released = server.release(path, id).await;
    assert_eq!((released.status, released.text.as_str()), (204, ""));
    let problem = server.release(path, id).await.is_problem(409, "lease-lost");
    assert_eq!(problem["resource"], "café/1");
    let problem = server
        .renew(path, id, json!({}))
        .await
        .is_problem(409, "lease-lost");
    assert_eq!(problem["resource"], "café/1");

    // Every member is optional, and so is the body.
    let next = Answer::to(server.post(path)).await;
    assert_eq!(
        (next.status, next.json()["ttl_ms"].as_i64()),
        (201, Some(30_000))
    );
    assert!(next.json()["token"].as_i64().unwrap() > token);
}

async fn a_held_lock_says_when_to_come_back<L: TestStore>() {
    let (leases, _, _db) = L::fresh().await;
    let server = start(leases).await;
    assert_eq!(
        server
            .acquire("/locks/a", json!({ "ttl_ms": 9_500 }))
            .await
            .status,
        201
    );
    let answer = server.acquire("/locks/a", json!({})).await;
    let problem = answer.is_problem(409, "lock-held");
    assert_eq!(problem["resource"], "a");
    let left = problem["retry_after_ms"].as_u64().unwrap();
    assert!((5_000..=9_500).contains(&left), "{left}");
    let seconds: u64 = answer.headers["retry-after"]
        .to_str()
        .unwrap()
        .parse()
        .unwrap();
    assert_eq!(seconds, left.div_ceil(1_000));
}

async fn a_client_may_choose_the_lease_id<L: TestStore>() {
    let (leases, _, _db) = L::fresh().await;
    let server = start(leases).await;
    let id = "my-own_lease-id-0123456789";
    let first = server.acquire("/locks/a", json!({ "lease_id": id })).await;
    let again = server.acquire("/locks/a", json!({ "lease_id": id })).await;
    assert_eq!((first.status, again.status), (201, 201));
    assert_eq!(first.json(), again.json());
    assert_eq!(first.json()["lease_id"], id);
    assert_eq!(server.release("/locks/a", id).await.status, 204);
}

async fn a_stranger_can_neither_renew_nor_release<L: TestStore>() {
    let (leases, _, _db) = L::fresh().await;
    let server = start(leases).await;
    let lease = server.acquire("/locks/a", json!({})).await.json();
    let stranger = "0123456789012345678901";
    server
        .renew("/locks/a", stranger, json!({}))
        .await
        .is_problem(409, "lease-lost");
    server
        .release("/locks/a", stranger)
        .await
        .is_problem(409, "lease-lost");
    // Nor does the right id on another resource.
    let id = lease["lease_id"].as_str().unwrap();
    server
        .release("/locks/b", id)
        .await
        .is_problem(409, "lease-lost");
    assert_eq!(server.inspect("/locks/a").await["token"], lease["token"]);
    assert_eq!(server.release("/locks/a", id).await.status, 204);
}

async fn each_wrong_request_has_its_answer<L: TestStore>() {
    let (leases, _, _db) = L::fresh().await;
    let server = start(leases).await;
    let too_long = "x".repeat(256);
    for (body, field) in [
        (json!({ "ttl_ms": 99 }), "ttl_ms"),
        (json!({ "ttl_ms": 600_001 }), "ttl_ms"),
        (json!({ "ttl_ms": -1 }), "ttl_ms"),
        (json!({ "ttl_ms": 1_000.5 }), "ttl_ms"),
        (json!({ "ttl_ms": "1000" }), "ttl_ms"),
        (json!({ "ttl_ms": u64::MAX }), "ttl_ms"),
        (json!({ "wait_ms": 60_001 }), "wait_ms"),
        (json!({ "lock_delay_ms": 60_001 }), "lock_delay_ms"),
        (json!({ "new_token": true }), "new_token"),
        (json!({ "wait_ms": "0" }), "wait_ms"),
        (json!({ "owner": 7 }), "owner"),
        (json!({ "owner": too_long }), "owner"),
        (json!({ "owner": "a\nb" }), "owner"),
        (json!({ "lease_id": "short" }), "lease_id"),
        (json!({ "lease_id": "012345678901234567890:" }), "lease_id"),
        (json!({ "lease_id": 7 }), "lease_id"),
        (json!({ "ttl": 1_000 }), "ttl"),
        (json!([]), "body"),
    ] {
        let answer = server.acquire("/locks/a", body.clone()).await;
        assert_eq!(
            answer.is_problem(422, "invalid-request")["field"],
            field,
            "{body}"
        );
    }
    for body in ["{", "nonsense", "\u{0}", &"[".repeat(1_000)] {
        let answer = Answer::to(server.post("/locks/a").body(body.to_owned())).await;
        assert_eq!(answer.is_problem(422, "invalid-request")["field"], "body");
    }
    let huge = server.post("/locks/a").body(" ".repeat(20_000));
    Answer::to(huge).await.is_problem(413, "body-too-large");
    for path in [
        format!("/locks/{too_long}"),
        "/locks/%0A".into(),
        "/locks/%FF".into(),
    ] {
        let answer = server.acquire(&path, json!({})).await;
        assert_eq!(
            answer.is_problem(422, "invalid-request")["field"],
            "resource",
            "{path}"
        );
    }
    let no_id = server.client.delete(server.url("/locks/a"));
    let two_ids = server.client.put(server.url("/locks/a"));
    let two_ids = two_ids
        .header("Lease-Id", "x".repeat(22))
        .header("Lease-Id", "y".repeat(22));
    let bad_id = server
        .client
        .delete(server.url("/locks/a"))
        .header("Lease-Id", "short");
    for request in [no_id, two_ids, bad_id] {
        let problem = Answer::to(request).await.is_problem(422, "invalid-request");
        assert_eq!(problem["field"], "lease-id");
    }
    let id = "x".repeat(22);
    for body in [
        json!({ "ttl_ms": 1 }),
        json!({ "wait_ms": 0 }),
        json!({ "new_token": 1 }),
    ] {
        server
            .renew("/locks/a", &id, body)
            .await
            .is_problem(422, "invalid-request");
    }
    assert_eq!(
        Answer::to(server.client.patch(server.url("/locks/a")))
            .await
            .status,
        405
    );
    assert_eq!(Answer::to(server.post("/locks/")).await.status, 404);
    // Nothing of this has taken the lock.
    assert_eq!(server.inspect("/locks/a").await["held"], false);
}

async fn the_limits_can_be_set<L: TestStore>() {
    let (leases, _, _db) = L::fresh().await;
    let issuer = Issuer::new(leases)
        .ttl(Duration::from_secs(2))
        .ttl_limits(Duration::from_secs(1)..=Duration::from_secs(3));
    let server = Server::start(issuer.router()).await;
    let lease = server.acquire("/a", json!({})).await.json();
    assert_eq!(lease["ttl_ms"], 2_000);
    for ttl_ms in [999, 3_001] {
        let refused = server.acquire("/b", json!({ "ttl_ms": ttl_ms })).await;
        refused.is_problem(422, "invalid-request");
    }
}
