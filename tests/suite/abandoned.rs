//! Statements that nobody waits for any more are ended, although the pool has no connection left to
//! do that with.

use std::time::Duration;

use futures_util::future::join_all;
use sqlx::{
    Connection, Executor, PgConnection, PgPool, Postgres,
    postgres::{PgConnectOptions, PgPoolOptions},
};
use tokio::{
    task::JoinHandle,
    time::{Instant, sleep, timeout},
};
use tower_fence::{Fence, Resource, Token, TokenUse};

use crate::support::{
    database::{Fresh, TestDatabase},
    eventually,
};

const POOL: u32 = 8;

fn resource(n: u32) -> Resource {
    Resource::new(format!("r-{n}")).unwrap()
}

fn one() -> Token {
    Token::new(1).unwrap()
}

/// The pool of the application under test.
async fn pool_under_test(db: &Fresh<Postgres>) -> PgPool {
    let options: PgConnectOptions = db.url.parse().unwrap();
    PgPoolOptions::new()
        .max_connections(POOL)
        .connect_with(options.application_name("under-test"))
        .await
        .unwrap()
}

async fn sessions(db: &Fresh<Postgres>, condition: &str) -> i64 {
    db.number(&format!(
        "SELECT count(*) FROM pg_stat_activity \
         WHERE datname = current_database() AND application_name = 'under-test' AND {condition}"
    ))
    .await
}

const ASLEEP: &str = "wait_event = 'PgSleep'";

/// A request whose statement takes twelve seconds, in a transaction or as a statement of its own.
fn slow_request(fence: &Fence<Postgres>, n: u32, at_once: bool) -> JoinHandle<()> {
    let (fence, resource) = (fence.clone(), resource(n));
    tokio::spawn(async move {
        if at_once {
            let query = "INSERT INTO ledger SELECT 1 FROM fence, pg_sleep(12) RETURNING entry";
            let _ = fence
                .write::<(i64,)>(&resource, one(), TokenUse::Reusable, query)
                .await;
        } else {
            let tx = fence.begin(&resource, one(), TokenUse::Reusable);
            let mut tx = tx.await.unwrap();
            let _ = tx.execute("SELECT pg_sleep(12)").await;
        }
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn abandoned_statements_are_ended_though_all_connections_are_taken() {
    let db = Postgres::fresh(1).await;
    for at_once in [false, true] {
        let fence = Fence::new(pool_under_test(&db).await);
        // The first of each resource is not written at once.
        for n in 0..POOL {
            fence.raise(&resource(n), one()).await.unwrap();
        }
        let requests: Vec<_> = (0..POOL)
            .map(|n| slow_request(&fence, n, at_once))
            .collect();
        eventually("all connections are taken", async || {
            sessions(&db, ASLEEP).await == i64::from(POOL)
        })
        .await;
        let began = Instant::now();
        for request in &requests {
            request.abort();
        }
        join_all(requests).await;
        let mut most = 0;
        let ended = async {
            while sessions(&db, ASLEEP).await > 0 {
                most = most.max(sessions(&db, "true").await);
                sleep(Duration::from_millis(5)).await;
            }
        };
        let ended = timeout(Duration::from_secs(20), ended).await;
        ended.expect("the statements were not ended");
        let took = began.elapsed();
        assert!(
            took < Duration::from_secs(4),
            "it took {took:?}, at once: {at_once}"
        );
        assert!(most <= i64::from(POOL) + 1, "{most} sessions to end {POOL}");
        // And the pool is whole.
        for n in 0..2 * POOL {
            fence.raise(&resource(n), one()).await.unwrap();
        }
        fence.pool().close().await;
        eventually("the connection that ended them is closed", async || {
            sessions(&db, "true").await == 0
        })
        .await;
    }
}

/// Numbers of server processes come again. Here the fence is given somebody else's.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_is_ended_who_has_the_number_of_a_session_that_is_gone() {
    let db = Postgres::fresh(1).await;
    db.execute(
        "CREATE SCHEMA fake; CREATE TABLE fake.process (id INTEGER); \
         CREATE FUNCTION fake.pg_backend_pid() RETURNS INTEGER LANGUAGE plpgsql VOLATILE AS $$ \
         DECLARE found INTEGER; BEGIN \
             LOOP SELECT id INTO found FROM fake.process; EXIT WHEN found IS NOT NULL; \
                 PERFORM pg_catalog.pg_sleep(0.01); END LOOP; \
             RETURN found; END $$",
    )
    .await;
    for is_newer in [false, true] {
        let options: PgConnectOptions = db.url.parse().unwrap();
        let path = [("search_path", "fake, pg_catalog, public")];
        let pool = PgPoolOptions::new()
            .max_connections(1)
            .connect_with(options.options(path))
            .await
            .unwrap();
        let patience = Duration::from_secs(2);
        let fence = Fence::new(pool).lock_wait(patience).answer_wait(patience);
        db.execute("DELETE FROM fake.process").await;
        let mut victim = None;
        if !is_newer {
            victim = Some(PgConnection::connect(&db.url).await.unwrap());
        }
        let request = slow_request(&fence, 0, false);
        eventually("it asks for its number", async || {
            let asks = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() \
                        AND query LIKE 'UPDATE%fence_resources%' AND state = 'active'";
            db.number(asks).await > 0 || db.number(&asks.replace("UPDATE", "INSERT")).await > 0
        })
        .await;
        let mut victim = match victim {
            Some(older) => older,
            None => PgConnection::connect(&db.url).await.unwrap(),
        };
        let id = Postgres::number(&mut victim, "SELECT CAST(pg_backend_pid() AS bigint)");
        let id = id.await.unwrap();
        db.execute(&format!("INSERT INTO fake.process VALUES ({id})"))
            .await;
        eventually("it sleeps", async || {
            let asleep = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() \
                          AND query LIKE 'SELECT pg_sleep(12)%' AND state = 'active'";
            db.number(asleep).await > 0
        })
        .await;
        request.abort();
        eventually("it is given up", async || fence.pool().size() == 0).await;
        let lives = victim.ping().await.is_ok();
        assert_eq!(
            lives, is_newer,
            "the session of that number is newer: {is_newer}"
        );
        let end = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity \
                   WHERE datname = current_database() AND query LIKE 'SELECT pg_sleep(12)%'";
        db.number(end).await;
    }
}
