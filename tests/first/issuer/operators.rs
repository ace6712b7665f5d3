//! The routes of the issuer: those for operators, and those below a path of the application.

use axum::Router;
use serde_json::{Value, json};
use sqlx::Sqlite;
use tower_fence::{
    issuer::{self, Issuer},
    lease::MemoryLeases,
};

use crate::support::{
    database::TestDatabase,
    http::{Answer, Server},
    store::{TestStore, on_store},
};

on_store!(
    in_memory: Memory,
    operators_list_and_break,
    router_without_operators_has_no_operator_routes,
);
// This store has another form of cursor.
on_store!(on_redis: Redis, operators_list_and_break);

async fn operators_list_and_break<S: TestStore>() {
    let (leases, _, _db) = S::fresh().await;
    let app = Router::new().nest("/locks", Issuer::new(leases).operator_router());
    let server = Server::start(app).await;
    let list = async |query: &str| Answer::to(server.get(&format!("/locks{query}"))).await;
    let empty = json!({ "leases": [], "cursor": null });
    assert_eq!(list("").await.json(), empty);
    for name in ["a", "b", "c"] {
        let body = json!({ "owner": format!("owner of {name}") });
        let granted = server.acquire(&format!("/locks/{name}"), body).await;
        assert_eq!(granted.status, 201);
    }
    let answer = list("?limit=1000").await;
    assert_eq!(answer.headers["cache-control"], "no-store");
    assert!(!answer.text.contains("lease_id"), "{answer:?}");
    let mut leases = answer.json()["leases"].as_array().unwrap().clone();
    leases.sort_by_key(|lease| lease["resource"].as_str().unwrap().to_owned());
    assert_eq!(leases.len(), 3);
    assert_eq!(leases[1]["resource"], "b");
    assert_eq!(leases[1]["owner"], "owner of b");
    assert_eq!(leases[1]["waiters"], 0);
    assert!(leases[1]["token"].is_i64() && leases[1]["ttl_ms"].as_u64() > Some(10_000));

    let mut names = vec![];
    let mut cursor = String::new();
    for _ in 0..1_000 {
        let page = list(&format!("?limit=1&cursor={cursor}")).await.json();
        let page_leases = page["leases"].as_array().unwrap();
        assert!(page_leases.len() <= 1);
        let page_names = page_leases
            .iter()
            .map(|lease| lease["resource"].to_string());
        names.extend(page_names);
        match page["cursor"].as_str() {
            Some(next) => cursor = next.to_owned(),
            None => break,
        }
    }
    names.sort_unstable();
    assert_eq!(names, ["\"a\"", "\"b\"", "\"c\""]);
    for query in "?limit=0 ?limit=1001 ?limit=x ?limit=-1 ?cursor=x ?limit=1&owner=a".split(' ') {
        list(query).await.is_problem(422, "invalid-request");
    }

    let end = || Answer::to(server.post("/locks/b/break"));
    assert_eq!(end().await.status, 204);
    assert_eq!(end().await.is_problem(409, "lease-lost")["resource"], "b");
    assert_eq!(server.inspect("/locks/b").await["held"], false);

    // A break with the token of an earlier lease spares the later one.
    let held = server.acquire("/locks/b", json!({})).await.json();
    let end = |body: Value| Answer::to(server.post("/locks/b/break").json(&body));
    let earlier = end(json!({ "token": leases[1]["token"] })).await;
    assert_eq!(earlier.is_problem(409, "lease-lost")["resource"], "b");
    for (body, field) in [
        (json!({ "tokn": held["token"] }), "tokn"),
        (json!({ "token": "1" }), "token"),
        (json!({ "token": 0 }), "token"),
        (json!([]), "body"),
    ] {
        let problem = end(body).await.is_problem(422, "invalid-request");
        assert_eq!(problem["field"], field);
    }
    let release = server.client.delete(server.url("/locks/b"));
    let release = release.header("Lease-Id", held["lease_id"].as_str().unwrap());
    let refused = Answer::to(release.json(&json!({ "token": 1 }))).await;
    assert_eq!(refused.is_problem(422, "invalid-request")["field"], "token");
    assert_eq!(server.inspect("/locks/b").await["token"], held["token"]);
    assert_eq!(end(json!({ "token": held["token"] })).await.status, 204);
    assert_eq!(server.inspect("/locks/b").await["held"], false);
}

async fn router_without_operators_has_no_operator_routes<S: TestStore>() {
    let (leases, _, _db) = S::fresh().await;
    let server = Server::issuer(leases).await;
    server.acquire("/locks/a", json!({})).await;
    assert_eq!(Answer::to(server.get("/locks")).await.status, 404);
    assert_eq!(Answer::to(server.post("/locks/a/break")).await.status, 404);
    assert_eq!(server.inspect("/locks/a").await["held"], true);
}

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
