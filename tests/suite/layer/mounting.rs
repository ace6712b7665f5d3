//! Where the layer stands in a service: around one route, around all, twice, or nowhere.

use axum::{
    Router,
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::{any, post},
};
use tower_fence::{FenceLayer, PathParam, layer::Rejection};

use super::handlers::{Plan, app, max_token, start};
use crate::support::{
    database::{TestDatabase, on_both_databases},
    http::{Answer, Server},
};

on_both_databases!(
    a_layer_around_the_whole_router_fails_closed,
    a_handler_without_a_layer_is_told_what_is_missing,
    the_typed_error_reaches_an_outer_layer,
    two_layers_are_a_mistake_of_the_service,
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
    server
        .write("/a/plain", 1)
        .await
        .is_problem(412, "stale-token");
    server
        .write("/no/such/route", 1)
        .await
        .is_problem(404, "unknown-route");
    Answer::to(server.post("/no/such/route"))
        .await
        .is_problem(404, "unknown-route");
    assert_eq!(Answer::to(server.get("/no/such/route")).await.status, 404);
    // A route without the parameter is a mistake in the service.
    server
        .write("/fixed", 1)
        .await
        .is_problem(500, "misconfigured");
    assert_eq!(Answer::to(server.get("/fixed")).await.text, "fixed");

    // Outside the router no route is known yet: no write gets through unchecked.
    let outside = Router::new().fallback_service(
        tower::ServiceBuilder::new()
            .layer(layer)
            .service(Router::new().route("/{sku}/plain", any(|| async { "plain" }))),
    );
    let server = Server::start(outside).await;
    server
        .write("/a/plain", 9)
        .await
        .is_problem(404, "unknown-route");
}

async fn a_handler_without_a_layer_is_told_what_is_missing<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let server = start(&db).await;
    let problem = server
        .write("/unfenced", 1)
        .await
        .is_problem(500, "misconfigured");
    assert!(
        problem["detail"]
            .as_str()
            .unwrap()
            .contains("route_layer(FenceLayer::new(")
    );
    // A safe method has no transaction, fenced or not.
    for token in [None, Some("5")] {
        let mut read = server.get("/a/add");
        if let Some(token) = token {
            read = read.header("Fencing-Token", token);
        }
        Answer::to(read).await.is_problem(500, "misconfigured");
    }
}

async fn the_typed_error_reaches_an_outer_layer<DB: TestDatabase>() {
    async fn restyle(response: Response) -> Response {
        let Some(rejection) = response.extensions().get::<Rejection>() else {
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

async fn two_layers_are_a_mistake_of_the_service<DB: TestDatabase>() {
    let db = DB::fresh(4).await;
    let layer = FenceLayer::new(db.fence(), PathParam("sku"));
    let app = Router::new()
        .route("/{sku}/plain", post(|| async {}))
        .route_layer(layer.clone())
        .route_layer(layer);
    let server = Server::start(app).await;
    server
        .write("/a/plain", 5)
        .await
        .is_problem(500, "misconfigured");
    assert_eq!(max_token(&db).await, Some(4));
}
