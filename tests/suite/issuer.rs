//! The issuer over real HTTP, over every store.

use std::time::Duration;

use axum::Router;
use serde_json::json;
use tower_fence::{
    issuer::{self, Issuer},
    lease::Operate,
};

use crate::support::{
    eventually,
    http::{Answer, Server},
    store::{TestStore, on_every_store},
};

on_every_store!(
    the_life_of_a_lease,
    a_held_lock_says_when_to_come_back,
    a_client_may_choose_the_lease_id,
    a_stranger_can_neither_renew_nor_release,
    each_wrong_request_has_its_answer,
    no_page_of_another_site_takes_a_lock_without_preflight,
    the_limits_can_be_set,
    a_call_waits_in_line,
    a_renewal_may_take_a_new_token,
    operators_list_and_break,
    without_operators_there_are_no_routes_for_them,
);

async fn start<L: Operate + Clone>(leases: L) -> Server {
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

async fn the_life_of_a_lease<S: TestStore>() {
    let (leases, _, _db) = S::fresh().await;
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
        "resource": "café/1",
        "held": true,
        "token": token,
        "owner": "worker-7",
        "ttl_ms": null,
        "waiters": 0,
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

async fn a_held_lock_says_when_to_come_back<S: TestStore>() {
    let (leases, _, _db) = S::fresh().await;
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

async fn a_client_may_choose_the_lease_id<S: TestStore>() {
    let (leases, _, _db) = S::fresh().await;
    let server = start(leases).await;
    let id = "my-own_lease-id-0123456789";
    let first = server.acquire("/locks/a", json!({ "lease_id": id })).await;
    let again = server.acquire("/locks/a", json!({ "lease_id": id })).await;
    assert_eq!((first.status, again.status), (201, 201));
    assert_eq!(first.json(), again.json());
    assert_eq!(first.json()["lease_id"], id);
    assert_eq!(server.release("/locks/a", id).await.status, 204);
}

async fn a_stranger_can_neither_renew_nor_release<S: TestStore>() {
    let (leases, _, _db) = S::fresh().await;
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

async fn each_wrong_request_has_its_answer<S: TestStore>() {
    let (leases, _, _db) = S::fresh().await;
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
        let request = server.post("/locks/a").body(body.to_owned());
        let request = request.header("Content-Type", "application/json");
        let answer = Answer::to(request).await;
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

async fn the_limits_can_be_set<S: TestStore>() {
    let (leases, _, _db) = S::fresh().await;
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

async fn a_call_waits_in_line<S: TestStore>() {
    let (leases, _, _db) = S::fresh().await;
    let server = start(leases).await;
    let first = server.acquire("/locks/a", json!({})).await.json();
    let refused = server.acquire("/locks/a", json!({ "wait_ms": 100 })).await;
    refused.is_problem(409, "lock-held");
    let waiting = server
        .post("/locks/a")
        .json(&json!({ "wait_ms": 30_000, "ttl_ms": 5_000 }));
    let waiting = tokio::spawn(Answer::to(waiting));
    eventually("it waits", async || {
        server.inspect("/locks/a").await["waiters"] == 1
    })
    .await;
    // A client that goes away is skipped.
    let gone = server.post("/locks/a").json(&json!({ "wait_ms": 30_000 }));
    let gone = tokio::spawn(Answer::to(gone));
    eventually("it waits", async || {
        server.inspect("/locks/a").await["waiters"] == 2
    })
    .await;
    gone.abort();
    eventually("it is gone", async || {
        server.inspect("/locks/a").await["waiters"] == 1
    })
    .await;
    let id = first["lease_id"].as_str().unwrap();
    assert_eq!(server.release("/locks/a", id).await.status, 204);
    let second = waiting.await.unwrap();
    assert_eq!(
        (second.status, second.json()["ttl_ms"].as_u64()),
        (201, Some(5_000))
    );
    assert!(second.json()["token"].as_i64() > first["token"].as_i64());
}

async fn a_renewal_may_take_a_new_token<S: TestStore>() {
    let (leases, _, _db) = S::fresh().await;
    let server = start(leases).await;
    let lease = server.acquire("/locks/a", json!({})).await.json();
    let id = lease["lease_id"].as_str().unwrap();
    let renewed = server
        .renew("/locks/a", id, json!({ "new_token": true }))
        .await;
    assert!(renewed.json()["token"].as_i64() > lease["token"].as_i64());
    let field = renewed.json()["fencing_token"].as_str().unwrap().to_owned();
    assert_eq!(renewed.headers["fencing-token"], field.as_str());
    let kept = server
        .renew("/locks/a", id, json!({ "new_token": false }))
        .await;
    assert_eq!(kept.json()["token"], renewed.json()["token"]);
}

async fn operators_list_and_break<S: TestStore>() {
    let (leases, _, _db) = S::fresh().await;
    let app = Router::new().nest("/locks", Issuer::new(leases).operator_router());
    let server = Server::start(app).await;
    let list = async |query: &str| Answer::to(server.get(&format!("/locks{query}"))).await;
    assert_eq!(
        list("").await.json(),
        json!({ "leases": [], "cursor": null })
    );
    for name in ["a", "b", "c"] {
        let body = json!({ "owner": format!("owner of {name}") });
        assert_eq!(
            server.acquire(&format!("/locks/{name}"), body).await.status,
            201
        );
    }
    let answer = list("?limit=1000").await;
    assert_eq!(answer.headers["cache-control"], "no-store");
    assert!(!answer.text.contains("lease_id"), "{answer:?}");
    let mut leases = answer.json()["leases"].as_array().unwrap().clone();
    leases.sort_by_key(|lease| lease["resource"].as_str().unwrap().to_owned());
    assert_eq!(leases.len(), 3);
    assert_eq!(leases[1]["resource"], "b");
    assert_eq!(leases[1]["owner"], "owner of b");
    assert_eq!(leases[1]["waiters"], 0);
    assert!(leases[1]["token"].is_i64() && leases[1]["ttl_ms"].as_u64() > Some(10_000));

    let mut names = vec![];
    let mut cursor = String::new();
    for _ in 0..1_000 {
        let page = list(&format!("?limit=1&cursor={cursor}")).await.json();
        let page_leases = page["leases"].as_array().unwrap();
        assert!(page_leases.len() <= 1);
        names.extend(
            page_leases
                .iter()
                .map(|lease| lease["resource"].to_string()),
        );
        match page["cursor"].as_str() {
            Some(next) => cursor = next.to_owned(),
            None => break,
        }
    }
    names.sort_unstable();
    assert_eq!(names, ["\"a\"", "\"b\"", "\"c\""]);
    for query in [
        "?limit=0",
        "?limit=1001",
        "?limit=x",
        "?limit=-1",
        "?cursor=x",
    ] {
        list(query).await.is_problem(422, "invalid-request");
    }

    let end = || Answer::to(server.post("/locks/b/break"));
    assert_eq!(end().await.status, 204);
    assert_eq!(end().await.is_problem(409, "lease-lost")["resource"], "b");
    assert_eq!(server.inspect("/locks/b").await["held"], false);
}

async fn without_operators_there_are_no_routes_for_them<S: TestStore>() {
    let (leases, _, _db) = S::fresh().await;
    let server = start(leases).await;
    server.acquire("/locks/a", json!({})).await;
    assert_eq!(Answer::to(server.get("/locks")).await.status, 404);
    assert_eq!(Answer::to(server.post("/locks/a/break")).await.status, 404);
    assert_eq!(server.inspect("/locks/a").await["held"], true);
}

/// What a browser sends to another site without asking there first: a POST of three types.
async fn no_page_of_another_site_takes_a_lock_without_preflight<S: TestStore>() {
    let (leases, _, _db) = S::fresh().await;
    let app = Issuer::new(leases).operator_router();
    let server = Server::start(Router::new().nest("/locks", app)).await;
    let simple = [
        Some("text/plain"),
        Some("application/x-www-form-urlencoded"),
        Some("multipart/form-data; boundary=x"),
        Some("text/plain; a=application/json"),
        None,
    ];
    for content_type in simple {
        for (path, body, origin) in [
            ("/locks/a", "{\"ttl_ms\": 1000}", None),
            (
                "/locks/a",
                "{\"ttl_ms\": 1000}",
                Some("http://evil.example"),
            ),
            ("/locks/a", "", Some("http://evil.example")),
            ("/locks/a", "", Some("null")),
            ("/locks/a/break", "", Some("http://evil.example")),
        ] {
            let mut request = server.post(path).body(body);
            if let Some(content_type) = content_type {
                request = request.header("Content-Type", content_type);
            }
            if let Some(origin) = origin {
                request = request.header("Origin", origin);
            }
            let answer = Answer::to(request).await;
            answer.is_problem(415, "unsupported-media-type");
            assert_eq!(server.inspect("/locks/a").await["held"], false);
        }
    }
    // JSON is what a browser asks about first; and no browser sends an empty body without `Origin`.
    for content_type in [
        "application/json",
        "Application/JSON; charset=utf-8",
        "application/vnd.shop+json",
    ] {
        let request = server.post("/locks/a").body("{\"ttl_ms\": 1000}");
        let request = request.header("Content-Type", content_type);
        let answer = Answer::to(request.header("Origin", "http://own.example")).await;
        assert_eq!(answer.status, 201, "{content_type}");
        assert_eq!(Answer::to(server.post("/locks/a/break")).await.status, 204);
        assert_eq!(Answer::to(server.post("/locks/a")).await.status, 201);
        let request = server.post("/locks/a/break");
        let request = request.header("Content-Type", content_type);
        let answer = Answer::to(request.header("Origin", "http://own.example")).await;
        assert_eq!(answer.status, 204);
    }
}
