//! A service whose handlers succeed and fail in every way, behind the layer.

use std::{convert::Infallible, sync::Arc};

use axum::{
    Extension, Router,
    body::{Body, Bytes},
    extract::Path,
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::{any, post},
};
use futures_util::StreamExt;
use tokio::sync::Notify;
use tower_fence::{
    Admitted, CommitError, Fence, FenceLayer, FencedTx, PathParam, layer::DatabaseError,
};

use crate::support::{
    database::{Fresh, Nested, TestDatabase},
    fence::resource,
    http::Server,
};

pub type Plan = Arc<Shared>;

#[derive(Default)]
pub struct Shared {
    pub done: Notify,
}

pub fn app<DB: TestDatabase>(fence: Fence<DB>, plan: Plan) -> Router {
    let layer = FenceLayer::new(fence.clone(), PathParam("sku"));
    Router::new()
        .route("/{sku}/add", any(add::<DB>))
        .route("/{sku}/plain", any(|| async { "plain" }))
        .route("/{sku}/fail", post(fail::<DB>))
        .route("/{sku}/panic", post(panic::<DB>))
        .route("/{sku}/slow", post(slow::<DB>))
        .route("/{sku}/spawn", post(spawn::<DB>))
        .route("/{sku}/stream", post(stream::<DB>))
        .route("/{sku}/defer", post(defer::<DB>))
        .route("/{sku}/lose", post(lose::<DB>))
        .route("/{sku}/forget", post(forget::<DB>))
        .route("/{sku}/commit", post(commit::<DB>))
        .route("/{sku}/linger", post(linger::<DB>))
        .route("/{sku}/echo", post(|body: Bytes| async { body }))
        .route("/{sku}/status/{status}", post(status))
        .route_layer(layer)
        .route("/unfenced", any(add::<DB>))
        .layer(Extension(plan))
}

pub async fn start<DB: TestDatabase>(db: &Fresh<DB>) -> Server {
    Server::start(app(db.fence(), Plan::default())).await
}

pub async fn insert<DB: TestDatabase>(tx: &mut FencedTx<DB>) {
    let entry = tx.admitted().token().get();
    DB::run(tx, &format!("INSERT INTO ledger VALUES ({entry})")).await;
}

pub async fn add<DB: TestDatabase>(mut tx: FencedTx<DB>, admitted: Admitted) -> String {
    assert_eq!(*tx.admitted(), admitted);
    insert(&mut tx).await;
    admitted.token().to_string()
}

pub async fn fail<DB: TestDatabase>(mut tx: FencedTx<DB>) -> StatusCode {
    insert(&mut tx).await;
    StatusCode::CONFLICT
}

pub async fn panic<DB: TestDatabase>(mut tx: FencedTx<DB>) -> StatusCode {
    insert(&mut tx).await;
    panic!("as planned");
}

pub async fn slow<DB: TestDatabase>(mut tx: FencedTx<DB>) -> StatusCode {
    insert(&mut tx).await;
    std::future::pending().await
}

pub async fn spawn<DB: TestDatabase>(mut tx: FencedTx<DB>, plan: Extension<Plan>) -> StatusCode {
    insert(&mut tx).await;
    tokio::spawn(async move {
        plan.done.notified().await;
        let outcome = tx.commit().await;
        assert_matches!(outcome, Err(CommitError::Escaped));
        plan.done.notify_one();
    });
    StatusCode::OK
}

pub async fn stream<DB: TestDatabase>(mut tx: FencedTx<DB>) -> Response {
    insert(&mut tx).await;
    let parts = futures_util::stream::iter([tx]).map(|_tx| Ok::<_, Infallible>("part"));
    Body::from_stream(parts).into_response()
}

pub async fn defer<DB: TestDatabase>(mut tx: FencedTx<DB>) -> StatusCode {
    insert(&mut tx).await;
    DB::run(&mut tx, "INSERT INTO child VALUES (404)").await;
    StatusCode::OK
}

/// Ends the session of its own connection.
pub async fn lose<DB: TestDatabase>(mut tx: FencedTx<DB>) -> StatusCode {
    insert(&mut tx).await;
    let kill = "SELECT pg_terminate_backend(pg_backend_pid())";
    DB::execute(&mut tx, kill).await.unwrap_err();
    StatusCode::SERVICE_UNAVAILABLE
}

pub async fn forget<DB: TestDatabase>(mut tx: FencedTx<DB>) -> StatusCode {
    DB::nested(&mut tx, 1, Nested::Forget).await.unwrap();
    StatusCode::OK
}

pub async fn commit<DB: TestDatabase>(mut tx: FencedTx<DB>) -> Result<StatusCode, DatabaseError> {
    insert(&mut tx).await;
    tx.commit().await?;
    Ok(StatusCode::IM_A_TEAPOT)
}

pub async fn linger<DB: TestDatabase>(mut tx: FencedTx<DB>) -> StatusCode {
    insert(&mut tx).await;
    tx.commit().await.unwrap();
    std::future::pending().await
}

pub async fn status(Path((_, status)): Path<(String, u16)>) -> StatusCode {
    StatusCode::from_u16(status).unwrap()
}

pub async fn max_token<DB: TestDatabase>(db: &Fresh<DB>) -> Option<i64> {
    db.fence().inspect(&resource("a")).await.unwrap()
}

/// Checks the state after each failure with token 5: nothing is written, token 4 is stale, and a
/// write with token 5 still succeeds.
pub async fn nothing_but_the_fence_has_moved<DB: TestDatabase>(db: &Fresh<DB>, server: &Server) {
    assert_eq!(max_token(db).await, Some(4));
    assert_eq!(db.entries().await, 0);
    server.refuses("/a/add", 4, 412, "stale-token").await;
    assert_eq!(server.write("/a/add", 5).await.status, 200);
    assert_eq!(db.entries().await, 1);
}
