//! Leases in Postgres: which calls wait for each other, and the effect of the caller's transaction
//! on a grant.

use std::time::Duration;

use futures_util::future::join_all;
use sqlx::{Acquire as _, AssertSqlSafe, PgConnection, Postgres};
use tokio::time::{sleep, timeout};
use tower_fence::{
    Fence, Token,
    announce::{Announce, LeaseDigest},
    lease::{Acquire, LeaseError, LeaseId, Leases, Owner, PostgresLeases, Renew},
};

use crate::support::{
    PATIENCE,
    database::{Fresh, TestDatabase, WAITING_FOR_LOCK, read},
    eventually,
    fence::{begin, refuses, token, write},
    functions::{self, Acquired, acquire, acquire_as, admit, is_refused, release, renew},
    lease::{LONG, grant, grant_and_release, is_held, is_lost, renew_for, sku, spawn_acquire},
};

const ID: &str = "an-id-that-the-client-chose";

/// Acquires `sku-1` under [`ID`].
async fn acquire_own(conn: &mut PgConnection, ttl: &str) -> Acquired {
    acquire_as(conn, "sku-1", ttl, Some(ID)).await.unwrap()
}

#[tokio::test]
async fn grant_supersedes_a_foreign_token_that_is_writing() {
    let db = Postgres::fresh(4).await;
    let (fence, leases) = (db.fence(), PostgresLeases::new(db.fence()));
    let first = grant_and_release(&leases).await;
    let elsewhere = first.token.get() + 10;
    let in_flight = begin(&fence, elsewhere).await;
    let next = spawn_acquire(&leases, &sku(), Acquire::new(LONG));
    db.waits_for_lock().await;
    in_flight.commit().await.unwrap();
    let next = next.await.unwrap().unwrap();
    assert_eq!(next.token.get(), elsewhere + 1);
    leases.release(&sku(), &next.id).await.unwrap();
    // A grant also supersedes a holder that has not written yet, without waiting for its first
    // write.
    let last = grant(&leases, &sku(), LONG).await;
    refuses(&fence, next.token.get(), last.token.get() - 1).await;
}

#[tokio::test]
async fn a_token_counts_only_after_commit() {
    let db = Postgres::fresh(2).await;
    let mut conn = db.pool.acquire().await.unwrap();
    let mut tx = conn.begin().await.unwrap();
    let rolled_back = acquire(&mut tx, "sku-1", "60 s").await.unwrap();
    tx.rollback().await.unwrap();
    let committed = acquire(&mut conn, "sku-1", "60 s").await.unwrap();
    // As documented, the grant that was rolled back and the next one have the same token.
    assert_eq!(rolled_back.token, committed.token);
    let renewed = renew(&mut conn, "sku-1", &rolled_back.lease_id, "1 s", false).await;
    is_refused(renewed, "TF410");
}

#[tokio::test]
async fn above_read_committed_no_lease_is_changed() {
    let db = Postgres::fresh(2).await;
    let mut conn = db.pool.acquire().await.unwrap();
    let held = acquire(&mut conn, "sku-2", "60 s").await.unwrap().lease_id;
    for level in ["REPEATABLE READ", "SERIALIZABLE"] {
        // The snapshot may not contain the waiter that the call must notify.
        for call in [
            format!("renew('sku-2', '{held}', '60 s')"),
            format!("release('sku-2', '{held}')"),
            "break_lease('sku-2')".to_owned(),
        ] {
            let sql = format!("BEGIN ISOLATION LEVEL {level}; SELECT tower_fence.{call}");
            is_refused(functions::execute(&mut conn, &sql).await, "25000");
            Postgres::run(&mut conn, "ROLLBACK").await;
        }
        Postgres::run(&mut conn, &format!("BEGIN ISOLATION LEVEL {level}")).await;
        let refused = is_refused(acquire(&mut conn, "sku-1", "60 s").await, "25000");
        assert!(refused.message.contains("READ COMMITTED"), "{refused:?}");
        Postgres::run(&mut conn, "ROLLBACK").await;
    }
    // Postgres implements this level as READ COMMITTED.
    Postgres::run(&mut conn, "BEGIN ISOLATION LEVEL READ UNCOMMITTED").await;
    acquire(&mut conn, "sku-3", "60 s").await.unwrap();
    Postgres::run(&mut conn, "ROLLBACK").await;
    drop(conn);
    // The store sets the isolation level that it needs, whatever the default of the sessions is.
    let name: String = read(&db.pool, "SELECT current_database()::text").await;
    let strict = format!("ALTER DATABASE {name} SET default_transaction_isolation = serializable");
    db.execute(&strict).await;
    let strict = sqlx::PgPool::connect(&db.url).await.unwrap();
    let leases = PostgresLeases::new(Fence::new(strict));
    grant_and_release(&leases).await;
}

