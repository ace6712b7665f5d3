//! The deferred layer with its other settings, on both databases: timeouts, idempotency keys,
//! several resources, and reusable tokens.

use std::{sync::Arc, time::Duration};

use axum::{Router, routing::post};
use tower_fence::{Admitted, FenceLayer, FencedTx, PathParam, PendingWrite, fence::WriteError};

use super::deferred::{INSERT, app, max_token, start};
use crate::support::{
    database::{TestDatabase, on_both_databases},
    http::{Answer, Server},
};

on_both_databases!(
    timed_out_handler_claims_no_key,
    keyed_write_happens_once,
    several_resources_are_written_in_one_statement,
    reusable_tokens_write_again,
    each_extractor_needs_its_layer,
    pending_write_is_taken_once_before_any_admission,
);

async fn timed_out_handler_claims_no_key<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let fence = db.fence_with(|fence| fence.hold_timeout(Duration::from_secs(1)));
    let server = Server::start(app(fence, Arc::default())).await;
    let answer = server.write("/r/begin-and-linger", 5).await;
    answer.is_problem(503, "handler-timeout");
    assert_eq!((db.entries().await, max_token(&db).await), (0, Some(4)));
    let answer = server.write("/r/linger", 5).await;
    answer.is_problem(503, "outcome-unknown");
    assert_eq!((db.entries().await, max_token(&db).await), (1, Some(5)));
}

async fn keyed_write_happens_once<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let server = start(&db).await;
    let write = |what: &str, key: &str| {
        let request = server.post(what).header("Fencing-Token", "5");
        Answer::to(request.header("Idempotency-Key", format!("\"{key}\"")))
    };
    assert_eq!(write("/r/no-row", "a").await.status, 409);
    assert_eq!((db.entries().await, max_token(&db).await), (0, Some(4)));
    for (what, key, text) in [("/r/insert", "b", "1"), ("/r/begin", "c", "begun")] {
        db.execute("DELETE FROM ledger").await;
        db.execute("UPDATE tower_fence.resources SET max_token = 4")
            .await;
        let first = write(what, key).await;
        assert_eq!((first.status, first.text.as_str()), (200, text));
        assert_eq!((db.entries().await, max_token(&db).await), (1, Some(5)));
        let again = write(what, key).await;
        assert_eq!((again.status, again.text.as_str()), (200, text));
        assert_eq!(again.headers["idempotent-replayed"], "true");
        assert_eq!(db.entries().await, 1);
    }
}

async fn several_resources_are_written_in_one_statement<DB: TestDatabase>() {
    async fn write<DB: TestDatabase>(pending: PendingWrite<DB>) -> Result<(), WriteError> {
        assert_eq!(pending.claims().len(), 2);
        assert_eq!(pending.write::<()>(INSERT).await?.len(), 1);
        Ok(())
    }
    let db = DB::fresh(2).await;
    let layer = FenceLayer::new(db.fence(), [PathParam("a"), PathParam("b")]).deferred();
    let server = Server::at("/{a}/{b}", post(write::<DB>).route_layer(layer)).await;
    let tokens = r#"5;resource="r", 3;resource="s""#;
    assert_eq!(server.write("/r/s", tokens).await.status, 200);
    assert_eq!((db.entries().await, max_token(&db).await), (1, Some(5)));
    let problem = server
        .write("/s/r", r#"6;resource="r", 3;resource="s""#)
        .await;
    assert_eq!(problem.is_problem(412, "stale-token")["resource"], "s");
    assert_eq!((db.entries().await, max_token(&db).await), (1, Some(5)));
}

async fn reusable_tokens_write_again<DB: TestDatabase>() {
    async fn write<DB: TestDatabase>(pending: PendingWrite<DB>) -> Result<(), WriteError> {
        let more = "UPDATE stock SET n = n + 1 WHERE EXISTS (SELECT 1 FROM fence) RETURNING n";
        pending.write::<()>(more).await?;
        Ok(())
    }
    let db = DB::fresh(2).await;
    db.execute("INSERT INTO stock VALUES ('r', 0)").await;
    let layer = FenceLayer::new(db.fence(), PathParam("r")).deferred();
    let layer = layer.reusable();
    let server = Server::at("/{r}", post(write::<DB>).route_layer(layer)).await;
    for written in 1..=3 {
        assert_eq!(server.write("/r", 5).await.status, 200);
        assert_eq!(max_token(&db).await, Some(4));
        assert_eq!(db.number("SELECT n FROM stock").await, written);
    }
    server.write("/r", 4).await.is_problem(412, "stale-token");
}

async fn each_extractor_needs_its_layer<DB: TestDatabase>() {
    async fn tx<DB: TestDatabase>(_: FencedTx<DB>) {}
    async fn pending<DB: TestDatabase>(_: PendingWrite<DB>) {}
    let db = DB::fresh(2).await;
    let layer = FenceLayer::new(db.fence(), PathParam("r"));
    let deferred = Router::new()
        .route("/{r}/tx", post(tx::<DB>))
        .route_layer(layer.clone().deferred());
    let app = Router::new()
        .route("/{r}/pending", post(pending::<DB>))
        .route_layer(layer)
        .route("/bare", post(pending::<DB>))
        .merge(deferred);
    let server = Server::start(app).await;
    for path in ["/r/pending", "/bare", "/r/tx"] {
        server.write(path, 5).await.is_problem(500, "misconfigured");
    }
    let answer = server.write("/r/tx", 6).await;
    assert!(answer.text.contains("PendingWrite"), "{answer:?}");
}

async fn pending_write_is_taken_once_before_any_admission<DB: TestDatabase>() {
    async fn twice<DB: TestDatabase>(_: PendingWrite<DB>, _: PendingWrite<DB>) {}
    async fn too_early<DB: TestDatabase>(_: PendingWrite<DB>, _: Admitted) {}
    let db = DB::fresh(2).await;
    let app = Router::new()
        .route("/{r}/twice", post(twice::<DB>))
        .route("/{r}/early", post(too_early::<DB>))
        .route_layer(FenceLayer::new(db.fence(), PathParam("r")).deferred());
    let server = Server::start(app).await;
    for (path, expected) in [
        ("/r/twice", "already taken by another extractor"),
        ("/r/early", "this layer is deferred"),
    ] {
        let answer = server.write(path, 5).await;
        answer.is_problem(500, "misconfigured");
        assert!(answer.text.contains(expected), "{answer:?}");
    }
}
