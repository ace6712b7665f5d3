//! A COMMIT whose answer is lost: an acknowledged write is in the database, and an unknown outcome
//! is not reported as a success.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering::Relaxed},
    },
    time::Duration,
};

use axum::{Router, routing::post};
use sqlx::Postgres;
use tower_fence::{
    Fence, FenceLayer, PathParam, PgFencedTx,
    layer::{PendingWrite, Refusal},
};

use crate::support::{
    database::{Fresh, TestDatabase, pool_of},
    http::Server,
    proxy::{Passage, Proxy, Sender},
};

// The points at which the proxy cuts the connection.
const NOWHERE: u8 = 0;
const BEFORE_THE_ANSWER: u8 = 1;

/// Starts a proxy in front of the database. The proxy cuts the connection at the answer to COMMIT,
/// at the point that the test sets in the returned value.
async fn cutting_proxy(db: &Fresh<Postgres>) -> (Proxy, Arc<AtomicU8>) {
    let place = Arc::new(AtomicU8::new(NOWHERE));
    let shared = place.clone();
    let proxy = Proxy::judging(db.addr(), move |sender, message| {
        let tag = b"COMMIT\0";
        let at = message.windows(tag.len()).position(|window| window == tag);
        match (sender, at, shared.load(Relaxed)) {
            (Sender::Server, Some(_), BEFORE_THE_ANSWER) => Passage::CutAfter(0),
            _ => Passage::Whole,
        }
    });
    (proxy.await, place)
}

async fn fence_behind(proxy: &Proxy, db: &Fresh<Postgres>) -> Fence<Postgres> {
    Fence::new(pool_of(&proxy.url(&db.url), 2).await)
}

async fn write(mut tx: PgFencedTx) {
    write_entry(&mut tx).await;
}

async fn write_entry(tx: &mut PgFencedTx) {
    let entry = tx.admitted().token();
    Postgres::run(tx, &format!("INSERT INTO ledger VALUES ({entry})")).await;
}

#[tokio::test]
async fn lost_answer_is_an_unknown_outcome() {
    let db = Postgres::fresh(2).await;
    let (proxy, cut) = cutting_proxy(&db).await;
    let fence = fence_behind(&proxy, &db).await;
    let layer = FenceLayer::new(fence, PathParam("sku"));
    let server = Server::at("/{sku}", post(write).route_layer(layer)).await;
    assert_eq!(server.write("/a", 1).await.status, 200);

    cut.store(BEFORE_THE_ANSWER, Relaxed);
    server.refuses("/a", 2, 503, "outcome-unknown").await;
    cut.store(NOWHERE, Relaxed);
    // The first request was committed. A retry finds its token used, so no write is applied twice.
    assert_eq!(db.entries().await, 2);
    server.refuses("/a", 2, 412, "stale-token").await;
    assert_eq!(server.write("/a", 3).await.status, 200);
    assert_eq!(db.entries().await, 3);
}

/// The fence cannot be raised either, because its COMMIT is lost as well.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unknown_outcome_of_a_handler_is_reported() {
    async fn written(mut tx: PgFencedTx) -> Result<(), Refusal> {
        write_entry(&mut tx).await;
        Ok(tx.commit().await?)
    }
    async fn deferred(write: PendingWrite<Postgres>) -> Result<(), Refusal> {
        let mut tx = write.begin().await?;
        write_entry(&mut tx).await;
        Ok(tx.commit().await?)
    }
    async fn slow(tx: PgFencedTx) -> Result<(), Refusal> {
        let written = written(tx).await;
        tokio::time::sleep(Duration::from_secs(60)).await;
        written
    }
    let db = Postgres::fresh(2).await;
    let (proxy, cut) = cutting_proxy(&db).await;
    let pool = pool_of(&proxy.url(&db.url), 2).await;
    let fence = Fence::builder().hold_timeout(Duration::from_secs(1));
    let layer = FenceLayer::new(fence.build(pool), PathParam("sku"));
    let app = Router::new()
        .route("/{sku}/written", post(written))
        .route("/{sku}/slow", post(slow))
        .route_layer(layer.clone())
        .route(
            "/{sku}/deferred",
            post(deferred).route_layer(layer.deferred()),
        );
    let server = Server::start(app).await;
    for (n, path) in (1..).zip(["/a/written", "/a/deferred", "/a/slow"]) {
        cut.store(BEFORE_THE_ANSWER, Relaxed);
        server.refuses(path, n, 503, "outcome-unknown").await;
        cut.store(NOWHERE, Relaxed);
        assert_eq!(db.entries().await, n, "{path}");
    }
}
