//! Leases in Postgres: the state after a crash, and the contents of the server log.

use std::time::Duration;

use sqlx::{Acquire as _, PgConnection, PgPool, Postgres, postgres::PgPoolOptions};
use tower_fence::{
    Fence, Resource,
    lease::{Acquire, LeaseAdmin, LeaseId, Leases, PostgresLeases, Renew},
};

use super::postgres_crash::lazy_server;
use crate::support::{
    database::{TestDatabase, read},
    eventually,
    functions::{acquire, release, renew},
    lease::{LONG, grant, renew_for, sku},
    postgres::PostgresServer,
};

async fn store(server: &PostgresServer) -> PostgresLeases {
    let pool = PgPoolOptions::new().max_connections(4);
    let pool = pool.acquire_timeout(Duration::from_secs(2));
    let fence = Fence::new(pool.connect(&server.url("postgres")).await.unwrap());
    fence.migrate().await.unwrap();
    PostgresLeases::new(fence)
}

#[tokio::test]
async fn grant_survives_a_crash_of_postgres_without_synchronous_commit() {
    let longer = Renew::new(LONG * 10);
    for renewal in [None, Some(longer), Some(longer.with_new_token())] {
        let mut server = lazy_server().await;
        let leases = store(&server).await;
        let mut last = grant(&leases, &sku(), LONG).await;
        if let Some(renew) = renewal {
            last = leases.renew(&sku(), &last.id, renew).await.unwrap();
        }
        // This acquisition does not wait for the disk, because the application set
        // `synchronous_commit` to `off`.
        let pool = PgPool::connect(&server.url("postgres")).await.unwrap();
        let mut conn = pool.acquire().await.unwrap();
        acquire(&mut conn, "lost", "60 s").await.unwrap();
        server.crash().await;
        server.restart().await;
        let after = store(&server).await;
        let held = after.inspect(&sku()).await.unwrap().unwrap();
        assert_eq!(held.token, last.token);
        assert_eq!(held.ttl > LONG, renewal.is_some(), "{held:?} {renewal:?}");
        // If the crash loses nothing, it proves nothing.
        let lost = Resource::new("lost").unwrap();
        assert_eq!(after.inspect(&lost).await.unwrap(), None);
        after.break_lease(&sku(), None).await.unwrap();
        assert!(grant(&after, &sku(), LONG).await.token > last.token);
    }
}

/// Whether a part of the log is not on disk yet. At the end of a log page, the header of the next
/// page (24 or 40 bytes) counts as inserted although no record follows it. A transaction has more
/// bytes.
async fn is_unflushed(pool: &PgPool) -> bool {
    let bytes = "SELECT (pg_current_wal_insert_lsn() - pg_current_wal_flush_lsn())::bigint";
    read::<i64>(pool, bytes).await > 40
}

#[tokio::test]
async fn only_calls_that_return_tokens_wait_for_the_disk() {
    let server = PostgresServer::start(&["wal_writer_delay=10000", "autovacuum=off"]).await;
    let leases = store(&server).await;
    let pool = PgPool::connect(&server.url("postgres")).await.unwrap();
    let mut releases = 0;
    for _ in 0..20 {
        let lease = grant(&leases, &sku(), LONG).await;
        assert!(!is_unflushed(&pool).await, "a grant");
        let repeated = Acquire::new(LONG).lease_id(lease.id.clone());
        leases.acquire(&sku(), repeated).await.unwrap();
        assert!(!is_unflushed(&pool).await, "a repeated request");
        renew_for(&leases, &lease, LONG).await;
        assert!(!is_unflushed(&pool).await, "a renewal");
        let renew = Renew::new(LONG).with_new_token();
        leases.renew(&sku(), &lease.id, renew).await.unwrap();
        assert!(!is_unflushed(&pool).await, "a renewal with a new token");
        leases.release(&sku(), &lease.id).await.unwrap();
        releases += i64::from(is_unflushed(&pool).await);
    }
    // Sometimes the server flushes its log by itself.
    assert!(releases > 10, "{releases} of 20");
}

#[tokio::test]
async fn functions_do_not_change_the_callers_synchronous_commit() {
    let db = Postgres::fresh(1).await;
    let mut conn = db.pool.acquire().await.unwrap();
    for setting in ["on", "off"] {
        let mut tx = conn.begin().await.unwrap();
        let set = format!("SET LOCAL synchronous_commit = {setting}");
        Postgres::run(&mut tx, &set).await;
        let check = async |conn: &mut PgConnection| {
            let now: String = read(conn, "SHOW synchronous_commit").await;
            assert_eq!(now, setting);
        };
        let lease = acquire(&mut tx, "sku-1", "60 s").await.unwrap();
        check(&mut tx).await;
        for new_token in [true, false] {
            let renewed = renew(&mut tx, "sku-1", &lease.lease_id, "60 s", new_token);
            renewed.await.unwrap();
            check(&mut tx).await;
        }
        release(&mut tx, "sku-1", &lease.lease_id).await.unwrap();
        check(&mut tx).await;
        tx.commit().await.unwrap();
    }
}

#[tokio::test]
async fn server_log_contains_no_lease_id() {
    let all = ["log_statement=all", "log_min_duration_statement=0"];
    let settings = [&all[..], &["log_parameter_max_length=-1"]].concat();
    let server = PostgresServer::start(&settings).await;
    let leases = store(&server).await;
    let id = LeaseId::random();
    let request = Acquire::new(LONG).lease_id(id.clone());
    leases.acquire(&sku(), request.clone()).await.unwrap();
    let other = Acquire::new(LONG).wait(Duration::from_millis(200));
    let waits = other.clone().lease_id(LeaseId::random());
    leases.acquire(&sku(), waits.clone()).await.unwrap_err();
    let renewal = Renew::new(LONG).with_new_token();
    leases.renew(&sku(), &id, renewal).await.unwrap();
    leases.release(&sku(), &id).await.unwrap();
    let release = "tower_fence.lease_end";
    eventually!("it is in the log", server.log().contains(release));
    let log = server.log();
    assert_contains!(log, "tower_fence.lease_ask");
    assert_contains!(log, "tower_fence.lease_renew");
    for secret in [&id, waits.id()] {
        assert!(!log.contains(secret.expose()));
    }
}
