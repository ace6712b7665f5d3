//! A fence that detects a failover with the only connection of its pool.

use sqlx::{Postgres, postgres::PgPoolOptions};
use tower_fence::{
    Fence,
    epochs::{Epoch, Epochs},
};

use crate::support::{
    database::TestDatabase,
    fence::{is_stale, sku, write},
};

#[tokio::test]
async fn catch_up_works_with_a_single_connection() {
    let db = Postgres::fresh(2).await;
    let partition = crc32fast::hash(sku().as_str().as_bytes()).to_le_bytes()[0];
    let fence = db.fence();
    fence.next_epoch(partition, Epoch::FIRST).await.unwrap();
    write(&fence, 1_000_000_005).await.unwrap();
    // Sets the timeline of all rows, as if the server had been on another timeline until now.
    db.execute("UPDATE tower_fence.resources SET history = 'X'; UPDATE tower_fence.floors SET history = 'X'")
        .await;
    let pool = PgPoolOptions::new().max_connections(1);
    let fence = Fence::new(pool.connect(&db.url).await.unwrap());
    let refused = write(&fence, 1_000_000_006).await;
    is_stale(refused, 1_000_000_006, 1_001_999_999_999);
}
