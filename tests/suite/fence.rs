//! The fence without HTTP, over both databases.

use std::time::Duration;

use sqlx::{Postgres, postgres::PgPoolOptions};
use tokio::time::{sleep, timeout};
use tower_fence::{
    AdmitError, CommitError, Fence, FencedTx, Resource, Stale, Token, TokenUse,
    epochs::{Epoch, Epochs},
    fence::FenceDatabase,
};

use crate::support::{
    database::{Nested, TestDatabase, is_autocommitted, on_both_databases},
    eventually,
    redis::free_port,
};

on_both_databases!(
    a_newer_token_is_admitted_and_its_write_is_there,
    a_used_token_and_an_older_one_are_refused_with_both_numbers,
    a_reusable_token_writes_again_and_outranks_everyone_older,
    a_dropped_transaction_leaves_nothing_behind,
    resources_do_not_know_each_other,
    a_waiting_writer_is_judged_by_what_its_predecessor_committed,
    a_wait_for_the_lock_ends_with_busy,
    a_wait_for_a_connection_ends_with_busy,
    a_limit_without_end_is_a_limit_all_the_same,
    admissions_that_race_on_a_new_resource_commit_in_the_order_of_their_tokens,
    a_swallowed_error_is_never_a_false_success,
    a_transaction_that_was_ended_by_hand_is_never_a_false_success,
    a_transaction_that_was_replaced_by_hand_is_never_a_false_success,
    a_deferred_constraint_that_fails_at_commit_writes_nothing,
    a_nested_commit_is_part_of_the_outer_transaction,
    a_nested_rollback_leaves_the_outer_transaction_whole,
    a_forgotten_nested_transaction_is_refused_and_leaks_nothing,
    raising_kills_older_tokens_and_leaves_the_token_usable,
    raising_waits_for_a_write_in_flight,
    admit_joins_the_callers_own_transaction,
    epochs_go_up_whoever_asks,
    migrating_twice_changes_nothing,
    a_future_dropped_at_any_moment_leaves_no_lock,
);

fn token(value: i64) -> Token {
    Token::new(value).unwrap()
}

fn sku() -> Resource {
    Resource::new("sku-1").unwrap()
}

async fn begin<DB: FenceDatabase>(fence: &Fence<DB>, value: i64) -> FencedTx<DB> {
    fence
        .begin(&sku(), token(value), TokenUse::SingleUse)
        .await
        .unwrap()
}

/// Writes an entry under a single-use token.
async fn write<DB: TestDatabase>(fence: &Fence<DB>, value: i64) -> Result<(), AdmitError> {
    let mut tx = fence
        .begin(&sku(), token(value), TokenUse::SingleUse)
        .await?;
    insert(&mut tx, value).await;
    tx.commit().await.unwrap();
    Ok(())
}

async fn insert<DB: TestDatabase>(tx: &mut FencedTx<DB>, entry: i64) {
    DB::execute(tx, &format!("INSERT INTO ledger VALUES ({entry})"))
        .await
        .unwrap();
}

fn stale(presented: i64, max_token: i64) -> Stale {
    Stale {
        resource: sku(),
        presented: token(presented),
        max_token,
    }
}

#[track_caller]
fn is_stale<T>(outcome: Result<T, AdmitError>, presented: i64, max_token: i64) {
    match outcome {
        Err(AdmitError::Stale(refused)) => assert_eq!(refused, stale(presented, max_token)),
        Err(other) => panic!("{other:?}"),
        Ok(_) => panic!("token {presented} was admitted"),
    }
}

async fn a_newer_token_is_admitted_and_its_write_is_there<DB: TestDatabase>() {
    let db = DB::fresh(4).await;
    let fence = db.fence();
    assert_eq!(fence.inspect(&sku()).await.unwrap(), None);
    for value in [1, 2, 1_000, Token::MAX.get()] {
        write(&fence, value).await.unwrap();
        assert_eq!(fence.inspect(&sku()).await.unwrap(), Some(value));
    }
    assert_eq!(db.entries().await, 4);
}

async fn a_used_token_and_an_older_one_are_refused_with_both_numbers<DB: TestDatabase>() {
    let db = DB::fresh(4).await;
    let fence = db.fence();
    write(&fence, 7).await.unwrap();
    is_stale(write(&fence, 7).await, 7, 7);
    is_stale(write(&fence, 6).await, 6, 7);
    assert_eq!(db.entries().await, 1);
}

