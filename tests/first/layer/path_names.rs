//! Names that refer to the same row share one fence.

use axum::{Router, extract::Path, routing::post};
use sqlx::Sqlite;
use tower_fence::{
    Admitted, FenceLayer, PathParam, Resource, ResourcePattern,
    layer::{FromPath, PathParams, ResourceError},
};

use crate::support::{database::TestDatabase, http::Server};

fn pattern(text: &str) -> ResourcePattern {
    ResourcePattern::new(text).unwrap()
}

async fn named(admitted: Admitted) -> String {
    admitted.resource().to_string()
}

#[tokio::test]
async fn equal_numbers_in_any_spelling_have_one_fence() {
    let db = Sqlite::fresh(2).await;
    let item = pattern("item/{id}");
    let parsed = FromPath(
        move |path: &PathParams| -> Result<Resource, ResourceError> {
            Ok(item.fill([("id", path.parse::<i64>("id")?)])?)
        },
    );
    let layer = FenceLayer::new(db.fence(), parsed);
    let item = |admitted: Admitted, Path(id): Path<i64>| async move {
        assert_eq!(admitted.resource().as_str(), format!("item/{id}"));
        admitted.resource().to_string()
    };
    let server = Server::at("/items/{id}", post(item).route_layer(layer)).await;
    assert_eq!(server.write("/items/7", 5).await.text, "item/7");
    for same in ["7", "07", "+7", "%37", "%2B7", "0007"] {
        let answer = server.write(&format!("/items/{same}"), 4).await;
        let problem = answer.is_problem(412, "stale-token");
        assert_eq!(problem["resource"], "item/7", "{same}");
    }
    let written = server.write("/items/007", r#"6;resource="item/7""#).await;
    assert_eq!(written.text, "item/7");
    let other = r#"8;resource="item/07""#;
    server
        .refuses("/items/07", other, 403, "wrong-resource")
        .await;
    for other in ["x", "7x", "%20", "7.0", "9223372036854775808"] {
        let answer = server.write(&format!("/items/{other}"), 9).await;
        assert_eq!(answer.is_problem(422, "invalid-request")["field"], "id");
    }
}

#[tokio::test]
async fn repeated_path_parameter_is_a_configuration_error() {
    let db = Sqlite::fresh(2).await;
    let layer = FenceLayer::new(db.fence(), PathParam("id"));
    let in_pattern = FenceLayer::new(db.fence(), pattern("item/{id}"));
    let write = || post(|| async {});
    let shops = Router::new().route("/items/{id}", write().route_layer(layer));
    let towns = Router::new().route("/items/{id}", write().route_layer(in_pattern));
    let app = Router::new().nest("/shops/{id}", shops);
    let server = Server::start(app.nest("/towns/{id}", towns)).await;
    for path in ["/shops/1/items/2", "/towns/1/items/2", "/shops/1/items/1"] {
        let answer = server.write(path, 5).await;
        answer.is_problem(500, "misconfigured");
        assert!(answer.text.contains("two path parameters"), "{answer:?}");
    }
}

#[tokio::test]
async fn a_pattern_is_filled_from_decoded_parameters_of_the_path() {
    let db = Sqlite::fresh(2).await;
    let layer = FenceLayer::new(db.fence(), pattern("show/{show}/seat/{seat}"));
    let server = Server::at("/{hall}/{show}/{seat}", post(named).route_layer(layer)).await;
    // The last parameter may contain a `/`, and the route may have more parameters.
    let written = server.write("/red/7/A%2F1%20b", 5).await;
    assert_eq!(written.text, "show/7/seat/A/1 b");
    // Two different seats must not have the same name.
    let refused = server.write("/red/7%2Fseat%2FA/1%20b", 6).await;
    let problem = refused.is_problem(422, "invalid-request");
    assert_eq!(problem["field"], "show");
    for seat in ["%00", &"x".repeat(250)] {
        let refused = server.write(&format!("/red/7/{seat}"), 6).await;
        let problem = refused.is_problem(422, "invalid-request");
        assert_eq!(problem["field"], "resource");
    }
}

#[tokio::test]
async fn one_layer_serves_routes_with_other_parameters() {
    let db = Sqlite::fresh(2).await;
    let (order, customer) = (pattern("order/{order}"), pattern("customer/{customer}"));
    let either = FromPath(
        move |path: &PathParams| -> Result<Resource, ResourceError> {
            match path.route() {
                "/shop/orders/{order}" => path.fill(&order),
                _ => path.fill(&customer),
            }
        },
    );
    let routes = Router::new()
        .route("/orders/{order}", post(named))
        .route("/customers/{customer}", post(named))
        .route_layer(FenceLayer::new(db.fence(), either));
    let server = Server::start(Router::new().nest("/shop", routes)).await;
    assert_eq!(server.write("/shop/orders/7", 5).await.text, "order/7");
    let written = server.write("/shop/customers/7", 5).await;
    assert_eq!(written.text, "customer/7");
}

#[tokio::test]
async fn missing_path_parameter_error_names_route_and_remedy() {
    let db = Sqlite::fresh(2).await;
    let routes = |layer| {
        Router::new()
            .route("/orders/{order}", post(|| async {}))
            .route("/accounts/{account}", post(|| async {}))
            .route_layer(layer)
    };
    let app = routes(FenceLayer::new(db.fence(), pattern("order/{order}")));
    let layer = FenceLayer::new(db.fence(), PathParam("order"));
    let write = post(|| async {}).route_layer(layer);
    let nested = Router::new().route("/accounts/{account}", write);
    let server = Server::start(app.nest("/v1", nested)).await;
    assert_eq!(server.write("/orders/7", 5).await.status, 200);
    for (path, route) in [
        ("/accounts/7", "`/accounts/{account}`"),
        ("/v1/accounts/7", "`/v1/accounts/{account}`"),
    ] {
        let answer = server.write(path, 5).await;
        let problem = answer.is_problem(500, "misconfigured");
        let detail = problem["detail"].as_str().unwrap();
        assert_contains!(detail, route);
        assert_contains!(detail, "post(handler).layer(FenceLayer::new(");
    }
}
