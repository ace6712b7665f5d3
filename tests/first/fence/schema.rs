//! Search paths, temporary tables, roles and collations that an application changes in its Postgres
//! session do not mislead a check.

use axum::{http::StatusCode, routing::post};
use sqlx::{
    AssertSqlSafe, Postgres,
    sqlite::{SqliteConnectOptions, SqlitePoolOptions},
};
use tower_fence::{Fence, FenceLayer, Idempotency, PathParam, PgFencedTx, layer::DatabaseError};

use crate::support::{
    database::{Fresh, TestDatabase, read},
    fence::{begin, is_stale, refuses, sku, token, use_up, write_at_once},
    functions,
    http::{Answer, Server},
};

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
        let mut tx = begin(&fence, 7).await;
        if !is_first {
            Postgres::run(&mut tx, change).await;
        }
        tx.commit().await.unwrap();
        for token in [7, 6] {
            for fence in [&fence, &db.fence()] {
                refuses(fence, token, 7).await;
            }
        }
        fence.raise(&sku(), token(9)).await.unwrap();
        assert_eq!(fence.inspect(&sku()).await.unwrap(), Some(8), "{change}");
        let ours = "SELECT max_token FROM tower_fence.resources";
        assert_eq!(db.number(ours).await, 8, "{change}");
        assert_eq!(db.count("twin.resources").await, 0, "{change}");
    }
}

#[tokio::test]
async fn tables_and_functions_may_live_in_any_schema() {
    let db = Postgres::fresh(2).await;
    let fence = db.fence_with(|fence| fence.schema("shop_2").unwrap());
    fence.migrate().await.unwrap();
    begin(&fence, 7).await.commit().await.unwrap();
    write_at_once(&fence, &sku(), 8).await;
    let call = "SELECT shop_2.admit('sku-1', 9)";
    assert_eq!(db.number(call).await, 9);
    assert_eq!(fence.inspect(&sku()).await.unwrap(), Some(9));
    is_stale(fence.raise(&sku(), token(9)).await, 9, 9);
    let mut conn = db.pool.acquire().await.unwrap();
    functions::refuses(&mut conn, call, "TF412").await;
    drop(conn);
    assert_eq!(db.count("shop_2.resources").await, 1);
    assert_eq!(db.count("tower_fence.resources").await, 0);
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
        use_up(fence, &sku(), token(value)).await.unwrap();
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
    let server = Server::at("/{sku}", post(handler).route_layer(layer)).await;
    for replayed in [false, true] {
        let request = server.post("/sku-1").header("Fencing-Token", "7");
        let answer = Answer::to(request.header("Idempotency-Key", "\"k\"")).await;
        assert_eq!(answer.status, 201, "{}", answer.text);
        assert_eq!(answer.headers.contains_key("idempotent-replayed"), replayed);
    }
    assert_eq!(db.entries().await, 1);
    assert_eq!(db.count("twin.idempotency_keys").await, 0);
}

#[tokio::test]
async fn names_are_compared_by_their_bytes() {
    let db = Postgres::fresh(1).await;
    let collations = "information_schema.columns \
         WHERE table_schema = 'tower_fence' AND (table_name, column_name) IN \
             (('resources', 'resource'), ('idempotency_keys', 'key')) \
         AND collation_name = 'C'";
    assert_eq!(db.count(collations).await, 2);
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
    let mut tx = begin(&fence, 7).await;
    let back = "ROLLBACK TO SAVEPOINT tower_fence; INSERT INTO ledger VALUES (1)";
    let outcome = Postgres::execute(&mut tx, back).await;
    assert!(outcome.is_err(), "there is no such savepoint");
    tx.commit().await.unwrap_err();
    assert_eq!(db.entries().await, 0);
    // A rollback to a savepoint of the handler itself is allowed.
    let mut tx = begin(&fence, 7).await;
    let own = "SAVEPOINT a; INSERT INTO ledger VALUES (2); ROLLBACK TO SAVEPOINT a";
    Postgres::run(&mut tx, own).await;
    tx.commit().await.unwrap();
    assert_eq!(db.entries().await, 0);
    refuses(&fence, 7, 7).await;
}
