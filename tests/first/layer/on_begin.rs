//! The hook at BEGIN: its settings apply to the statements of the handler, in each mode of the
//! layer.

use std::{future::pending, time::Duration};

use axum::{
    Router,
    http::{HeaderName, request::Parts},
    routing::post,
};
use sqlx::{AssertSqlSafe, Connection, PgConnection, Postgres};
use tokio::time::sleep;
use tower_fence::{
    FenceLayer, Idempotency, PathParam, PgFencedTx, PgPendingWrite, Resource, fence::WriteError,
    layer::Refusal,
};

use crate::support::{
    database::{Fresh, TestDatabase},
    http::{Answer, Server},
};

/// Returns a database in which only the tenant of a row can read and write it.
async fn with_tenants() -> Fresh<Postgres> {
    let db = Postgres::fresh(4).await;
    // Policies do not apply to a superuser or to the owner of a table.
    let tenants =
        "CREATE TABLE orders (tenant TEXT DEFAULT current_setting('app.tenant'), n BIGINT);
         INSERT INTO orders VALUES ('red', 0), ('blue', 0);
         ALTER TABLE orders ENABLE ROW LEVEL SECURITY;
         CREATE POLICY own ON orders USING (tenant = current_setting('app.tenant', true));
         CREATE FUNCTION check_role() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
             IF current_user <> '{role}' THEN RAISE EXCEPTION 'checked by %', current_user; END IF;
             RETURN NULL; END $$;
         CREATE CONSTRAINT TRIGGER deferred AFTER UPDATE ON orders DEFERRABLE INITIALLY DEFERRED
             FOR EACH ROW EXECUTE FUNCTION check_role();
         CREATE TABLE role (name TEXT);
         INSERT INTO role VALUES ('{role}');
         GRANT ALL ON ALL TABLES IN SCHEMA public TO {role};";
    db.role(tenants).await;
    db
}

async fn become_tenant(parts: &Parts, conn: &mut PgConnection) -> sqlx::Result<()> {
    let tenant = parts.headers.get("x-tenant");
    let tenant = tenant.and_then(|tenant| tenant.to_str().ok());
    let role: String = sqlx::query_scalar("SELECT name FROM role")
        .fetch_one(&mut *conn)
        .await?;
    let set = AssertSqlSafe(format!("SET LOCAL ROLE {role}"));
    sqlx::raw_sql(set).execute(&mut *conn).await?;
    let Some(tenant) = tenant else {
        return sqlx::raw_sql("SELECT 1 / 0").execute(conn).await.map(drop);
    };
    sqlx::query("SELECT set_config('app.tenant', $1, true)")
        .bind(tenant)
        .execute(conn)
        .await?;
    Ok(())
}

/// A statement that updates all visible orders, and returns one row for each.
const WRITE: &str = "UPDATE orders SET n = n + 1 RETURNING n";

async fn write(mut tx: PgFencedTx) -> String {
    let all = sqlx::query(WRITE).fetch_all(&mut *tx).await.unwrap();
    all.len().to_string()
}

async fn begin(pending: PgPendingWrite) -> Result<String, Refusal> {
    Ok(write(pending.begin().await?).await)
}

async fn at_once(pending: PgPendingWrite) -> Result<String, WriteError> {
    let write = "UPDATE orders SET n = n + 1 WHERE EXISTS (SELECT 1 FROM fence) RETURNING n";
    let all: Vec<(i64,)> = pending.write(write).await?;
    Ok(all.len().to_string())
}

async fn swallow(pending: PgPendingWrite) -> &'static str {
    let _ = pending.begin().await;
    "all is well"
}

/// Returns a route for each mode of this layer.
fn modes(layer: FenceLayer<Postgres, PathParam>) -> Router {
    let keys = Idempotency::optional();
    let reusable = layer.clone().reusable();
    let keyed = layer.clone().idempotent(keys.clone());
    let deferred = layer.clone().deferred();
    let deferred_keys = deferred.clone().idempotent(keys);
    Router::new()
        .route("/{r}/once", post(write).route_layer(layer))
        .route("/{r}/reusable", post(write).route_layer(reusable))
        .route("/{r}/keys", post(write).route_layer(keyed))
        .route("/{r}/begin", post(begin).route_layer(deferred.clone()))
        .route("/{r}/at-once", post(at_once).route_layer(deferred.clone()))
        .route("/{r}/swallow", post(swallow).route_layer(deferred))
        .route(
            "/{r}/deferred-keys",
            post(at_once).route_layer(deferred_keys),
        )
}

async fn start(db: &Fresh<Postgres>) -> Server {
    let fence = db.fence_with(|fence| fence.hold_timeout(Duration::from_secs(2)));
    let layer = FenceLayer::new(fence.clone(), PathParam("r"))
        .on_begin(|parts, conn| Box::pin(become_tenant(parts, conn)));
    let both = FenceLayer::new(fence, [PathParam("r"), PathParam("s")])
        .on_begin(|parts, conn| Box::pin(become_tenant(parts, conn)));
    let both = post(write).route_layer(both);
    Server::start(modes(layer).route("/{r}/and/{s}", both)).await
}

