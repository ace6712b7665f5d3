//! A request that is rejected before its handler serves it does not raise the fence, whatever token
//! it contains.

use axum::{
    Json, Router,
    extract::{FromRequestParts, Path, Query},
    http::{Method, StatusCode, request::Parts},
    routing::{any, post},
};
use serde::Deserialize;
use tower_fence::{
    FenceLayer, FencedTx, Idempotency, PathParam, PendingWrite, Token, fence::WriteError,
};

use super::handlers::max_token;
use crate::support::{
    database::{Fresh, TestDatabase, on_both_databases},
    http::{Answer, Server},
};

on_both_databases!(
    rejected_request_does_not_raise_the_fence,
    options_and_trace_pass_with_any_headers,
    served_request_refuses_older_tokens,
);

/// The highest possible token. If the fence were raised to it, no further write would be admitted.
const LAST: i64 = Token::MAX.get();

/// An extractor that accepts no user.
struct User;

impl<S: Sync> FromRequestParts<S> for User {
    type Rejection = StatusCode;

    async fn from_request_parts(_: &mut Parts, _: &S) -> Result<Self, StatusCode> {
        Err(StatusCode::UNAUTHORIZED)
    }
}

#[derive(Deserialize)]
struct Page {
    #[serde(rename = "page")]
    _page: u32,
}

async fn status(Path((_, status)): Path<(String, u16)>) -> StatusCode {
    StatusCode::from_u16(status).unwrap()
}

async fn begun<DB: TestDatabase>(
    pending: PendingWrite<DB>,
    path: Path<(String, u16)>,
) -> StatusCode {
    let mut tx = pending.begin().await.unwrap();
    DB::run(&mut tx, "INSERT INTO ledger VALUES (1)").await;
    status(path).await
}

/// A handler whose statement checks the rights.
async fn not_theirs<DB: TestDatabase>(
    pending: PendingWrite<DB>,
    path: Path<(String, u16)>,
) -> Result<StatusCode, WriteError> {
    let update = "UPDATE stock SET n = 0 \
         WHERE sku = 'theirs' AND EXISTS (SELECT 1 FROM fence) RETURNING n";
    assert!(pending.write::<()>(update).await?.is_empty());
    Ok(status(path).await)
}

fn routes<DB: TestDatabase>(layer: FenceLayer<DB, PathParam>) -> Router {
    let unknown = post(|_: FencedTx<DB>, _: User| async {});
    Router::new()
        .route("/{sku}/plain", post(|| async {}))
        .route("/{sku}/unknown", unknown.get(|_: User| async {}))
        .route(
            "/{sku}/json",
            post(|_: FencedTx<DB>, _: Json<u32>| async {}),
        )
        .route("/{sku}/page", any(|_: Query<Page>| async {}))
        .route_layer(layer)
}

async fn start<DB: TestDatabase>(db: &Fresh<DB>) -> Server {
    let layer = FenceLayer::new(db.fence(), PathParam("sku"));
    let deferred = Router::new()
        .route("/{sku}/begun/{status}", post(begun::<DB>))
        .route("/{sku}/not-theirs/{status}", post(not_theirs::<DB>))
        .route_layer(layer.clone().deferred());
    let keys = || layer.clone().idempotent(Idempotency::optional());
    let deferred_with_keys = Router::new()
        .route("/{sku}/not-theirs/{status}", post(not_theirs::<DB>))
        .route_layer(keys().deferred());
    let app = routes(layer.clone())
        .merge(deferred)
        .nest("/deferred-keys", deferred_with_keys)
        .nest("/reusable", routes(layer.clone().reusable()))
        .nest("/keys", routes(keys()));
    Server::start(app).await
}

