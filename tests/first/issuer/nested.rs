//! An issuer below a path with parameters of the application.

use axum::Router;
use serde_json::json;
use sqlx::Sqlite;
use tower_fence::{issuer, lease::MemoryLeases};

use crate::support::{database::TestDatabase, http::Server};

#[tokio::test]
async fn parameters_of_the_application_precede_the_resource() {
    let db = Sqlite::fresh(2).await;
    for prefix in ["/{shop}/locks", "/{resource}/locks"] {
        let leases = issuer::router(MemoryLeases::new(db.fence()));
        let server = Server::start(Router::new().nest(prefix, leases)).await;
        let granted = server.acquire("/red/locks/caf%C3%A9", json!({})).await;
        assert_eq!(granted.status, 201, "{granted:?}");
        assert_eq!(granted.json()["resource"], "caf\u{e9}");
        let malformed = server.acquire("/red/locks/%FF", json!({})).await;
        let problem = malformed.is_problem(422, "invalid-request");
        assert_eq!(problem["field"], "resource");
    }
}
