//! The fence as functions in Postgres: what waits for whom, who may call them, and what leads them astray.

use std::time::Duration;

use sqlx::{
    Acquire, AssertSqlSafe, Connection, PgConnection, Postgres, postgres::PgConnectOptions,
};
use tokio::time::sleep;
use tower_fence::Fence;

use crate::contract::grants;
use crate::support::{
    database::{Fresh, TestDatabase},
    fence::{begin, is_stale, sku, token, write},
    functions::{admit, is_refused, max_token, raise},
    variant::on_other_postgres,
};

on_other_postgres!(
    [on_postgres Plain, partitioned Partitioned]
    [
        an_admission_that_waits_is_judged_by_what_its_predecessor_committed,
        functions_and_the_fence_wait_for_each_other
    ]
);

async fn execute(conn: &mut PgConnection, sql: &str) -> sqlx::Result<()> {
    Postgres::execute(conn, sql).await
}

async fn fence_row(db: &Fresh<Postgres>) -> Option<i64> {
    db.fence().inspect(&sku()).await.unwrap()
}

async fn an_admission_that_waits_is_judged_by_what_its_predecessor_committed() {
    let db = Postgres::fresh(4).await;
    // Without a row, and with one.
    for first in [10, 20] {
        for commits in [true, false] {
            let mut holder = db.pool.begin().await.unwrap();
            let first = first + if commits { 0 } else { 5 };
            admit(&mut holder, "sku-1", first).await.unwrap();
            let waiting = tokio::spawn({
                let pool = db.pool.clone();
                async move {
                    let mut conn = pool.acquire().await.unwrap();
                    admit(&mut conn, "sku-1", first - 1).await
                }
            });
            sleep(Duration::from_millis(100)).await;
            assert!(!waiting.is_finished(), "it must wait for the row lock");
            if commits {
                holder.commit().await.unwrap();
                let refused = is_refused(waiting.await.unwrap(), "TF412");
                assert_eq!(refused.problem["max_token"], first);
            } else {
                holder.rollback().await.unwrap();
                assert_eq!(waiting.await.unwrap().unwrap(), first - 1);
            }
        }
    }
}

async fn functions_and_the_fence_wait_for_each_other() {
    let db = Postgres::fresh(4).await;
    let fence = db.fence();
    let mut holder = db.pool.begin().await.unwrap();
    admit(&mut holder, "sku-1", 5).await.unwrap();
    let waiting = tokio::spawn({
        let fence = fence.clone();
        async move { write(&fence, 4).await }
    });
    sleep(Duration::from_millis(100)).await;
    assert!(!waiting.is_finished(), "it must wait for the row lock");
    holder.commit().await.unwrap();
    is_stale(waiting.await.unwrap(), 4, 5);

    let holder = begin(&fence, 8).await;
    let waiting = tokio::spawn({
        let pool = db.pool.clone();
        async move { raise(&mut pool.acquire().await.unwrap(), "sku-1", 7).await }
    });
    sleep(Duration::from_millis(100)).await;
    assert!(!waiting.is_finished(), "it must wait for the row lock");
    holder.commit().await.unwrap();
    is_refused(waiting.await.unwrap(), "TF412");
}

#[tokio::test]
async fn a_rollback_leaves_nothing() {
    let db = Postgres::fresh(2).await;
    let mut conn = db.pool.acquire().await.unwrap();
    let mut tx = conn.begin().await.unwrap();
    admit(&mut tx, "sku-1", 5).await.unwrap();
    execute(&mut tx, "INSERT INTO ledger VALUES (1)")
        .await
        .unwrap();
    tx.rollback().await.unwrap();
    assert_eq!((db.entries().await, fence_row(&db).await), (0, None));

    // A refusal takes with it what was written before.
    admit(&mut conn, "sku-1", 5).await.unwrap();
    let mut tx = conn.begin().await.unwrap();
    execute(&mut tx, "INSERT INTO ledger VALUES (2)")
        .await
        .unwrap();
    is_refused(admit(&mut tx, "sku-1", 5).await, "TF412");
    let _ = tx.commit().await;
    assert_eq!((db.entries().await, fence_row(&db).await), (0, Some(5)));
}

#[tokio::test]
async fn above_read_committed_a_wait_ends_with_a_serialization_failure() {
    let db = Postgres::fresh(4).await;
    // Without a row, and with one.
    for value in [5, 10] {
        let mut reader = db.pool.acquire().await.unwrap();
        execute(&mut reader, "BEGIN ISOLATION LEVEL REPEATABLE READ")
            .await
            .unwrap();
        let seen = max_token(&mut reader, "sku-1").await.unwrap();
        write(&db.fence(), value).await.unwrap();
        assert_ne!(seen, Some(value));
        is_refused(admit(&mut reader, "sku-1", value + 1).await, "40001");
        execute(&mut reader, "ROLLBACK").await.unwrap();
    }
}

