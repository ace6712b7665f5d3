//! Search paths, temporary tables, roles and collations that an application changes in its Postgres
//! session do not mislead a check.

use axum::{Router, http::StatusCode, routing::post};
use sqlx::{
    AssertSqlSafe, Postgres,
    sqlite::{SqliteConnectOptions, SqlitePoolOptions},
};
use tower_fence::{
    AdmitError, Fence, FenceLayer, FencedTx, Idempotency, PathParam, PgFencedTx, TokenUse,
    layer::DatabaseError,
};

use crate::support::{
    database::{Fresh, TestDatabase, read},
    fence::{is_stale, sku, token, write_at_once},
    functions::{self, is_refused},
    http::{Answer, Server},
};

async fn begin(fence: &Fence<Postgres>, value: i64) -> Result<FencedTx<Postgres>, AdmitError> {
    fence.begin(&sku(), token(value), TokenUse::SingleUse).await
}

async fn execute(tx: &mut FencedTx<Postgres>, sql: &'static str) {
    sqlx::raw_sql(sql).execute(&mut **tx).await.unwrap();
}

/// Returns a database with a second schema, whose tables have the same names and contain no tokens.
async fn with_a_twin() -> Fresh<Postgres> {
    let db = Postgres::fresh(1).await;
    db.execute(
        "CREATE SCHEMA twin; \
         CREATE TABLE twin.resources (LIKE tower_fence.resources INCLUDING ALL); \
         CREATE TABLE twin.idempotency_keys (LIKE tower_fence.idempotency_keys INCLUDING ALL)",
    )
    .await;
    db
}

#[tokio::test]
async fn a_table_of_the_same_name_is_not_used() {
    for (is_first, change) in [
        (false, "SET search_path = twin"),
        (true, "SET search_path = twin, public"),
        (
            true,
            "CREATE TEMPORARY TABLE resources (LIKE tower_fence.resources)",
        ),
    ] {
        // The pool has one connection, so each call has the changed session.
        let db = with_a_twin().await;
        let fence = db.fence();
        if is_first {
            db.execute(change).await;
        }
        let mut tx = begin(&fence, 7).await.unwrap();
        if !is_first {
            execute(&mut tx, change).await;
        }
        tx.commit().await.unwrap();
        for token in [7, 6] {
            for fence in [&fence, &db.fence()] {
                let refused = begin(fence, token).await;
                assert_matches!(refused, Err(AdmitError::Stale(_)));
            }
        }
        fence.raise(&sku(), token(9)).await.unwrap();
        assert_eq!(fence.inspect(&sku()).await.unwrap(), Some(8), "{change}");
        let ours = "SELECT max_token FROM tower_fence.resources";
        assert_eq!(db.number(ours).await, 8, "{change}");
        let twins = "SELECT count(*) FROM twin.resources";
        assert_eq!(db.number(twins).await, 0, "{change}");
    }
}

#[tokio::test]
async fn tables_and_functions_may_live_in_any_schema() {
    let db = Postgres::fresh(2).await;
    let fence = db.fence_with(|fence| fence.schema("shop_2").unwrap());
    fence.migrate().await.unwrap();
    begin(&fence, 7).await.unwrap().commit().await.unwrap();
    write_at_once(&fence, &sku(), 8).await;
    let call = "SELECT shop_2.admit('sku-1', 9)";
    assert_eq!(db.number(call).await, 9);
    assert_eq!(fence.inspect(&sku()).await.unwrap(), Some(9));
    is_stale(fence.raise(&sku(), token(9)).await, 9, 9);
    let mut conn = db.pool.acquire().await.unwrap();
    is_refused(functions::execute(&mut conn, call).await, "TF412");
    drop(conn);
    let own = "SELECT count(*) FROM shop_2.resources";
    assert_eq!(db.number(own).await, 1);
    let others = "SELECT count(*) FROM tower_fence.resources";
    assert_eq!(db.number(others).await, 0);
}

/// A schema of SQLite is an attached file. Another fence is in the main file.
#[tokio::test]
async fn tables_may_live_in_an_attached_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name).display().to_string();
    let options = SqliteConnectOptions::new().create_if_missing(true);
    let shop = file("shop.db");
    let pool = SqlitePoolOptions::new()
        .max_connections(1)
        .after_connect(move |connection, _| {
            let attach = AssertSqlSafe(format!("ATTACH '{shop}' AS shop"));
            Box::pin(async move { sqlx::raw_sql(attach).execute(connection).await.map(drop) })
        })
        .connect_with(options.filename(file("main.db")))
        .await
        .unwrap();
    let main = Fence::builder().build(pool.clone());
    let shop = Fence::builder().schema("shop").unwrap().build(pool);
    for (fence, value) in [(&main, 7), (&shop, 9)] {
        fence.migrate().await.unwrap();
        let tx = fence.begin(&sku(), token(value), TokenUse::SingleUse).await;
        tx.unwrap().commit().await.unwrap();
    }
    assert_eq!(main.inspect(&sku()).await.unwrap(), Some(7));
    assert_eq!(shop.inspect(&sku()).await.unwrap(), Some(9));
}

