//! Which state clones of a fence share, and which they do not share.

use axum::routing::post;
use sqlx::Postgres;
use tower_fence::{
    Fence, FenceLayer, PathParam, Token,
    epochs::{Epoch, Epochs},
};

use crate::support::{
    PATIENCE,
    database::{Fresh, TestDatabase},
    fence::{begin, is_stale, sku, token, use_up},
    http::Server,
};

/// Returns the fences of two tenants, each with its own schema, over one pool.
async fn of_two_tenants(db: &Fresh<Postgres>) -> [Fence<Postgres>; 2] {
    let tenants = ["red", "blue"].map(|schema| {
        let fence_of = Fence::builder().pool_timeout(PATIENCE).schema(schema);
        fence_of.unwrap().build(db.pool.clone())
    });
    for tenant in &tenants {
        tenant.migrate().await.unwrap();
    }
    tenants
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fences_with_other_schemas_share_no_refusals() {
    let db = Postgres::fresh(2).await;
    let [red, blue] = of_two_tenants(&db).await;
    begin(&red, 9).await.commit().await.unwrap();
    is_stale(use_up(&red, &sku(), token(7)).await, 7, 9);
    // Another write of the first tenant is in progress.
    let open = begin(&red, 10).await;
    let mut tx = begin(&blue, 7).await;
    Postgres::run(&mut tx, "INSERT INTO public.ledger VALUES (7)").await;
    tx.commit().await.unwrap();
    drop(open);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fences_with_other_schemas_share_no_epochs() {
    let db = Postgres::fresh(2).await;
    let [red, blue] = of_two_tenants(&db).await;
    for partition in 0..=u8::MAX {
        red.next_epoch(partition, Epoch::FIRST).await.unwrap();
    }
    let issued: Token = Epoch::FIRST.token(1).unwrap();
    for (tenant, status) in [(red, 200), (blue, 403)] {
        let layer = FenceLayer::new(tenant, PathParam("r")).issued_by_this_database();
        let server = Server::at("/{r}", post(|| async {}).route_layer(layer)).await;
        assert_eq!(server.write("/sku-1", issued).await.status, status);
    }
}
