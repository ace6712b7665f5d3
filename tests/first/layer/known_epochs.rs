//! `FenceLayer::issued_by_this_database`: a token of an epoch that was never assigned is refused.

use axum::{Router, routing::post};
use tower_fence::{
    FenceLayer, Idempotency, PathParam, Token,
    epochs::{Epoch, Epochs},
    lease::{Leases, MemoryLeases},
};

use super::handlers::max_token;
use crate::support::{
    database::{Fresh, TestDatabase, on_both_databases},
    fence::resource,
    http::{Answer, Server},
    lease::{LONG, grant},
};

on_both_databases!(
    token_that_was_never_granted_is_refused,
    granted_token_is_known_without_a_read,
    tokens_of_the_issuer_are_known,
    grant_is_known_although_its_token_was_tried_before,
    a_repetition_is_answered_whatever_its_token,
);

/// The partition of "a", computed by `zlib.crc32(name) & 255` in Python.
const PARTITION: u8 = 0x43;

async fn start<DB: TestDatabase>(db: &Fresh<DB>) -> Server {
    let layer = FenceLayer::new(db.fence(), PathParam("r")).issued_by_this_database();
    let route = || post(|| async { "done" }).get(|| async { "read" });
    let deferred = layer.clone().deferred();
    let keyed = layer.clone().idempotent(Idempotency::optional());
    let app = Router::new()
        .route("/{r}", route().route_layer(layer))
        .route("/{r}/deferred", route().route_layer(deferred))
        .route("/{r}/keys", route().route_layer(keyed));
    Server::start(app).await
}

async fn begin_epoch<DB: TestDatabase>(db: &Fresh<DB>, epoch: i64) {
    let epoch = Epoch::new(epoch).unwrap();
    let begun = db.fence().next_epoch(PARTITION, epoch).await.unwrap();
    assert_eq!(begun, epoch);
}

async fn token_that_was_never_granted_is_refused<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let server = start(&db).await;
    server
        .refuses("/a", 1_000_000_001, 403, "unknown-epoch")
        .await;
    begin_epoch(&db, 3).await;
    assert_eq!(server.write("/a", 3_000_000_001_i64).await.text, "done");
    for token in [Token::MAX.get(), 4_000_000_000, 999_999_999, 1] {
        for path in ["/a", "/a/deferred"] {
            let problem = server.refuses(path, token, 403, "unknown-epoch").await;
            assert_eq!(problem["resource"], "a");
            assert_eq!(problem["presented_token"], token);
        }
        let read = server.get("/a").header("Fencing-Token", token);
        Answer::to(read).await.is_problem(403, "unknown-epoch");
    }
    assert_eq!(max_token(&db).await, Some(3_000_000_001));
    // A new epoch is known as soon as it is assigned.
    begin_epoch(&db, 4).await;
    assert_eq!(server.write("/a", 4_000_000_001_i64).await.text, "done");
    // Without a token, the layer does not check the epoch.
    assert_eq!(Answer::to(server.get("/a")).await.text, "read");
}

async fn granted_token_is_known_without_a_read<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let server = start(&db).await;
    begin_epoch(&db, 3).await;
    assert_eq!(server.write("/a", 3_000_000_001_i64).await.text, "done");
    db.execute("ALTER TABLE tower_fence.epochs RENAME TO gone")
        .await;
    for token in [3_000_000_002_i64, 3_999_999_999] {
        assert_eq!(server.write("/a", token).await.text, "done");
    }
    let above = server.write("/a", 4_000_000_000_i64).await;
    above.is_problem(500, "misconfigured");
}

async fn tokens_of_the_issuer_are_known<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let server = start(&db).await;
    let leases = MemoryLeases::new(db.fence());
    for name in ["a", "b", "c"] {
        let token = grant(&leases, &resource(name), LONG).await.token;
        let answer = server.write(&format!("/{name}"), token).await;
        assert_eq!(answer.text, "done");
    }
}

async fn a_repetition_is_answered_whatever_its_token<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let server = start(&db).await;
    begin_epoch(&db, 3).await;
    let send = |key: &str, token: i64| {
        let request = server.post("/a/keys").header("Fencing-Token", token);
        Answer::to(request.header("Idempotency-Key", format!("\"{key}\"")))
    };
    assert_eq!(send("k", 3_000_000_001).await.text, "done");
    for token in [3_000_000_001, 1, Token::MAX.get()] {
        let again = send("k", token).await;
        assert_eq!(again.headers["idempotent-replayed"], "true");
    }
    let new = send("new", Token::MAX.get()).await;
    new.is_problem(403, "unknown-epoch");
    assert_eq!(max_token(&db).await, Some(3_000_000_001));
    assert_eq!(send("new", 3_000_000_002).await.text, "done");
    // The stored response is removed at its expiry.
    let now = if DB::ABORTS_ON_ERROR { "now()" } else { "0" };
    let expire = format!("UPDATE tower_fence.idempotency_keys SET expires_at = {now}");
    db.execute(&expire).await;
    let expired = send("k", Token::MAX.get()).await;
    expired.is_problem(403, "unknown-epoch");
}

/// A write uses the last token of the first epoch, so the next grant is the first token of an epoch
/// that was unknown before.
async fn grant_is_known_although_its_token_was_tried_before<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let server = start(&db).await;
    let leases = MemoryLeases::new(db.fence()).announced_to(db.fence());
    let a = resource("a");
    let first = grant(&leases, &a, LONG).await;
    let next_epoch = (first.token.get() / 1_000_000_000 + 1) * 1_000_000_000;
    assert_eq!(server.write("/a", next_epoch - 1).await.text, "done");
    let forged = server.write("/a", next_epoch).await;
    forged.is_problem(403, "unknown-epoch");
    leases.release(&a, &first.id).await.unwrap();
    let second = grant(&leases, &a, LONG).await;
    assert_eq!(second.token.get(), next_epoch);
    assert_eq!(server.write("/a", second.token).await.text, "done");
    let above = server.write("/a", next_epoch + 1).await;
    above.is_problem(403, "unknown-epoch");
}