async fn a_reusable_token_writes_again_and_outranks_everyone_older<DB: TestDatabase>() {
    let db = DB::fresh(4).await;
    let fence = db.fence();
    for entry in 0..3 {
        let mut tx = fence
            .begin(&sku(), token(7), TokenUse::Reusable)
            .await
            .unwrap();
        insert(&mut tx, entry).await;
        tx.commit().await.unwrap();
        assert_eq!(fence.inspect(&sku()).await.unwrap(), Some(6));
    }
    is_stale(
        fence.begin(&sku(), token(6), TokenUse::Reusable).await,
        6,
        6,
    );
    write(&fence, 7).await.unwrap();
    is_stale(
        fence.begin(&sku(), token(7), TokenUse::Reusable).await,
        7,
        7,
    );
    assert_eq!(db.entries().await, 4);
}

async fn a_dropped_transaction_leaves_nothing_behind<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let fence = db.fence();
    let mut tx = begin(&fence, 7).await;
    insert(&mut tx, 7).await;
    drop(tx);
    // The row lock is gone, and an older token still counts: nothing was answered.
    write(&fence, 6).await.unwrap();
    assert_eq!(
        db.number("SELECT CAST(sum(entry) AS BIGINT) FROM ledger")
            .await,
        6
    );
}

async fn resources_do_not_know_each_other<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let fence = db.fence();
    write(&fence, 7).await.unwrap();
    for name in ["sku-2", "SKU-1", "sku-1 ", "é'\"$1;--"] {
        let other = Resource::new(name).unwrap();
        assert_eq!(fence.inspect(&other).await.unwrap(), None);
        let tx = fence
            .begin(&other, token(1), TokenUse::SingleUse)
            .await
            .unwrap();
        tx.commit().await.unwrap();
        assert_eq!(fence.inspect(&other).await.unwrap(), Some(1));
    }
}

async fn a_waiting_writer_is_judged_by_what_its_predecessor_committed<DB: TestDatabase>() {
    let db = DB::fresh(4).await;
    let fence = db.fence();

    let first = begin(&fence, 5).await;
    let waiting = tokio::spawn({
        let fence = fence.clone();
        async move { write(&fence, 4).await }
    });
    sleep(Duration::from_millis(100)).await;
    assert!(!waiting.is_finished(), "it must wait for the row lock");
    first.commit().await.unwrap();
    is_stale(waiting.await.unwrap(), 4, 5);

    let second = begin(&fence, 8).await;
    let waiting = tokio::spawn({
        let fence = fence.clone();
        async move { write(&fence, 7).await }
    });
    sleep(Duration::from_millis(100)).await;
    assert!(!waiting.is_finished(), "it must wait for the row lock");
    drop(second);
    waiting.await.unwrap().unwrap();
}

async fn a_wait_for_the_lock_ends_with_busy<DB: TestDatabase>() {
    let db = DB::fresh(4).await;
    let fence = db.fence().lock_wait(Duration::from_millis(100));
    let first = begin(&fence, 5).await;
    let refused = write(&fence, 6).await;
    assert!(matches!(refused, Err(AdmitError::Busy(_))), "{refused:?}");
    first.commit().await.unwrap();
    write(&fence, 6).await.unwrap();
}

async fn a_limit_without_end_is_a_limit_all_the_same<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let fence = db
        .fence()
        .lock_wait(Duration::MAX)
        .hold_limit(Duration::MAX);
    write(&fence, 5).await.unwrap();
    is_stale(write(&fence, 5).await, 5, 5);
}

async fn a_wait_for_a_connection_ends_with_busy<DB: TestDatabase>() {
    let db = DB::fresh(1).await;
    let fence = db.fence().pool_wait(Duration::from_millis(100));
    let first = begin(&fence, 5).await;
    let refused = write(&fence, 6).await;
    assert!(matches!(refused, Err(AdmitError::Busy(_))), "{refused:?}");
    first.commit().await.unwrap();
    eventually("the connection is back", async || {
        write(&fence, 6).await.is_ok()
    })
    .await;
}

/// Each writer notes how many entries there are, and its token. In the order of those counts, the
/// tokens must go up.
async fn admissions_that_race_on_a_new_resource_commit_in_the_order_of_their_tokens<
    DB: TestDatabase,
