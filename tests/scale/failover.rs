//! A worker that fails over, and shards that move: no admitted token is admitted again.

use sqlx::{AssertSqlSafe, Connection, Postgres};
use tower_fence::{AdmitError, Fence, TokenUse};

use super::{
    distributed::{is_stale, resource, take, token},
    http::{RIGHTS, as_writer},
};
use crate::support::{
    citus::Cluster,
    database::TestDatabase,
    standby::{Replication, Standby},
};

/// The first token of the first epoch.
pub const EPOCH: i64 = 1_000_000_000;

/// Returns a cluster in which an issuer has begun an epoch in each partition.
async fn with_epochs() -> Cluster {
    let cluster = Cluster::with_distributed_fence().await;
    cluster
        .execute("SELECT tower_fence.next_epoch(number::smallint, 1) FROM generate_series(0, 255) AS number")
        .await;
    cluster
}

/// Returns the numbers of the resources on a worker.
pub async fn resources_of(cluster: &Cluster, worker: usize) -> Vec<usize> {
    let mut found = vec![];
    for number in 0..10 {
        if cluster.worker_of(&format!("sku-{number}")).await == worker {
            found.push(number);
        }
    }
    found
}

/// Replaces a worker with its standby, which lacks the writes that were held back.
pub async fn fail_over(cluster: &mut Cluster, worker: usize, standby: Standby) {
    let old = cluster.workers[worker].addr();
    cluster.workers[worker].crash().await;
    cluster.workers[worker] = standby.promote().await;
    cluster
        .update_node(old, cluster.workers[worker].addr())
        .await;
}

/// Returns the state after the first worker has failed over and two writes are lost: the cluster, a
/// fence that has not seen these writes, a resource whose second write was lost, a resource whose
/// first write was lost, and a resource on the other worker.
async fn after_lost_writes() -> (Cluster, Fence<Postgres>, [usize; 3]) {
    let mut cluster = with_epochs().await;
    let fence = cluster.fence().await;
    let own = resources_of(&cluster, 0).await;
    let other = resources_of(&cluster, 1).await[0];
    let (second, first) = (own[0], own[1]);
    take(&fence, &resource(second), EPOCH + 1).await.unwrap();
    take(&fence, &resource(other), EPOCH + 1).await.unwrap();
    let standby = Standby::of(&cluster.workers[0], Replication::Asynchronous).await;
    standby.hold_back();
    take(&fence, &resource(second), EPOCH + 5).await.unwrap();
    take(&fence, &resource(first), EPOCH + 5).await.unwrap();
    fail_over(&mut cluster, 0, standby).await;
    let fence = cluster.fence().await;
    (cluster, fence, [second, first, other])
}

#[tokio::test]
async fn promoted_worker_refuses_earlier_tokens() {
    let (cluster, fence, [second, first, other]) = after_lost_writes().await;
    for lost in [second, first] {
        for old in [2, 5, 6] {
            let refused = take(&fence, &resource(lost), EPOCH + old).await;
            assert!(
                matches!(refused, Err(AdmitError::Stale(_))),
                "{lost}: {refused:?}"
            );
        }
        take(&fence, &resource(lost), 1_002 * EPOCH).await.unwrap();
    }
    // A resource on a worker that did not fail over is unchanged.
    is_stale(
        take(&fence, &resource(other), EPOCH + 1).await,
        EPOCH + 1,
        EPOCH + 1,
    );
    take(&fence, &resource(other), EPOCH + 2).await.unwrap();
    let epochs: i64 = cluster
        .read("SELECT max(epoch)::bigint FROM tower_fence.epochs")
        .await;
    assert_eq!(epochs, 1_001, "one failover was detected once");
}

/// The SQL functions do not catch up by themselves.
#[tokio::test]
async fn sql_is_refused_until_the_operator_catches_up() {
    let (cluster, _fence, [second, first, other]) = after_lost_writes().await;
    let admit = |number: usize, old: i64| {
        format!("SELECT tower_fence.admit('sku-{number}', {})", EPOCH + old)
    };
    for number in [second, first] {
        let refused = cluster.try_execute(&admit(number, 6)).await.unwrap_err();
        assert_contains!(refused.to_string(), "before a failover");
        let raise = format!("SELECT tower_fence.raise('sku-{number}', {})", EPOCH + 6);
        let refused = cluster.try_execute(&raise).await.unwrap_err();
        assert_contains!(refused.to_string(), "before a failover");
    }
    cluster.try_execute(&admit(other, 2)).await.unwrap();
    cluster
        .execute("SELECT tower_fence.notice_failover(NULL)")
        .await;
    for number in [second, first] {
        let refused = cluster.try_execute(&admit(number, 6)).await.unwrap_err();
        assert_contains!(refused.to_string(), "is not newer than");
    }
}

