//! The rights of a role, as the documentation lists them.

use std::time::Duration;

use axum::{
    Router,
    body::Body,
    http::{Request, request::Parts},
    routing::any,
};
use reqwest::Url;
use sqlx::{Postgres, postgres::PgPoolOptions};
use tower::ServiceExt;
use tower_fence::{
    Fence, FenceLayer, Idempotency, Resource, TokenUse,
    announce::{Announce, LeaseDigest},
    issuer,
    lease::{Acquire, EmbeddedLeases, Leases, Operate, PostgresLeases, Renew},
};

use super::admission::answer;
use super::{resource, sql_blocks, text, token};
use crate::support::{
    database::TestDatabase,
    lease::{LONG, grant, is_held},
};

#[tokio::test]
async fn the_rights_that_the_documentation_names_suffice() {
    let db = Postgres::fresh(1).await;
    let role = format!("app_{:016x}", rand::random::<u64>());
    let documentation = text("src/deployment.md");
    let blocks = sql_blocks(&documentation);
    let [grants, of_leases, ..] = blocks[..] else {
        panic!("the documentation has lists of rights: {blocks:?}");
    };
    db.execute(&format!("CREATE ROLE {role} LOGIN PASSWORD 'of-a-test'"))
        .await;
    let mut url = Url::parse(&db.url).unwrap();
    url.set_username(&role).unwrap();
    url.set_password(Some("of-a-test")).unwrap();
    let options = PgPoolOptions::new().max_connections(2);
    let pool = options.connect(url.as_str()).await.unwrap();
    let fence = Fence::new(pool.clone());
    let name = resource("sku-1");
    let refused = fence.begin(&name, token(1), TokenUse::SingleUse).await;
    refused.expect_err("nothing was granted yet");

    db.execute(&grants.replace("shop_app", &role)).await;
    db.execute(&format!("GRANT SELECT, INSERT ON ledger TO {role}"))
        .await;
    fence.migrate().await.unwrap();
    let leases = EmbeddedLeases::new(fence.clone());
    let keys = Idempotency::required();
    let layer = FenceLayer::new(fence.clone(), |_: &Parts| Resource::new("sku-1"));
    let layer = layer.idempotent(keys).issued_by_this_database();
    let app: Router = Router::new()
        .route("/{status}/{entry}", any(answer::<Postgres>))
        .route_layer(layer)
        .nest("/locks", issuer::router(leases));
    let acquire = Request::post("/locks/sku-1").body(Body::empty()).unwrap();
    let granted = app.clone().oneshot(acquire).await.unwrap();
    assert_eq!(granted.status(), 201);
    let first = token(1_000_000_001);
    let lease = LeaseDigest::of("its lease");
    let announced = fence.announce(&name, first, &lease).await;
    announced.unwrap_or_else(|error| panic!("{error:?}"));
    for (status, entry) in [(409, 1), (200, 2), (200, 2)] {
        let request = Request::post(format!("/{status}/{entry}"))
            .header("Fencing-Token", &granted.headers()["fencing-token"])
            .header("Idempotency-Key", format!("\"{status}\""))
            .body(Body::empty());
        let response = app.clone().oneshot(request.unwrap()).await.unwrap();
        assert_eq!(response.status(), status);
    }
    assert_eq!(db.entries().await, 1);
    let written: Vec<(i64,)> = fence
        .write(
            &name,
            token(2_000_000_000),
            TokenUse::Reusable,
            sqlx::query("INSERT INTO ledger SELECT 3 FROM fence RETURNING entry"),
        )
        .await
        .unwrap_or_else(|error| panic!("{error:?}"));
    assert_eq!(written, [(3,)]);
    fence.remove_expired_keys().await.unwrap();
    fence.reset(&name, token(2_000_000_000)).await.unwrap();

    // The leases in the same database.
    let leases = PostgresLeases::new(fence.clone());
    let refused = leases.acquire(&name, Acquire::new(LONG)).await;
    refused.expect_err("nothing was granted yet");
    db.execute(&of_leases.replace("shop_app", &role)).await;
    let lease = grant(&leases, &name, LONG).await;
    let in_vain = Acquire::new(LONG).wait(Duration::from_millis(200));
    is_held(leases.acquire(&name, in_vain).await);
    let renew = Renew::new(LONG).with_new_token();
    leases.renew(&name, &lease.id, renew).await.unwrap();
    leases.release(&name, &lease.id).await.unwrap();
    assert!(!leases.break_lease(&name).await.unwrap());
    assert!(leases.list(10, None).await.unwrap().leases.is_empty());
    drop(leases);
    pool.close().await;
    db.execute(&format!("DROP OWNED BY {role}; DROP ROLE {role}"))
        .await;
}
