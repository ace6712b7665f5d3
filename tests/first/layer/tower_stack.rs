//! The layer in a tower stack, without a router.

use std::convert::Infallible;

use axum::body::Body;
use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use sqlx::Sqlite;
use tower::{ServiceBuilder, ServiceExt, service_fn};
use tower_fence::{FenceLayer, InvalidResource, Resource, SqliteFencedTx};

use crate::support::database::TestDatabase;

async fn echo(request: Request<Body>) -> Result<Response<Body>, Infallible> {
    let body = request.into_body().collect().await.unwrap().to_bytes();
    Ok(Response::new(Body::from(body)))
}

/// A body whose type is not axum's is forwarded completely.
#[tokio::test]
async fn any_body_type_is_accepted() {
    let db = Sqlite::fresh(2).await;
    let path = |parts: &http::request::Parts| -> Result<Resource, InvalidResource> {
        Resource::new(parts.uri.path())
    };
    let mut stack = ServiceBuilder::new()
        .layer(FenceLayer::new(db.fence(), path))
        .service(service_fn(echo));
    assert!(format!("{stack:?}").starts_with("FenceService"));
    let request = |token: &str| {
        Request::post("/sku-1")
            .header("Fencing-Token", token)
            .body(Full::new(Bytes::from_static(b"whole")))
            .unwrap()
    };
    let answer = stack.clone().oneshot(request("5")).await.unwrap();
    let answer = answer.into_body().collect().await.unwrap();
    assert_eq!(answer.to_bytes(), "whole");
    let stale = stack.clone().oneshot(request("5")).await.unwrap();
    assert_eq!(stale.status(), StatusCode::PRECONDITION_FAILED);
    let inner = *stack.get_ref();
    let _ = (stack.get_mut(), inner);
    let plain = stack.into_inner().oneshot(Request::new(Body::empty()));
    assert_eq!(plain.await.unwrap().status(), StatusCode::OK);
}

/// On a route of the Postgres fence, an extractor for SQLite fails with an error that names the
/// fence.
#[tokio::test]
async fn extractor_for_another_database_names_the_fence() {
    use axum::{Router, routing::post};
    use tower_fence::PathParam;

    use crate::support::http::Server;

    let db = sqlx::Postgres::fresh(2).await;
    let app = Router::new()
        .route("/{sku}", post(|_: SqliteFencedTx| async {}))
        .route_layer(FenceLayer::new(db.fence(), PathParam("sku")));
    let server = Server::start(app).await;
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
    use axum::{Router, routing::post};
    use tower_fence::PathParam;

    use crate::support::http::Server;

    let (postgres, sqlite) = (sqlx::Postgres::fresh(2).await, Sqlite::fresh(2).await);
    for deferred in [false, true] {
        let outer = FenceLayer::new(postgres.fence(), PathParam("sku"));
        let outer = if deferred { outer.deferred() } else { outer };
        let app = Router::new()
            .route("/{sku}", post(|| async {}))
            .route_layer(FenceLayer::new(sqlite.fence(), PathParam("sku")))
            .route_layer(outer);
        let server = Server::start(app).await;
        let answer = server.write("/sku-1", 5).await;
        answer.is_problem(500, "misconfigured");
        assert!(answer.text.contains("two `FenceLayer`s"), "{answer:?}");
    }
}
