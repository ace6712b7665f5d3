//! Properties of a fence that follow from SQLite's file: its durability, its locks, and concurrent
//! migrations.

use sqlx::{
    Sqlite,
    sqlite::{SqliteConnectOptions, SqlitePoolOptions, SqliteSynchronous},
};
use tower_fence::Fence;

use crate::support::database::TestDatabase;

#[tokio::test]
async fn commits_of_an_own_pool_survive_a_power_loss() {
    let db = Sqlite::fresh(1).await;
    let synchronous = async |fence: Fence<Sqlite>| -> i64 {
        let read = sqlx::query_scalar("PRAGMA synchronous").fetch_one(fence.pool());
        read.await.unwrap()
    };
    // EXTRA
    assert_eq!(synchronous(Fence::connect(&db.url).await.unwrap()).await, 3);
    let chosen: SqliteConnectOptions = db.url.parse().unwrap();
    let chosen = chosen.synchronous(SqliteSynchronous::Normal);
    let fence = Fence::builder().connect_with(SqlitePoolOptions::new(), chosen);
    assert_eq!(synchronous(fence.await.unwrap()).await, 1);
}
