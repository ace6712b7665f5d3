//! A Postgres version that is too old. The tier `versions` runs this test on such a server.

use sqlx::postgres::PgPoolOptions;
use tower_fence::Fence;

use crate::support::variable;

#[tokio::test]
async fn migration_refuses_an_old_postgres() {
    let pool = PgPoolOptions::new().max_connections(1);
    let pool = pool.connect(&variable("TEST_DATABASE_URL")).await.unwrap();
    let error = Fence::new(pool).migrate().await.unwrap_err().to_string();
    assert_contains!(error, "tower-fence needs Postgres 14 or later, not 13.");
}