>() {
    let db = DB::fresh(8).await;
    db.execute("CREATE TABLE history (position BIGINT, token BIGINT)")
        .await;
    let guarded = {
        let db = &db;
        // A fence each, as in a process each: they meet in the database only.
        async move |value: i64| {
            let fence = db.fence().lock_wait(Duration::from_secs(20));
            let begun = fence.begin(&sku(), token(value), TokenUse::SingleUse).await;
            let Ok(mut tx) = begun else { return };
            note::<DB>(&mut tx, value).await;
            tx.commit().await.unwrap();
        }
    };
    assert!(race(&db, guarded).await, "tokens went back");
}

/// The same race loses where the check has a transaction of its own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_race_catches_a_check_outside_the_transaction() {
    let db = Postgres::fresh(8).await;
    db.execute("CREATE TABLE history (position BIGINT, token BIGINT)")
        .await;
    let mut caught = false;
    for _ in 0..20 {
        db.execute("DELETE FROM history; DELETE FROM fence_resources")
            .await;
        let broken = {
            let (db, pool) = (&db, &db.pool);
            async move |value: i64| {
                let fence = db.fence();
                let begun = fence.begin(&sku(), token(value), TokenUse::SingleUse).await;
                let Ok(tx) = begun else { return };
                tx.commit().await.unwrap();
                let mut tx = pool.begin().await.unwrap();
                note::<Postgres>(&mut tx, value).await;
                tx.commit().await.unwrap();
            }
        };
        if !race(&db, broken).await {
            caught = true;
            break;
        }
    }
    assert!(caught, "twenty races and no harm: the race proves nothing");
}

async fn note<DB: TestDatabase>(conn: &mut DB::Connection, value: i64) {
    let position = DB::number(conn, "SELECT count(*) FROM history")
        .await
        .unwrap();
    // Time for others to come in between, if they can.
    sleep(Duration::from_millis(2)).await;
    let note = format!("INSERT INTO history VALUES ({position}, {value})");
    DB::execute(conn, &note).await.unwrap();
}

/// Whether the history of 16 writers at once is in order: no position twice, and no token after a
/// higher one.
async fn race<DB: TestDatabase>(
    db: &crate::support::database::Fresh<DB>,
    writer: impl AsyncFn(i64),
) -> bool {
    futures_util::future::join_all((1..=16).map(|value| writer((value * 7) % 17))).await;
    let twice = "SELECT count(*) - count(DISTINCT position) FROM history";
    let back = "SELECT count(*) FROM history a JOIN history b \
                ON a.position < b.position AND a.token >= b.token";
    assert!(db.number("SELECT count(*) FROM history").await > 0);
    db.number(twice).await == 0 && db.number(back).await == 0
}

async fn a_swallowed_error_is_never_a_false_success<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let fence = db.fence();
    let mut tx = begin(&fence, 5).await;
    insert(&mut tx, 1).await;
    DB::execute(&mut tx, "INSERT INTO ledger VALUES (1)")
        .await
        .unwrap_err();
    let outcome = tx.commit().await;
    if DB::ABORTS_ON_ERROR {
        assert!(
            matches!(outcome, Err(CommitError::Aborted(_))),
            "{outcome:?}"
        );
        assert_eq!(db.entries().await, 0);
        write(&fence, 5).await.unwrap();
    } else {
        // SQLite undoes the statement alone; the rest is whole, and is there.
        outcome.unwrap();
        assert_eq!(db.entries().await, 1);
    }
}

async fn a_transaction_that_was_ended_by_hand_is_never_a_false_success<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let fence = db.fence();
    let mut tx = begin(&fence, 5).await;
    insert(&mut tx, 1).await;
    DB::execute(&mut tx, "ROLLBACK").await.unwrap();
    let outcome = tx.commit().await;
    assert!(
        matches!(outcome, Err(CommitError::Aborted(_))),
        "{outcome:?}"
    );
    assert_eq!(db.entries().await, 0);
    // The connection is whole again.
    write(&fence, 5).await.unwrap();
}

async fn a_transaction_that_was_replaced_by_hand_is_never_a_false_success<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    for (value, replacement) in [(5, "ROLLBACK; BEGIN"), (6, "COMMIT; BEGIN")] {
        let mut tx = begin(&db.fence(), value).await;
        DB::execute(&mut tx, replacement).await.unwrap();
        let outcome = tx.commit().await;
        assert!(
            matches!(outcome, Err(CommitError::Aborted(_))),
            "{outcome:?}"
        );
    }
}

