//! A connection that the application has left in a transaction. sqlx returns such a connection to
//! the pool if a `begin` was dropped after it was sent, as in the handler of a client that
//! disconnected. An autocommit statement would not commit there.

use std::mem;

use futures_util::StreamExt;
use sqlx::{AssertSqlSafe, Connection, PgConnection, Postgres, Sqlite, postgres::PgPoolOptions};
use tower_fence::{
    AdmitError, CommitError, Fence, TokenUse,
    fence::WriteError,
    lease::{Leases, PostgresLeases, Renew},
};

use crate::support::{
    database::{Fresh, TestDatabase, read},
    eventually,
    fence::{begin, resource, token, use_up, write_at_once},
    lease::{LONG, grant},
};

/// Statements that open transactions without the knowledge of sqlx.
const LEFT: [&str; 5] = [
    "BEGIN",
    "BEGIN; SET LOCAL application_name = 'left'",
    "BEGIN; INSERT INTO ledger VALUES (1)",
    "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM ledger",
    "BEGIN; SELECT 1 / 0",
];

/// Counts the writes with token 9.
const NINTH: &str = "SELECT count(*) FROM ledger WHERE entry = 9";

/// Leaves the only connection of the pool in the state that `sql` creates.
async fn leave(db: &Fresh<Postgres>, sql: &'static str) {
    let mut conn = db.pool.acquire().await.unwrap();
    let _ = sqlx::raw_sql(sql).execute(&mut *conn).await;
}

/// Reads a number on another connection.
async fn seen(db: &Fresh<Postgres>, sql: &str) -> i64 {
    let mut other = PgConnection::connect(&db.url).await.unwrap();
    let number = sqlx::query_scalar(AssertSqlSafe(sql)).fetch_one(&mut other);
    number.await.unwrap()
}

async fn commits_what_it_answers(fence: fn(&Fresh<Postgres>) -> Fence<Postgres>) {
    for left in LEFT {
        let db = Postgres::fresh(1).await;
        let fence = fence(&db);
        let leases = PostgresLeases::new(fence.clone());
        let [written, leased] = ["written", "leased"].map(resource);
        let write = async |value| write_at_once(&fence, &written, value).await;
        // From the second token on, each write is a single statement.
        for token in 7..9 {
            write(token).await;
        }
        leave(&db, left).await;
        write(9).await;
        assert_eq!(seen(&db, NINTH).await, 1, "{left}");

        leave(&db, left).await;
        let lease = grant(&leases, &leased, LONG).await;
        let leased_token = "SELECT token FROM tower_fence.leases WHERE resource = 'leased'";
        let seen_token = seen(&db, leased_token).await;
        assert_eq!(seen_token, lease.token.get(), "{left}");

        leave(&db, left).await;
        let renew = Renew::new(LONG).with_new_token();
        let renewed = leases.renew(&leased, &lease.id, renew).await.unwrap();
        assert!(renewed.token > lease.token);
        let seen_token = seen(&db, leased_token).await;
        assert_eq!(seen_token, renewed.token.get(), "{left}");

        leave(&db, left).await;
        fence.raise(&written, token(20)).await.unwrap();
        let max = "SELECT max_token FROM tower_fence.resources WHERE resource = 'written'";
        assert_eq!(seen(&db, max).await, 19, "{left}");
        let abandoned = "SELECT count(*) FROM ledger WHERE entry = 1";
        assert_eq!(seen(&db, abandoned).await, 0, "{left}");
    }
}

/// The connection that replaces a broken one may have been left in a transaction, too.
#[tokio::test]
async fn success_is_committed_on_the_next_connection_too() {
    let pid = "SELECT pg_backend_pid()::bigint";
    for ended_first in [true, false] {
        let db = Postgres::fresh(1).await;
        let options = PgPoolOptions::new().max_connections(2);
        let pool = options.test_before_acquire(false).connect(&db.url);
        let pool = pool.await.unwrap();
        let fence = Fence::new(pool.clone());
        let resource = resource("written");
        let write = async |value| write_at_once(&fence, &resource, value).await;
        for token in 7..9 {
            write(token).await;
        }
        let mut conns = [pool.acquire().await.unwrap(), pool.acquire().await.unwrap()];
        let (ended, left) = if ended_first { (0, 1) } else { (1, 0) };
        let pid = Postgres::number(&mut conns[ended], pid).await.unwrap();
        Postgres::run(&mut conns[left], "BEGIN").await;
        for (n, conn) in (1..).zip(conns) {
            drop(conn);
            eventually!("the connection is back in the pool", pool.num_idle() == n);
        }
        let end = format!("SELECT count(pg_terminate_backend({pid}))");
        assert_eq!(seen(&db, &end).await, 1);
        write(9).await;
        assert_eq!(seen(&db, NINTH).await, 1, "ended first: {ended_first}");
    }
}

#[tokio::test]
async fn success_is_committed_despite_an_open_transaction() {
    commits_what_it_answers(Fresh::fence).await;
}

#[tokio::test]
async fn success_is_committed_on_reused_connections() {
    commits_what_it_answers(Fresh::reusing_fence).await;
}