#[tokio::test]
async fn whoever_may_execute_needs_no_right_on_tables_and_nobody_else_may() {
    let db = Postgres::fresh(2).await;
    let role = format!("tower_fence_test_{:016x}", rand::random::<u64>());
    db.execute(&format!("CREATE ROLE {role} LOGIN PASSWORD '{role}'"))
        .await;
    let options: PgConnectOptions = db.url.parse().unwrap();
    let options = options.username(&role).password(&role);
    let mut conn = PgConnection::connect_with(&options).await.unwrap();

    let public = "SELECT count(*) FROM pg_proc WHERE proname LIKE 'fence\\_%' \
         AND has_function_privilege('public', oid, 'EXECUTE') AND proname <> 'fence_history'";
    assert_eq!(db.number(public).await, 0);
    is_refused(admit(&mut conn, "sku-1", 5).await, "42501");
    is_refused(raise(&mut conn, "sku-1", 5).await, "42501");
    is_refused(max_token(&mut conn, "sku-1").await, "42501");

    // As the documentation lists them.
    let grants = grants("shop_worker").replace("shop_worker", &role);
    db.execute(&grants).await;
    admit(&mut conn, "sku-1", 5).await.unwrap();
    raise(&mut conn, "sku-1", 8).await.unwrap();
    assert_eq!(max_token(&mut conn, "sku-1").await.unwrap(), Some(7));
    is_refused(admit(&mut conn, "sku-1", 7).await, "TF412");
    is_refused(admit(&mut conn, "", 7).await, "TF400");
    for forbidden in [
        "SELECT * FROM fence_resources",
        "UPDATE fence_resources SET max_token = 0",
        "SELECT fence_refuse_malformed('x')",
    ] {
        let refused = execute(&mut conn, forbidden).await.unwrap_err();
        let refused = refused.into_database_error().unwrap();
        assert_eq!(refused.code().as_deref(), Some("42501"), "{forbidden}");
    }
    conn.close().await.unwrap();
    db.execute(&format!("DROP OWNED BY {role}; DROP ROLE {role}"))
        .await;
}

/// An operator that finds every number less than every other.
const EVERYTHING_IS_LESS: &str = "\
    CREATE FUNCTION {schema}.less(bigint, bigint) RETURNS boolean LANGUAGE sql AS 'SELECT true'; \
    CREATE OPERATOR {schema}.< (LEFTARG = bigint, RIGHTARG = bigint, FUNCTION = {schema}.less);";

#[tokio::test]
async fn temporary_tables_and_search_paths_lead_no_function_astray() {
    let db = Postgres::fresh(2).await;
    let mut conn = db.pool.acquire().await.unwrap();
    admit(&mut conn, "sku-1", 5).await.unwrap();
    let like = "(LIKE public.fence_resources INCLUDING ALL)";
    execute(
        &mut conn,
        &format!(
            "CREATE TEMPORARY TABLE fence_resources {like}; CREATE SCHEMA twin; \
             CREATE TABLE twin.fence_resources {like}; \
             CREATE FUNCTION twin.fence_refuse_stale(text, bigint, bigint) RETURNS void \
                 LANGUAGE sql AS ''; {}; {}",
            EVERYTHING_IS_LESS.replace("{schema}", "twin"),
            // Who may create in the schema of the tables is not the owner of the functions yet.
            EVERYTHING_IS_LESS.replace("{schema}", "public"),
        ),
    )
    .await
    .unwrap();
    for path in [
        "public",
        "pg_temp, public",
        "twin, pg_temp, public, pg_catalog",
    ] {
        execute(&mut conn, &format!("SET search_path = {path}"))
            .await
            .unwrap();
        for stale in [5, 4] {
            is_refused(admit(&mut conn, "sku-1", stale).await, "TF412");
            is_refused(raise(&mut conn, "sku-1", stale).await, "TF412");
        }
        assert_eq!(max_token(&mut conn, "sku-1").await.unwrap(), Some(5));
    }
    // Backslashes that are no escapes, and those that are.
    execute(&mut conn, "SET standard_conforming_strings = off")
        .await
        .unwrap();
    is_refused(admit(&mut conn, "a\tb", 6).await, "TF400");
    admit(&mut conn, "01f", 6).await.unwrap();
    for table in ["pg_temp.fence_resources", "twin.fence_resources"] {
        let rows = format!("SELECT count(*) FROM {table}");
        assert_eq!(Postgres::number(&mut conn, &rows).await.unwrap(), 0);
    }
}

