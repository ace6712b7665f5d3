//! A service with idempotency keys, whose handlers count their calls.

use std::{
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use axum::{
    Extension, Router,
    body::{Body, Bytes},
    http::{StatusCode, header},
    response::{IntoResponse, Response},
    routing::{any, get, post},
};
use futures_util::{StreamExt, stream};
use reqwest::RequestBuilder;
use tokio::sync::Semaphore;
use tower_fence::{CommitError, Fence, FenceLayer, FencedTx, Idempotency, PathParam};

pub use super::handlers::max_token;
use crate::support::{
    database::{Fresh, TestDatabase},
    http::{Answer, Server},
};

/// The behaviour of the handlers, and counts of their calls.
pub struct Plan {
    pub calls: AtomicU64,
    /// The number of initial calls that fail.
    failures: u64,
    pub gate: Semaphore,
}

impl Plan {
    pub fn new(failures: u64, gate: usize) -> Arc<Self> {
        Arc::new(Self {
            calls: AtomicU64::new(0),
            failures,
            gate: Semaphore::new(gate),
        })
    }
}

/// Writes an entry, waits at the gate, and answers with the number of the call.
pub async fn add<DB: TestDatabase>(mut tx: FencedTx<DB>, plan: Extension<Arc<Plan>>) -> Response {
    let call = plan.calls.fetch_add(1, Relaxed) + 1;
    DB::run(&mut tx, &format!("INSERT INTO ledger VALUES ({call})")).await;
    plan.gate.acquire().await.unwrap().forget();
    if call <= plan.failures {
        // Longer than a response that can be stored.
        return (StatusCode::CONFLICT, "x".repeat(70_000)).into_response();
    }
    let headers = [
        (header::LOCATION, format!("/calls/{call}")),
        (header::SET_COOKIE, "secret".into()),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff".into()),
    ];
    (StatusCode::CREATED, headers, format!("call {call}")).into_response()
}

pub async fn long<DB: TestDatabase>(tx: FencedTx<DB>, plan: Extension<Arc<Plan>>) -> String {
    add(tx, plan).await;
    "x".repeat(101)
}

pub async fn streamed<DB: TestDatabase>(tx: FencedTx<DB>, plan: Extension<Arc<Plan>>) -> Body {
    add(tx, plan).await;
    Body::from_stream(
        stream::repeat("x".repeat(10))
            .map(Ok::<_, Infallible>)
            .take(11),
    )
}

pub async fn broken<DB: TestDatabase>(tx: FencedTx<DB>, plan: Extension<Arc<Plan>>) -> Body {
    add(tx, plan).await;
    Body::from_stream(stream::iter([Ok("x"), Err("broken")]))
}

pub async fn commit<DB: TestDatabase>(mut tx: FencedTx<DB>) -> StatusCode {
    DB::run(&mut tx, "INSERT INTO ledger VALUES (1)").await;
    let outcome = tx.commit().await;
    assert_matches!(outcome, Err(CommitError::Unrecorded));
    StatusCode::OK
}

pub async fn by_hand<DB: TestDatabase>(mut tx: FencedTx<DB>) -> StatusCode {
    DB::run(&mut tx, "INSERT INTO ledger VALUES (1); ROLLBACK").await;
    StatusCode::OK
}

pub async fn start_with<DB: TestDatabase>(
    fence: Fence<DB>,
    keys: Idempotency,
    plan: &Arc<Plan>,
) -> Server {
    let layer = FenceLayer::new(fence.clone(), PathParam("sku")).idempotent(keys.clone());
    let both = FenceLayer::new(fence, [PathParam("sku"), PathParam("to")]).idempotent(keys);
    let inner = || Router::new().route("/{sku}/inner", post(add::<DB>).route_layer(layer.clone()));
    let app = Router::new()
        .route("/{sku}/add", any(add::<DB>))
        .route("/{sku}/other", post(add::<DB>))
        .route("/{sku}/echo", post(|body: Bytes| async { body }))
        .route("/{sku}/read", get(|| async { "read" }))
        .route("/{sku}/long", post(long::<DB>))
        .route("/{sku}/streamed", post(streamed::<DB>))
        .route("/{sku}/broken", post(broken::<DB>))
        .route("/{sku}/commit", post(commit::<DB>))
        .route("/{sku}/by-hand", post(by_hand::<DB>))
        .route_layer(layer.clone())
        .route("/{sku}/to/{to}", post(add::<DB>).route_layer(both))
        .nest("/v1", inner())
        .nest("/v2", inner())
        .layer(Extension(plan.clone()));
    Server::start(app).await
}

pub async fn start<DB: TestDatabase>(db: &Fresh<DB>) -> Server {
    start_with(db.fence(), Idempotency::optional(), &Plan::new(0, 1_000)).await
}

pub fn keyed(server: &Server, path: &str, token: impl ToString, key: &str) -> RequestBuilder {
    let request = server.post(path).header("Fencing-Token", token.to_string());
    request.header("Idempotency-Key", format!("\"{key}\""))
}

pub async fn write(server: &Server, path: &str, token: i64, key: &str) -> Answer {
    Answer::to(keyed(server, path, token, key)).await
}

#[track_caller]
pub fn is_call(answer: &Answer, call: u64, replayed: bool) {
    let text = format!("call {call}");
    assert_eq!((answer.status, &answer.text), (201, &text), "{answer:?}");
    assert_eq!(answer.headers["location"], format!("/calls/{call}"));
    assert_eq!(answer.headers["x-content-type-options"], "nosniff");
    let expected = replayed.then_some("true");
    let replayed = answer.headers.get("idempotent-replayed");
    assert_eq!(replayed.map(|value| value.to_str().unwrap()), expected);
}

pub async fn records<DB: TestDatabase>(db: &Fresh<DB>) -> i64 {
    db.number("SELECT count(*) FROM tower_fence.idempotency_keys")
        .await
}
