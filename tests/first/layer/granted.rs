//! `FenceLayer::granted_up_to`: a token above all that its issuer has granted is refused.

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering::Relaxed},
    },
    time::Duration,
};

use axum::{Router, routing::post};
use tower_fence::{FenceLayer, Idempotency, PathParam, Resource, Token};

use crate::support::{
    database::{Fresh, TestDatabase, on_both_databases},
    http::{Answer, Server},
};

on_both_databases!(
    what_was_never_granted_is_refused,
    an_issuer_that_is_away_is_missed_only_by_what_is_above,
    an_issuer_that_does_not_answer_is_not_waited_for,
    a_repetition_is_answered_though_its_token_was_never_granted,
);

/// An issuer elsewhere: what it has granted, 0 while it cannot be asked, and how often it was.
#[derive(Clone, Default)]
struct Issuer {
    granted: Arc<AtomicI64>,
    asked: Arc<AtomicI64>,
}

async fn start<DB: TestDatabase>(db: &Fresh<DB>, issuer: &Issuer) -> Server {
    let issuer = issuer.clone();
    let layer = FenceLayer::new(db.fence(), PathParam("r")).granted_up_to(move || {
        issuer.asked.fetch_add(1, Relaxed);
        let granted = issuer.granted.load(Relaxed);
        async move { Ok(Token::new(granted)?) }
    });
    let route = || post(|| async { "done" }).get(|| async { "read" });
    let app = Router::new()
        .route("/{r}", route())
        .route_layer(layer.clone())
        .route(
            "/{r}/deferred",
            route().route_layer(layer.clone().deferred()),
        )
        .route(
            "/{r}/keys",
            route().route_layer(layer.idempotent(Idempotency::optional())),
        );
    Server::start(app).await
}

async fn max_token<DB: TestDatabase>(db: &Fresh<DB>) -> Option<i64> {
    let a = Resource::new("a").unwrap();
    db.fence().inspect(&a).await.unwrap()
}

async fn what_was_never_granted_is_refused<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let issuer = Issuer::default();
    let server = start(&db, &issuer).await;
    for token in 1..=7 {
        issuer.granted.store(token, Relaxed);
        assert_eq!(server.write("/a", token).await.text, "done");
    }
    assert_eq!(issuer.asked.load(Relaxed), 7, "once for each that is new");
    for path in ["/a", "/a/deferred", "/a/keys"] {
        let problem = server.write(path, 8).await;
        let problem = problem.is_problem(403, "unknown-epoch");
        assert_eq!(problem["resource"], "a");
        assert_eq!(problem["presented_token"], 8);
    }
    let read = server.get("/a").header("Fencing-Token", Token::MAX.get());
    Answer::to(read).await.is_problem(403, "unknown-epoch");
    assert_eq!(max_token(&db).await, Some(7));
    // A new one is known as soon as it is there.
    issuer.granted.store(8, Relaxed);
    assert_eq!(server.write("/a", 8).await.text, "done");
    // Without a token nobody asks.
    let asked = issuer.asked.load(Relaxed);
    assert_eq!(Answer::to(server.get("/a")).await.text, "read");
    assert_eq!(issuer.asked.load(Relaxed), asked);
}

async fn an_issuer_that_is_away_is_missed_only_by_what_is_above<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let issuer = Issuer::default();
    issuer.granted.store(7, Relaxed);
    let server = start(&db, &issuer).await;
    assert_eq!(server.write("/b", 7).await.text, "done");
    issuer.granted.store(0, Relaxed);
    assert_eq!(server.write("/a", 6).await.text, "done");
    let refused = server.write("/a", 8).await;
    refused.is_problem(503, "store-unavailable");
    assert!(refused.headers.contains_key("retry-after"));
    assert_eq!(max_token(&db).await, Some(6));
    issuer.granted.store(8, Relaxed);
    assert_eq!(server.write("/a", 8).await.text, "done");
}

async fn an_issuer_that_does_not_answer_is_not_waited_for<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let fence = db.fence().answer_wait(Duration::from_millis(100));
    let layer = FenceLayer::new(fence, PathParam("r")).granted_up_to(std::future::pending);
    let route = post(|| async {}).route_layer(layer);
    let server = Server::start(Router::new().route("/{r}", route)).await;
    let refused = server.write("/a", 1).await;
    refused.is_problem(503, "store-unavailable");
    assert_eq!(max_token(&db).await, None);
}

async fn a_repetition_is_answered_though_its_token_was_never_granted<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let issuer = Issuer::default();
    issuer.granted.store(7, Relaxed);
    let server = start(&db, &issuer).await;
    let send = |token: i64| {
        let request = server.post("/a/keys").header("Fencing-Token", token);
        Answer::to(request.header("Idempotency-Key", "\"k\""))
    };
    assert_eq!(send(7).await.text, "done");
    let again = send(Token::MAX.get()).await;
    assert_eq!(again.headers["idempotent-replayed"], "true");
    assert_eq!(max_token(&db).await, Some(7));
}
