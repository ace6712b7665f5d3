//! Which tokens are admitted, and how long an admission waits, on both databases.

use std::time::Duration;

use tokio::{task::JoinHandle, time::sleep};
use tower_fence::{
    AdmitError, TokenUse,
    announce::{Announce, LeaseDigest},
};

use crate::support::{
    database::{TestDatabase, on_both_databases},
    eventually,
    fence::{begin, is_stale, resource, sku, spawn_write, token, use_up, write},
};

on_both_databases!(
    refusals_of_used_and_older_tokens_name_both_numbers,
    superseded_token_is_not_reported_as_used,
    resources_are_independent,
    waiting_writer_is_checked_against_its_predecessors_commit,
    a_wait_for_the_lock_ends_with_busy,
    a_wait_for_a_connection_ends_with_busy,
    maximum_durations_are_accepted_as_limits,
    raising_waits_for_a_write_in_flight,
);

async fn refusals_of_used_and_older_tokens_name_both_numbers<DB: TestDatabase>() {
    let db = DB::fresh(4).await;
    let fence = db.fence();
    write(&fence, 7).await.unwrap();
    is_stale(write(&fence, 7).await, 7, 7);
    is_stale(write(&fence, 6).await, 6, 7);
    assert_eq!(db.entries().await, 1);
}

async fn superseded_token_is_not_reported_as_used<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    // For each of two fences, the first refusal comes from the database, and the second one from
    // the cache.
    let is_used = async |presented: i64, token_use| {
        let fence = db.fence();
        let refused = async || match fence.begin(&sku(), token(presented), token_use).await {
            Err(AdmitError::Stale(stale)) => stale.used,
            other => panic!("{other:?}"),
        };
        let first = refused().await;
        assert_eq!(refused().await, first);
        first
    };
    let (fence, sku) = (db.fence(), sku());
    let grant = async |granted: i64| {
        let lease = LeaseDigest::of("lease-id-of-a-grant");
        let announced = fence.announce(&sku, token(granted), &lease, false);
        announced.await.unwrap();
    };
    // The holder of token 5 never wrote before the next lease was granted.
    grant(5).await;
    grant(6).await;
    assert!(!is_used(5, TokenUse::SingleUse).await);
    write(&fence, 6).await.unwrap();
    assert!(is_used(6, TokenUse::SingleUse).await);
    assert!(!is_used(5, TokenUse::SingleUse).await);
    // A reusable token is never refused as used.
    assert!(!is_used(6, TokenUse::Reusable).await);
    grant(7).await;
    assert!(!is_used(6, TokenUse::SingleUse).await);
    // A foreign write under the next token has the same effect on `max_token` as a write under the
    // announced one.
    let tx = fence.begin(&sku, token(8), TokenUse::Reusable).await;
    tx.unwrap().commit().await.unwrap();
    assert!(!is_used(7, TokenUse::SingleUse).await);
}

async fn resources_are_independent<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let fence = db.fence();
    write(&fence, 7).await.unwrap();
    for name in ["sku-2", "SKU-1", "sku-1 ", "é'\"$1;--"] {
        let other = resource(name);
        assert_eq!(fence.inspect(&other).await.unwrap(), None);
        use_up(&fence, &other, token(1)).await.unwrap();
        assert_eq!(fence.inspect(&other).await.unwrap(), Some(1));
    }
}

/// Checks that a request waits for the row lock.
pub async fn must_wait<T>(request: &JoinHandle<T>) {
    sleep(Duration::from_millis(100)).await;
    assert!(!request.is_finished(), "the request does not wait");
}

async fn waiting_writer_is_checked_against_its_predecessors_commit<DB: TestDatabase>() {
    let db = DB::fresh(4).await;
    let fence = db.fence();

    let first = begin(&fence, 5).await;
    let waiting = spawn_write(&fence, 4);
    must_wait(&waiting).await;
    first.commit().await.unwrap();
    is_stale(waiting.await.unwrap(), 4, 5);

    let second = begin(&fence, 8).await;
    let waiting = spawn_write(&fence, 7);
    must_wait(&waiting).await;
    drop(second);
    waiting.await.unwrap().unwrap();
}

async fn a_wait_for_the_lock_ends_with_busy<DB: TestDatabase>() {
    let db = DB::fresh(4).await;
    let fence = db.fence_with(|fence| fence.lock_timeout(Duration::from_millis(100)));
    let first = begin(&fence, 5).await;
    let refused = write(&fence, 6).await;
    assert_matches!(refused, Err(AdmitError::Busy(_)));
    first.commit().await.unwrap();
    write(&fence, 6).await.unwrap();
}

async fn maximum_durations_are_accepted_as_limits<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let longest = Duration::MAX;
    let fence = db.fence_with(|fence| fence.lock_timeout(longest).hold_timeout(longest));
    write(&fence, 5).await.unwrap();
    is_stale(write(&fence, 5).await, 5, 5);
}

async fn a_wait_for_a_connection_ends_with_busy<DB: TestDatabase>() {
    let db = DB::fresh(1).await;
    let fence = db.fence_with(|fence| fence.pool_timeout(Duration::from_millis(100)));
    let first = begin(&fence, 5).await;
    let refused = write(&fence, 6).await;
    assert_matches!(refused, Err(AdmitError::Busy(_)));
    first.commit().await.unwrap();
    eventually!("the connection is back", write(&fence, 6).await.is_ok());
}

async fn raising_waits_for_a_write_in_flight<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let fence = db.fence();
    let tx = begin(&fence, 5).await;
    let raising = tokio::spawn(async move { fence.raise(&sku(), token(9)).await });
    must_wait(&raising).await;
    tx.commit().await.unwrap();
    raising.await.unwrap().unwrap();
    assert_eq!(db.fence().inspect(&sku()).await.unwrap(), Some(8));
}