const MODES: [&str; 7] = [
    "once",
    "reusable",
    "keys",
    "begin",
    "at-once",
    "deferred-keys",
    "and/s",
];

async fn send(server: &Server, path: &str, token: &str, key: i64, tenant: Option<&str>) -> Answer {
    let mut request = server
        .post(path)
        .header("Fencing-Token", token)
        .header("Idempotency-Key", format!("\"{key}\""));
    if let Some(tenant) = tenant {
        request = request.header(HeaderName::from_static("x-tenant"), tenant);
    }
    Answer::to(request).await
}

/// Returns the header for a token, for one resource or for two.
fn tokens(mode: &str, token: i64) -> String {
    if mode == "and/s" {
        format!(r#"{token};resource="r", {token};resource="s""#)
    } else {
        token.to_string()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_tenant_writes_its_own_rows_in_each_mode() {
    let db = with_tenants().await;
    let server = start(&db).await;
    let (mut token, mut red, mut blue) = (1, 0, 0);
    for mode in MODES {
        for tenant in ["red", "blue", "nobody"] {
            token += 1;
            let path = format!("/r/{mode}");
            let answer = send(&server, &path, &tokens(mode, token), token, Some(tenant)).await;
            let rows = if tenant == "nobody" { "0" } else { "1" };
            assert_eq!((answer.status, answer.text.as_str()), (200, rows), "{mode}");
            red += i64::from(tenant == "red");
            blue += i64::from(tenant == "blue");
        }
        let written = async |tenant| {
            let n = format!("SELECT n FROM orders WHERE tenant = '{tenant}'");
            db.number(&n).await
        };
        assert_eq!((written("red").await, written("blue").await), (red, blue));
    }
    // The setting ended with the transaction.
    assert_eq!(db.number("SELECT count(*) FROM orders").await, 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failed_hook_writes_nothing_and_keeps_the_token_usable() {
    let db = with_tenants().await;
    let server = start(&db).await;
    for mode in MODES {
        let path = format!("/r/{mode}");
        let answer = send(&server, &path, &tokens(mode, 5), 5, None).await;
        answer.is_problem(500, "transaction-aborted");
        assert!(!answer.text.contains("division"), "{answer:?}");
    }
    let answer = send(&server, "/r/swallow", "5", 5, None).await;
    answer.is_problem(503, "store-unavailable");
    let r = Resource::new("r").unwrap();
    assert_eq!(db.fence().inspect(&r).await.unwrap(), None);
    assert_eq!(db.number("SELECT max(n) FROM orders").await, 0);
    let answer = send(&server, "/r/once", "5", 5, Some("red")).await;
    assert_eq!((answer.status, answer.text.as_str()), (200, "1"));
}

/// A hook that never returns, in each mode of the layer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hook_that_hangs_has_one_answer() {
    let db = Postgres::fresh(4).await;
    let fence = db.fence_with(|fence| fence.hold_timeout(Duration::from_millis(200)));
    let layer = FenceLayer::new(fence, PathParam("r")).on_begin(|_, _| Box::pin(pending()));
    let server = Server::start(modes(layer)).await;
    for mode in ["once", "keys", "begin", "at-once", "swallow"] {
        let path = format!("/r-{mode}/{mode}");
        let answer = send(&server, &path, "5", 5, None).await;
        answer.is_problem(503, "handler-timeout");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_hold_limit_bounds_hook_and_handler_together() {
    const PART: Duration = Duration::from_millis(800);
    let db = Postgres::fresh(2).await;
    let start = async |hold: Duration| {
        let fence = db.fence_with(|fence| fence.hold_timeout(hold));
        let layer = FenceLayer::new(fence, PathParam("r"));
        let hooked = layer.on_begin(|_, _| {
            Box::pin(async {
                sleep(PART).await;
                Ok(())
            })
        });
        Server::at("/{r}", post(|| sleep(PART)).route_layer(hooked)).await
    };
    let strict = start(Duration::from_secs(1)).await;
    let ample = start(Duration::from_secs(60)).await;
    strict.refuses("/r", 5, 503, "handler-timeout").await;
    assert_eq!(ample.write("/r", 6).await.status, 200);
}

/// sqlx rolls back the transaction, so the statements of the handler would commit by themselves.
#[tokio::test]
async fn request_is_refused_if_its_hook_ends_the_transaction() {
    let db = Postgres::fresh(2).await;
    let layer = FenceLayer::new(db.fence(), PathParam("r"));
    let layer = layer.on_begin(|_, conn| {
        Box::pin(async move {
            assert!(conn.begin_with("BEGIN").await.is_err());
            Ok(())
        })
    });
    let insert = async |mut tx: PgFencedTx| {
        let insert = sqlx::raw_sql("INSERT INTO ledger VALUES (1)");
        insert.execute(&mut *tx).await.unwrap();
    };
    let server = Server::at("/{r}", post(insert).route_layer(layer)).await;
    server.refuses("/a", 7, 500, "transaction-aborted").await;
    assert_eq!(db.entries().await, 0);
}
