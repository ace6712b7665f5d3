//! Idempotency keys of different requests, resources and principals, on both databases.

use std::time::Duration;

use axum::{Extension, Router, http::request::Parts, routing::post};
use tokio::time::timeout;
use tower_fence::{
    FenceLayer, Idempotency, Resource, Token,
    layer::{ResourceError, ResourceFrom, Resources},
};

use super::keyed::{Plan, add, is_call, keyed, max_token, start, start_with, write};
use crate::support::{
    database::{TestDatabase, on_both_databases},
    http::{Answer, Server},
};

on_both_databases!(
    a_key_belongs_to_one_request,
    a_nested_path_is_compared_whole,
    a_key_belongs_to_its_resource_or_to_its_scope,
    stored_response_is_bound_to_its_sender,
    application_may_name_the_principal,
    a_key_with_cookies_needs_a_principal,
    custom_scope_does_not_mix_resources,
    hanging_scope_is_refused_after_the_answer_timeout,
    keys_work_with_several_resources,
);

fn named_by(parts: &Parts, header: &str) -> Result<Resource, ResourceError> {
    let name = parts.headers.get(header).ok_or(ResourceError::Nothing)?;
    Ok(Resource::new(name.to_str().unwrap())?)
}

async fn a_key_belongs_to_one_request<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let server = start(&db).await;
    let request = |path: &str| keyed(&server, path, 5, "k");
    let first = Answer::to(request("/a/add?x=1").body("body")).await;
    is_call(&first, 1, false);
    let put = server.client.put(server.url("/a/add?x=1"));
    let put = put
        .header("Fencing-Token", "5")
        .header("Idempotency-Key", "\"k\"");
    for other in [
        put.body("body"),
        request("/a/other?x=1").body("body"),
        request("/a/add?x=2").body("body"),
        request("/a/add").body("body"),
        request("/a/add?x=1").body("Body"),
        request("/a/add?x=1"),
    ] {
        let answer = Answer::to(other).await;
        answer.is_problem(422, "idempotency-mismatch");
    }
    let again = Answer::to(request("/a/add?x=1").body("body")).await;
    is_call(&again, 1, true);
    assert_eq!(db.entries().await, 1);
}

async fn a_nested_path_is_compared_whole<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let server = start(&db).await;
    is_call(&write(&server, "/v1/a/inner", 5, "k").await, 1, false);
    let other = write(&server, "/v2/a/inner", 5, "k").await;
    other.is_problem(422, "idempotency-mismatch");
}

async fn a_key_belongs_to_its_resource_or_to_its_scope<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let server = start(&db).await;
    is_call(&write(&server, "/a/add", 5, "k").await, 1, false);
    is_call(&write(&server, "/b/add", 5, "k").await, 2, false);

    let keys = Idempotency::optional().scope(|parts: &Parts| named_by(parts, "x-tenant"));
    let server = start_with(db.fence(), keys, &Plan::new(0, 1_000)).await;
    let write = |path: &str, tenant: &str| {
        Answer::to(keyed(&server, path, 9, "t").header("X-Tenant", tenant))
    };
    db.execute("DELETE FROM ledger").await;
    is_call(&write("/a/add", "acme").await, 1, false);
    is_call(&write("/a/add", "acme").await, 1, true);
    let other = write("/b/add", "acme").await;
    other.is_problem(422, "idempotency-mismatch");
    let stale = write("/a/add", "other").await;
    stale.is_problem(412, "stale-token");
    let anonymous = Answer::to(keyed(&server, "/a/add", 9, "t")).await;
    anonymous.is_problem(422, "invalid-request");
}

async fn stored_response_is_bound_to_its_sender<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let server = start(&db).await;
    let send = |token: i64, authorization: &'static [&'static str]| {
        let request = keyed(&server, "/a/add", token, "k");
        let request = authorization.iter().fold(request, |request, line| {
            request.header("Authorization", *line)
        });
        Answer::to(request)
    };
    is_call(&send(5, &["Bearer alice"]).await, 1, false);
    is_call(&send(5, &["Bearer alice"]).await, 1, true);
    // Other senders repeat the request with the same key.
    for stranger in [
        &[][..],
        &["Bearer bob"],
        &["Bearer alice", ""],
        &["Bearer", "alice"],
        &["bearer alice"],
    ] {
        for token in [5, 1] {
            let answer = send(token, stranger).await;
            answer.is_problem(412, "stale-token");
        }
    }
    is_call(&send(6, &["Bearer bob"]).await, 2, false);
    is_call(&send(1, &["Bearer alice"]).await, 1, true);
}