#[tokio::test]
async fn handler_with_a_key_may_change_path_and_role() {
    let db = with_a_twin().await;
    let rights = "GRANT INSERT ON ledger TO {role}; GRANT USAGE ON SCHEMA twin TO {role}";
    let role = db.role(rights).await.name;
    let set = format!("SET LOCAL ROLE {role}; SET LOCAL search_path = twin, public");
    let handler = move |mut tx: PgFencedTx| async move {
        let set = AssertSqlSafe(set);
        sqlx::raw_sql(set).execute(&mut *tx).await?;
        let insert = sqlx::query("INSERT INTO ledger VALUES (1)");
        insert.execute(&mut *tx).await?;
        // The response is stored after the handler has returned.
        let back = sqlx::raw_sql("SET LOCAL ROLE NONE");
        back.execute(&mut *tx).await?;
        Ok::<_, DatabaseError>(StatusCode::CREATED)
    };
    let layer = FenceLayer::new(db.fence(), PathParam("sku")).idempotent(Idempotency::required());
    let app = Router::new()
        .route("/{sku}", post(handler))
        .route_layer(layer);
    let server = Server::start(app).await;
    for replayed in [false, true] {
        let request = server.post("/sku-1").header("Fencing-Token", "7");
        let answer = Answer::to(request.header("Idempotency-Key", "\"k\"")).await;
        assert_eq!(answer.status, 201, "{}", answer.text);
        assert_eq!(answer.headers.contains_key("idempotent-replayed"), replayed);
    }
    assert_eq!(db.entries().await, 1);
    let twins = "SELECT count(*) FROM twin.idempotency_keys";
    assert_eq!(db.number(twins).await, 0);
}

#[tokio::test]
async fn names_are_compared_by_their_bytes() {
    let db = Postgres::fresh(1).await;
    let collations = "SELECT count(*) FROM information_schema.columns \
         WHERE table_schema = 'tower_fence' AND (table_name, column_name) IN \
             (('resources', 'resource'), ('idempotency_keys', 'key')) \
         AND collation_name = 'C'";
    assert_eq!(db.number(collations).await, 2);
}

#[tokio::test]
async fn each_table_and_function_has_a_comment() {
    let db = Postgres::fresh(1).await;
    let without = "SELECT concat_ws(' ', \
         (SELECT string_agg(p.proname, ' ') FROM pg_proc AS p WHERE p.pronamespace = 'tower_fence'::regnamespace \
             AND obj_description(p.oid, 'pg_proc') IS NULL), \
         (SELECT string_agg(c.relname, ' ') FROM pg_class AS c WHERE c.relnamespace = 'tower_fence'::regnamespace \
             AND c.relkind IN ('r', 'v') AND c.relname <> 'migrations' AND obj_description(c.oid, 'pg_class') IS NULL))";
    let without: String = read(&db.pool, without).await;
    assert_eq!(without, "");
}

#[tokio::test]
async fn transaction_rolled_back_before_its_admission_cannot_commit() {
    let db = Postgres::fresh(2).await;
    let fence = db.fence();
    let mut tx = begin(&fence, 7).await.unwrap();
    let back = sqlx::raw_sql("ROLLBACK TO SAVEPOINT tower_fence; INSERT INTO ledger VALUES (1)");
    let outcome = back.execute(&mut *tx).await;
    assert!(outcome.is_err(), "there is no such savepoint");
    tx.commit().await.unwrap_err();
    assert_eq!(db.entries().await, 0);
    // A rollback to a savepoint of the handler itself is allowed.
    let mut tx = begin(&fence, 7).await.unwrap();
    execute(
        &mut tx,
        "SAVEPOINT a; INSERT INTO ledger VALUES (2); ROLLBACK TO SAVEPOINT a",
    )
    .await;
    tx.commit().await.unwrap();
    assert_eq!(db.entries().await, 0);
    let refused = begin(&fence, 7).await;
    assert_matches!(refused, Err(AdmitError::Stale(_)));
}