async fn a_deferred_constraint_that_fails_at_commit_writes_nothing<DB: TestDatabase>() {
    let db = DB::fresh(1).await;
    let fence = db.fence();
    let mut tx = begin(&fence, 5).await;
    insert(&mut tx, 1).await;
    DB::execute(&mut tx, "INSERT INTO child VALUES (404)")
        .await
        .unwrap();
    let outcome = tx.commit().await;
    assert!(
        matches!(outcome, Err(CommitError::Aborted(_))),
        "{outcome:?}"
    );
    assert_eq!(db.entries().await, 0);
    write(&fence, 5).await.unwrap();
}

async fn a_nested_commit_is_part_of_the_outer_transaction<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let fence = db.fence();
    let mut tx = begin(&fence, 5).await;
    DB::nested(&mut tx, 1, Nested::Commit).await.unwrap();
    drop(tx);
    eventually("the outer rollback", async || {
        fence.inspect(&sku()).await.unwrap().is_none()
    })
    .await;
    assert_eq!(db.entries().await, 0);

    let mut tx = begin(&fence, 5).await;
    DB::nested(&mut tx, 1, Nested::Commit).await.unwrap();
    tx.commit().await.unwrap();
    assert_eq!(db.entries().await, 1);
}

async fn a_nested_rollback_leaves_the_outer_transaction_whole<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let fence = db.fence();
    let mut tx = begin(&fence, 5).await;
    insert(&mut tx, 1).await;
    DB::nested(&mut tx, 2, Nested::Drop).await.unwrap();
    insert(&mut tx, 4).await;
    tx.commit().await.unwrap();
    assert_eq!(
        db.number("SELECT CAST(sum(entry) AS BIGINT) FROM ledger")
            .await,
        5
    );
    is_stale(write(&fence, 5).await, 5, 5);
}

async fn a_forgotten_nested_transaction_is_refused_and_leaks_nothing<DB: TestDatabase>() {
    let db = DB::fresh(1).await;
    let fence = db.fence();
    let mut tx = begin(&fence, 5).await;
    DB::nested(&mut tx, 1, Nested::Forget).await.unwrap();
    let outcome = tx.commit().await;
    assert!(
        matches!(outcome, Err(CommitError::Unfinished)),
        "{outcome:?}"
    );
    assert_eq!(db.entries().await, 0);
    write(&fence, 5).await.unwrap();
}

async fn raising_kills_older_tokens_and_leaves_the_token_usable<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let fence = db.fence();
    fence.raise(&sku(), token(1)).await.unwrap();
    assert_eq!(fence.inspect(&sku()).await.unwrap(), Some(0));
    fence.raise(&sku(), token(7)).await.unwrap();
    fence.raise(&sku(), token(7)).await.unwrap();
    assert_eq!(fence.inspect(&sku()).await.unwrap(), Some(6));
    is_stale(write(&fence, 6).await, 6, 6);
    is_stale(fence.raise(&sku(), token(6)).await, 6, 6);
    write(&fence, 7).await.unwrap();
    is_stale(fence.raise(&sku(), token(7)).await, 7, 7);
    // A refused raise has moved nothing.
    assert_eq!(fence.inspect(&sku()).await.unwrap(), Some(7));
}

async fn raising_waits_for_a_write_in_flight<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let fence = db.fence();
    let tx = begin(&fence, 5).await;
    let raising = tokio::spawn({
        let fence = fence.clone();
        async move { fence.raise(&sku(), token(9)).await }
    });
    sleep(Duration::from_millis(100)).await;
    assert!(!raising.is_finished(), "it must wait for the write");
    tx.commit().await.unwrap();
    raising.await.unwrap().unwrap();
    assert_eq!(fence.inspect(&sku()).await.unwrap(), Some(8));
}

async fn admit_joins_the_callers_own_transaction<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let fence = db.fence();
    let mut tx = db.pool.begin().await.unwrap();
    fence
        .admit(&mut tx, &sku(), token(5), TokenUse::SingleUse)
        .await
        .unwrap();
    tx.rollback().await.unwrap();
    assert_eq!(fence.inspect(&sku()).await.unwrap(), None);

    let mut tx = db.pool.begin().await.unwrap();
    fence
        .admit(&mut tx, &sku(), token(5), TokenUse::SingleUse)
        .await
        .unwrap();
    let again = fence
        .admit(&mut tx, &sku(), token(5), TokenUse::SingleUse)
        .await;
    is_stale(again, 5, 5);
    tx.commit().await.unwrap();
    assert_eq!(fence.inspect(&sku()).await.unwrap(), Some(5));
}

