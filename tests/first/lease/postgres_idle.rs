//! The removal of idle rows and of idle leases.

use std::time::Duration;

use sqlx::Postgres;
use tower_fence::lease::{Leases, PostgresLeases, live_tokens};

use crate::support::{
    database::{Fresh, TestDatabase},
    fence::{resource, write},
    functions::{admit, is_refused},
    lease::{LONG, grant, grant_and_release, granted, sku, wait},
};

async fn rows(db: &Fresh<Postgres>) -> (i64, i64) {
    let resources = db.count("tower_fence.resources").await;
    (resources, db.count("tower_fence.leases").await)
}

#[tokio::test]
async fn idle_lease_is_removed_and_its_token_stays_stale() {
    let db = Postgres::fresh(4).await;
    let (fence, leases) = (db.fence(), PostgresLeases::new(db.fence()));
    let held = grant(&leases, &sku(), LONG).await;
    // The lease is held.
    assert_eq!(fence.remove_idle(Duration::ZERO, 10).await.unwrap(), 0);
    assert_eq!(rows(&db).await, (1, 1));
    let waiting = wait(&leases, LONG).await;
    leases.release(&sku(), &held.id).await.unwrap();
    let last = granted(waiting).await;
    leases.release(&sku(), &last.id).await.unwrap();
    // The row was used recently.
    assert_eq!(fence.remove_idle(LONG, 10).await.unwrap(), 0);
    // Another transaction has locked the lease, which is removed only together with the row.
    let mut other = db.pool.begin().await.unwrap();
    Postgres::run(&mut other, "SELECT FROM tower_fence.leases FOR UPDATE").await;
    assert_eq!(fence.remove_idle(Duration::ZERO, 10).await.unwrap(), 0);
    other.rollback().await.unwrap();
    assert_eq!(rows(&db).await, (1, 1));
    assert_eq!(fence.remove_idle(Duration::ZERO, 10).await.unwrap(), 1);
    assert_eq!(rows(&db).await, (0, 0));
    // The last token was announced, and never used for a write.
    let mut conn = db.pool.acquire().await.unwrap();
    is_refused(admit(&mut conn, "sku-1", last.token.get()).await, "TF412");
    let next = grant(&leases, &sku(), LONG).await;
    assert!(next.token > last.token);
    write(&fence, next.token.get()).await.unwrap();
}

/// A later write has a higher token than the lease that is removed with the row.
#[tokio::test]
async fn floor_exceeds_the_row_and_its_lease() {
    let db = Postgres::fresh(4).await;
    let (fence, leases) = (db.fence(), PostgresLeases::new(db.fence()));
    let held = grant_and_release(&leases).await;
    let above = held.token.get() + 10;
    write(&fence, above).await.unwrap();
    assert_eq!(fence.remove_idle(Duration::ZERO, 10).await.unwrap(), 1);
    let mut conn = db.pool.acquire().await.unwrap();
    is_refused(admit(&mut conn, "sku-1", above).await, "TF412");
    admit(&mut conn, "sku-1", above + 1).await.unwrap();
}

