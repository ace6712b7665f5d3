//! The number of round trips to the database before a write is answered.

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use axum::{
    Router,
    body::Body,
    http::{Request, StatusCode},
    routing::post,
};
use sqlx::{
    PgPool, Postgres,
    postgres::{PgConnectOptions, PgPoolOptions},
};
use tower::ServiceExt;
use tower_fence::{
    Fence, FenceLayer, Idempotency, PathParam, PgFencedTx, PgPendingWrite, fence::WriteError,
};

use crate::support::{database::TestDatabase, proxy::Proxy};

async fn insert(mut tx: PgFencedTx) -> StatusCode {
    let insert = sqlx::query("INSERT INTO taken VALUES (1)").execute(&mut *tx);
    insert.await.unwrap();
    StatusCode::NO_CONTENT
}

async fn insert_at_once(pending: PgPendingWrite) -> Result<StatusCode, WriteError> {
    let insert = "INSERT INTO taken SELECT 1 FROM fence RETURNING n";
    pending.write::<(i64,)>(sqlx::query(insert)).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Writes without the fence, for comparison.
async fn insert_unfenced(pool: PgPool) -> StatusCode {
    let mut tx = pool.begin().await.unwrap();
    let insert = sqlx::query("INSERT INTO taken VALUES (1)").execute(&mut *tx);
    insert.await.unwrap();
    tx.commit().await.unwrap();
    StatusCode::NO_CONTENT
}

fn app(fence: &Fence<Postgres>) -> Router {
    let layer = FenceLayer::new(fence.clone(), PathParam("r"));
    let keys = Idempotency::required();
    let pool = fence.pool().clone();
    Router::new()
        .route("/{r}/transaction", post(insert).route_layer(layer.clone()))
        .route(
            "/{r}/at-once",
            post(insert_at_once).route_layer(layer.clone().deferred()),
        )
        .route(
            "/{r}/keyed",
            post(insert).route_layer(layer.idempotent(keys)),
        )
        .route("/{r}/unfenced", post(move || insert_unfenced(pool)))
}

/// Returns the lowest number of round trips of a write. The first writes need more, because they
/// prepare statements, and a busy machine may add some to any write.
async fn trips(app: &Router, counter: &AtomicU64, who: &str, path: &str, expected: u64) -> u64 {
    let mut fewest = u64::MAX;
    for token in 1..=300 {
        if token > 20 && fewest <= expected {
            break;
        }
        // During this pause, the connection returns to the pool.
        tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        counter.store(0, SeqCst);
        let request = Request::post(format!("/{who}-{path}/{path}"))
            .header("Fencing-Token", token)
            .header("Idempotency-Key", format!("\"{who}-{path}-{token}\""))
            .body(Body::empty())
            .unwrap();
        let answer = app.clone().oneshot(request).await.unwrap();
        fewest = fewest.min(counter.load(SeqCst));
        assert_eq!(answer.status(), StatusCode::NO_CONTENT, "{path}");
    }
    fewest
}

#[tokio::test]
async fn each_path_has_its_number_of_round_trips() {
    let db = Postgres::fresh(1).await;
    db.execute("CREATE TABLE taken (n BIGINT)").await;
    let (proxy, counter) = Proxy::counting(db.addr()).await;
    let options: PgConnectOptions = proxy.url(&db.url).parse().unwrap();
    let pool = PgPoolOptions::new().max_connections(1);
    let of_application = pool.connect_with(options.clone()).await.unwrap();
    let of_application = app(&Fence::new(of_application));
    let pool = PgPoolOptions::new().max_connections(2);
    let own = Fence::builder().connect_with(pool, options).await.unwrap();
    let own = app(&own);
    for (path, application, of_fence) in [
        ("unfenced", 4, 4),
        ("transaction", 5, 3),
        ("at-once", 3, 1),
        ("keyed", 6, 4),
    ] {
        let of_application =
            trips(&of_application, &counter, "application", path, application).await;
        let of_own = trips(&own, &counter, "own", path, of_fence).await;
        assert_eq!((of_application, of_own), (application, of_fence), "{path}");
    }
}
