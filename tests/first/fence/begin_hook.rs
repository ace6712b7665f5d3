//! What an application runs at the beginning of each transaction, and what becomes of it.

use axum::{Router, routing::post};
use sqlx::Postgres;
use tower_fence::{
    AdmitError, Fence, FenceLayer, Idempotency, PathParam, PgFencedTx, PgPendingWrite, Resource,
    Token, TokenUse,
    fence::WriteError,
    layer::{DatabaseError, Rejection},
};

use crate::support::{
    database::{Fresh, TestDatabase},
    http::{Answer, Server},
};

/// A fence each of whose transactions belongs to a tenant, and a table that notes the tenant.
async fn with_tenant() -> (Fresh<Postgres>, Fence<Postgres>) {
    let db = Postgres::fresh(2).await;
    db.execute("CREATE TABLE notes (tenant TEXT DEFAULT current_setting('app.tenant', true))")
        .await;
    let fence = of_the_tenant(db.fence());
    (db, fence)
}

fn of_the_tenant(fence: Fence<Postgres>) -> Fence<Postgres> {
    fence.on_begin(|conn| {
        Box::pin(async move {
            let set = sqlx::query("SELECT set_config('app.tenant', 'acme', true)");
            set.execute(conn).await.map(|_| ())
        })
    })
}

const NOTE: &str = "INSERT INTO notes SELECT FROM fence RETURNING 1::bigint";

async fn in_the_layers_transaction(mut tx: PgFencedTx) -> Result<(), DatabaseError> {
    sqlx::query("INSERT INTO notes DEFAULT VALUES")
        .execute(&mut *tx)
        .await?;
    Ok(())
}

async fn in_its_own(pending: PgPendingWrite) -> Result<(), Rejection> {
    in_the_layers_transaction(pending.begin().await?)
        .await
        .unwrap();
    Ok(())
}

async fn in_one_statement(pending: PgPendingWrite) -> Result<(), WriteError> {
    let rows: Vec<(i64,)> = pending.write(sqlx::query(NOTE)).await?;
    assert_eq!(rows, [(1,)]);
    Ok(())
}

/// One that has begun with the COMMIT of the one before.
#[tokio::test]
async fn it_runs_in_a_transaction_that_began_early() {
    let (db, _) = with_tenant().await;
    let fence = of_the_tenant(db.reusing_fence());
    let sku = Resource::new("a").unwrap();
    for token in 1..=20 {
        let token = Token::new(token).unwrap();
        let mut tx = fence.begin(&sku, token, TokenUse::SingleUse).await.unwrap();
        sqlx::query("INSERT INTO notes DEFAULT VALUES")
            .execute(&mut *tx)
            .await
            .unwrap();
        tx.commit().await.unwrap();
    }
    let noted = "SELECT count(*) FROM notes WHERE tenant = 'acme'";
    assert_eq!(db.number(noted).await, 20);
}

#[tokio::test]
async fn it_runs_in_each_mode_and_ends_with_the_transaction() {
    let (db, fence) = with_tenant().await;
    let layer = || FenceLayer::new(fence.clone(), PathParam("sku"));
    let route = |handler: axum::routing::MethodRouter, layer: FenceLayer<Postgres, PathParam>| {
        handler.layer(layer)
    };
    let app = Router::new()
        .route(
            "/plain/{sku}",
            route(post(in_the_layers_transaction), layer()),
        )
        .route(
            "/reusable/{sku}",
            route(post(in_the_layers_transaction), layer().reusable()),
        )
        .route("/begin/{sku}", route(post(in_its_own), layer().deferred()))
        .route(
            "/write/{sku}",
            route(post(in_one_statement), layer().deferred()),
        )
        .route(
            "/keyed/{sku}",
            route(
                post(in_the_layers_transaction),
                layer().idempotent(Idempotency::required()),
            ),
        );
    let server = Server::start(app).await;
    let modes = ["plain", "reusable", "begin", "write", "keyed"];
    for (token, mode) in (1..).zip(modes) {
        let request = server
            .post(&format!("/{mode}/a"))
            .header("Fencing-Token", token.to_string());
        let answer = Answer::to(request.header("Idempotency-Key", "\"k\"")).await;
        assert_eq!(answer.status, 200, "{mode}: {}", answer.text);
    }
    let (sku, token) = (Resource::new("a").unwrap(), |value| {
        Token::new(value).unwrap()
    });
    let mut tx = fence
        .begin(&sku, token(10), TokenUse::SingleUse)
        .await
        .unwrap();
    sqlx::query("INSERT INTO notes DEFAULT VALUES")
        .execute(&mut *tx)
        .await
        .unwrap();
    tx.commit().await.unwrap();
    let written: Vec<(i64,)> = fence
        .write(&sku, token(11), TokenUse::SingleUse, sqlx::query(NOTE))
        .await
        .unwrap();
    assert_eq!(written, [(1,)]);
    let acme = "SELECT count(*) FROM notes WHERE tenant = 'acme'";
    assert_eq!(db.number(acme).await, modes.len() as i64 + 2);
    let left_over = "SELECT count(*) FROM pg_settings WHERE name = 'app.tenant' AND setting <> ''";
    assert_eq!(db.number(left_over).await, 0);
}

#[tokio::test]
async fn where_it_fails_nothing_is_written_and_the_token_stays_usable() {
    let db = Postgres::fresh(2).await;
    let broken = |sql: &'static str| {
        db.fence().on_begin(move |conn| {
            Box::pin(async move { sqlx::query(sql).execute(conn).await.map(|_| ()) })
        })
    };
    let sku = Resource::new("a").unwrap();
    let token = Token::new(7).unwrap();
    for (sql, status) in [
        ("SET LOCAL ROLE tower_fence_nobody", 500),
        ("SELECT pg_terminate_backend(pg_backend_pid())", 503),
    ] {
        let refused = broken(sql).begin(&sku, token, TokenUse::SingleUse).await;
        match (&refused, status) {
            (Err(AdmitError::Hook(_)), 500) | (Err(AdmitError::Unavailable(_)), 503) => {}
            _ => panic!("{sql}: {refused:?}"),
        }
        let layer = FenceLayer::new(broken(sql), PathParam("sku"));
        let app = Router::new()
            .route("/{sku}", post(in_the_layers_transaction))
            .route_layer(layer);
        let answer = Server::start(app).await.write("/a", 7).await;
        assert_eq!(answer.status, status, "{sql}: {}", answer.text);
    }
    assert_eq!(db.fence().inspect(&sku).await.unwrap(), None);
    let tx = db.fence().begin(&sku, token, TokenUse::SingleUse).await;
    tx.unwrap().commit().await.unwrap();
}
