//! The layer in a tower stack, without a router.

use std::{convert::Infallible, sync::Arc, time::Duration};

use axum::{body::Body, extract::FromRequestParts, routing::post};
use bytes::Bytes;
use http::{Request, Response, StatusCode, request::Parts};
use http_body::Body as _;
use http_body_util::{BodyExt, Full};
use sqlx::{PgPool, Sqlite};
use tower::{Layer, ServiceBuilder, ServiceExt, service_fn};
use tower_fence::{Fence, FenceLayer, InvalidResource, PathParam, Resource, SqliteFencedTx};
use tracing::{Instrument, field::Empty};

use crate::support::{
    database::TestDatabase,
    http::Server,
    log::Log,
    proxy::{Link, Proxy},
};

async fn echo(request: Request<Body>) -> Result<Response<Body>, Infallible> {
    let body = request.into_body();
    let (length, is_empty) = (body.size_hint().exact(), body.is_end_stream());
    let body = body.collect().await.unwrap().to_bytes();
    assert_eq!(
        (length, is_empty),
        (Some(body.len() as u64), body.is_empty())
    );
    Ok(Response::new(Body::from(body)))
}

fn path(parts: &Parts) -> Result<Resource, InvalidResource> {
    Resource::new(parts.uri.path())
}

fn write() -> Request<Body> {
    let request = Request::post("/sku-1").header("Fencing-Token", "5");
    request.body(Body::empty()).unwrap()
}

/// A body whose type is not axum's is forwarded completely, with its length.
#[tokio::test]
async fn any_body_type_is_accepted() {
    let db = Sqlite::fresh(2).await;
    let mut stack = ServiceBuilder::new()
        .layer(FenceLayer::new(db.fence(), path))
        .service(service_fn(echo));
    assert!(format!("{stack:?}").starts_with("FenceService"));
    let request = |token: &str, body: &'static str| {
        Request::post("/sku-1")
            .header("Fencing-Token", token)
            .body(Full::new(Bytes::from(body)))
            .unwrap()
    };
    for (token, body) in [("4", ""), ("5", "whole")] {
        let answer = stack.clone().oneshot(request(token, body)).await.unwrap();
        let answer = answer.into_body().collect().await.unwrap();
        assert_eq!(answer.to_bytes(), body);
    }
    let stale = stack.clone().oneshot(request("5", "")).await.unwrap();
    assert_eq!(stale.status(), StatusCode::PRECONDITION_FAILED);
    let inner = *stack.get_ref();
    let _ = (stack.get_mut(), inner);
    let plain = stack.into_inner().oneshot(Request::new(Body::empty()));
    assert_eq!(plain.await.unwrap().status(), StatusCode::OK);
}

/// The database becomes unreachable, and then the service fails.
#[tokio::test]
async fn service_error_is_replaced_if_the_fence_is_not_raised() {
    let db = sqlx::Postgres::fresh(2).await;
    let proxy = Arc::new(Proxy::to(db.addr()).await);
    let pool = PgPool::connect(&proxy.url(&db.url)).await.unwrap();
    let fence = Fence::builder().pool_timeout(Duration::from_millis(300));
    let service = service_fn(move |_: Request<Body>| {
        proxy.set(Link::Cut);
        std::future::ready(Err::<Response<Body>, _>("the error of the service"))
    });
    let layer = FenceLayer::new(fence.build(pool), path);
    let answer = layer.layer(service).oneshot(write()).await.unwrap();
    assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE);
}

/// The service fails while its transaction still holds the lock.
#[tokio::test]
async fn service_error_is_replaced_if_the_lock_is_kept() {
    let db = Sqlite::fresh(2).await;
    let fence = db.fence_with(|fence| fence.lock_timeout(Duration::from_millis(100)));
    let service = service_fn(async |request: Request<Body>| {
        let (mut parts, _) = request.into_parts();
        let tx = SqliteFencedTx::from_request_parts(&mut parts, &()).await;
        std::mem::forget(tx.unwrap());
        Err::<Response<Body>, _>("the error of the service")
    });
    let answer = FenceLayer::new(fence, path).layer(service).oneshot(write());
    let status = answer.await.unwrap().status();
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
}

/// On a route of the Postgres fence, an extractor for SQLite fails with an error that names the
/// fence.
#[tokio::test]
async fn extractor_for_another_database_names_the_fence() {
    let db = sqlx::Postgres::fresh(2).await;
    let layer = FenceLayer::new(db.fence(), PathParam("sku"));
    let server = Server::at(
        "/{sku}",
        post(|_: SqliteFencedTx| async {}).route_layer(layer),
    )
    .await;
    let answer = server.write("/sku-1", 5).await;
    let problem = answer.is_problem(500, "misconfigured");
    let detail = problem["detail"].as_str().unwrap();
    assert_eq!(
        detail,
        "this route's fence uses PostgreSQL, but its handler extracts a transaction of SQLite"
    );
}

/// Two fences around one handler are refused, even on two databases, because one could commit what
/// the other one refuses.
#[tokio::test]
async fn two_fences_on_two_databases_are_a_configuration_error() {
    let (postgres, sqlite) = (sqlx::Postgres::fresh(2).await, Sqlite::fresh(2).await);
    for deferred in [false, true] {
        let outer = FenceLayer::new(postgres.fence(), PathParam("sku"));
        let outer = if deferred { outer.deferred() } else { outer };
        let inner = FenceLayer::new(sqlite.fence(), PathParam("sku"));
        let write = post(|| async {}).route_layer(inner).route_layer(outer);
        let server = Server::at("/{sku}", write).await;
        let answer = server.write("/sku-1", 5).await;
        answer.is_problem(500, "misconfigured");
        assert!(answer.text.contains("two `FenceLayer`s"), "{answer:?}");
    }
}

/// A filter may disable the span of the layer.
#[tokio::test]
async fn span_of_the_application_is_left_unchanged() {
    let db = Sqlite::fresh(2).await;
    let service = service_fn(async |_: Request<Body>| {
        tracing::warn!("handled");
        Ok::<_, Infallible>(Response::new(Body::empty()))
    });
    let (log, _guard) = Log::of_this_thread("warn,tower_fence=off");
    let span = tracing::warn_span!("request", resource = Empty, token = Empty);
    let answer = FenceLayer::new(db.fence(), path)
        .layer(service)
        .oneshot(write());
    let status = answer.instrument(span).await.unwrap().status();
    assert_eq!(status, StatusCode::OK);
    let log = log.take();
    assert_contains!(log, "request: ");
    assert_contains!(log, "handled");
    assert!(!log.contains("sku-1"), "{log}");
}
