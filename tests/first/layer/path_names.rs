//! Names that mean one row have one fence.

use axum::{Router, extract::Path, routing::post};
use sqlx::Sqlite;
use tower_fence::{
    Admitted, FenceLayer, PathParam, Resource,
    layer::{FromPath, PathParams, ResourceError},
};

use crate::support::{database::TestDatabase, http::Server};

#[tokio::test]
async fn however_a_number_is_spelled_it_has_one_fence() {
    let db = Sqlite::fresh(2).await;
    let layer = FenceLayer::new(db.fence(), PathParam("id").parsed::<i64>());
    let item = |admitted: Admitted, Path(id): Path<i64>| async move {
        assert_eq!(admitted.resource.as_str(), id.to_string());
        admitted.resource.to_string()
    };
    let app = Router::new()
        .route("/items/{id}", post(item))
        .route_layer(layer);
    let server = Server::start(app).await;
    assert_eq!(server.write("/items/7", 5).await.text, "7");
    for same in ["7", "07", "+7", "%37", "%2B7", "0007"] {
        let answer = server.write(&format!("/items/{same}"), 4).await;
        let problem = answer.is_problem(412, "stale-token");
        assert_eq!(problem["resource"], "7", "{same}");
    }
    assert_eq!(
        server.write("/items/007", r#"6;resource="7""#).await.text,
        "7"
    );
    server
        .write("/items/07", r#"8;resource="07""#)
        .await
        .is_problem(403, "wrong-resource");
    for other in ["x", "7x", "%20", "7.0", "9223372036854775808"] {
        let answer = server.write(&format!("/items/{other}"), 9).await;
        assert_eq!(answer.is_problem(422, "invalid-request")["field"], "id");
    }
}

#[tokio::test]
async fn a_text_is_compared_percent_decoded() {
    let db = Sqlite::fresh(2).await;
    let app = Router::new()
        .route("/items/{id}", post(|| async {}))
        .route_layer(FenceLayer::new(db.fence(), PathParam("id")));
    let server = Server::start(app).await;
    assert_eq!(server.write("/items/7", 5).await.status, 200);
    let stale = server.write("/items/%37", 5).await;
    stale.is_problem(412, "stale-token");
}

#[tokio::test]
async fn a_parameter_that_stands_twice_is_a_mistake_of_the_service() {
    let db = Sqlite::fresh(2).await;
    let layer = FenceLayer::new(db.fence(), PathParam("id"));
    let parsed = FenceLayer::new(db.fence(), PathParam("id").parsed::<i64>());
    let app = Router::new()
        .nest(
            "/shops/{id}",
            Router::new()
                .route("/items/{id}", post(|| async {}))
                .route_layer(layer),
        )
        .nest(
            "/towns/{id}",
            Router::new()
                .route("/items/{id}", post(|| async {}))
                .route_layer(parsed),
        );
    let server = Server::start(app).await;
    for path in ["/shops/1/items/2", "/towns/1/items/2", "/shops/1/items/1"] {
        let answer = server.write(path, 5).await;
        answer.is_problem(500, "misconfigured");
        assert!(answer.text.contains("twice"), "{answer:?}");
    }
}

#[tokio::test]
async fn a_prefix_keeps_things_with_the_same_number_apart() {
    let db = Sqlite::fresh(2).await;
    let named = |admitted: Admitted| async move { admitted.resource.to_string() };
    let layer = |resource| FenceLayer::new(db.fence(), resource);
    let order = PathParam("id").prefix("order/");
    let account = PathParam("id").parsed::<i64>().prefix("account/");
    let app = Router::new()
        .route("/orders/{id}", post(named).layer(layer(order)))
        .route(
            "/accounts/{id}",
            post(named).layer(FenceLayer::new(db.fence(), account)),
        );
    let server = Server::start(app).await;
    assert_eq!(server.write("/orders/7", 5).await.text, "order/7");
    assert_eq!(server.write("/accounts/07", 5).await.text, "account/7");
    let stale = server.write("/accounts/+7", 5).await;
    stale.is_problem(412, "stale-token");
    let long = format!("/orders/{}", "x".repeat(250));
    let answer = server.write(&long, 5).await;
    answer.is_problem(422, "invalid-request");
}

#[tokio::test]
async fn a_function_reads_the_decoded_parameters_of_the_path() {
    let db = Sqlite::fresh(2).await;
    let both = |path: &PathParams| -> Result<Resource, ResourceError> {
        let (tenant, sku) = (path.get("tenant")?, path.get("sku")?);
        Ok(Resource::new(format!("{tenant}/{sku}"))?)
    };
    let named = |admitted: Admitted| async move { admitted.resource.to_string() };
    let app = Router::new()
        .route("/{tenant}/{sku}", post(named))
        .route_layer(FenceLayer::new(db.fence(), FromPath(both)));
    let server = Server::start(app).await;
    assert_eq!(server.write("/red/a%20b", 5).await.text, "red/a b");
}

#[tokio::test]
async fn a_layer_on_a_route_without_its_parameter_names_the_route_and_the_cure() {
    let db = Sqlite::fresh(2).await;
    let app = Router::new()
        .route("/orders/{order}", post(|| async {}))
        .route("/accounts/{account}", post(|| async {}))
        .route_layer(FenceLayer::new(db.fence(), PathParam("order")));
    let server = Server::start(app).await;
    assert_eq!(server.write("/orders/7", 5).await.status, 200);
    let answer = server.write("/accounts/7", 5).await;
    let problem = answer.is_problem(500, "misconfigured");
    let detail = problem["detail"].as_str().unwrap();
    assert!(detail.contains("`/accounts/{account}`"), "{detail}");
    assert!(
        detail.contains("post(handler).layer(FenceLayer::new("),
        "{detail}"
    );
}