#[tokio::test]
async fn long_held_lease_survives_removal_of_its_neighbours() {
    let db = Postgres::fresh(4).await;
    let (fence, leases) = (db.fence(), PostgresLeases::new(db.fence()));
    let held = grant(&leases, &sku(), LONG).await;
    // The test creates rows of the same partition with higher tokens.
    let names = "SELECT 'n-' || n FROM generate_series(1, 2000) AS n \
         WHERE tower_fence.partition_of('n-' || n) = tower_fence.partition_of('sku-1')";
    let names = sqlx::query_scalar::<_, String>(names).fetch_all(&db.pool);
    let names = names.await.unwrap();
    for name in &names {
        let name = resource(name);
        for _ in 0..3 {
            let lease = grant(&leases, &name, LONG).await;
            leases.release(&name, &lease.id).await.unwrap();
        }
    }
    let live = live_tokens(&leases).await.unwrap();
    let spared = fence.remove_idle_below(Duration::ZERO, 100, &live).await;
    assert_eq!(spared.unwrap(), 0, "the rows are above the held lease");
    let removed = fence.remove_idle(Duration::ZERO, 100).await.unwrap();
    assert_eq!(removed, names.len() as u64);
    // The row of the lease still exists, so the floor does not apply to it.
    write(&fence, held.token.get()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lease_is_granted_above_a_moving_floor() {
    const ABOVE_ALL_EPOCHS: i64 = 5_000_000_000_000;
    let db = Postgres::fresh(4).await;
    let mut removal = db.pool.begin().await.unwrap();
    let raise =
        format!("UPDATE tower_fence.floors SET floor = {ABOVE_ALL_EPOCHS} WHERE partition = 110");
    Postgres::run(&mut removal, &raise).await;
    let pool = db.pool.clone();
    let acquire = "SELECT token FROM tower_fence.acquire('sku-1', '1 min')";
    let waits =
        tokio::spawn(async move { sqlx::query_scalar::<_, i64>(acquire).fetch_one(&pool).await });
    db.waits_for_lock().await;
    removal.commit().await.unwrap();
    assert_eq!(waits.await.unwrap().unwrap(), ABOVE_ALL_EPOCHS + 1);
}

/// The rows that must stay are the first candidates, and the removal is limited to one row.
#[tokio::test]
async fn rows_that_must_stay_block_no_other_removal() {
    let db = Postgres::fresh(2).await;
    let mut listener = db.pool.acquire().await.unwrap();
    Postgres::run(&mut listener, "SELECT tower_fence.lease_listen(7)").await;
    for (stays, max_token, announced, hours, lease) in [
        ("used a moment ago", 5, 5, 0, ""),
        ("seen more than was granted", 1_001, 5, 2, ""),
        ("announced more than was granted", 5, 1_001, 2, ""),
        (
            "leased more than was granted",
            5,
            5,
            2,
            "(1001, now() - interval '2 hours')",
        ),
        ("held", 5, 5, 2, "(5, now() + interval '2 hours')"),
        ("held a moment ago", 5, 5, 2, "(5, now())"),
        ("waited for", 5, 5, 2, "line"),
    ] {
        let leases = match lease {
            "" => String::new(),
            "line" => "INSERT INTO tower_fence.waiters (resource, ticket, lease, listener) \
                SELECT n, n, ''::bytea, 7 FROM generate_series(1, 5) AS n;"
                .into(),
            held => format!(
                "INSERT INTO tower_fence.leases (resource, token, lease, granted_at, expires_at, lock_delay, ttl) \
                 SELECT n, token, ''::bytea, now(), expires_at, interval '0', interval '3 hours' \
                 FROM generate_series(1, 5) AS n, (VALUES {held}) AS l (token, expires_at);"
            ),
        };
        db.execute(&format!(
            "TRUNCATE tower_fence.resources, tower_fence.leases, tower_fence.waiters; \
             INSERT INTO tower_fence.resources (resource, max_token, announced, updated_at, partition, history) \
             SELECT n, {max_token}, {announced}, now() - {hours} * interval '1 hour', 110, \
                 tower_fence.current_history() \
             FROM generate_series(1, 5) AS n; {leases} \
             INSERT INTO tower_fence.resources (resource, max_token, updated_at, partition, history) \
             VALUES ('idle', 1000, now() - interval '2 hours', 110, tower_fence.current_history())"
        ))
        .await;
        let remove =
            "SELECT tower_fence.remove_idle_of(110::smallint, '1 hour', 1, 1000, NULL)::bigint";
        assert_eq!(db.number(remove).await, 1, "{stays}");
        assert_eq!(db.number(remove).await, 0, "{stays}");
        assert_eq!(rows(&db).await.0, 5, "{stays}");
    }
}

/// A removal reads the rows before it waits for the lock on the partition's floor, and reads them
/// again afterwards.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_used_while_a_removal_waits_stay() {
    let db = Postgres::fresh(4).await;
    let wait_for_long = "ALTER FUNCTION tower_fence.remove_idle_of(smallint, interval, integer, bigint, bigint) \
        SET lock_timeout = '60 s'";
    db.execute(wait_for_long).await;
    for used in [
        "UPDATE tower_fence.resources SET updated_at = now()",
        "UPDATE tower_fence.resources SET max_token = 1001",
        "UPDATE tower_fence.resources SET announced = 1001",
        "UPDATE tower_fence.leases SET token = 1001",
        "UPDATE tower_fence.leases SET expires_at = now()",
    ] {
        db.execute(
            "TRUNCATE tower_fence.resources, tower_fence.leases; \
             INSERT INTO tower_fence.resources (resource, max_token, updated_at, partition, history) \
             VALUES ('idle', 1000, now() - interval '2 hours', 110, tower_fence.current_history()); \
             INSERT INTO tower_fence.leases (resource, token, granted_at, expires_at, lock_delay, ttl) \
             VALUES ('idle', 1000, now(), now() - interval '2 hours', '0', '1 hour')",
        )
        .await;
        let mut writer = db.pool.begin().await.unwrap();
        let lock = "SELECT FROM tower_fence.floors WHERE partition = 110 FOR SHARE";
        Postgres::run(&mut writer, lock).await;
        let pool = db.pool.clone();
        let removal = tokio::spawn(async move {
            let remove =
                "SELECT tower_fence.remove_idle_of(110::smallint, '1 hour', 1, 1000, NULL)";
            sqlx::query_scalar::<_, i32>(remove).fetch_one(&pool).await
        });
        db.waits_for_lock().await;
        Postgres::run(&mut writer, used).await;
        writer.commit().await.unwrap();
        assert_eq!(removal.await.unwrap().unwrap(), 0, "{used}");
        assert_eq!(rows(&db).await, (1, 1), "{used}");
    }
}
