//! A synchronous standby is unreachable. The primary's commits wait for it, and are not
//! acknowledged.

use std::time::Duration;

use axum::{Router, extract::Path, routing::post};
use reqwest::RequestBuilder;
use tokio::time::sleep;
use tower_fence::{
    Fence, FenceLayer, Idempotency, PathParam, PgFencedTx, Resource,
    layer::DatabaseError,
    lease::{Acquire, LeaseId, Leases, PostgresLeases},
};

use super::answered::{fence, server};
use crate::support::{
    eventually,
    http::{Answer, Server},
    lease::{LONG, is_unavailable},
    postgres::PostgresServer,
    standby::{Replication, Standby, number},
};

const LIMIT: Duration = Duration::from_secs(1);

/// A query that counts the commits that wait for the standby.
const COMMITS: &str = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'";

async fn write(mut tx: PgFencedTx, Path(sku): Path<String>) -> Result<(), DatabaseError> {
    let insert = sqlx::query("INSERT INTO written VALUES ($1, 1)").bind(sku);
    insert.execute(&mut *tx).await?;
    Ok(())
}

async fn service(fence: Fence<sqlx::Postgres>) -> Server {
    let keys = Idempotency::optional().wait(LIMIT);
    let layer = FenceLayer::new(fence, PathParam("sku")).idempotent(keys);
    let app = Router::new().route("/{sku}", post(write));
    Server::start(app.route_layer(layer)).await
}

/// Returns a request for a write with an idempotency key.
fn keyed(server: &Server) -> RequestBuilder {
    let request = server.post("/sku-2").header("Fencing-Token", "1");
    request.header("Idempotency-Key", "\"key\"")
}

async fn written(server: &PostgresServer) -> i64 {
    number(server, "SELECT count(*) FROM written").await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unreplicated_writes_are_not_acknowledged() {
    let mut primary = server().await;
    let limited = Fence::builder()
        .answer_timeout(LIMIT)
        .lock_timeout(LIMIT)
        .hold_timeout(LIMIT)
        .build(fence(&primary).await.pool().clone());
    let leases = PostgresLeases::new(limited.clone());
    let service = service(limited).await;
    let standby = Standby::of(&primary, Replication::Synchronous).await;
    let (leased, id) = (Resource::new("leased").unwrap(), LeaseId::random());
    let acquire = async || {
        let request = Acquire::new(LONG).lease_id(id.clone());
        leases.acquire(&leased, request).await
    };
    standby.hold_back();
    service.refuses("/sku-1", 1, 503, "outcome-unknown").await;
    is_unavailable(acquire().await);
    // The client of this write disconnects before the answer.
    let commits = async || number(&primary, COMMITS).await;
    let before = commits().await;
    let asked = tokio::spawn(keyed(&service).send());
    eventually!("the transaction commits", commits().await > before);
    asked.abort();
    // The server ends abandoned statements after a second, but not a COMMIT.
    sleep(Duration::from_secs(2)).await;
    assert_eq!(written(&primary).await, 0);
    service.refuses("/sku-1", 1, 503, "fence-busy").await;
    is_unavailable(acquire().await);
    assert_eq!(Answer::to(keyed(&service)).await.status, 409);
    primary.crash().await;
    let promoted = standby.promote().await;
    assert_eq!(written(&promoted).await, 0);
    let service = self::service(fence(&promoted).await).await;
    assert_eq!(service.write("/sku-1", 1).await.status, 200);
    assert_eq!(Answer::to(keyed(&service)).await.status, 200);
    assert_eq!(written(&promoted).await, 2);
}
