//! The fence as functions in Postgres: which calls wait for each other, and objects that could
//! mislead them.

use sqlx::{Acquire, AssertSqlSafe, Connection, PgConnection, Postgres};

use super::admission::must_wait;
use crate::support::{
    database::TestDatabase,
    fence::write,
    functions::{acquire, admit, is_refused, max_token, raise, release, renew},
    log::Log,
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiting_admission_is_checked_against_its_predecessors_commit() {
    let db = Postgres::fresh(4).await;
    // The first admission finds no row. The later ones find a row.
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
            must_wait(&waiting).await;
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

/// A session keeps the plans that it made while the tables were small.
#[tokio::test]
async fn functions_use_indexes_while_tables_grow() {
    let db = Postgres::fresh(1).await;
    let mut conn = db.pool.acquire().await.unwrap();
    for number in 0..30 {
        let name = format!("early-{number}");
        acquire(&mut conn, &name, "30 s").await.unwrap();
    }
    Postgres::run(&mut conn, "ANALYZE").await;
    let mut tx = conn.begin().await.unwrap();
    for number in 0..8 {
        let name = format!("late-{number}");
        let lease = acquire(&mut tx, &name, "30 s").await.unwrap();
        let renewed = renew(&mut tx, &name, &lease.lease_id, "30 s", true).await;
        let token = renewed.unwrap();
        admit(&mut tx, &*name, token).await.unwrap();
        release(&mut tx, &name, &lease.lease_id).await.unwrap();
        raise(&mut tx, &*name, token + 2).await.unwrap();
    }
    let scans = "SELECT string_agg(relname, ' ') FROM pg_stat_xact_user_tables \
                 WHERE relname IN ('resources', 'leases', 'waiters', 'queues') AND seq_scan > 0";
    let scanned: Option<String> = sqlx::query_scalar(scans).fetch_one(&mut *tx).await.unwrap();
    assert_eq!(scanned, None);
}

/// A call of a function that is not inlined takes longer than the update of a row.
#[tokio::test]
async fn function_that_runs_for_each_row_is_inlined() {
    let db = Postgres::fresh(1).await;
    let explain = "EXPLAIN VERBOSE SELECT tower_fence.max_token_after(max_token, announced, 5, 6) \
                   FROM tower_fence.resources";
    let plan = sqlx::query_scalar::<_, String>(explain).fetch_all(&db.pool);
    let plan = plan.await.unwrap().concat();
    assert_contains!(plan, "GREATEST");
    assert!(!plan.contains("tower_fence.max_token_after"), "{plan}");
}

#[tokio::test]
async fn above_read_committed_a_wait_ends_with_a_serialization_failure() {
    let db = Postgres::fresh(4).await;
    // The first call finds no row. The second one finds a row.
    for value in [5, 10] {
        let mut reader = db.pool.acquire().await.unwrap();
        Postgres::run(&mut reader, "BEGIN ISOLATION LEVEL REPEATABLE READ").await;
        let seen = max_token(&mut reader, "sku-1").await.unwrap();
        write(&db.fence(), value).await.unwrap();
        assert_ne!(seen, Some(value));
        is_refused(admit(&mut reader, "sku-1", value + 1).await, "40001");
        Postgres::run(&mut reader, "ROLLBACK").await;
    }
}

/// The snapshot of the transaction still shows the announcement that a later grant has replaced.
#[tokio::test]
async fn above_read_committed_a_superseded_renewal_is_not_confirmed() {
    let db = Postgres::fresh(4).await;
    let announce = async |conn: &mut PgConnection, token: i64, lease: &str, renews: bool| {
        let announce = format!(
            "SELECT outcome FROM tower_fence.announce('sku-1', {token}, '{lease}', {renews})"
        );
        sqlx::query_scalar::<_, String>(AssertSqlSafe(announce))
            .fetch_one(conn)
            .await
    };
    let mut conn = db.pool.acquire().await.unwrap();
    announce(&mut conn, 5, "a", false).await.unwrap();
    let mut renewing = db.pool.acquire().await.unwrap();
    Postgres::run(&mut renewing, "BEGIN ISOLATION LEVEL REPEATABLE READ").await;
    assert_eq!(max_token(&mut renewing, "sku-1").await.unwrap(), Some(4));
    let outcome = announce(&mut conn, 6, "b", false).await.unwrap();
    assert_eq!(outcome, "announced");
    let refused = announce(&mut renewing, 5, "a", true).await.unwrap_err();
    let refused = refused.into_database_error().unwrap();
    assert_eq!(refused.code().unwrap(), "40001");
}

/// A `<` operator for which every number is less than every other number, and an `=` operator for
/// which no number is equal to another.
const FALSE_OPERATORS: &str = "\
    CREATE FUNCTION {schema}.less(bigint, bigint) RETURNS boolean LANGUAGE sql AS 'SELECT true'; \
    CREATE OPERATOR {schema}.< (LEFTARG = bigint, RIGHTARG = bigint, FUNCTION = {schema}.less); \
    CREATE FUNCTION {schema}.equal(bigint, integer) RETURNS boolean LANGUAGE sql AS 'SELECT false'; \
    CREATE OPERATOR {schema}.= (LEFTARG = bigint, RIGHTARG = integer, FUNCTION = {schema}.equal);";

#[tokio::test]
async fn temporary_tables_and_search_paths_mislead_no_function() {
    let db = Postgres::fresh(2).await;
    let mut conn = db.pool.acquire().await.unwrap();
    admit(&mut conn, "sku-1", 5).await.unwrap();
    let like = "(LIKE tower_fence.resources INCLUDING ALL)";
    let set_up = format!(
        "CREATE TEMPORARY TABLE resources {like}; CREATE TEMPORARY TABLE leases (token bigint); \
             CREATE SCHEMA twin; CREATE TABLE twin.resources {like}; {}; {}",
        FALSE_OPERATORS.replace("{schema}", "twin"),
        // A role that may create objects in the schema of the fence does not own its functions.
        FALSE_OPERATORS.replace("{schema}", "tower_fence"),
    );
    Postgres::run(&mut conn, &set_up).await;
    for path in [
        "public",
        "pg_temp, tower_fence",
        "twin, pg_temp, tower_fence, pg_catalog",
    ] {
        Postgres::run(&mut conn, &format!("SET search_path = {path}")).await;
        for stale in [5, 4] {
            is_refused(admit(&mut conn, "sku-1", stale).await, "TF412");
            is_refused(raise(&mut conn, "sku-1", stale).await, "TF412");
        }
        assert_eq!(max_token(&mut conn, "sku-1").await.unwrap(), Some(5));
        // This function has no search path of its own.
        let moved = "SELECT tower_fence.max_token_after(5, 6, 0, 0)";
        assert_eq!(Postgres::number(&mut conn, moved).await.unwrap(), 5);
        let lease = acquire(&mut conn, "sku-2", "60 s").await.unwrap();
        is_refused(acquire(&mut conn, "sku-2", "60 s").await, "TF409");
        let renewed = renew(&mut conn, "sku-2", &lease.lease_id, "60 s", true).await;
        assert!(renewed.unwrap() > lease.token);
        let released = release(&mut conn, "sku-2", &lease.lease_id).await;
        released.unwrap();
    }
    // Without this setting, a backslash is an ordinary character. With it, a backslash begins an
    // escape.
    Postgres::run(&mut conn, "SET standard_conforming_strings = off").await;
    is_refused(admit(&mut conn, "a\tb", 6).await, "TF400");
    admit(&mut conn, "01f", 6).await.unwrap();
    // The catalogs of Citus exist only on servers with Citus. On other servers, their names without
    // a schema could refer to temporary tables.
    let unqualified = "SELECT count(*) FROM pg_proc WHERE pronamespace = 'tower_fence'::regnamespace \
                       AND prosrc ~ '(^|[^._a-z])pg_dist_'";
    assert_eq!(Postgres::number(&mut conn, unqualified).await.unwrap(), 0);
    for table in ["pg_temp.resources", "twin.resources"] {
        let rows = format!("SELECT count(*) FROM {table}");
        assert_eq!(Postgres::number(&mut conn, &rows).await.unwrap(), 0);
    }
}

/// Counts the warnings that the server logs for these statements.
async fn warnings(url: &str, run: impl AsyncFnOnce(&mut PgConnection)) -> usize {
    let (log, _guard) = Log::of_this_thread("warn");
    let mut conn = PgConnection::connect(url).await.unwrap();
    run(&mut conn).await;
    log.text()
        .matches("has no effect on later statements")
        .count()
}

#[tokio::test]
async fn autocommit_admission_logs_a_warning() {
    let db = Postgres::fresh(2).await;
    db.execute(
        "CREATE SEQUENCE tokens; CREATE FUNCTION write() RETURNS void LANGUAGE plpgsql AS \
         'BEGIN PERFORM tower_fence.admit(''a'', nextval(''tokens'')); INSERT INTO ledger DEFAULT VALUES; END'",
    )
    .await;
    const ADMIT: &str = "SELECT tower_fence.admit('a', nextval('tokens'))";
    const BYPASS: &str = "SELECT tower_fence.bypass('by hand')";
    const WRITE: &str = "INSERT INTO ledger DEFAULT VALUES";
    let simple = [
        (ADMIT.to_owned(), 1),
        (BYPASS.to_owned(), 1),
        (format!("{ADMIT};\n"), 1),
        (format!("BEGIN; {ADMIT}; {WRITE}; COMMIT"), 0),
        (format!("BEGIN; {BYPASS}; COMMIT"), 0),
        // Statements in one message run in one implicit transaction.
        (format!("{ADMIT}; {WRITE}"), 0),
        ("SELECT write()".to_owned(), 0),
        (format!("DO $$ BEGIN PERFORM write(); {WRITE}; END $$"), 0),
    ];
    for (message, expected) in simple {
        let found = warnings(&db.url, async |conn| Postgres::run(conn, &message).await).await;
        assert_eq!(found, expected, "{message}");
    }
    // Each statement is sent in its own message.
    let apart = async |conn: &mut PgConnection| {
        for message in ["BEGIN", ADMIT, BYPASS, WRITE, "COMMIT"] {
            Postgres::run(conn, message).await;
        }
    };
    assert_eq!(warnings(&db.url, apart).await, 0);
    // These statements are prepared, and then bound and executed.
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
