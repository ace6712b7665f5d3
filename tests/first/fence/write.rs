//! `Fence::write` in Postgres: a statement whose snapshot may be older than the lock that it needs.

use std::time::Duration;

use axum::routing::post;
use sqlx::{
    Postgres,
    encode::IsNull,
    error::BoxDynError,
    postgres::{PgArgumentBuffer, PgTypeInfo},
};
use tokio::time::{sleep, timeout};
use tower_fence::{
    AdmitError, Fence, FenceLayer, Idempotency, PathParam, PgFencedTx, Resource, TokenUse,
    fence::WriteError, layer::PendingWrite,
};

use crate::support::{
    database::{Fresh, TestDatabase},
    eventually,
    fence::token,
    http::{Answer, Server},
};

/// A statement that reads the rows of its predecessors, and writes the next number.
const NEXT: &str = "INSERT INTO numbers SELECT 1 + count(*) FROM numbers \
    HAVING EXISTS (SELECT 1 FROM fence) RETURNING n";

async fn with_numbers() -> Fresh<Postgres> {
    let db = Postgres::fresh(12).await;
    db.execute("CREATE TABLE numbers (n BIGINT NOT NULL)").await;
    // If a connection has never prepared a statement, the fence assumes that it may lead to a
    // pooler, and uses it differently.
    let mut connections = vec![];
    for _ in 0..12 {
        let mut conn = db.pool.acquire().await.unwrap();
        sqlx::query("SELECT 1").execute(&mut *conn).await.unwrap();
        connections.push(conn);
    }
    drop(connections);
    db
}

fn resource() -> Resource {
    Resource::new("r").unwrap()
}

/// Writes with a reusable token, so `max_token` stays the same.
async fn write(fence: &Fence<Postgres>, sql: &'static str) -> Result<Vec<(i64,)>, WriteError> {
    fence
        .write(&resource(), token(7), TokenUse::Reusable, sqlx::query(sql))
        .await
}

/// Returns the number of duplicates in `numbers`.
async fn repeated(db: &Fresh<Postgres>) -> i64 {
    let repeated = "SELECT count(*) - count(DISTINCT n) FROM numbers";
    db.number(repeated).await
}