#[tokio::test]
async fn refusal_names_metadata_that_is_not_synchronized() {
    let cluster = with_epochs().await;
    let mut conn = cluster.connect().await;
    let mut transaction = conn.begin().await.unwrap();
    let unsynchronized = "UPDATE pg_dist_node SET metadatasynced = false";
    Postgres::run(&mut transaction, unsynchronized).await;
    let refused = sqlx::query("SELECT tower_fence.admit('sku-1', 1000000001)")
        .execute(&mut *transaction)
        .await
        .unwrap_err();
    let refused = refused.as_database_error().unwrap();
    assert_eq!(refused.code().unwrap(), "57P03");
    assert!(
        refused.message().contains("not synchronized its metadata"),
        "{refused}"
    );
}

/// The same failover on a fence that handles the new timeline like that of a moved shard.
#[tokio::test]
async fn without_the_timeline_a_lost_write_is_overwritten() {
    let (cluster, fence, [second, first, _]) = after_lost_writes().await;
    cluster
        .execute(
            "SELECT run_command_on_shards('tower_fence.resources', 'UPDATE %s SET history = tower_fence.current_history()'); \
             UPDATE tower_fence.shards SET history = s.result FROM (SELECT * FROM run_command_on_shards( \
             'tower_fence.resources', 'SELECT tower_fence.current_history()')) AS s WHERE s.shardid = shard",
        )
        .await;
    take(&fence, &resource(second), EPOCH + 2).await.unwrap();
    take(&fence, &resource(first), EPOCH + 2).await.unwrap();
}

#[tokio::test]
async fn moving_shards_does_not_hide_a_failover() {
    let (cluster, fence, [second, first, _]) = after_lost_writes().await;
    for number in [second, first] {
        cluster.move_shard(&format!("sku-{number}"), 1).await;
        assert_eq!(cluster.worker_of(&format!("sku-{number}")).await, 1);
    }
    for number in [second, first] {
        let refused = take(&fence, &resource(number), EPOCH + 2).await;
        assert!(
            matches!(refused, Err(AdmitError::Stale(_))),
            "{number}: {refused:?}"
        );
    }
}

#[tokio::test]
async fn switched_off_detection_applies_to_later_failovers_only() {
    let (_cluster, fence, [second, first, _]) = after_lost_writes().await;
    fence.notice_failover(false).await.unwrap();
    for number in [second, first] {
        let refused = take(&fence, &resource(number), EPOCH + 2).await;
        assert_matches!(refused, Err(AdmitError::Stale(_)));
    }
}

/// The role of the caller has written on the worker, and the functions of the fence write as their
/// owner.
#[tokio::test]
async fn admission_in_a_callers_transaction_catches_up() {
    let (cluster, _fence, [_, lost, other]) = after_lost_writes().await;
    cluster.execute(RIGHTS).await;
    cluster
        .execute("GRANT EXECUTE ON FUNCTION tower_fence.admit_within TO shop_writer")
        .await;
    let writer = as_writer(&cluster).await;
    let fence = Fence::new(writer.clone());
    let mut tx = writer.begin().await.unwrap();
    for (number, old, is_admitted) in [
        (other, 2, true),
        (lost, 6, false),
        (lost, 1_002_000_000_000, true),
    ] {
        let value = token(EPOCH + old);
        let sku = resource(number);
        let admitted = fence.admit(&mut tx, &sku, value, TokenUse::SingleUse);
        let admitted = admitted.await;
        assert_eq!(admitted.is_ok(), is_admitted, "{admitted:?}");
        assert!(
            !matches!(admitted, Err(AdmitError::Unavailable(_))),
            "{admitted:?}"
        );
    }
    tx.commit().await.unwrap();
}

#[tokio::test]
async fn moved_shards_keep_their_tokens() {
    let cluster = with_epochs().await;
    let fence = cluster.fence().await;
    let [moved, new] = resources_of(&cluster, 0).await[..2] else {
        panic!("the first worker does not have two resources");
    };
    take(&fence, &resource(moved), EPOCH + 1).await.unwrap();
    for number in [moved, new] {
        cluster.move_shard(&format!("sku-{number}"), 1).await;
    }
    for number in [moved, new] {
        let admit = format!("SELECT tower_fence.admit('sku-{number}', {})", EPOCH + 2);
        let refused = cluster.try_execute(&admit).await.unwrap_err();
        assert_contains!(refused.to_string(), "on another server");
    }
    cluster
        .execute("SELECT tower_fence.notice_failover(NULL)")
        .await;
    // The id of an admitting transaction must not move to another worker, because a later
    // transaction of that worker may have the same id.
    let admitted = "SELECT count(*) FROM tower_fence.resources WHERE admitted_by IS NOT NULL";
    assert_eq!(cluster.read::<i64>(admitted).await, 0);
    for number in [moved, new] {
        take(&fence, &resource(number), EPOCH + 2).await.unwrap();
        is_stale(
            take(&fence, &resource(number), EPOCH + 1).await,
            EPOCH + 1,
            EPOCH + 2,
        );
    }
    // The library needs no call of an operator.
    cluster.move_shard(&format!("sku-{moved}"), 0).await;
    take(&fence, &resource(moved), EPOCH + 3).await.unwrap();
    is_stale(
        take(&fence, &resource(moved), EPOCH + 3).await,
        EPOCH + 3,
        EPOCH + 3,
    );
    let epochs = "SELECT max(epoch)::bigint FROM tower_fence.epochs";
    assert_eq!(cluster.read::<i64>(epochs).await, 1);
}

