//! A Postgres version that is too old. The tier `versions` runs this test on such a server.

use tower_fence::Fence;

use crate::support::{database::pool_of, variable};

#[tokio::test]
async fn migration_refuses_an_old_postgres() {
    let pool = pool_of(&variable("TEST_DATABASE_URL"), 1).await;
    let error = Fence::new(pool).migrate().await.unwrap_err().to_string();
    assert_contains!(error, "tower-fence needs Postgres 14 or later, not 13.");
}
