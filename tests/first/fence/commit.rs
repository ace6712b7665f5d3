//! The result of a commit, and the state after a transaction that ended in another way, on both
//! databases.

use std::{panic::AssertUnwindSafe, thread, time::Duration};

use futures_util::FutureExt;
use sqlx::{Connection, PgConnection, Postgres};
use tokio::time::timeout;
use tower_fence::{CommitError, TokenUse};

use crate::support::{
    database::{Nested, TestDatabase, is_autocommitted, on_both_databases},
    eventually,
    fence::{begin, insert, is_stale, sku, token, write},
};

on_both_databases!(
    a_dropped_transaction_leaves_nothing_behind,
    ignored_error_is_never_a_false_success,
    manually_ended_transaction_is_never_a_false_success,
    a_nested_commit_is_part_of_the_outer_transaction,
    nested_rollback_leaves_the_outer_transaction_intact,
    a_forgotten_nested_transaction_is_refused_and_leaks_nothing,
    admit_joins_the_callers_own_transaction,
    a_future_dropped_at_any_moment_leaves_no_lock,
);

const SUM: &str = "SELECT CAST(sum(entry) AS BIGINT) FROM ledger";

#[track_caller]
fn is_aborted(outcome: Result<(), CommitError>) {
    assert_matches!(outcome, Err(CommitError::Aborted(_)));
}

async fn a_dropped_transaction_leaves_nothing_behind<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let fence = db.fence();
    let mut tx = begin(&fence, 7).await;
    insert(&mut tx, 7).await;
    drop(tx);
    // The row lock is released, and an older token is still admitted, because no request was
    // answered.
    write(&fence, 6).await.unwrap();
    assert_eq!(db.number(SUM).await, 6);
    // A thread outside of the runtime may drop the transaction as well.
    let mut tx = begin(&fence, 9).await;
    insert(&mut tx, 9).await;
    thread::spawn(|| drop(tx)).join().unwrap();
    write(&fence, 8).await.unwrap();
    assert_eq!(db.entries().await, 2);
}

async fn ignored_error_is_never_a_false_success<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let fence = db.fence();
    let mut tx = begin(&fence, 5).await;
    insert(&mut tx, 1).await;
    DB::execute(&mut tx, "INSERT INTO ledger VALUES (1)")
        .await
        .unwrap_err();
    let outcome = tx.commit().await;
    if DB::ABORTS_ON_ERROR {
        is_aborted(outcome);
        assert_eq!(db.entries().await, 0);
        write(&fence, 5).await.unwrap();
    } else {
        // SQLite rolls back only the failed statement. The rest of the transaction is committed.
        outcome.unwrap();
        assert_eq!(db.entries().await, 1);
    }
}

async fn manually_ended_transaction_is_never_a_false_success<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let fence = db.fence();
    for (value, end) in [
        (5, "ROLLBACK"),
        (5, "ROLLBACK; BEGIN"),
        (6, "COMMIT; BEGIN"),
    ] {
        let mut tx = begin(&fence, value).await;
        insert(&mut tx, value).await;
        DB::run(&mut tx, end).await;
        is_aborted(tx.commit().await);
    }
    // The handler itself has committed the last row.
    assert_eq!(db.entries().await, 1);
    // The connection is usable again.
    write(&fence, 7).await.unwrap();
}

async fn a_nested_commit_is_part_of_the_outer_transaction<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let fence = db.fence();
    let mut tx = begin(&fence, 5).await;
    DB::nested(&mut tx, 1, Nested::Commit).await.unwrap();
    drop(tx);
    eventually!(
        "the outer transaction is rolled back",
        fence.inspect(&sku()).await.unwrap().is_none()
    );
    assert_eq!(db.entries().await, 0);

    let mut tx = begin(&fence, 5).await;
    DB::nested(&mut tx, 1, Nested::Commit).await.unwrap();
    tx.commit().await.unwrap();
    assert_eq!(db.entries().await, 1);
}