/// The renewal has locked the row of the lease, and its transaction needs the row of the fence
/// next. A grant locks them in the opposite order.
#[tokio::test]
async fn transaction_that_renews_and_then_admits_never_deadlocks() {
    let db = Postgres::fresh(4).await;
    let mut holder = db.pool.acquire().await.unwrap();
    let first = acquire_own(&mut holder, "2 s").await;
    let mut tx = holder.begin().await.unwrap();
    renew(&mut tx, "sku-1", ID, "60 s", false).await.unwrap();
    // For other clients the lease expires, because the renewal is not committed.
    sleep(Duration::from_millis(2_100)).await;
    let leases = PostgresLeases::new(db.fence());
    let resource = sku();
    let others = (0..4).map(|_| leases.acquire(&resource, Acquire::new(LONG)));
    let others = timeout(PATIENCE, join_all(others)).await;
    for other in others.expect("the requests wait for the transaction") {
        is_held(other);
    }
    admit(&mut tx, "sku-1", first.token).await.unwrap();
    tx.commit().await.unwrap();
    let mut conn = db.pool.acquire().await.unwrap();
    is_refused(acquire(&mut conn, "sku-1", "1 s").await, "TF409");
}

/// The previous request under the lease id is being undone while the client repeats it.
#[tokio::test]
async fn request_whose_own_lease_is_being_released_is_granted_afterwards() {
    let db = Postgres::fresh(4).await;
    let mut holder = db.pool.acquire().await.unwrap();
    let first = acquire_own(&mut holder, "60 s").await;
    write(&db.fence(), first.token).await.unwrap();
    let mut tx = holder.begin().await.unwrap();
    release(&mut tx, "sku-1", ID).await.unwrap();
    let leases = PostgresLeases::new(db.fence());
    let request = Acquire::new(LONG).lease_id(LeaseId::new(ID).unwrap());
    let again = spawn_acquire(&leases, &sku(), request);
    sleep(Duration::from_millis(100)).await;
    // The SQL function does not wait.
    let mut conn = db.pool.acquire().await.unwrap();
    let other = acquire_as(&mut conn, "sku-1", "1 s", Some(ID)).await;
    is_refused(other, "55P03");
    tx.commit().await.unwrap();
    assert!(again.await.unwrap().unwrap().token.get() > first.token);
}

/// The request has waited for the row of the lease, which stays locked. A grant would lock the row
/// of the fence next, and other transactions lock the rows in the opposite order.
#[tokio::test]
async fn request_that_waited_for_its_own_lease_is_not_granted() {
    let db = Postgres::fresh(4).await;
    let mut conn = db.pool.acquire().await.unwrap();
    acquire_own(&mut conn, "60 s").await;
    let mut releasing = db.pool.begin().await.unwrap();
    release(&mut releasing, "sku-1", ID).await.unwrap();
    let repeated = tokio::spawn(async move {
        let again = acquire_as(&mut conn, "sku-1", "60 s", Some(ID)).await;
        again.map(|lease| lease.token)
    });
    db.waits_for_lock().await;
    releasing.commit().await.unwrap();
    is_refused(repeated.await.unwrap(), "55P03");
    let mut conn = db.pool.acquire().await.unwrap();
    acquire_own(&mut conn, "60 s").await;
}

#[tokio::test]
async fn token_renewal_does_not_wait_for_renew_and_admit() {
    let db = Postgres::fresh(4).await;
    let mut holder = db.pool.acquire().await.unwrap();
    let first = acquire_own(&mut holder, "60 s").await;
    let mut tx = holder.begin().await.unwrap();
    renew(&mut tx, "sku-1", ID, "60 s", false).await.unwrap();
    // The other renewal has locked the row of the fence, which the transaction needs next.
    let mut conn = db.pool.acquire().await.unwrap();
    let other = renew(&mut conn, "sku-1", ID, "60 s", true);
    let other = timeout(Duration::from_secs(30), other).await;
    is_refused(other.expect("the renewal waits"), "55P03");
    admit(&mut tx, "sku-1", first.token).await.unwrap();
    tx.commit().await.unwrap();
}