async fn rejected_request_does_not_raise_the_fence<DB: TestDatabase>() {
    let db = DB::fresh(4).await;
    let server = start(&db).await;
    let send = async |method: &str, path: &str, body: &'static str| {
        let method: Method = method.parse().unwrap();
        let request = server.client.request(method, server.url(path));
        let request = request
            .header("Fencing-Token", LAST)
            .header("Idempotency-Key", "\"k\"")
            .header("Content-Type", "application/json");
        Answer::to(request.body(body)).await.status
    };
    for mode in ["", "/reusable", "/keys"] {
        for (method, path, body, expected) in [
            // The extractor of the handler accepts no user.
            ("POST", "unknown", "", 401),
            ("GET", "unknown", "", 401),
            ("HEAD", "unknown", "", 401),
            // Methods that the route does not have.
            ("QUERY", "unknown", "", 405),
            ("PUT", "plain", "", 405),
            ("GET", "plain", "", 405),
            ("HEAD", "plain", "", 405),
            // Bodies and queries that cannot be parsed.
            ("POST", "json", "", 400),
            ("POST", "json", "\"x\"", 422),
            ("POST", "page?page=x", "", 400),
            ("GET", "page?page=x", "", 400),
            ("QUERY", "page", "", 400),
        ] {
            let path = format!("{mode}/a/{path}");
            let status = send(method, &path, body).await;
            assert_eq!(status, expected, "{method} {path}");
            assert_eq!(max_token(&db).await, None, "{method} {path}");
        }
    }
    for (path, expected) in [
        ("/a/begun/403", 403),
        ("/a/not-theirs/401", 401),
        ("/a/not-theirs/403", 403),
    ] {
        assert_eq!(send("POST", path, "").await, expected, "{path}");
        assert_eq!(max_token(&db).await, None, "{path}");
    }
    let other_type = server.post("/a/json").header("Fencing-Token", LAST);
    assert_eq!(Answer::to(other_type.body("1")).await.status, 415);
    assert_eq!((db.entries().await, max_token(&db).await), (0, None));
    assert_eq!(server.write("/a/plain", 1).await.status, 200);
    assert_eq!(send("POST", "/a/not-theirs/403", "").await, 403);
    assert_eq!(max_token(&db).await, Some(1));
}

async fn options_and_trace_pass_with_any_headers<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let layer = FenceLayer::new(db.fence(), PathParam("sku"));
    let server = Server::at("/{sku}", any(|| async { "passed" }).layer(layer)).await;
    for method in [Method::OPTIONS, Method::TRACE] {
        let request = || server.client.request(method.clone(), server.url("/a"));
        let last = LAST.to_string();
        let preflight = request()
            .header("Origin", "https://example.org")
            .header("Access-Control-Request-Method", "PUT")
            .header("Access-Control-Request-Headers", "fencing-token");
        assert_eq!(Answer::to(preflight).await.text, "passed");
        for token in [last.as_str(), "5", "x", "1, 2", "1;resource=\"b\""] {
            let request = request().header("Fencing-Token", token);
            let answer = Answer::to(request).await;
            assert_eq!((answer.status, answer.text.as_str()), (200, "passed"));
        }
    }
    assert_eq!(max_token(&db).await, None);
}

async fn served_request_refuses_older_tokens<DB: TestDatabase>() {
    let db = DB::fresh(4).await;
    let server = start(&db).await;
    let mut token = 1;
    // The vectors of answers have the layer that is not deferred.
    for path in [
        "begun/422",
        "not-theirs/200",
        "not-theirs/404",
        "not-theirs/422",
    ] {
        token += 2;
        let answer = server.write(&format!("/a/{path}"), token).await;
        assert!(path.ends_with(&answer.status.to_string()), "{answer:?}");
        assert_eq!(max_token(&db).await, Some(token - 1), "{path}");
    }
    token += 2;
    let keyed = server.post("/deferred-keys/a/not-theirs/422");
    let keyed = keyed.header("Fencing-Token", token);
    let answer = Answer::to(keyed.header("Idempotency-Key", "\"k\"")).await;
    assert_eq!(answer.status, 422);
    assert_eq!(max_token(&db).await, Some(token - 1));
    assert_eq!(db.entries().await, 0);
    let older = server.write("/a/plain", token - 1).await;
    older.is_problem(412, "stale-token");
    assert_eq!(server.write("/a/plain", token).await.status, 200);
}
