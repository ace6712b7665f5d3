//! The calls of an operator about failovers: the report of a failover that the server does not
//! report itself, and the setting of failover detection.

use std::time::Duration;

use sqlx::{Connection, PgConnection, Postgres};
use tower_fence::{
    AdmitError, Fence, LiveTokens, Token, TokenUse,
    epochs::{Epoch, EpochError, Epochs},
};

use super::failover::{
    HIGHEST_STALE, HIGHEST_STALE_BY_OPERATOR, PARTITION, in_epoch_1, in_the_same_partition,
    is_on_timeline, was_on_timeline,
};
use crate::support::{
    database::{TestDatabase, WAITING_FOR_LOCK, on_both_databases, read},
    eventually,
    fence::{refuses, resource, sku, token, use_up, write},
    functions::admit,
};

on_both_databases!(operator_call_moves_each_partition_above_its_own_epoch,);

/// The timelines of two promotions that the server reports.
const REPORTED: [&str; 2] = ["1500000001", "1500000003"];

async fn next_epoch(fence: &Fence<Postgres>) -> i64 {
    let next = fence.next_epoch(PARTITION, Epoch::FIRST).await;
    next.unwrap().get()
}

/// The operator may report a promotion that the server reports as well.
#[tokio::test]
async fn rows_advanced_by_an_operator_are_not_advanced_again() {
    let (db, fence) = in_epoch_1::<Postgres>().await;
    was_on_timeline(&db, "00000000").await;
    fence.after_failover().await.unwrap();
    assert_eq!(next_epoch(&fence).await, 1_502);
    for resource in [sku(), in_the_same_partition()] {
        let alive = fence.begin(&resource, token(1_502_000_000_001), TokenUse::SingleUse);
        drop(alive.await.unwrap());
    }
}

/// The partitions of `a` and `sku-1` have different epochs.
async fn operator_call_moves_each_partition_above_its_own_epoch<DB: TestDatabase>() {
    let (_db, fence) = in_epoch_1::<DB>().await;
    let (other, partition, seventh) = (resource("a"), 0x43, Epoch::new(7).unwrap());
    fence.next_epoch(partition, seventh).await.unwrap();
    use_up(&fence, &other, token(7_000_000_001)).await.unwrap();
    fence.after_failover().await.unwrap();
    for (resource, highest_stale) in [(sku(), HIGHEST_STALE_BY_OPERATOR), (other, 507_999_999_999)]
    {
        assert_eq!(fence.inspect(&resource).await.unwrap(), Some(highest_stale));
    }
    let floors = fence.floors().await.unwrap();
    assert!(floors.contains(&(PARTITION, HIGHEST_STALE_BY_OPERATOR)));
    assert!(floors.contains(&(partition, 507_999_999_999)));
    assert_eq!(floors.iter().filter(|(_, floor)| *floor > 0).count(), 256);
}

#[tokio::test]
async fn one_call_has_the_effect_of_several() {
    let forged = 700_000_000_000_000;
    let mut results = vec![];
    for calls in [&["after_failover(3)"][..], &["after_failover()"; 3]] {
        let (db, fence) = in_epoch_1::<Postgres>().await;
        let other = in_the_same_partition();
        use_up(&fence, &other, token(forged)).await.unwrap();
        was_on_timeline(&db, "00000000").await;
        for call in calls {
            db.execute(&format!("SELECT tower_fence.{call}")).await;
        }
        let (one, other) = (fence.inspect(&sku()).await, fence.inspect(&other).await);
        results.push((one.unwrap(), other.unwrap(), next_epoch(&fence).await));
    }
    let expected = (Some(2_501_999_999_999), Some(forged + 2_500_000), 2_502);
    assert_eq!(results, [expected; 2]);
}

/// The last epoch is 999,999.
#[tokio::test]
async fn operator_calls_stop_at_the_last_epoch() {
    let (db, fence) = in_epoch_1::<Postgres>().await;
    for _ in 0..2 {
        db.execute("SELECT tower_fence.after_failover(1999)").await;
    }
    let epochs = "SELECT min(epoch)::bigint FROM tower_fence.epochs";
    assert_eq!(db.number(epochs).await, 999_999);
    let highest_stale = fence.inspect(&sku()).await.unwrap();
    assert_eq!(highest_stale, Some(Token::MAX.get()));
    let next = fence.next_epoch(PARTITION, Epoch::FIRST).await;
    assert_matches!(next, Err(EpochError::Exhausted));
}