async fn nested_rollback_leaves_the_outer_transaction_intact<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let fence = db.fence();
    let mut tx = begin(&fence, 5).await;
    insert(&mut tx, 1).await;
    DB::nested(&mut tx, 2, Nested::Drop).await.unwrap();
    insert(&mut tx, 4).await;
    // The transaction is committed right after the nested one was dropped.
    DB::nested(&mut tx, 8, Nested::Drop).await.unwrap();
    tx.commit().await.unwrap();
    assert_eq!(db.number(SUM).await, 5);
    is_stale(write(&fence, 5).await, 5, 5);
}

/// If a nested transaction cannot begin, sqlx rolls back the enclosing transaction. On SQLite, the
/// thread of the connection does so later.
#[tokio::test]
async fn statement_after_a_failed_nested_begin_is_not_committed() {
    let db = Postgres::fresh(2).await;
    let fence = db.fence();
    let mut tx = begin(&fence, 5).await;
    insert(&mut tx, 1).await;
    assert!(tx.begin_with("BEGIN").await.is_err());
    let inserted = AssertUnwindSafe(insert(&mut tx, 2)).catch_unwind().await;
    assert!(inserted.is_err(), "the statement was executed");
    drop(tx);
    assert_eq!(db.entries().await, 0);
    write(&fence, 4).await.unwrap();

    let mut tx = begin(&fence, 6).await;
    assert!(tx.begin_with("BEGIN").await.is_err());
    let committed = tx.commit().await;
    assert_matches!(committed, Err(CommitError::Unfinished));
    write(&fence, 5).await.unwrap();
}

async fn a_forgotten_nested_transaction_is_refused_and_leaks_nothing<DB: TestDatabase>() {
    let db = DB::fresh(1).await;
    let fence = db.fence();
    let mut tx = begin(&fence, 5).await;
    DB::nested(&mut tx, 1, Nested::Forget).await.unwrap();
    let outcome = tx.commit().await;
    assert_matches!(outcome, Err(CommitError::Unfinished));
    assert_eq!(db.entries().await, 0);
    write(&fence, 5).await.unwrap();
}

async fn admit_joins_the_callers_own_transaction<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let (fence, sku) = (db.fence(), sku());
    for (commits, max_token) in [(false, None), (true, Some(5))] {
        let mut tx = db.pool.begin().await.unwrap();
        let admitted = fence.admit(&mut tx, &sku, token(5), TokenUse::SingleUse);
        admitted.await.unwrap();
        let again = fence.admit(&mut tx, &sku, token(5), TokenUse::SingleUse);
        is_stale(again.await, 5, 5);
        match commits {
            true => tx.commit().await.unwrap(),
            false => tx.rollback().await.unwrap(),
        }
        assert_eq!(db.fence().inspect(&sku).await.unwrap(), max_token);
    }
}

/// The resource has no row before the first of these transactions.
#[tokio::test]
async fn admit_keeps_the_settings_of_the_callers_transaction() {
    const SETTINGS: &str = "SELECT string_agg(name || setting, ' ' ORDER BY name) FROM pg_settings \
         WHERE name LIKE '%timeout%' OR name IN ('client_connection_check_interval', 'synchronous_commit')";
    let db = Postgres::fresh(2).await;
    let (fence, sku) = (db.fence(), sku());
    for value in [5, 6] {
        let begin = "BEGIN; SET LOCAL lock_timeout = '7s'; SET LOCAL synchronous_commit = off";
        let mut tx = db.pool.begin_with(begin).await.unwrap();
        let settings = async |tx: &mut PgConnection| -> String {
            sqlx::query_scalar(SETTINGS).fetch_one(tx).await.unwrap()
        };
        let before = settings(&mut tx).await;
        let admitted = fence.admit(&mut tx, &sku, token(value), TokenUse::SingleUse);
        admitted.await.unwrap();
        assert_eq!(settings(&mut tx).await, before);
        tx.commit().await.unwrap();
    }
}