/// After both workers have failed over once, each of their histories is that of another node.
#[tokio::test]
async fn nodes_with_one_system_identifier_hide_no_failover() {
    let mut cluster = with_epochs().await;
    cluster
        .execute(
            "CREATE OR REPLACE FUNCTION tower_fence.current_history()
             RETURNS text LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
             BEGIN
                 RETURN concat(left(current_setting('server_version_num'), 2),
                     left(pg_walfile_name(pg_current_wal_lsn()), 8), ':1');
             END
             $$; SELECT tower_fence.after_failover()",
        )
        .await;
    let own = resource(resources_of(&cluster, 1).await[0]);
    let standby = Standby::of(&cluster.workers[0], Replication::Asynchronous).await;
    fail_over(&mut cluster, 0, standby).await;
    cluster
        .execute("SELECT tower_fence.notice_failover(NULL)")
        .await;
    let standby = Standby::of(&cluster.workers[1], Replication::Asynchronous).await;
    standby.hold_back();
    take(&cluster.fence().await, &own, 3_500 * EPOCH + 9)
        .await
        .unwrap();
    fail_over(&mut cluster, 1, standby).await;
    let refused = take(&cluster.fence().await, &own, 3_500 * EPOCH + 7).await;
    assert_matches!(refused, Err(AdmitError::Stale(_)));
}

/// The deadlock detection of Citus does not see the statements on the shards.
#[tokio::test]
async fn failover_call_does_not_wait_for_an_open_transaction() {
    let cluster = with_epochs().await;
    cluster
        .execute("ALTER FUNCTION tower_fence.after_failover SET lock_timeout = '500ms'")
        .await;
    let mut conn = cluster.connect().await;
    let mut transaction = conn.begin().await.unwrap();
    let admit = AssertSqlSafe(format!("SELECT tower_fence.admit('sku-1', {})", EPOCH + 1));
    sqlx::query(admit).execute(&mut *transaction).await.unwrap();
    let call = "SELECT tower_fence.after_failover()";
    let refused = cluster.try_execute(call).await.unwrap_err();
    let code = refused.as_database_error().unwrap().code();
    assert_eq!(code.as_deref(), Some("55P03"), "{refused}");
    transaction.commit().await.unwrap();
    cluster.execute(call).await;
}

#[tokio::test]
async fn an_operator_resets_a_fence_that_saw_a_forged_token() {
    let cluster = with_epochs().await;
    let fence = cluster.fence().await;
    let (seen, unseen) = (resource(1), resource(2));
    take(&fence, &seen, 900 * EPOCH).await.unwrap();
    is_stale(take(&fence, &seen, EPOCH + 1).await, EPOCH + 1, 900 * EPOCH);
    assert!(
        fence.reset(&seen, token(1)).await.is_err(),
        "a reset below a grant must be refused"
    );
    fence.reset(&seen, token(EPOCH)).await.unwrap();
    take(&fence, &seen, EPOCH + 1).await.unwrap();
    // This resource has no row, and its token is below the floor.
    cluster
        .execute("UPDATE tower_fence.floors SET floor = 900000000000")
        .await;
    fence.reset(&unseen, token(EPOCH)).await.unwrap();
    take(&fence, &unseen, EPOCH + 1).await.unwrap();
}

#[tokio::test]
async fn worker_outage_affects_no_other_worker() {
    let mut cluster = with_epochs().await;
    let fence = cluster.fence().await;
    let own = resource(resources_of(&cluster, 0).await[0]);
    let other = resource(resources_of(&cluster, 1).await[0]);
    take(&fence, &own, EPOCH + 1).await.unwrap();
    cluster.workers[0].crash().await;
    let refused = take(&fence, &own, EPOCH + 2).await;
    assert_matches!(refused, Err(AdmitError::Unavailable(_)));
    take(&fence, &other, EPOCH + 1).await.unwrap();
    // The worker has lost nothing, so the fences of its resources are unchanged.
    cluster.workers[0].restart().await;
    is_stale(take(&fence, &own, EPOCH + 1).await, EPOCH + 1, EPOCH + 1);
    take(&fence, &own, EPOCH + 2).await.unwrap();
}
