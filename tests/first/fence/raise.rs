//! Raising the fence without a write, on both databases.

use super::admission::must_wait;
use crate::support::{
    database::{TestDatabase, on_both_databases},
    fence::{begin, sku, token},
};

on_both_databases!(raising_waits_for_a_write_in_flight,);

async fn raising_waits_for_a_write_in_flight<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let fence = db.fence();
    let tx = begin(&fence, 5).await;
    let raising = tokio::spawn({
        let fence = fence.clone();
        async move { fence.raise(&sku(), token(9)).await }
    });
    must_wait(&raising).await;
    tx.commit().await.unwrap();
    raising.await.unwrap().unwrap();
    assert_eq!(fence.inspect(&sku()).await.unwrap(), Some(8));
}