async fn a_future_dropped_at_any_moment_leaves_no_lock<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let fence = db.fence();
    for round in 1..=100 {
        let attempt = async {
            let mut tx = begin(&fence, round).await;
            insert(&mut tx, round).await;
            tx.commit().await
        };
        let _ = timeout(Duration::from_micros(rand::random_range(0..3_000)), attempt).await;
    }
    // Each connection works and is not in a transaction, because another connection sees its write.
    let (one, two) = tokio::join!(db.pool.acquire(), db.pool.acquire());
    let (mut one, mut two) = (one.unwrap(), two.unwrap());
    is_autocommitted::<DB>(&mut one, &mut two, 1_001).await;
    is_autocommitted::<DB>(&mut two, &mut one, 1_002).await;
}

/// sqlx does not count the response to a COPY that fails at its start, or whose end is not awaited.
/// COMMIT then receives the responses to two statements of the handler.
#[tokio::test]
async fn responses_to_the_handlers_statements_do_not_confirm_commit() {
    let db = Postgres::fresh(1).await;
    db.execute(
        "CREATE TABLE slow (n int); \
         CREATE FUNCTION delay() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(0.2); RETURN NULL; END'; \
         CREATE TRIGGER delay AFTER INSERT ON slow EXECUTE FUNCTION delay()",
    )
    .await;
    for fence in [db.fence(), db.reusing_fence()] {
        for copy_fails in [true, false] {
            let mut tx = begin(&fence, 5).await;
            if copy_fails {
                fail_to_copy(&mut tx).await;
            } else {
                let copy = tx.copy_in_raw("COPY slow FROM STDIN").await.unwrap();
                assert!(copy.finish().now_or_never().is_none());
            }
            // The second statement fails at COMMIT.
            let both = "INSERT INTO ledger VALUES (1); INSERT INTO child VALUES (99)";
            Postgres::run(&mut tx, both).await;
            assert_matches!(tx.commit().await, Err(CommitError::OutcomeUnknown(_)));
            assert_eq!(db.entries().await, 0);
        }
    }
}

/// Runs a COPY that fails at its start, in a nested transaction.
async fn fail_to_copy(conn: &mut PgConnection) {
    let mut nested = conn.begin().await.unwrap();
    assert!(nested.copy_out_raw("COPY missing TO STDOUT").await.is_err());
    nested.rollback().await.unwrap();
}

/// The error of the second COPY is the response that COMMIT receives.
#[tokio::test]
async fn error_of_an_earlier_statement_is_not_the_outcome_of_commit() {
    let db = Postgres::fresh(2).await;
    let mut tx = begin(&db.fence(), 5).await;
    insert(&mut tx, 5).await;
    fail_to_copy(&mut tx).await;
    fail_to_copy(&mut tx).await;
    assert_matches!(tx.commit().await, Err(CommitError::OutcomeUnknown(_)));
    assert_eq!(db.entries().await, 1);
}

#[tokio::test]
async fn transaction_with_an_unfinished_copy_is_aborted() {
    let db = Postgres::fresh(1).await;
    let fence = db.fence();
    let mut tx = begin(&fence, 5).await;
    drop(tx.copy_in_raw("COPY ledger FROM STDIN").await.unwrap());
    is_aborted(tx.commit().await);
    write(&fence, 5).await.unwrap();
}

#[tokio::test]
async fn rolled_back_copy_does_not_disturb_the_next_write() {
    let db = Postgres::fresh(1).await;
    for fence in [db.fence(), db.reusing_fence()] {
        let mut tx = begin(&fence, 5).await;
        fail_to_copy(&mut tx).await;
        drop(tx);
        drop(begin(&fence, 5).await);
    }
}

#[tokio::test]
async fn server_ends_the_transaction_of_a_frozen_holder() {
    let db = Postgres::fresh(3).await;
    let fence = db.fence_with(|fence| fence.hold_timeout(Duration::from_secs(1)));
    let mut tx = begin(&fence, 5).await;
    insert(&mut tx, 5).await;
    // The first holder is paused here. A newer holder is admitted before the `lock_timeout` of its
    // own admission expires.
    write(&db.fence(), 6).await.unwrap();
    is_aborted(tx.commit().await);
    assert_eq!(db.number(SUM).await, 6);
}