async fn epochs_go_up_whoever_asks<DB: TestDatabase>() {
    let db = DB::fresh(4).await;
    let (one, two) = (db.fence(), db.fence());
    assert_eq!(one.next_epoch(7, Epoch::FIRST).await.unwrap(), Epoch::FIRST);
    assert_eq!(two.next_epoch(7, Epoch::FIRST).await.unwrap().get(), 2);
    let far = Epoch::new(40).unwrap();
    assert_eq!(one.next_epoch(7, far).await.unwrap(), far);
    assert_eq!(one.next_epoch(7, far).await.unwrap().get(), 41);
    assert_eq!(one.next_epoch(8, Epoch::FIRST).await.unwrap(), Epoch::FIRST);

    let asking = (0..20).map(|_| one.next_epoch(9, Epoch::FIRST));
    let mut epochs: Vec<i64> = futures_util::future::join_all(asking)
        .await
        .into_iter()
        .map(|epoch| epoch.unwrap().get())
        .collect();
    epochs.sort_unstable();
    assert_eq!(epochs, (1..=20).collect::<Vec<_>>());

    let last = Epoch::new(999_999).unwrap();
    one.next_epoch(1, last).await.unwrap();
    one.next_epoch(1, Epoch::FIRST).await.unwrap_err();
}

async fn migrating_twice_changes_nothing<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let fence = db.fence();
    write(&fence, 5).await.unwrap();
    fence.migrate().await.unwrap();
    assert_eq!(fence.inspect(&sku()).await.unwrap(), Some(5));
    let history = "SELECT count(*) FROM _tower_fence_migrations";
    assert_eq!(db.number(history).await, 3);
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
    // Every connection works, and outside any transaction: the next write is there for others.
    let (one, two) = tokio::join!(db.pool.acquire(), db.pool.acquire());
    let (mut one, mut two) = (one.unwrap(), two.unwrap());
    is_autocommitted::<DB>(&mut one, &mut two, 1_001).await;
    is_autocommitted::<DB>(&mut two, &mut one, 1_002).await;
}

#[tokio::test]
async fn the_server_takes_the_transaction_of_a_holder_that_is_frozen() {
    let db = Postgres::fresh(3).await;
    let fence = db.fence().hold_limit(Duration::from_millis(200));
    let mut tx = begin(&fence, 5).await;
    insert(&mut tx, 5).await;
    // This holder is frozen now. A newer one gets through before its `lock_wait` is over.
    write(&db.fence(), 6).await.unwrap();
    let outcome = tx.commit().await;
    assert!(
        matches!(outcome, Err(CommitError::Aborted(_))),
        "{outcome:?}"
    );
    assert_eq!(
        db.number("SELECT CAST(sum(entry) AS BIGINT) FROM ledger")
            .await,
        6
    );
}

#[tokio::test]
async fn a_database_that_is_not_there_is_unavailable() {
    let url = format!("postgres://nobody:sesame@127.0.0.1:{}/none", free_port());
    let pool = PgPoolOptions::new().connect_lazy(&url).unwrap();
    let fence = Fence::new(pool).pool_wait(Duration::from_millis(200));
    let refused = fence
        .begin(&sku(), token(1), TokenUse::SingleUse)
        .await
        .unwrap_err();
    assert!(matches!(refused, AdmitError::Unavailable(_)), "{refused:?}");
    assert!(
        !format!("{refused:?}").contains("sesame"),
        "no password in an error"
    );
}

#[tokio::test]
async fn missing_tables_are_unavailable_and_leak_nothing() {
    let db = Postgres::fresh(1).await;
    db.execute("DROP TABLE fence_resources").await;
    let refused = write(&db.fence(), 1).await;
    assert!(
        matches!(refused, Err(AdmitError::Unavailable(_))),
        "{refused:?}"
    );
    assert_eq!(db.entries().await, 0);
}

#[tokio::test]
async fn a_stricter_default_isolation_level_does_not_matter() {
    let db = Postgres::fresh(4).await;
    let name = db.url.rsplit('/').next().unwrap().to_owned();
    let setting = "SET default_transaction_isolation = 'serializable'";
    db.execute(&format!("ALTER DATABASE {name} {setting}"))
        .await;
    let pool = PgPoolOptions::new().connect(&db.url).await.unwrap();
    let fence = Fence::new(pool);
    let first = begin(&fence, 5).await;
    let waiting = tokio::spawn({
        let fence = fence.clone();
        async move { write(&fence, 6).await }
    });
    sleep(Duration::from_millis(50)).await;
    first.commit().await.unwrap();
    waiting.await.unwrap().unwrap();
}