/// The other transaction has locked the row of the resource, and then calls the next request.
#[tokio::test]
async fn request_that_skips_ended_waiters_never_deadlocks() {
    let db = Postgres::fresh(4).await;
    let leases = PostgresLeases::new(db.fence());
    grant_and_release(&leases).await;
    let ended = "INSERT INTO tower_fence.waiters (resource, ticket, place, lease, listener) \
         VALUES ('sku-1', 1, 1, 'a', 8)";
    db.execute(ended).await;
    let mut other = db.pool.begin().await.unwrap();
    // This transaction detects a deadlock first, and is then rolled back.
    Postgres::run(&mut other, "SET LOCAL deadlock_timeout = '10ms'").await;
    let lock = "SELECT FROM tower_fence.resources FOR NO KEY UPDATE";
    Postgres::run(&mut other, lock).await;
    let asking = spawn_acquire(&leases, &sku(), Acquire::new(LONG));
    // At first, the request waits only for a moment.
    sleep(Duration::from_millis(200)).await;
    db.waits_for_lock().await;
    Postgres::run(&mut other, "SELECT tower_fence.lease_call('sku-1')").await;
    other.commit().await.unwrap();
    let granted = timeout(Duration::from_secs(20), asking).await;
    granted.expect("the request still waits").unwrap().unwrap();
}

/// Renews a lease in a loop on the server, and fails if the lease is lost.
fn renewing(new_token: bool) -> String {
    format!(
        "DO $do$ DECLARE held bytea; said text; until timestamptz := clock_timestamp() + interval '2 s'; \
         BEGIN \
             SELECT lease INTO held FROM tower_fence.leases; \
             WHILE clock_timestamp() < until LOOP \
                 SELECT r.outcome INTO said FROM tower_fence.lease_renew('sku-1', held, 60000, {new_token}, NULL) AS r; \
                 COMMIT; \
                 IF said = 'lost' THEN RAISE 'a renewal has lost the lease'; END IF; \
             END LOOP; \
         END $do$"
    )
}

#[tokio::test]
async fn overlapping_renewals_of_one_holder_keep_the_lease() {
    let db = Postgres::fresh(4).await;
    let leases = PostgresLeases::new(db.fence());
    let lease = grant(&leases, &sku(), LONG).await;
    let renewals = [true, false, false].map(|new_token| {
        let pool = db.pool.clone();
        let renewing = AssertSqlSafe(renewing(new_token));
        async move { sqlx::raw_sql(renewing).execute(&pool).await }
    });
    for renewed in join_all(renewals).await {
        renewed.unwrap();
    }
    leases.release(&sku(), &lease.id).await.unwrap();
}

#[tokio::test]
async fn token_renewal_is_lost_if_reads_are_not_covered() {
    let db = Postgres::fresh(2).await;
    let (fence, leases) = (db.fence(), PostgresLeases::new(db.fence()));
    let lease = grant(&leases, &sku(), LONG).await;
    // Since the grant, a write has used a token from another issuer.
    write(&fence, lease.token.get() + 10).await.unwrap();
    let renew = Renew::new(LONG).with_new_token();
    is_lost(leases.renew(&sku(), &lease.id, renew).await);
    assert_eq!(leases.inspect(&sku()).await.unwrap(), None);
    // The next grant supersedes that token.
    let owner = Owner::new("worker-7").unwrap();
    let named = Acquire::new(LONG).owner(owner.clone());
    let next = leases.acquire(&sku(), named).await.unwrap();
    let age = "UPDATE tower_fence.leases SET granted_at = granted_at - interval '1 hour'";
    db.execute(age).await;
    let granted_at = leases.inspect(&sku()).await.unwrap().unwrap().granted_at;
    assert!(next.token.get() > lease.token.get() + 10);
    write(&fence, next.token.get()).await.unwrap();
    // The holder's own write does not prevent its renewal.
    let renewed = leases.renew(&sku(), &next.id, renew).await.unwrap();
    write(&fence, renewed.token.get()).await.unwrap();
    // A repeated request whose token was used up gets a new, valid token, for the same lease.
    let again = Acquire::new(LONG).lease_id(next.id.clone());
    let again = leases.acquire(&sku(), again).await.unwrap();
    assert!(again.token > renewed.token);
    let held = leases.inspect(&sku()).await.unwrap().unwrap();
    assert_eq!((held.owner, held.granted_at), (Some(owner), granted_at));
    write(&fence, again.token.get()).await.unwrap();
    // The row was lost, and another issuer has announced its lease with the same token.
    db.execute("DELETE FROM tower_fence.resources").await;
    let other = LeaseDigest::of("another lease");
    let announced = fence.announce(&sku(), again.token, &other, false).await;
    announced.unwrap();
    is_lost(leases.renew(&sku(), &again.id, renew).await);
}

