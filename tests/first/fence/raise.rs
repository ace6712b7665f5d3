//! Raising the fence without a write, on both databases.

use std::time::Duration;

use tokio::time::sleep;

use crate::support::{
    database::{TestDatabase, on_both_databases},
    fence::{begin, is_stale, sku, token, write},
};

on_both_databases!(
    raise_refuses_older_tokens_and_keeps_the_token_usable,
    raising_waits_for_a_write_in_flight,
);

async fn raise_refuses_older_tokens_and_keeps_the_token_usable<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let fence = db.fence();
    assert_eq!(fence.inspect(&sku()).await.unwrap(), None);
    fence.raise(&sku(), token(1)).await.unwrap();
    assert_eq!(fence.inspect(&sku()).await.unwrap(), Some(0));
    fence.raise(&sku(), token(7)).await.unwrap();
    fence.raise(&sku(), token(7)).await.unwrap();
    assert_eq!(fence.inspect(&sku()).await.unwrap(), Some(6));
    is_stale(write(&fence, 6).await, 6, 6);
    is_stale(fence.raise(&sku(), token(6)).await, 6, 6);
    write(&fence, 7).await.unwrap();
    is_stale(fence.raise(&sku(), token(7)).await, 7, 7);
    // A refused raise has changed nothing.
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
    assert!(
        !raising.is_finished(),
        "the raise must wait for the pending write"
    );
    tx.commit().await.unwrap();
    raising.await.unwrap().unwrap();
    assert_eq!(fence.inspect(&sku()).await.unwrap(), Some(8));
}
