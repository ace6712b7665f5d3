//! The layer, an issuer and a client over HTTP, on a distributed fence. The service connects as a
//! role that owns nothing.

use axum::{Router, extract::Path, routing::post};
use sqlx::{PgPool, Postgres, postgres::PgConnectOptions};
use tower_fence::{
    Fence, FenceLayer, FencedTx, Idempotency, PathParam,
    client::{Holder, HttpLeases},
    lease::RedisLeases,
};

use super::distributed::{resource, take};
use crate::support::{
    citus::{Cluster, STOCK},
    http::{Answer, Server},
    redis::{fresh_prefix, shared_url},
};

/// The rights that the guide grants to a role that owns nothing, and the rights on the role's own
/// table.
pub const RIGHTS: &str = "CREATE ROLE shop_writer LOGIN; \
    GRANT SELECT, UPDATE ON inventory TO shop_writer; \
    GRANT USAGE ON SCHEMA tower_fence TO shop_writer; \
    GRANT EXECUTE ON FUNCTION tower_fence.current_history, tower_fence.try_admit, tower_fence.catch_up, \
        tower_fence.try_raise, tower_fence.max_token, tower_fence.admit_once, tower_fence.find_response, \
        tower_fence.store_response, tower_fence.admit_header TO shop_writer";

async fn take_one(Path(sku): Path<String>, mut tx: FencedTx<Postgres>) -> String {
    let take = "UPDATE inventory SET n = n - 1 WHERE sku = $1 RETURNING n";
    let left: i64 = sqlx::query_scalar(take)
        .bind(&sku)
        .fetch_one(&mut *tx)
        .await
        .unwrap();
    left.to_string()
}

pub async fn as_writer(cluster: &Cluster) -> PgPool {
    let options: PgConnectOptions = cluster.coordinator.url("postgres").parse().unwrap();
    PgPool::connect_with(options.username("shop_writer"))
        .await
        .unwrap()
}

#[tokio::test]
async fn a_service_and_an_issuer_use_a_distributed_fence() {
    let cluster = Cluster::with_fence().await;
    cluster.execute(RIGHTS).await;
    cluster.distribute().await;
    let writer = as_writer(&cluster).await;
    let layer = FenceLayer::new(Fence::new(writer), PathParam("sku"));
    let service = Router::new()
        .route("/{sku}/take", post(take_one))
        .route_layer(layer.idempotent(Idempotency::optional()));
    let service = Server::start(service).await;
    let fence = cluster.fence().await;
    let leases = RedisLeases::builder(fence.clone())
        .key_prefix(fresh_prefix())
        .connect(&shared_url())
        .await
        .unwrap();
    let issuer = Server::issuer(leases.announced_to(fence.clone())).await;
    let holder = Holder::new(HttpLeases::new(&issuer.url("/locks")).unwrap());

    for number in [1, 2, 3] {
        let (sku, path) = (format!("sku-{number}"), format!("/sku-{number}/take"));
        let before = holder.acquire(&sku).await.unwrap();
        let old = before.token().get();
        before.release().await.unwrap();
        let lease = holder.acquire(&sku).await.unwrap();
        let new = lease.token().get();
        // Because the grant was announced, the earlier token is refused before the first write of
        // the new holder.
        service.refuses(&path, old, 412, "stale-token").await;
        let taken = service.write(&path, new).await;
        assert_eq!((taken.status, taken.text), (200, (STOCK - 1).to_string()));
        service.refuses(&path, new, 412, "stale-token").await;
        // The record of the idempotency key is on the coordinator.
        let keyed = || {
            let request = service.post(&path).header("Fencing-Token", new + 1);
            Answer::to(request.header("Idempotency-Key", format!("\"{number}\"")))
        };
        for _ in 0..2 {
            let taken = keyed().await;
            assert_eq!((taken.status, taken.text), (200, (STOCK - 2).to_string()));
        }
        assert_eq!(
            fence.inspect(&resource(number)).await.unwrap(),
            Some(new + 1)
        );
    }
}

#[tokio::test]
async fn operators_read_the_states_of_a_distributed_fence() {
    let cluster = Cluster::with_distributed_fence().await;
    let fence = cluster.fence().await;
    for number in (0..5).rev() {
        take(&fence, &resource(number), 7).await.unwrap();
    }
    let mut seen: Vec<(String, i64)> = vec![];
    let mut after = None;
    loop {
        let page = fence.states("sku-", after.as_ref(), 2).await.unwrap();
        seen.extend(
            page.iter()
                .map(|row| (row.resource.to_string(), row.max_token)),
        );
        match page.last() {
            Some(last) => after = Some(last.resource.clone()),
            None => break,
        }
    }
    let all: Vec<_> = (0..5).map(|number| (format!("sku-{number}"), 7)).collect();
    assert_eq!(seen, all);
    let state = fence.state(&resource(9)).await.unwrap();
    assert_eq!((state.row, state.floor), (None, 0));
    assert_eq!(fence.floors().await.unwrap(), []);
}

#[tokio::test]
async fn a_role_without_tables_admits_the_field_and_writes() {
    let cluster = Cluster::with_distributed_fence().await;
    cluster.execute(RIGHTS).await;
    let writer = as_writer(&cluster).await;
    let mut tx = writer.begin().await.unwrap();
    for statement in [
        "SELECT tower_fence.admit_header('7;resource=\"sku-1\"', 'sku-1')",
        "UPDATE inventory SET n = n - 1 WHERE sku = 'sku-1'",
    ] {
        sqlx::query(statement).execute(&mut *tx).await.unwrap();
    }
    tx.commit().await.unwrap();
    let left: i64 = cluster
        .read("SELECT n FROM inventory WHERE sku = 'sku-1'")
        .await;
    assert_eq!(left, STOCK - 1);
}
