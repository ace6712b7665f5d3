//! The position of the layer in a service: around one route, around all routes, twice, or nowhere.

use std::time::Duration;

use axum::{
    Router,
    http::{StatusCode, request::Parts},
    response::{IntoResponse, Response},
    routing::{any, post},
};
use sqlx::Sqlite;
use tower_fence::{
    FenceLayer, PathParam, Resource,
    layer::{Refusal, ResourceError, ResourceFrom, Resources},
};

use super::handlers::{Plan, app, max_token, start};
use crate::support::{
    database::{TestDatabase, on_both_databases},
    http::{Answer, Server},
};

on_both_databases!(
    a_layer_around_the_whole_router_fails_closed,
    handler_without_a_layer_logs_what_is_missing,
    the_typed_error_reaches_an_outer_layer,
    two_layers_are_a_configuration_error,
);

async fn a_layer_around_the_whole_router_fails_closed<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let layer = FenceLayer::new(db.fence(), PathParam("sku"));
    let app = Router::new()
        .route("/{sku}/plain", any(|| async { "plain" }))
        .route("/fixed", any(|| async { "fixed" }))
        .layer(layer.clone());
    let server = Server::start(app.clone()).await;
    assert_eq!(server.write("/a/plain", 1).await.text, "plain");
    server.refuses("/a/plain", 1, 412, "stale-token").await;
    let nowhere = "/no/such/route";
    server.refuses(nowhere, 1, 404, "unknown-route").await;
    let without_token = Answer::to(server.post(nowhere)).await;
    without_token.is_problem(404, "unknown-route");
    assert_eq!(Answer::to(server.get(nowhere)).await.status, 404);
    // A route without the parameter is a configuration error.
    server.refuses("/fixed", 1, 500, "misconfigured").await;
    assert_eq!(Answer::to(server.get("/fixed")).await.text, "fixed");

    // Outside the router, the layer cannot determine the route, so it refuses the write instead of
    // forwarding it unchecked.
    let outside = Router::new().fallback_service(
        tower::ServiceBuilder::new()
            .layer(layer.clone())
            .service(Router::new().route("/{sku}/plain", any(|| async { "plain" }))),
    );
    let nested = Router::new().nest_service("/{sku}", any(|| async { "plain" }).layer(layer));
    for app in [outside, nested] {
        let refused = Server::start(app).await.write("/a/plain", 9).await;
        let problem = refused.is_problem(404, "unknown-route");
        assert!(refused.text.contains("`nest_service`"), "{problem}");
    }
}

async fn handler_without_a_layer_logs_what_is_missing<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let server = start(&db).await;
    let problem = server.refuses("/unfenced", 1, 500, "misconfigured").await;
    let detail = problem["detail"].as_str().unwrap();
    assert_contains!(detail, "route_layer(FenceLayer::new(");
    // A read without a token has no transaction.
    let read = Answer::to(server.get("/a/add")).await;
    read.is_problem(500, "misconfigured");
}

async fn the_typed_error_reaches_an_outer_layer<DB: TestDatabase>() {
    async fn restyle(response: Response) -> Response {
        let Some(rejection) = response.extensions().get::<Refusal>() else {
            return response;
        };
        let stale = rejection.stale().map_or(0, |stale| stale.max_token);
        (StatusCode::IM_A_TEAPOT, stale.to_string()).into_response()
    }
    let db = DB::fresh(2).await;
    let app = app(db.fence(), Plan::default()).layer(axum::middleware::map_response(restyle));
    let server = Server::start(app).await;
    assert_eq!(server.write("/a/plain", 5).await.status, 200);
    let answer = server.write("/a/plain", 4).await;
    assert_eq!((answer.status, answer.text.as_str()), (418, "5"));
    assert_eq!(server.write("/a/plain", "").await.text, "0");
}

async fn two_layers_are_a_configuration_error<DB: TestDatabase>() {
    let db = DB::fresh(4).await;
    let layer = FenceLayer::new(db.fence(), PathParam("sku"));
    let write = post(|| async {}).route_layer(layer.clone());
    let server = Server::at("/{sku}/plain", write.route_layer(layer)).await;
    server.refuses("/a/plain", 5, 500, "misconfigured").await;
    assert_eq!(max_token(&db).await, Some(4));
}

/// The resource may have to be looked up in a store that is unreachable or silent.
#[tokio::test]
async fn unavailable_resource_lookup_is_answered_503_in_time() {
    #[derive(Clone)]
    struct AskedFor;

    impl ResourceFrom for AskedFor {
        async fn resources_from(&self, parts: &mut Parts) -> Result<Resources, ResourceError> {
            match parts.uri.path() {
                "/away" => Err(ResourceError::Unavailable),
                "/silent" => std::future::pending().await,
                path => Ok(Resource::new(path)?.into()),
            }
        }
    }
    let db = Sqlite::fresh(2).await;
    let fence = db.fence_with(|fence| fence.answer_timeout(Duration::from_secs(1)));
    let layer = FenceLayer::new(fence, AskedFor);
    let server = Server::at("/{r}", post(|| async {}).route_layer(layer)).await;
    assert_eq!(server.write("/there", 5).await.status, 200);
    for path in ["/away", "/silent"] {
        let answer = server.write(path, 5).await;
        answer.is_problem(503, "store-unavailable");
        assert_eq!(answer.headers["retry-after"], "1");
    }
}
