//! The response to breaking a lease reports whether there was a lease or a lock delay.

use axum::Router;
use serde_json::{Value, json};
use tower_fence::issuer::Issuer;

use crate::support::{
    http::{Answer, Server},
    store::TestStore,
};

on_every_store!(a_break_spares_the_lease_of_a_later_holder,);

/// The operator reads the token of the first holder's lease. After the second holder has acquired,
/// the operator tries to break the lease with this token.
async fn a_break_spares_the_lease_of_a_later_holder<S: TestStore>() {
    let (leases, _, _db) = S::fresh().await;
    let app = Router::new().nest("/locks", Issuer::new(leases).operator_router());
    let server = Server::start(app).await;
    let seen = server.acquire("/locks/a", json!({})).await.json();
    let release = server.client.delete(server.url("/locks/a"));
    let release = release.header("Lease-Id", seen["lease_id"].as_str().unwrap());
    assert_eq!(Answer::to(release).await.status, 204);
    let held = server.acquire("/locks/a", json!({})).await.json();
    let end = |body: Value| Answer::to(server.post("/locks/a/break").json(&body));
    let refused = end(json!({ "token": seen["token"] })).await;
    assert_eq!(refused.is_problem(409, "lease-lost")["resource"], "a");
    for (body, field) in [
        (json!({ "tokn": held["token"] }), "tokn"),
        (json!({ "token": "1" }), "token"),
        (json!({ "token": 0 }), "token"),
        (json!([]), "body"),
    ] {
        let problem = end(body).await.is_problem(422, "invalid-request");
        assert_eq!(problem["field"], field);
    }
    // A request with an undefined member is refused.
    let release = server.client.delete(server.url("/locks/a"));
    let release = release.header("Lease-Id", held["lease_id"].as_str().unwrap());
    let refused = Answer::to(release.json(&json!({ "token": 1 }))).await;
    assert_eq!(refused.is_problem(422, "invalid-request")["field"], "token");
    let list = server.get("/locks?limit=1&owner=a");
    Answer::to(list).await.is_problem(422, "invalid-request");
    assert_eq!(server.inspect("/locks/a").await["token"], held["token"]);
    assert_eq!(end(json!({ "token": held["token"] })).await.status, 204);
    assert_eq!(server.inspect("/locks/a").await["held"], false);
}
