//! The requests that the issuer refuses over real HTTP.

use std::time::Duration;

use axum::Router;
use serde_json::json;
use tower_fence::issuer::Issuer;

use crate::support::{
    http::{Answer, Server, lasts_ms},
    store::{TestStore, on_store},
};

on_store!(
    in_memory: Memory,
    each_wrong_request_has_its_answer,
    cross_site_page_acquires_no_lock_without_preflight,
    the_limits_can_be_set,
);

async fn each_wrong_request_has_its_answer<S: TestStore>() {
    let (leases, _, _db) = S::fresh().await;
    let server = Server::issuer(leases).await;
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
        let problem = answer.is_problem(422, "invalid-request");
        assert_eq!(problem["field"], field, "{body}");
        // Clients print the field before the detail.
        let detail = problem["detail"].as_str().unwrap();
        assert!(!detail.contains(&format!("`{field}`")), "{detail}");
    }
    for body in ["{", "nonsense", "\u{0}", &"[".repeat(1_000)] {
        let request = server.post("/locks/a").body(body.to_owned());
        let request = request.header("Content-Type", "application/json");
        let answer = Answer::to(request).await;
        assert_eq!(answer.is_problem(422, "invalid-request")["field"], "body");
    }
    let huge = server.post("/locks/a").body(" ".repeat(20_000));
    Answer::to(huge).await.is_problem(413, "body-too-large");
    for name in [&too_long, "%0A", "%FF"] {
        let path = format!("/locks/{name}");
        let answer = server.acquire(&path, json!({})).await;
        let problem = answer.is_problem(422, "invalid-request");
        assert_eq!(problem["field"], "resource", "{path}");
    }
    let no_id = server.client.delete(server.url("/locks/a"));
    let two_ids = server.client.put(server.url("/locks/a"));
    let two_ids = two_ids
        .header("Lease-Id", "x".repeat(22))
        .header("Lease-Id", "y".repeat(22));
    let bad_id = server.client.delete(server.url("/locks/a"));
    let bad_id = bad_id.header("Lease-Id", "short");
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
        let refused = server.renew("/locks/a", &id, body).await;
        refused.is_problem(422, "invalid-request");
    }
    let patch = server.client.patch(server.url("/locks/a"));
    assert_eq!(Answer::to(patch).await.status, 405);
    assert_eq!(Answer::to(server.post("/locks/")).await.status, 404);
    // None of these requests has taken the lock.
    assert_eq!(server.inspect("/locks/a").await["held"], false);
}

async fn the_limits_can_be_set<S: TestStore>() {
    let (leases, _, _db) = S::fresh().await;
    let issuer = Issuer::new(leases)
        .ttl(Duration::from_secs(2))
        .ttl_limits(Duration::from_secs(1)..=Duration::from_secs(3));
    let server = Server::start(issuer.router()).await;
    let mut lease = server.acquire("/a", json!({})).await.json();
    lasts_ms(&mut lease, 2_000);
    for ttl_ms in [999, 3_001] {
        let refused = server.acquire("/b", json!({ "ttl_ms": ttl_ms })).await;
        refused.is_problem(422, "invalid-request");
    }
}

/// A browser sends a POST with one of three content types to another site without a preflight.
async fn cross_site_page_acquires_no_lock_without_preflight<S: TestStore>() {
    const TTL: &str = r#"{"ttl_ms": 1000}"#;
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
        let evil = Some("http://evil.example");
        for (path, body, origin) in [
            ("/locks/a", TTL, None),
            ("/locks/a", TTL, evil),
            ("/locks/a", "", evil),
            ("/locks/a", "", Some("null")),
            ("/locks/a/break", "", evil),
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
    // Before a POST with JSON, a browser sends a preflight. No browser sends a POST without a body
    // and without `Origin`.
    for content_type in [
        "application/json",
        "Application/JSON; charset=utf-8",
        "application/vnd.shop+json",
    ] {
        let request = server.post("/locks/a").body(TTL);
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