#[tokio::test]
async fn renewal_is_checked_against_the_awaited_transaction() {
    // A write with another issuer's higher token commits, so the data that the holder has read may
    // be out of date.
    let db = Postgres::fresh(4).await;
    let (fence, leases) = (db.fence(), PostgresLeases::new(db.fence()));
    let lease = grant(&leases, &sku(), LONG).await;
    let elsewhere = lease.token.get() + 10;
    let in_flight = begin(&fence, elsewhere).await;
    let renew_new = Renew::new(LONG).with_new_token();
    let renewal = tokio::spawn({
        let leases = leases.clone();
        async move { leases.renew(&sku(), &lease.id, renew_new).await }
    });
    db.waits_for_lock().await;
    in_flight.commit().await.unwrap();
    is_lost(renewal.await.unwrap());
    assert_eq!(leases.inspect(&sku()).await.unwrap(), None);
    assert_eq!(fence.inspect(&sku()).await.unwrap(), Some(elsewhere));

    // This call grants the lease to the successor.
    let mut conn = db.pool.acquire().await.unwrap();
    acquire_own(&mut conn, "60 s").await;
    let mut tx = db.pool.begin().await.unwrap();
    release(&mut tx, "sku-1", ID).await.unwrap();
    let next = acquire(&mut tx, "sku-1", "60 s").await.unwrap();
    let renewal = tokio::spawn(async move { renew(&mut conn, "sku-1", ID, "60 s", false).await });
    db.waits_for_lock().await;
    tx.commit().await.unwrap();
    is_refused(renewal.await.unwrap(), "TF410");
    let held = leases.inspect(&sku()).await.unwrap().unwrap();
    assert_eq!(held.token.get(), next.token);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lease_that_expires_while_its_renewal_waits_is_lost() {
    let db = Postgres::fresh(4).await;
    let leases = PostgresLeases::new(db.fence());
    let lease = grant(&leases, &sku(), LONG).await;
    let mut writer = db.pool.begin().await.unwrap();
    Postgres::run(&mut writer, "SELECT FROM tower_fence.resources FOR UPDATE").await;
    let renewal = tokio::spawn({
        let leases = leases.clone();
        let renew_new = Renew::new(LONG).with_new_token();
        async move { leases.renew(&sku(), &lease.id, renew_new).await }
    });
    db.waits_for_lock().await;
    db.execute("UPDATE tower_fence.leases SET expires_at = clock_timestamp()")
        .await;
    writer.rollback().await.unwrap();
    is_lost(renewal.await.unwrap());
    assert_eq!(leases.inspect(&sku()).await.unwrap(), None);
}

#[tokio::test]
async fn exhausted_token_range_is_repaired_by_a_reset() {
    let db = Postgres::fresh(2).await;
    let (fence, leases) = (db.fence(), PostgresLeases::new(db.fence()));
    let lease = grant_and_release(&leases).await;
    fence.raise(&sku(), Token::MAX).await.unwrap();
    // This is the highest possible token.
    let last = grant(&leases, &sku(), LONG).await;
    assert_eq!(last.token, Token::MAX);
    leases.release(&sku(), &last.id).await.unwrap();
    let refused = leases.acquire(&sku(), Acquire::new(LONG)).await;
    assert_matches!(
        refused,
        Err(LeaseError::Exhausted { max_token, .. }) if max_token == Token::MAX.get()
    );
    let begun = token(lease.token.get() / 1_000_000_000 * 1_000_000_000 + 100);
    fence.reset(&sku(), begun).await.unwrap();
    let next = grant(&leases, &sku(), LONG).await;
    write(&fence, next.token.get()).await.unwrap();
}

/// Without a new epoch, two issuers could grant the same token.
#[tokio::test]
async fn last_epoch_of_another_issuer_is_not_shared() {
    let db = Postgres::fresh(2).await;
    let last = "INSERT INTO tower_fence.epochs SELECT generate_series(0, 255), 999999";
    db.execute(last).await;
    let leases = PostgresLeases::new(db.fence());
    let refused = leases.acquire(&sku(), Acquire::new(LONG)).await;
    assert_matches!(
        refused,
        Err(LeaseError::Exhausted { max_token, .. }) if max_token == Token::MAX.get()
    );
    let mut conn = db.pool.acquire().await.unwrap();
    is_refused(acquire(&mut conn, "sku-1", "60 s").await, "TF411");
}

#[tokio::test]
async fn first_grant_in_postgres_exceeds_all_granted_epochs() {
    let db = Postgres::fresh(2).await;
    // The tokens of these grants belong to an assigned epoch, but were not announced.
    let assigned = "INSERT INTO tower_fence.epochs SELECT generate_series(0, 255), 7";
    db.execute(assigned).await;
    let leases = PostgresLeases::new(db.fence());
    let next = async || grant_and_release(&leases).await.token.get();
    assert_eq!(next().await, 8_000_000_001);
    // The second grant needs no new epoch.
    assert_eq!(next().await, 8_000_000_002);
    db.execute("UPDATE tower_fence.epochs SET epoch = 20").await;
    assert_eq!(next().await, 21_000_000_001);
}

/// Returns the number of requests that are granted the lease after waiting for the same write.
async fn winners(db: &Fresh<Postgres>) -> usize {
    let mut writer = db.pool.begin().await.unwrap();
    let lock = "SELECT FROM tower_fence.resources WHERE resource = 'sku-1' FOR UPDATE";
    Postgres::run(&mut writer, lock).await;
    let crowd: Vec<_> = (0..8)
        .map(|_| {
            let pool = db.pool.clone();
            tokio::spawn(async move {
                let acquire = "SELECT token FROM tower_fence.acquire('sku-1', '60 s')";
                let granted = sqlx::query_scalar::<_, i64>(acquire).fetch_one(&pool);
                granted.await.ok()
            })
        })
        .collect();
    let waiting = async || db.number(WAITING_FOR_LOCK).await == 8;
    eventually("all requests wait", waiting).await;
    writer.commit().await.unwrap();
    let granted = join_all(crowd).await.into_iter();
    granted.filter_map(Result::unwrap).count()
}

#[tokio::test]
async fn one_of_many_waiters_for_a_write_is_granted() {
    let db = Postgres::fresh(11).await;
    let mut conn = db.pool.acquire().await.unwrap();
    let first = acquire(&mut conn, "sku-1", "60 s").await.unwrap();
    release(&mut conn, "sku-1", &first.lease_id).await.unwrap();
    for _ in 0..3 {
        assert_eq!(winners(&db).await, 1);
        Postgres::run(&mut conn, "SELECT tower_fence.break_lease('sku-1')").await;
    }
}

#[tokio::test]
async fn rows_are_updated_in_place() {
    let db = Postgres::fresh(2).await;
    let leases = PostgresLeases::new(db.fence());
    for _ in 0..300 {
        let lease = grant(&leases, &sku(), LONG).await;
        renew_for(&leases, &lease, LONG).await;
        leases.release(&sku(), &lease.id).await.unwrap();
    }
    // Sessions report their counts when they end.
    drop(leases);
    db.pool.close().await;
    let pool = sqlx::PgPool::connect(&db.url).await.unwrap();
    let mut counts: Vec<(String, i64, i64)> = vec![];
    eventually("the sessions have reported their counts", async || {
        counts = sqlx::query_as(
            "SELECT relname::text, n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables \
             WHERE schemaname = 'tower_fence' AND relname IN ('leases', 'resources')",
        )
        .fetch_all(&pool)
        .await
        .unwrap();
        counts.len() == 2 && counts.iter().all(|(_, updates, _)| *updates >= 299)
    })
    .await;
    for (table, updates, in_place) in counts {
        assert!(
            in_place * 20 >= updates * 19,
            "{table}: {in_place} of {updates}"
        );
    }
    pool.close().await;
}