#[tokio::test]
async fn functions_work_in_a_schema_of_any_name() {
    let db = Postgres::fresh(2).await;
    for schema in ["odd \"name", "a, public", "Upper", "o'clock", "täglich"] {
        let quoted = format!("\"{}\"", schema.replace('"', "\"\""));
        db.execute(&format!("CREATE SCHEMA {quoted}")).await;
        let path = format!("SET search_path = {quoted}");
        let pool = sqlx::postgres::PgPoolOptions::new().after_connect(move |conn, _| {
            let path = path.clone();
            Box::pin(async move {
                sqlx::raw_sql(AssertSqlSafe(path)).execute(conn).await?;
                Ok(())
            })
        });
        let pool = pool.max_connections(2).connect(&db.url).await.unwrap();
        let fence = Fence::new(pool.clone());
        fence.migrate().await.unwrap();
        let mut conn = pool.acquire().await.unwrap();
        // Called from anywhere, by its whole name.
        execute(&mut conn, "SET search_path = pg_catalog")
            .await
            .unwrap();
        let call = format!("SELECT {quoted}.fence_admit('sku-1', 7)");
        assert_eq!(Postgres::number(&mut conn, &call).await.unwrap(), 7);
        assert_eq!(fence.inspect(&sku()).await.unwrap(), Some(7));
        is_stale(fence.raise(&sku(), token(7)).await, 7, 7);
        let stale = Postgres::number(&mut conn, &call).await.unwrap_err();
        let stale = stale.into_database_error().unwrap();
        assert_eq!(stale.code().as_deref(), Some("TF412"), "{schema}: {stale}");
        drop(conn);
        pool.close().await;
    }
    assert_eq!(fence_row(&db).await, None);
}

/// What the server warns of, in all of these statements.
async fn warnings(url: &str, run: impl AsyncFnOnce(&mut PgConnection)) -> usize {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("log");
    let log = std::fs::File::create(&path).unwrap();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::WARN)
        .with_writer(log)
        .finish();
    let guard = tracing::subscriber::set_default(subscriber);
    let mut conn = PgConnection::connect(url).await.unwrap();
    run(&mut conn).await;
    drop(guard);
    let log = std::fs::read_to_string(&path).unwrap();
    log.matches("has no effect on later statements").count()
}

#[tokio::test]
async fn an_admission_that_is_its_own_transaction_is_warned_of() {
    let db = Postgres::fresh(2).await;
    db.execute(
        "CREATE SEQUENCE tokens; CREATE FUNCTION write() RETURNS void LANGUAGE plpgsql AS \
         'BEGIN PERFORM fence_admit(''a'', nextval(''tokens'')); INSERT INTO ledger DEFAULT VALUES; END'",
    )
    .await;
    const ADMIT: &str = "SELECT fence_admit('a', nextval('tokens'))";
    const BYPASS: &str = "SELECT fence_bypass('by hand')";
    const WRITE: &str = "INSERT INTO ledger DEFAULT VALUES";
    let simple = [
        (ADMIT.to_owned(), 1),
        (BYPASS.to_owned(), 1),
        (format!("{ADMIT};\n"), 1),
        (format!("BEGIN; {ADMIT}; {WRITE}; COMMIT"), 0),
        (format!("BEGIN; {BYPASS}; COMMIT"), 0),
        // An implicit transaction.
        (format!("{ADMIT}; {WRITE}"), 0),
        ("SELECT write()".to_owned(), 0),
        (
            format!("DO $$ BEGIN PERFORM fence_admit('a', nextval('tokens')); {WRITE}; END $$"),
            0,
        ),
    ];
    for (message, expected) in simple {
        let found = warnings(&db.url, async |conn| execute(conn, &message).await.unwrap()).await;
        assert_eq!(found, expected, "{message}");
    }
    // One message after another.
    let apart = async |conn: &mut PgConnection| {
        for message in ["BEGIN", ADMIT, BYPASS, WRITE, "COMMIT"] {
            execute(conn, message).await.unwrap();
        }
    };
    assert_eq!(warnings(&db.url, apart).await, 0);
    // Prepared, and then bound and executed.
    for statement in [ADMIT, BYPASS] {
        let bound = async |conn: &mut PgConnection| {
            for _ in 0..2 {
                sqlx::query(statement).execute(&mut *conn).await.unwrap();
            }
        };
        assert_eq!(warnings(&db.url, bound).await, 2, "{statement}");
        let bound = async |conn: &mut PgConnection| {
            let mut tx = Connection::begin(&mut *conn).await.unwrap();
            for _ in 0..2 {
                sqlx::query(statement).execute(&mut *tx).await.unwrap();
            }
            tx.commit().await.unwrap();
        };
        assert_eq!(warnings(&db.url, bound).await, 0, "{statement}");
    }
}