async fn application_may_name_the_principal<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let keys = Idempotency::optional().principal(|parts| {
        let user = parts.headers.get("x-user")?;
        Some(user.as_bytes().to_vec())
    });
    let server = start_with(db.fence(), keys, &Plan::new(0, 1_000)).await;
    let send = |user: &'static str, authorization: &'static str| {
        let request = keyed(&server, "/a/add", 5, "k").header("X-User", user);
        Answer::to(request.header("Authorization", authorization))
    };
    is_call(&send("alice", "Bearer 1").await, 1, false);
    // Alice repeats the request with a new access token.
    is_call(&send("alice", "Bearer 2").await, 1, true);
    let other = send("bob", "Bearer 1").await;
    other.is_problem(412, "stale-token");
}

async fn hanging_scope_is_refused_after_the_answer_timeout<DB: TestDatabase>() {
    #[derive(Clone)]
    struct Silent;

    impl ResourceFrom for Silent {
        async fn resources_from(&self, _: &mut Parts) -> Result<Resources, ResourceError> {
            std::future::pending().await
        }
    }
    let db = DB::fresh(2).await;
    let fence = db.fence_with(|fence| fence.answer_timeout(Duration::from_secs(1)));
    let keys = Idempotency::optional().scope(Silent);
    let server = start_with(fence, keys, &Plan::new(0, 1_000)).await;
    let answer = timeout(Duration::from_secs(30), write(&server, "/a/add", 5, "k")).await;
    let answer = answer.expect("the scope has no timeout");
    answer.is_problem(503, "store-unavailable");
    assert_eq!(db.entries().await, 0);
}

async fn a_key_with_cookies_needs_a_principal<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let server = start(&db).await;
    let send = |cookie: &'static str| keyed(&server, "/a/add", 5, "k").header("Cookie", cookie);
    for request in [
        send("session=alice"),
        send("session=alice").header("Authorization", ""),
    ] {
        let refused = Answer::to(request).await;
        let problem = refused.is_problem(400, "idempotency-principal-required");
        let detail = problem["detail"].as_str().unwrap();
        assert_contains!(detail, "`Authorization`");
    }
    assert_eq!((db.entries().await, max_token(&db).await), (0, None));
    // With `Authorization` the principal is known. Without a key, no principal is needed.
    let known = |authorization| send("session=alice").header("Authorization", authorization);
    is_call(&Answer::to(known("Bearer alice")).await, 1, false);
    is_call(&Answer::to(known("Bearer alice")).await, 1, true);
    let bare = server.post("/a/add").header("Fencing-Token", "6");
    let bare = Answer::to(bare.header("Cookie", "session=alice")).await;
    is_call(&bare, 2, false);
    // Without `Authorization` and `Cookie`, the principal is empty, and all such requests share it.
    for replayed in [false, true] {
        let answer = write(&server, "/b/add", 5, "k").await;
        is_call(&answer, 3, replayed);
    }

    let keys = Idempotency::optional().principal(|parts| {
        let session = parts.headers.get("cookie")?;
        Some(session.as_bytes().to_vec())
    });
    let server = start_with(db.fence(), keys, &Plan::new(0, 1_000)).await;
    db.execute("DELETE FROM ledger").await;
    let send = |cookie: &'static str| {
        Answer::to(keyed(&server, "/c/add", 5, "k").header("Cookie", cookie))
    };
    is_call(&send("session=alice").await, 1, false);
    is_call(&send("session=alice").await, 1, true);
    // No principal gets the answer of another principal.
    send("session=bob").await.is_problem(412, "stale-token");
    let unknown = keyed(&server, "/c/add", 6, "k").header("Authorization", "Bearer alice");
    let refused = Answer::to(unknown).await;
    refused.is_problem(400, "idempotency-principal-required");
}

async fn custom_scope_does_not_mix_resources<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let tenant = |parts: &Parts| named_by(parts, "x-tenant");
    let sku = |parts: &Parts| named_by(parts, "x-sku");
    let layer = FenceLayer::new(db.fence(), sku);
    let app = Router::new()
        .route("/add", post(add::<DB>))
        .route_layer(layer.idempotent(Idempotency::optional().scope(tenant)))
        .layer(Extension(Plan::new(0, 1_000)));
    let server = Server::start(app).await;
    let write = |sku: &'static str| {
        let request = keyed(&server, "/add", 5, "k").header("X-Tenant", "acme");
        Answer::to(request.header("X-Sku", sku))
    };
    is_call(&write("sku-1").await, 1, false);
    let other = write("sku-2").await;
    other.is_problem(422, "idempotency-mismatch");
    is_call(&write("sku-1").await, 1, true);
}

async fn keys_work_with_several_resources<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let server = start(&db).await;
    let tokens = r#"5;resource="a", 7;resource="b""#;
    for replayed in [false, true] {
        let answer = Answer::to(keyed(&server, "/a/to/b", tokens, "k")).await;
        is_call(&answer, 1, replayed);
    }
    let other = Answer::to(keyed(&server, "/b/to/a", tokens, "k")).await;
    other.is_problem(422, "idempotency-mismatch");
    assert_eq!(max_token(&db).await, Some(Token::new(5).unwrap().get()));
}