/// A fenced transaction inside the other one would have its `now()` and its settings.
#[tokio::test]
async fn transaction_begins_outside_of_a_transaction_that_was_left_open() {
    let clock = "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint";
    let state = "SELECT (extract(epoch FROM now()) * 1000000)::bigint, \
         current_setting('application_name'), (SELECT count(*) FROM ledger)";
    for fence in [Fresh::fence, Fresh::reusing_fence] {
        for left in LEFT {
            let db = Postgres::fresh(1).await;
            let fence = fence(&db);
            leave(&db, left).await;
            let began = seen(&db, clock).await;
            let mut tx = begin(&fence, 7).await;
            let found: (i64, String, i64) =
                sqlx::query_as(state).fetch_one(&mut *tx).await.unwrap();
            assert!(found.0 >= began, "{left}");
            assert_eq!((found.1.as_str(), found.2), ("", 0), "{left}");
            tx.commit().await.unwrap();
        }
    }
}

#[tokio::test]
async fn transaction_begins_after_one_that_was_left_open_on_sqlite() {
    let db = Sqlite::fresh(1).await;
    db.execute("BEGIN; INSERT INTO ledger VALUES (1)").await;
    let mut tx = begin(&db.fence(), 7).await;
    let left = Sqlite::number(&mut tx, "SELECT count(*) FROM ledger").await;
    assert_eq!(left.unwrap(), 0);
    tx.commit().await.unwrap();
}

/// sqlx does not count the responses to a COPY that is dropped, so each later statement on the
/// connection receives the response to the statement before it.
#[tokio::test]
async fn responses_to_earlier_statements_are_not_taken_for_an_outcome() {
    for fence in [Fresh::fence, Fresh::reusing_fence] {
        let db = Postgres::fresh(1).await;
        let fence = fence(&db);
        let resource = resource("written");
        let write = async |value| {
            let sql = "INSERT INTO ledger SELECT $1 FROM fence RETURNING entry";
            let query = sqlx::query(sql).bind(value);
            let written = fence.write(&resource, token(value), TokenUse::Reusable, query);
            let written: Result<Vec<(i64,)>, _> = written.await;
            written
        };
        for value in 7..9 {
            write(value).await.unwrap();
        }
        let cut_off_copy = async || {
            let mut conn = db.pool.acquire().await.unwrap();
            let sql = "COPY (SELECT repeat('x', 1000) FROM generate_series(1, 10)) TO STDOUT";
            let mut rows = conn.copy_out_raw(sql).await.unwrap();
            rows.next().await.unwrap().unwrap();
        };
        cut_off_copy().await;
        let written = write(9).await;
        let count = seen(&db, NINTH).await;
        match written {
            Ok(rows) => assert_eq!((rows.len(), count), (1, 1)),
            Err(error) => {
                assert_matches!(error, WriteError::Commit(CommitError::OutcomeUnknown(_)));
            }
        }
        write(10).await.unwrap();

        cut_off_copy().await;
        use_up(&fence, &resource, token(11)).await.unwrap();
    }
}

/// The test of the connection returns a row, which must not become the result of the single
/// statement. After `RESET ALL` in the hook, the test changes the session again.
#[tokio::test]
async fn response_to_the_test_of_a_connection_is_not_taken_for_a_row() {
    let db = Postgres::fresh(1).await;
    let options = PgPoolOptions::new().max_connections(1);
    let options = options.after_release(|conn, _| {
        Box::pin(async {
            sqlx::raw_sql("RESET ALL").execute(conn).await?;
            Ok(true)
        })
    });
    let pool = options.connect(&db.url).await.unwrap();
    let [fence, other] = [pool.clone(), db.pool.clone()].map(Fence::new);
    let resource = resource("written");
    let write = async |fence: &Fence<Postgres>, value: i64| {
        let sql = "INSERT INTO ledger SELECT $1 FROM fence RETURNING entry::text";
        let query = sqlx::query(sql).bind(value);
        let written = fence.write(&resource, token(value), TokenUse::SingleUse, query);
        let written: Result<Vec<(String,)>, _> = written.await;
        written
    };
    for value in 7..9 {
        write(&fence, value).await.unwrap();
    }
    write(&other, 20).await.unwrap();
    let mut conn = pool.acquire().await.unwrap();
    assert!(conn.copy_out_raw("COPY missing TO STDOUT").await.is_err());
    drop(conn);
    let written = write(&fence, 10).await;
    assert_matches!(written, Err(WriteError::Admit(AdmitError::Stale(_))));
    write(&fence, 21).await.unwrap();
}

#[tokio::test]
async fn forgotten_transaction_is_left_before_a_single_statement() {
    let db = Postgres::fresh(1).await;
    let fence = db.fence();
    let resource = resource("written");
    for token in 7..9 {
        let mut conn = db.pool.acquire().await.unwrap();
        mem::forget(conn.begin().await.unwrap());
        drop(conn);
        write_at_once(&fence, &resource, token).await;
        let tx = db.pool.begin().await.unwrap();
        tx.commit().await.unwrap();
    }
    assert_eq!(seen(&db, "SELECT count(*) FROM ledger").await, 2);
}

/// Otherwise the statement of a client that disconnects would keep its locks.
#[tokio::test]
async fn disconnect_is_detected_after_an_open_transaction_has_ended() {
    let interval = "SELECT current_setting('client_connection_check_interval')";
    for left in LEFT {
        let db = Postgres::fresh(1).await;
        let fence = db.fence();
        let resource = resource("written");
        for token in 7..10 {
            db.execute("SET client_connection_check_interval = 0").await;
            leave(&db, left).await;
            write_at_once(&fence, &resource, token).await;
            db.execute("DELETE FROM ledger").await;
        }
        let interval: String = read(&db.pool, interval).await;
        assert_eq!(interval, "1s", "{left}");
    }
}