/// Writes like another process, and returns the transaction just before its COMMIT.
async fn predecessor(db: &Fresh<Postgres>) -> PgFencedTx {
    let (fence, resource) = (db.fence(), resource());
    let tx = fence.begin(&resource, token(7), TokenUse::Reusable);
    let mut tx = tx.await.unwrap();
    let next = "INSERT INTO numbers SELECT 1 + count(*) FROM numbers";
    Postgres::run(&mut tx, next).await;
    tx
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiter_sees_the_write_of_its_predecessor() {
    for resource_is_new in [true, false] {
        let db = with_numbers().await;
        if !resource_is_new {
            write(&db.fence(), NEXT).await.unwrap();
        }
        let first = predecessor(&db).await;
        let fence = db.fence();
        let second = tokio::spawn(async move { write(&fence, NEXT).await });
        db.waits_for_lock().await;
        first.commit().await.unwrap();
        let written = second.await.unwrap().unwrap();
        assert_eq!(written, [(if resource_is_new { 2 } else { 3 },)]);
        assert_eq!(repeated(&db).await, 0);
    }
}

/// The predecessor commits between the snapshot of the statement and its read of the fence. The
/// statement therefore does not wait for a lock, and `max_token` does not show the change.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn write_after_the_snapshot_is_seen() {
    const SLOW: &str = "INSERT INTO numbers \
        SELECT 1 + count(*) FROM numbers, (SELECT pg_advisory_xact_lock_shared(1)) AS slow \
        HAVING count(*) < CASE WHEN EXISTS (SELECT 1 FROM fence) THEN 1000 ELSE 0 END RETURNING n";
    let db = with_numbers().await;
    let insert = "INSERT INTO numbers SELECT 1 FROM fence RETURNING n";
    write(&db.fence(), insert).await.unwrap();
    let mut gate = db.pool.acquire().await.unwrap();
    Postgres::run(&mut gate, "SELECT pg_advisory_lock(1)").await;
    let fence = db.fence();
    let second = tokio::spawn(async move { write(&fence, SLOW).await.unwrap().len() });
    db.waits_for_lock().await;
    predecessor(&db).await.commit().await.unwrap();
    Postgres::run(&mut gate, "SELECT pg_advisory_unlock(1)").await;
    assert_eq!(second.await.unwrap(), 1);
    assert_eq!(repeated(&db).await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn write_reads_the_latest_version_of_a_locked_row() {
    let db = Postgres::fresh(4).await;
    db.execute("INSERT INTO stock VALUES ('r', 10)").await;
    let decrement = "UPDATE stock SET n = n - 1 \
        WHERE sku = 'r' AND EXISTS (SELECT 1 FROM fence) RETURNING n";
    let fence = db.fence();
    assert_eq!(write(&fence, decrement).await.unwrap(), [(9,)]);
    let mut application = db.pool.begin().await.unwrap();
    Postgres::run(&mut application, "UPDATE stock SET n = n - 5").await;
    let waiting = tokio::spawn(async move { write(&fence, decrement).await });
    db.waits_for_lock().await;
    application.commit().await.unwrap();
    assert_eq!(waiting.await.unwrap().unwrap(), [(3,)]);
}

/// A migration adds a column, which changes the result of statements that the connections have
/// prepared.
#[tokio::test]
async fn statement_that_returns_all_columns_survives_a_new_column() {
    const ALL: &str = "INSERT INTO numbers SELECT 1 FROM fence RETURNING *";
    let db = Postgres::fresh(2).await;
    db.execute("CREATE TABLE numbers (n BIGINT NOT NULL)").await;
    let fence = db.reusing_fence();
    let write = async || {
        let (resource, query) = (resource(), sqlx::query(ALL));
        let written = fence.write::<(i64,)>(&resource, token(7), TokenUse::Reusable, query);
        written.await.map(|rows| rows.len())
    };
    for _ in 0..3 {
        assert_eq!(write().await.unwrap(), 1);
    }
    db.execute("ALTER TABLE numbers ADD COLUMN note TEXT").await;
    for _ in 0..3 {
        assert_eq!(write().await.unwrap(), 1);
    }
}

/// Under an idempotency key, the statement cannot be repeated, but its connection is closed.
#[tokio::test]
async fn connection_with_a_changed_result_is_not_used_again() {
    async fn write(pending: PendingWrite<Postgres>) -> Result<(), WriteError> {
        let all = sqlx::query("INSERT INTO numbers SELECT 1 FROM fence RETURNING *");
        pending.write::<(i64,)>(all).await.map(drop)
    }
    let db = Postgres::fresh(1).await;
    db.execute("CREATE TABLE numbers (n BIGINT NOT NULL)").await;
    let layer = FenceLayer::new(db.fence(), PathParam("r")).deferred();
    let layer = layer.idempotent(Idempotency::required());
    let server = Server::at("/{r}", post(write).route_layer(layer)).await;
    let write = async |token: i64| {
        let request = server.post("/r").header("Fencing-Token", token);
        let request = request.header("Idempotency-Key", format!(r#""{token}""#));
        Answer::to(request).await.status
    };
    for token in 1..4 {
        assert_eq!(write(token).await, 200);
    }
    db.execute("ALTER TABLE numbers ADD COLUMN note TEXT").await;
    let answers = [write(4).await, write(4).await, write(5).await];
    assert_eq!(answers, [503, 200, 200]);
}

/// Two holders: once the newer one has written, the older one writes nothing, whenever its
/// statement arrives.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_older_holder_writes_nothing_after_a_newer_one() {
    let db = with_numbers().await;
    async fn mine(fence: &Fence<Postgres>, value: i64) -> Result<Vec<(i64,)>, WriteError> {
        let next = "INSERT INTO numbers SELECT $1 FROM fence RETURNING n";
        let query = sqlx::query(next).bind(value);
        fence
            .write(&resource(), token(value), TokenUse::SingleUse, query)
            .await
    }
    let holders = (0..4).map(|holder| {
        let fence = db.fence();
        tokio::spawn(async move {
            for round in 0..50 {
                match mine(&fence, 1 + round * 4 + holder).await {
                    Ok(rows) => assert_eq!(rows, [(1 + round * 4 + holder,)]),
                    Err(WriteError::Admit(AdmitError::Stale(_))) => {}
                    Err(error) => panic!("{error:?}"),
                }
                sleep(Duration::from_micros(500)).await;
            }
        })
    });
    for holder in holders.collect::<Vec<_>>() {
        holder.await.unwrap();
    }
    // The rows are in commit order.
    let out_of_order = "SELECT count(*) FROM (\
        SELECT n < lag(n) OVER (ORDER BY ctid) AS back FROM numbers) AS steps WHERE back";
    assert_eq!(db.number(out_of_order).await, 0);
    let written = db.count("numbers").await;
    assert!(written > 10, "{written} were admitted");
}

/// A statement that names `fence` but writes without it, and a trigger that writes although its
/// statement does not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn neither_statement_nor_trigger_writes_without_the_fence() {
    const CARELESS: &str = "INSERT INTO numbers VALUES (1) RETURNING n -- fence";
    const DEPENDENT: &str = "INSERT INTO numbers SELECT 1 FROM fence RETURNING n";
    let db = with_numbers().await;
    db.execute(
        "CREATE TABLE log (entry TEXT);
         CREATE FUNCTION log() RETURNS trigger LANGUAGE plpgsql AS
             $$ BEGIN INSERT INTO log VALUES ('entry'); RETURN NULL; END $$;
         CREATE TRIGGER log AFTER INSERT ON numbers FOR EACH STATEMENT EXECUTE FUNCTION log();",
    )
    .await;
    let fresh = db.fence();
    for (value, written, sql) in [
        (7, true, CARELESS),
        (8, true, DEPENDENT),
        (9, true, CARELESS),
        (9, false, CARELESS),
        (8, false, DEPENDENT),
    ] {
        let before = db.count("log").await;
        let (token, token_use) = (token(value), TokenUse::SingleUse);
        // The refusal comes from the database, not from the cache.
        let fence = if written { fresh.clone() } else { db.fence() };
        let resource = resource();
        let outcome = fence.write::<(i64,)>(&resource, token, token_use, sqlx::query(sql));
        match outcome.await {
            Ok(rows) => assert_eq!((rows, written), (vec![(1,)], true)),
            Err(WriteError::Admit(AdmitError::Stale(_))) => assert!(!written),
            Err(error) => panic!("{error:?}"),
        }
        let logged = db.count("log").await - before;
        assert_eq!(logged, i64::from(written), "{sql} under {value}");
    }
    assert_eq!(db.count("numbers").await, 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropped_or_slow_statement_releases_the_lock() {
    const SLOW: &str = "INSERT INTO numbers SELECT 1 FROM fence, pg_sleep(30) RETURNING n";
    let db = with_numbers().await;
    let limit = Duration::from_secs(1);
    let hasty = db.fence_with(|fence| {
        let fence = fence.hold_timeout(limit).lock_timeout(limit);
        fence.answer_timeout(limit)
    });
    for fence in [db.fence(), hasty] {
        write(&fence, NEXT).await.unwrap();
        let slow = timeout(Duration::from_secs(5), write(&fence, SLOW)).await;
        assert!(!matches!(slow, Ok(Ok(_))), "{slow:?}");
        let running = "pg_stat_activity WHERE query LIKE '%pg_sleep(30)%' AND state = 'active' \
            AND datname = current_database() AND pid <> pg_backend_pid()";
        eventually!("the statement has ended", db.count(running).await == 0);
        write(&fence, NEXT).await.unwrap();
    }
    assert_eq!(db.count("numbers").await, 4);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn undecodable_rows_are_written_and_reported() {
    let db = with_numbers().await;
    let fence = db.fence();
    let (resource, once) = (resource(), TokenUse::SingleUse);
    let written = fence.write::<(String,)>(&resource, token(7), once, NEXT);
    assert_matches!(written.await, Err(WriteError::Rows(_)));
    assert_eq!(db.count("numbers").await, 1);
    // A semicolon or a comment at the end of the statement does not matter.
    let odd = "INSERT INTO numbers SELECT $1 FROM fence RETURNING n, n + 1 -- that is all\n;\n";
    let query = sqlx::query(odd).bind(5_i64);
    let written = fence.write::<(i64, i64)>(&resource, token(8), once, query);
    assert_eq!(written.await.unwrap(), [(5, 6)]);
}

#[tokio::test]
async fn error_of_an_invalid_statement_names_its_cause() {
    let db = with_numbers().await;
    db.execute(
        "CREATE TABLE ruled (n BIGINT NOT NULL); \
         CREATE RULE quiet AS ON INSERT TO ruled WHERE new.n < 0 DO INSTEAD NOTHING",
    )
    .await;
    let fence = db.fence();
    // The first use of a fence reads its tables, and is never a single statement.
    assert_eq!(fence.inspect(&resource()).await.unwrap(), None);

    struct Unknown(i64);
    impl sqlx::Type<sqlx::Postgres> for Unknown {
        fn type_info() -> PgTypeInfo {
            PgTypeInfo::with_name("no_such_type")
        }
    }
    impl sqlx::Encode<'_, sqlx::Postgres> for Unknown {
        fn encode_by_ref(&self, buffer: &mut PgArgumentBuffer) -> Result<IsNull, BoxDynError> {
            sqlx::Encode::<sqlx::Postgres>::encode_by_ref(&self.0, buffer)
        }
    }
    let insert = "INSERT INTO numbers SELECT 1 FROM fence WHERE $1 IS NOT NULL RETURNING n";
    let unknown = sqlx::query(insert).bind(Unknown(1));
    let refused: Result<Vec<(i64,)>, _> = fence
        .write(&resource(), token(7), TokenUse::SingleUse, unknown)
        .await;
    let Err(WriteError::Statement(cause)) = &refused else {
        panic!("{refused:?}");
    };
    assert_contains!(cause.to_string(), "no_such_type");

    let ruled = "INSERT INTO ruled SELECT 1 FROM fence RETURNING n";
    let refused = write(&fence, ruled).await;
    assert_matches!(refused, Err(WriteError::Unsupported(_)));
    let answer = axum::response::IntoResponse::into_response(refused.unwrap_err());
    assert_eq!(answer.status(), 500);
    // Neither statement has used up the token.
    assert_eq!(write(&fence, NEXT).await.unwrap(), [(1,)]);
}
