//! Pool hooks that remove the session state of one request before the next request sees it.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering::SeqCst},
};

use futures_util::future::join_all;
use sqlx::{
    Executor, PgConnection, PgPool, Postgres, Sqlite, postgres::PgPoolOptions, query_scalar,
    sqlite::SqlitePoolOptions,
};
use tower_fence::{Fence, Resource, TokenUse};

use crate::support::{
    PATIENCE,
    database::{Fresh, TestDatabase},
    eventually,
    fence::token,
};

const POOL: u32 = 4;

tokio::task_local! {
    /// The tenant whose request this task serves.
    static TENANT: &'static str;
}

fn resource(n: i64) -> Resource {
    Resource::new(format!("r-{n}")).unwrap()
}

/// Returns a pool whose hooks run `sql` before and after each use.
async fn pool_with_reset(db: &Fresh<Postgres>, sql: &'static str) -> PgPool {
    let options = PgPoolOptions::new()
        .max_connections(POOL)
        .acquire_timeout(PATIENCE)
        .before_acquire(move |conn, _| {
            Box::pin(async move { conn.execute(sql).await.map(|_| true) })
        })
        .after_release(move |conn, _| {
            Box::pin(async move { conn.execute(sql).await.map(|_| true) })
        });
    options.connect(&db.url).await.unwrap()
}

async fn tenant(conn: &mut PgConnection) -> String {
    query_scalar("SELECT coalesce(current_setting('app.tenant', true), '')")
        .fetch_one(conn)
        .await
        .unwrap()
}

/// Counts the requests that ran with the setting of another tenant.
async fn leaks(fence: &Fence<Postgres>) -> usize {
    let requests = (0..300).map(|n| async move {
        let resource = resource(n);
        let tx = fence.begin(&resource, token(1), TokenUse::Reusable);
        let mut tx = tx.await.unwrap();
        let leaked = !tenant(&mut tx).await.is_empty();
        // Sets the tenant for the session, like a careless handler.
        let set = "SET app.tenant = 'somebody'";
        tx.execute(set).await.unwrap();
        tx.commit().await.unwrap();
        leaked
    });
    let leaked = join_all(requests).await;
    leaked.into_iter().filter(|leaked| *leaked).count()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_settings_are_reset_before_the_next_request() {
    let db = Postgres::fresh(1).await;
    let pool = pool_with_reset(&db, "RESET app.tenant").await;
    assert_eq!(
        leaks(&Fence::builder().pool_timeout(PATIENCE).build(pool)).await,
        0
    );
    // If the hooks are bypassed, the same requests see the setting of another tenant.
    let pool = pool_with_reset(&db, "RESET app.tenant").await;
    let reusing = Fence::builder()
        .pool_timeout(PATIENCE)
        .reuse_connections(true)
        .build(pool);
    assert!(
        leaks(&reusing).await > 0,
        "the requests leak nothing, so the test proves nothing"
    );
}

/// Returns a pool whose hook takes the tenant from the requesting task. All its connections are
/// open, because this hook does not run for a new one.
async fn pool_with_tenants(db: &Fresh<Postgres>) -> PgPool {
    let options = PgPoolOptions::new()
        .max_connections(POOL)
        .before_acquire(|conn, _| {
            Box::pin(async move {
                let tenant = TENANT.try_with(|tenant| *tenant).unwrap_or("nobody");
                sqlx::query("SELECT set_config('app.tenant', $1, false)")
                    .bind(tenant)
                    .execute(conn)
                    .await
                    .map(|_| true)
            })
        });
    let pool = options.connect(&db.url).await.unwrap();
    drop(join_all((0..POOL).map(|_| pool.acquire())).await);
    eventually!("all connections are open", pool.num_idle() == POOL as usize);
    pool
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hook_runs_in_the_task_of_the_request() {
    let db = Postgres::fresh(1).await;
    db.execute("CREATE TABLE seen (tenant TEXT)").await;
    let fence = Fence::new(pool_with_tenants(&db).await);
    assert_eq!(mistaken(&fence).await, 0);
    // If the hooks are bypassed, the same requests run as another tenant.
    let fence = Fence::builder()
        .reuse_connections(true)
        .build(pool_with_tenants(&db).await);
    assert!(
        mistaken(&fence).await > 0,
        "the requests leak nothing, so the test proves nothing"
    );
}

/// Counts the requests of two tenants that ran as the other tenant.
async fn mistaken(fence: &Fence<Postgres>) -> usize {
    let requests = (0..100).map(|n| {
        let fence = fence.clone();
        let expected = ["a", "b"][usize::from(n % 2 == 0)];
        tokio::spawn(TENANT.scope(expected, async move {
            let resource = resource(n);
            let tx = fence.begin(&resource, token(1), TokenUse::Reusable);
            let mut tx = tx.await.unwrap();
            let in_transaction = tenant(&mut tx).await;
            tx.commit().await.unwrap();
            let query = "INSERT INTO seen SELECT coalesce(current_setting('app.tenant', true), '') \
                 FROM fence RETURNING tenant";
            let written = fence.write::<(String,)>(&resource, token(1), TokenUse::Reusable, query);
            let [(in_statement,)] = written.await.unwrap().try_into().unwrap();
            let seen = [in_transaction, in_statement];
            seen.into_iter().filter(|seen| seen != expected).count()
        }))
    });
    let mistaken = join_all(requests).await;
    mistaken.into_iter().map(Result::unwrap).sum()
}

/// On SQLite, a connection returns to the pool after each write, so reuse would only add a queue.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hooks_run_for_each_write_on_sqlite() {
    let db = Sqlite::fresh(1).await;
    let acquired = Arc::<AtomicUsize>::default();
    let count = acquired.clone();
    let options = SqlitePoolOptions::new().max_connections(1);
    let options = options.before_acquire(move |_, _| {
        count.fetch_add(1, SeqCst);
        Box::pin(async { Ok(true) })
    });
    let pool = options.connect(&db.url).await.unwrap();
    let fence = Fence::builder().reuse_connections(true).build(pool.clone());
    for n in 1..4 {
        eventually!("the connection is in the pool", pool.num_idle() == 1);
        let (resource, before) = (resource(n), acquired.load(SeqCst));
        let tx = fence.begin(&resource, token(1), TokenUse::SingleUse);
        tx.await.unwrap().commit().await.unwrap();
        assert_eq!(acquired.load(SeqCst) - before, 1);
    }
}
