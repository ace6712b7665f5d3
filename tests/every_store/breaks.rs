//! The response to breaking a lease reports whether there was a lease or a lock delay.

use axum::Router;
use serde_json::{Value, json};
use tower_fence::{
    issuer::Issuer,
    lease::{Acquire, LeaseAdmin, Leases},
};

use crate::support::{
    http::{Answer, Server},
    lease::{LONG, grant, is_lost, sku},
    store::TestStore,
};

on_every_store!(
    break_reports_whether_the_resource_was_blocked,
    a_break_spares_the_lease_of_a_later_holder,
);

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

async fn break_reports_whether_the_resource_was_blocked<S: TestStore>() {
    let (one, two, _db) = S::fresh().await;
    assert!(
        !two.break_lease(&sku(), None).await.unwrap(),
        "the lease was never granted"
    );
    let lease = grant(&one, &sku(), LONG).await;
    assert!(two.break_lease(&sku(), None).await.unwrap());
    assert!(
        !two.break_lease(&sku(), None).await.unwrap(),
        "the lease has already ended"
    );
    is_lost(one.release(&sku(), &lease.id).await);
    let next = two.acquire(&sku(), Acquire::new(LONG)).await.unwrap();
    assert!(next.token > lease.token);
    two.release(&sku(), &next.id).await.unwrap();
    assert!(
        !one.break_lease(&sku(), None).await.unwrap(),
        "the lease was released"
    );
}
