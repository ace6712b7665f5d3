//! A client that disconnects from a service whose connections go through PgBouncer in transaction
//! mode.

use sqlx::{
    Postgres,
    postgres::{PgConnectOptions, PgPoolOptions},
};
use tower_fence::Fence;

use crate::support::{
    database::TestDatabase, disconnect::leaves_no_lock_and_no_session, pgbouncer::PgBouncer,
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disconnected_client_leaves_no_lock_behind_a_pooler() {
    let db = Postgres::fresh(3).await;
    let pooler = PgBouncer::start(&db.url).await;
    let options: PgConnectOptions = pooler.url().parse().unwrap();
    let options = options.statement_cache_capacity(0);
    for exhausted in [false, true] {
        let pool = PgPoolOptions::new().max_connections(4);
        let pool = pool.connect_with(options.clone()).await.unwrap();
        let settings = Fence::builder().transaction_pooling(true);
        leaves_no_lock_and_no_session(&db, settings, pool, exhausted).await;
    }
}
