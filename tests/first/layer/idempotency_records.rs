//! Which responses are stored with a key, and for how long, on both databases.

use std::time::Duration;

use sqlx::Postgres;
use tower_fence::Idempotency;

use super::keyed::{Plan, is_call, keyed, max_token, records, start, start_with, write};
use crate::support::{
    database::{TestDatabase, on_both_databases},
    http::Answer,
};

on_both_databases!(
    a_failure_leaves_no_record,
    response_that_cannot_be_stored_rolls_back_the_write,
    a_record_without_a_response_is_final,
    an_expired_key_is_new_and_the_token_still_counts,
    expired_keys_are_removed_and_no_others,
    a_handler_cannot_commit_without_its_record,
    manually_ended_transaction_leaves_no_record,
);

async fn a_failure_leaves_no_record<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let plan = Plan::new(2, 1_000);
    let server = start_with(db.fence(), Idempotency::optional(), &plan).await;
    for _ in 0..2 {
        let failed = write(&server, "/a/add", 5, "k").await;
        assert_eq!((failed.status, failed.text.len()), (409, 70_000));
        assert_eq!((records(&db).await, db.entries().await), (0, 0));
        assert_eq!(max_token(&db).await, Some(4));
    }
    is_call(&write(&server, "/a/add", 5, "k").await, 3, false);
    is_call(&write(&server, "/a/add", 5, "k").await, 3, true);
}

async fn response_that_cannot_be_stored_rolls_back_the_write<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let keys = Idempotency::optional().response_limit_bytes(100);
    let server = start_with(db.fence(), keys, &Plan::new(0, 1_000)).await;
    for path in ["/a/long", "/a/streamed", "/a/broken"] {
        let answer = write(&server, path, 5, "k").await;
        answer.is_problem(500, "response-not-stored");
        assert_eq!((records(&db).await, db.entries().await), (0, 0));
        assert_eq!(max_token(&db).await, Some(4));
    }
    is_call(&write(&server, "/a/add", 5, "k").await, 4, false);
}

/// Returns a time in the past, as the database stores it.
const fn past<DB: TestDatabase>() -> &'static str {
    match DB::ABORTS_ON_ERROR {
        true => "now() - interval '1 second'",
        false => "1",
    }
}

/// An SQL statement of the handler has committed the transaction.
async fn a_record_without_a_response_is_final<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let server = start(&db).await;
    is_call(&write(&server, "/a/add", 5, "k").await, 1, false);
    db.execute(
        "UPDATE tower_fence.idempotency_keys SET status = NULL, headers = NULL, body = NULL",
    )
    .await;
    let repeated = write(&server, "/a/add", 5, "k").await;
    repeated.is_problem(500, "response-missing");
}

async fn an_expired_key_is_new_and_the_token_still_counts<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let keys = Idempotency::optional().ttl(Duration::ZERO);
    let plan = Plan::new(0, 1_000);
    let server = start_with(db.fence(), keys, &plan).await;
    is_call(&write(&server, "/a/add", 5, "k").await, 1, false);
    // A concurrent request with the key must find the record, whatever the TTL is.
    is_call(&write(&server, "/a/add", 5, "k").await, 1, true);
    let past = past::<DB>();
    db.execute(&format!(
        "UPDATE tower_fence.idempotency_keys SET expires_at = {past}"
    ))
    .await;
    let stale = write(&server, "/a/add", 5, "k").await;
    stale.is_problem(412, "stale-token");
    // The request differs from the earlier one. The old record is replaced completely, and the new
    // one has its own expiry.
    let lasting = start_with(db.fence(), Idempotency::optional(), &plan).await;
    for replayed in [false, true] {
        let new = keyed(&lasting, "/a/other", 6, "k").body("new");
        is_call(&Answer::to(new).await, 2, replayed);
    }
    assert_eq!(records(&db).await, 1);
    // The longest possible TTL.
    let keys = Idempotency::optional().ttl(Duration::MAX);
    let server = start_with(db.fence(), keys, &Plan::new(0, 1_000)).await;
    db.execute("DELETE FROM ledger").await;
    is_call(&write(&server, "/a/add", 7, "long").await, 1, false);
    is_call(&write(&server, "/a/add", 7, "long").await, 1, true);
}

async fn expired_keys_are_removed_and_no_others<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let server = start(&db).await;
    is_call(&write(&server, "/a/add", 5, "k").await, 1, false);
    let past = past::<DB>();
    db.execute(&format!(
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 2500) \
         INSERT INTO tower_fence.idempotency_keys (scope, key, fingerprint, expires_at) \
         SELECT scope, 'old ' || i, fingerprint, {past} FROM tower_fence.idempotency_keys, n"
    ))
    .await;
    assert_eq!(records(&db).await, 2_501);
    assert_eq!(db.fence().remove_expired_keys().await.unwrap(), 2_500);
    assert_eq!(db.fence().remove_expired_keys().await.unwrap(), 0);
    is_call(&write(&server, "/a/add", 5, "k").await, 1, true);
}

#[tokio::test]
async fn call_removes_at_most_the_given_number_of_keys() {
    let db = Postgres::fresh(2).await;
    // With these statistics, Postgres runs a subquery in FROM once for each row.
    for sql in [
        "INSERT INTO tower_fence.idempotency_keys (scope, key, fingerprint, expires_at) \
         VALUES (sha256('a'), 'new', sha256('a'), now() + interval '1 day')",
        "ANALYZE tower_fence.idempotency_keys",
        "INSERT INTO tower_fence.idempotency_keys (scope, key, fingerprint, expires_at) \
         SELECT sha256('a'), 'old ' || i, sha256('a'), now() - interval '1 day' \
         FROM generate_series(1, 10) AS i",
    ] {
        db.execute(sql).await;
    }
    for removed in [3, 3, 3, 1, 0] {
        let remove = "SELECT tower_fence.remove_expired_keys(3)::bigint";
        assert_eq!(db.number(remove).await, removed);
    }
}

async fn a_handler_cannot_commit_without_its_record<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let server = start(&db).await;
    let answer = write(&server, "/a/commit", 5, "k").await;
    answer.is_problem(500, "transaction-aborted");
    assert_eq!((records(&db).await, db.entries().await), (0, 0));
    assert_eq!(max_token(&db).await, Some(4));
}

async fn manually_ended_transaction_leaves_no_record<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let server = start(&db).await;
    let answer = write(&server, "/a/by-hand", 5, "k").await;
    answer.is_problem(500, "transaction-aborted");
    assert_eq!((records(&db).await, db.entries().await), (0, 0));
    is_call(&write(&server, "/a/add", 5, "k").await, 1, false);
}

#[tokio::test]
async fn keyed_write_keeps_the_settings_of_its_session() {
    let db = Postgres::fresh(1).await;
    let settings = async || -> String {
        let all = "SELECT string_agg(name || ' ' || setting, ', ' ORDER BY name) FROM pg_settings \
             WHERE name NOT LIKE 'plpgsql.%'";
        sqlx::query_scalar(all).fetch_one(&db.pool).await.unwrap()
    };
    let before = settings().await;
    let server = start(&db).await;
    for replayed in [false, true] {
        is_call(&write(&server, "/a/add", 5, "k").await, 1, replayed);
    }
    assert_eq!(settings().await, before);
}
