//! Fenced reads and raises on a promoted database: they detect the promotion like writes.

use axum::{
    Router,
    body::{Body, to_bytes},
    http::{Request, request::Parts},
    routing::get,
};
use serde_json::Value;
use sqlx::Postgres;
use tower::ServiceExt;
use tower_fence::{
    AdmitError, FenceLayer, InvalidResource,
    epochs::{Epoch, Epochs},
};

use super::failover::{HIGHEST_STALE, PARTITION, was_on_timeline};
use crate::support::{
    database::{Fresh, TestDatabase},
    fence::{sku, token, write},
    functions::{self, Refused},
};

/// The highest stale token before a failover.
const USED: i64 = 1_000_000_005;

/// A token below which all tokens are already stale, so that a read with it has nothing to raise.
const NEXT: i64 = USED + 1;

/// A token with which a read has to raise the fence.
const LATER: i64 = USED + 10;

/// The fence must catch up with the failover on the only connection of its pool.
async fn in_epoch_1() -> Fresh<Postgres> {
    let db = Postgres::fresh(1).await;
    let fence = db.fence();
    fence.next_epoch(PARTITION, Epoch::FIRST).await.unwrap();
    write(&fence, USED).await.unwrap();
    db
}

/// Reads under a token. A refusal returns the highest stale token.
async fn read(db: &Fresh<Postgres>, token: i64) -> Result<(), i64> {
    let layer = FenceLayer::new(db.fence(), |_: &Parts| Ok::<_, InvalidResource>(sku()));
    let app: Router = Router::new()
        .route("/", get(async || {}))
        .route_layer(layer);
    let request = Request::get("/").header("Fencing-Token", token);
    let request = request.body(Body::empty()).unwrap();
    let answer = app.oneshot(request).await.unwrap();
    if answer.status() == 200 {
        return Ok(());
    }
    let body = to_bytes(answer.into_body(), 10_000).await.unwrap();
    let problem: Value = serde_json::from_slice(&body).unwrap();
    Err(problem["max_token"].as_i64().unwrap())
}

#[tokio::test]
async fn token_from_before_a_failover_cannot_read() {
    for token in [NEXT, LATER] {
        let db = in_epoch_1().await;
        read(&db, token).await.unwrap();
        was_on_timeline(&db, "00000000").await;
        assert_eq!(read(&db, token).await, Err(HIGHEST_STALE), "{token}");
        read(&db, HIGHEST_STALE + 2).await.unwrap();
    }
}

#[tokio::test]
async fn without_failover_detection_reads_continue() {
    let db = in_epoch_1().await;
    db.fence().notice_failover(false).await.unwrap();
    for token in [NEXT, LATER] {
        was_on_timeline(&db, "00000000").await;
        read(&db, token).await.unwrap();
    }
}

#[tokio::test]
async fn token_from_before_a_failover_raises_nothing() {
    for token in [NEXT, LATER] {
        for by_function in [true, false] {
            let db = in_epoch_1().await;
            let raise = async |token: i64| {
                if by_function {
                    let mut conn = db.pool.acquire().await.unwrap();
                    let raised = functions::raise(&mut conn, "sku-1", token).await;
                    let max = |refused: Refused| refused.problem["max_token"].as_i64();
                    return raised.map(drop).map_err(max);
                }
                let raised = db.fence().raise(&sku(), self::token(token)).await;
                raised.map_err(|error| match error {
                    AdmitError::Stale(stale) => Some(stale.max_token),
                    other => panic!("{other:?}"),
                })
            };
            was_on_timeline(&db, "00000000").await;
            assert_eq!(raise(token).await, Err(Some(HIGHEST_STALE)), "{token}");
            raise(HIGHEST_STALE + 2).await.unwrap();
            // Without a row, the floor of the partition decides.
            db.execute("DELETE FROM tower_fence.resources").await;
            was_on_timeline(&db, "0000000F").await;
            let highest_stale = Some(HIGHEST_STALE + 1_000_000_000_000);
            assert_eq!(raise(HIGHEST_STALE + 3).await, Err(highest_stale));
        }
    }
}