/// Tokens may have been granted on each unobserved timeline, and above each forged token.
#[tokio::test]
async fn unobserved_promotions_add_to_those_an_operator_reports() {
    let (db, fence) = in_epoch_1::<Postgres>().await;
    let forged = 700_000_000_000_000;
    let other = in_the_same_partition();
    use_up(&fence, &other, token(forged)).await.unwrap();
    was_on_timeline(&db, REPORTED[0]).await;
    is_on_timeline(&db, REPORTED[1]).await;
    fence.after_failover().await.unwrap();
    assert_eq!(next_epoch(&fence).await, 2_502);
    let highest_stale = fence.inspect(&other).await.unwrap();
    assert_eq!(highest_stale, Some(forged + 2_500_000));
}

#[tokio::test]
async fn forged_row_is_moved_once_per_missed_promotion() {
    let (db, fence) = in_epoch_1::<Postgres>().await;
    let forged = 700_000_000_000_000;
    write(&fence, forged).await.unwrap();
    was_on_timeline(&db, REPORTED[0]).await;
    is_on_timeline(&db, REPORTED[1]).await;
    let lost = forged + 1_000_001;
    refuses(&fence, lost, forged + 2_000_000).await;
}

/// The call does not change the effect of earlier promotions.
#[tokio::test]
async fn turning_detection_off_does_not_affect_the_past() {
    let (db, fence) = in_epoch_1::<Postgres>().await;
    was_on_timeline(&db, "00000000").await;
    fence.notice_failover(false).await.unwrap();
    let moved = "tower_fence.floors WHERE history <> '00000000'";
    assert_eq!(db.count(moved).await, 256);
    refuses(&fence, 1_000_000_006, HIGHEST_STALE).await;
}

/// Without a flush, a crash would undo the call. The failover would stay undetected, and the epoch
/// of the issuer could begin again.
#[tokio::test]
async fn operator_call_waits_for_the_disk() {
    let db = Postgres::fresh(1).await;
    for said in [
        "tower_fence.after_failover()",
        "tower_fence.notice_failover(false)",
        "tower_fence.report_epoch(7::smallint, 9)",
    ] {
        for (before, then) in [
            ("off", "on"),
            ("local", "on"),
            ("remote_apply", "remote_apply"),
        ] {
            let mut tx = db.pool.begin().await.unwrap();
            let set = format!("SET LOCAL synchronous_commit = {before}");
            Postgres::run(&mut tx, &set).await;
            Postgres::run(&mut tx, &format!("SELECT {said}")).await;
            let now: String = read(&mut *tx, "SHOW synchronous_commit").await;
            assert_eq!(now, then, "{said} {before}");
        }
    }
}

/// The writer has locked the row of one resource, and then needs the floor of the partition for
/// another.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operator_call_does_not_deadlock_with_a_writer() {
    const TOKEN: i64 = 700_000_000_000_000;
    let (db, fence) = in_epoch_1::<Postgres>().await;
    let mut writer = db.pool.begin().await.unwrap();
    admit(&mut writer, "sku-1", TOKEN).await.unwrap();
    let reported = tokio::spawn(async move { fence.after_failover().await });
    db.waits_for_lock().await;
    let other = in_the_same_partition();
    admit(&mut writer, other.as_str(), TOKEN).await.unwrap();
    writer.commit().await.unwrap();
    reported.await.unwrap().unwrap();
}

/// The catch-up has locked the floor of its partition, and then needs the row of the resource.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operator_call_does_not_deadlock_with_a_catch_up() {
    let (db, _fence) = in_epoch_1::<Postgres>().await;
    was_on_timeline(&db, "00000000").await;
    let mut issuer = db.pool.begin().await.unwrap();
    Postgres::run(&mut issuer, "SELECT FROM tower_fence.epochs FOR UPDATE").await;
    let mut calls = vec![];
    for call in ["catch_up('sku-1')", "after_failover()"] {
        let pool = db.pool.clone();
        calls.push(tokio::spawn(async move {
            let mut conn = pool.acquire().await.unwrap();
            Postgres::execute(&mut conn, &format!("SELECT tower_fence.{call}")).await
        }));
        let waiting = calls.len() as i64;
        eventually!(
            "the call waits for a lock",
            db.number(WAITING_FOR_LOCK).await == waiting
        );
    }
    issuer.rollback().await.unwrap();
    for call in calls {
        call.await.unwrap().unwrap();
    }
}

