//! `Issuer::sign_with`: the answers, and how a holder uses them.

use axum::{Router, routing::post};
use serde_json::json;
use sqlx::Sqlite;
use tower_fence::{
    FenceLayer, PathParam, Resource, TokenKey, TokenKeys,
    client::{Holder, HttpLeases},
    header::FencingToken,
    issuer::Issuer,
    lease::{LeaseAdmin, Leases, MemoryLeases, Signed},
};

use crate::support::{
    database::{Fresh, TestDatabase},
    http::Server,
    lease::{LONG, grant, grant_and_release, sku},
};

fn keys(id: &str) -> TokenKeys {
    TokenKeys::new([TokenKey::random(id).unwrap()]).unwrap()
}

/// Starts an issuer that signs, and a fence that verifies.
async fn start(db: &Fresh<Sqlite>, keys: &TokenKeys) -> Server {
    let leases = MemoryLeases::new(db.fence()).announced_to(db.fence());
    let layer = FenceLayer::new(db.fence(), PathParam("r")).verify_with(keys.clone());
    let issuer = Issuer::new(leases).sign_with(keys.clone());
    let app = Router::new()
        .route("/{r}", post(|| async {}))
        .route_layer(layer)
        .nest("/locks", issuer.operator_router());
    Server::start(app).await
}

#[tokio::test]
async fn only_the_holder_receives_the_signature() {
    let (db, keys) = (Sqlite::fresh(2).await, keys("k1"));
    let server = start(&db, &keys).await;
    let granted = server.acquire("/locks/caf%C3%A9", json!({})).await;
    assert_eq!(granted.status, 201);
    let body = granted.json();
    let id = body["lease_id"].as_str().unwrap();
    let field = body["fencing_token"].as_str().unwrap();
    assert_eq!(granted.headers["fencing-token"], field);
    let signed: FencingToken = field.parse().unwrap();
    assert_eq!(keys.verify(&signed), Ok(&Resource::new("café").unwrap()));
    assert_eq!(signed.token.get(), body["token"].as_i64().unwrap());

    // A renewed lease is signed by the current key.
    let later = TokenKey::random("k2").unwrap();
    keys.replace(&TokenKeys::new([later]).unwrap());
    let renewed = server.renew("/locks/caf%C3%A9", id, json!({})).await;
    let again = renewed.json()["fencing_token"].clone();
    let again: FencingToken = again.as_str().unwrap().parse().unwrap();
    let key = again.key.as_ref().unwrap().as_str();
    assert_eq!((again.token, key), (signed.token, "k2"));
    assert_eq!(renewed.headers["fencing-token"], again.to_string());
    keys.verify(&again).unwrap();
    keys.verify(&signed).unwrap_err();

    // Neither an inspection nor a list returns a signature.
    for path in ["/locks/caf%C3%A9", "/locks"] {
        let seen = server.inspect(path).await.to_string();
        assert!(
            seen.contains(&signed.token.to_string()) && !seen.contains("mac"),
            "{seen}"
        );
    }
}

#[tokio::test]
async fn holder_forwards_the_signed_token_without_a_key() {
    let (db, keys) = (Sqlite::fresh(2).await, keys("k1"));
    let server = start(&db, &keys).await;
    let holder = Holder::new(HttpLeases::new(&server.url("/locks")).unwrap());
    let lease = holder.acquire("a").await.unwrap();
    let write = async |headers: http::HeaderMap| {
        let sent = server.client.post(server.url("/a")).headers(headers).send();
        sent.await.unwrap().status()
    };
    assert_eq!(write(lease.headers()).await, 200);
    assert_eq!(write(lease.headers()).await, 412);
    let field = lease.renew_with_new_token().await.unwrap().to_string();
    assert_eq!(lease.headers()["fencing-token"], field);
    let signed = keys.sign(lease.resource(), lease.token());
    assert_eq!(field, signed.to_string());
    assert_eq!(write(lease.headers()).await, 200);

    // After a rotation, the next renewal returns a new signature, even for the same token.
    let short = holder.ttl(std::time::Duration::from_millis(600));
    let lease = short.acquire("b").await.unwrap();
    let old = lease.headers()["fencing-token"].clone();
    keys.replace(&TokenKeys::new([TokenKey::random("k2").unwrap()]).unwrap());
    crate::support::eventually!(
        "the lease is renewed",
        lease.headers()["fencing-token"] != old
    );
    assert_eq!(lease.fencing_token().key.unwrap().as_str(), "k2");
    lease.check().unwrap();
}

#[tokio::test]
async fn announced_signed_lease_ends_in_its_store() {
    let (db, keys) = (Sqlite::fresh(2).await, keys("k1"));
    let store = MemoryLeases::new(db.fence());
    let leases = Signed::new(store.clone().announced_to(db.fence()), keys);
    grant_and_release(&leases).await;
    assert_eq!(store.inspect(&sku()).await.unwrap(), None);
    grant(&leases, &sku(), LONG).await;
    assert_eq!(leases.list(9, None).await.unwrap().leases.len(), 1);
    assert!(leases.break_lease(&sku(), None).await.unwrap());
    assert_eq!(store.inspect(&sku()).await.unwrap(), None);
    assert!(!leases.break_lease(&sku(), None).await.unwrap());
}