/// A promoted server keeps prepared transactions. The first write of a resource locks the floor of
/// its partition.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn notice_of_a_failover_does_not_wait_for_a_lock_without_end() {
    let (db, _fence) = in_epoch_1::<Postgres>().await;
    let setting = "pg_proc WHERE oid IN ('tower_fence.notice_failover'::regproc, 'tower_fence.after_failover'::regproc) \
                   AND 'lock_timeout=10s' = ANY (proconfig)";
    assert_eq!(db.count(setting).await, 2);
    db.execute("ALTER FUNCTION tower_fence.notice_failover(boolean) SET lock_timeout = '3s'")
        .await;
    let mut writer = db.pool.begin().await.unwrap();
    let other = in_the_same_partition();
    admit(&mut writer, other.as_str(), 700_000_000_000_000)
        .await
        .unwrap();
    is_on_timeline(&db, REPORTED[1]).await;
    // The timeout of the function is longer than those of the fence.
    let second = Duration::from_secs(1);
    let fence = db.fence_with(|fence| fence.lock_timeout(second).answer_timeout(second));
    let refused = fence.notice_failover(true).await;
    assert_matches!(refused, Err(AdmitError::Busy(_)));
}

/// The removal reads the floor of the partition before the failover is committed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn removal_uses_no_floor_from_before_a_failover() {
    let (db, fence) = in_epoch_1::<Postgres>().await;
    db.execute(
        "ALTER FUNCTION tower_fence.remove_idle_of(smallint, interval, integer, bigint, bigint) SET lock_timeout = '10s'",
    )
    .await;
    let mut failover = db.pool.begin().await.unwrap();
    Postgres::run(&mut failover, "SELECT tower_fence.after_failover()").await;
    let live = LiveTokens::default().granted_up_to(token(8_000_000_000_000));
    let removing = tokio::spawn({
        let (fence, live) = (fence.clone(), live.clone());
        async move { fence.remove_idle_below(Duration::ZERO, 10, &live).await }
    });
    db.waits_for_lock().await;
    failover.commit().await.unwrap();
    assert_eq!(removing.await.unwrap().unwrap(), 0);
    let later = fence.remove_idle_below(Duration::ZERO, 10, &live).await;
    assert_eq!(later.unwrap(), 1);
}

/// A re-report of an epoch and a catch-up lock the epoch and the floor in different orders.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn conflict_with_a_catch_up_is_retried() {
    const EPOCH: &str = "UPDATE tower_fence.epochs SET epoch = epoch WHERE partition = $1";
    const FLOOR: &str = "UPDATE tower_fence.floors SET floor = floor WHERE partition = $1";
    for [first, second] in [[EPOCH, FLOOR], [FLOOR, EPOCH]] {
        let (db, fence) = in_epoch_1::<Postgres>().await;
        was_on_timeline(&db, "00000000").await;
        let mut other = PgConnection::connect(&db.url).await.unwrap();
        let run = async |other: &mut PgConnection, sql: &'static str| {
            let query = sqlx::query(sql).bind(i16::from(PARTITION));
            query.execute(other).await.unwrap();
        };
        // The session that has waited longer detects the deadlock, and is rolled back.
        Postgres::run(&mut other, "SET deadlock_timeout = '1min'").await;
        let mut other = other.begin().await.unwrap();
        run(&mut other, first).await;
        let colliding = tokio::spawn({
            let fence = fence.clone();
            async move {
                match first {
                    EPOCH => refuses(&fence, 1_000_000_006, HIGHEST_STALE).await,
                    _ => {
                        let alive = fence.report_epoch(PARTITION, Epoch::new(7).unwrap()).await;
                        assert_eq!(alive.unwrap().get(), 1_008);
                    }
                }
            }
        });
        db.waits_for_lock().await;
        run(&mut other, second).await;
        other.commit().await.unwrap();
        colliding.await.unwrap();
    }
}
