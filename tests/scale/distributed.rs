//! A fence whose rows are on the workers.

use std::time::Duration;

use sqlx::{AssertSqlSafe, PgConnection, Row};
use tokio::time::Instant;
use tower_fence::{
    AdmitError, Fence, Resource, Token, TokenUse,
    announce::{Announce, AnnounceError, LeaseDigest},
    epochs::{Epoch, Epochs},
};

pub use crate::support::fence::token;
use crate::support::{
    citus::{Cluster, STOCK},
    database::{TestDatabase, read},
    eventually,
    standby::execute,
};

pub fn resource(number: usize) -> Resource {
    Resource::new(format!("sku-{number}")).unwrap()
}

/// Takes one item from the stock of a resource with a single-use token.
pub async fn take(
    fence: &Fence<sqlx::Postgres>,
    resource: &Resource,
    value: i64,
) -> Result<(), AdmitError> {
    let until = Instant::now() + Duration::from_secs(30);
    let mut tx = loop {
        // After a failover, an earlier transaction may still be ending.
        match fence
            .begin(resource, token(value), TokenUse::SingleUse)
            .await
        {
            Err(AdmitError::Busy(_)) if Instant::now() < until => {}
            begun => break begun?,
        }
    };
    sqlx::query("UPDATE inventory SET n = n - 1 WHERE sku = $1")
        .bind(resource.as_str())
        .execute(&mut *tx)
        .await
        .unwrap();
    tx.commit().await.unwrap();
    Ok(())
}

#[track_caller]
pub fn is_stale<T: std::fmt::Debug>(
    outcome: Result<T, AdmitError>,
    presented: i64,
    max_token: i64,
) {
    let Err(AdmitError::Stale(stale)) = outcome else {
        panic!("not refused as stale: {outcome:?}");
    };
    let found = (stale.presented_token.get(), stale.max_token);
    assert_eq!(found, (presented, max_token));
}

#[tokio::test]
async fn check_and_write_are_one_transaction_of_a_worker() {
    let cluster = Cluster::with_distributed_fence().await;
    let fence = cluster.fence().await;
    fence.check().await.unwrap();
    let (first, second) = (resource(0), resource(1));
    assert_eq!(fence.inspect(&first).await.unwrap(), None);
    take(&fence, &first, 5).await.unwrap();
    is_stale(take(&fence, &first, 5).await, 5, 5);
    // The refusal comes from the database, not from the cache of this fence.
    let other = cluster.fence().await;
    is_stale(take(&other, &first, 4).await, 4, 5);
    take(&other, &first, 6).await.unwrap();
    // After a handler has failed, older tokens are stale, and its own token is still usable.
    let tx = fence
        .begin(&first, token(9), TokenUse::SingleUse)
        .await
        .unwrap();
    drop(tx);
    take(&fence, &first, 9).await.unwrap();
    fence.raise(&first, token(20)).await.unwrap();
    is_stale(take(&fence, &first, 10).await, 10, 19);
    fence.raise(&second, token(20)).await.unwrap();
    is_stale(take(&fence, &second, 10).await, 10, 19);
    assert_eq!(fence.inspect(&second).await.unwrap(), Some(19));
    // These two resources are on two workers.
    let all = [(second.clone(), token(30)), (first.clone(), token(30))];
    let mut tx = fence.begin_all(&all, TokenUse::SingleUse).await.unwrap();
    let both = "UPDATE inventory SET n = n - 1 WHERE sku IN ('sku-0', 'sku-1')";
    sqlx::query(both).execute(&mut *tx).await.unwrap();
    tx.commit().await.unwrap();
    let left = "SELECT string_agg(n::text, ' ' ORDER BY sku) FROM inventory WHERE sku IN ('sku-0', 'sku-1')";
    let left: String = cluster.read(left).await;
    assert_eq!(left, format!("{} {}", STOCK - 4, STOCK - 1));
    // Each row records the timeline of the server that has it.
    let strange = "SELECT count(*) FROM tower_fence.resources AS r WHERE r.history NOT IN \
         (SELECT s.history FROM tower_fence.shards AS s)";
    assert_eq!(cluster.read::<i64>(strange).await, 0);
}

#[tokio::test]
async fn a_grant_is_announced_on_the_worker() {
    let cluster = Cluster::with_distributed_fence().await;
    let fence = cluster.fence().await;
    let (sku, lease) = (resource(3), LeaseDigest::of("lease"));
    fence.announce(&sku, token(7), &lease, false).await.unwrap();
    fence.announce(&sku, token(7), &lease, false).await.unwrap();
    is_stale(take(&fence, &sku, 6).await, 6, 6);
    let superseded = fence.announce(&sku, token(6), &lease, false).await;
    assert_matches!(superseded, Err(AnnounceError::Superseded { .. }));
    take(&fence, &sku, 7).await.unwrap();
}

#[tokio::test]
async fn single_statement_write_uses_a_transaction() {
    single_statement_writes(Cluster::with_distributed_fence().await).await;
}

/// The fence is on the coordinator, and the rows of the application are on the workers.
#[tokio::test]
async fn single_statement_write_across_nodes_uses_a_transaction() {
    single_statement_writes(Cluster::with_fence().await).await;
}

async fn single_statement_writes(cluster: Cluster) {
    let fence = cluster.fence().await;
    let sku = resource(2);
    let write = async |value: i64| {
        let statement = "UPDATE inventory SET n = n - 1 WHERE sku = $1 AND EXISTS (SELECT 1 FROM fence) RETURNING n";
        let query = sqlx::query(statement).bind("sku-2");
        fence
            .write::<(i64,)>(&sku, token(value), TokenUse::SingleUse, query)
            .await
    };
    assert_eq!(write(3).await.unwrap(), [(STOCK - 1,)]);
    assert!(write(3).await.is_err());
    assert_eq!(write(4).await.unwrap(), [(STOCK - 2,)]);
}

#[tokio::test]
async fn existing_row_keeps_its_token() {
    let cluster = Cluster::with_fence().await;
    let fence = cluster.fence().await;
    for number in 0..10 {
        take(&fence, &resource(number), 100).await.unwrap();
    }
    cluster.distribute().await;
    // This fence has not detected that the rows have moved, so its call is refused.
    let unaware = take(&fence, &resource(0), 200).await;
    assert_matches!(
        &unaware,
        Err(AdmitError::Unavailable(_) | AdmitError::Misconfigured(_))
    );
    let fence = cluster.fence().await;
    for number in 0..10 {
        is_stale(take(&fence, &resource(number), 100).await, 100, 100);
        take(&fence, &resource(number), 101).await.unwrap();
    }
}

/// The names of the resources have the collation of the table that is colocated with the fence.
#[tokio::test]
async fn fence_with_another_collation_catches_up() {
    let cluster = Cluster::start().await;
    cluster.fence().await.migrate().await.unwrap();
    cluster
        .execute(
            "CREATE TABLE inventory (sku text COLLATE \"en-US-x-icu\" PRIMARY KEY, n bigint); \
             SELECT create_distributed_table('inventory', 'sku', shard_count => 8); \
             SELECT tower_fence.distribute('inventory')",
        )
        .await;
    let fence = cluster.fence().await;
    let names = ["shop/a", "Shop/b", "shop/C", "shop/d"].map(|name| Resource::new(name).unwrap());
    for name in &names {
        take(&fence, name, 5).await.unwrap();
    }
    let page = fence.states("shop/", None, 10).await.unwrap();
    let listed: Vec<_> = page.iter().map(|state| state.resource.as_str()).collect();
    assert_eq!(listed, ["shop/C", "shop/a", "shop/d"]);
    fence.next_epoch(0, Epoch::FIRST).await.unwrap();
    fence.after_failover().await.unwrap();
    for name in &names {
        assert!(matches!(
            fence.begin(name, token(6), TokenUse::SingleUse).await,
            Err(AdmitError::Stale(_))
        ));
    }
    // This function of Citus removes the distribution of the functions.
    let alter = "SELECT alter_distributed_table('inventory', shard_count => 4, cascade_to_colocated => true)";
    cluster.execute(alter).await;
    let refused = take(&fence, &names[0], Token::MAX.get()).await;
    assert_matches!(refused, Err(AdmitError::NotMigrated(_)));
    assert!(!fence.distribute(None).await.unwrap());
    fence.after_failover().await.unwrap();
    take(&fence, &names[0], Token::MAX.get()).await.unwrap();
}

#[tokio::test]
async fn unsupported_calls_on_a_distributed_fence_name_the_reason() {
    let cluster = Cluster::with_fence().await;
    let refusal = async |sql: &str| {
        let mut conn = cluster.connect().await;
        let refused = sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).fetch_all(&mut conn);
        match refused.await {
            Err(error) => error.to_string(),
            Ok(rows) => format!("no refusal of {sql}: {} rows", rows.len()),
        }
    };
    cluster
        .execute(
            "CREATE TABLE local (sku text); CREATE TABLE numbers (n bigint); \
             SELECT create_distributed_table('numbers', 'n')",
        )
        .await;
    #[rustfmt::skip]
    let rows = [
        ("SELECT tower_fence.distribute('local')", "is not distributed by a column"),
        ("SELECT tower_fence.distribute('numbers')", "distributed by n of type bigint"),
        ("SELECT tower_fence.protect('inventory', '{sku}')", "in the metadata of Citus"),
    ];
    for (sql, reason) in rows {
        let refused = refusal(sql).await;
        assert!(refused.contains(reason), "{sql}: {refused}");
    }
    cluster.execute("SELECT tower_fence.distribute()").await;
    for (sql, reason) in [
        ("CALL tower_fence.remove_idle('30 days')", "deadlocks"),
        (
            "SELECT tower_fence.protect('local', '{sku}')",
            "the fence is distributed",
        ),
        (
            "SELECT tower_fence.protect('inventory', '{sku}')",
            "not colocated with it",
        ),
    ] {
        let refused = refusal(sql).await;
        assert!(refused.contains(reason), "{sql}: {refused}");
    }
    // No local table is in the metadata, but a write that spans two workers commits in two phases
    // anyway.
    let fence = cluster.fence().await;
    take(&fence, &resource(1), 5).await.unwrap();
    is_stale(take(&fence, &resource(1), 5).await, 5, 5);
    let mut conn = cluster.connect().await;
    let again = sqlx::raw_sql("SELECT tower_fence.distribute()").fetch_one(&mut conn);
    assert!(!again.await.unwrap().get::<bool, _>(0));
    // A change of the distribution removes that of the functions.
    cluster
        .execute("SELECT alter_distributed_table('tower_fence.resources', shard_count => 6, cascade_to_colocated => true)")
        .await;
    let fence = cluster.fence().await;
    fence.migrate().await.unwrap();
    take(&fence, &resource(1), 6).await.unwrap();
    let refused = fence.remove_idle(Duration::ZERO, 10).await;
    assert_matches!(refused, Err(AdmitError::Misconfigured(_)));
}

/// The tables are local again, as after the restore of a dump in another cluster.
#[tokio::test]
async fn restored_fence_can_be_distributed_again() {
    let cluster = Cluster::with_distributed_fence().await;
    let fence = cluster.fence().await;
    take(&fence, &resource(1), 7).await.unwrap();
    cluster
        .execute(
            "SELECT undistribute_table('tower_fence.resources'); \
             SELECT undistribute_table('tower_fence.shards'); \
             SELECT undistribute_table('tower_fence.floors')",
        )
        .await;
    cluster.distribute().await;
    let fence = cluster.fence().await;
    is_stale(take(&fence, &resource(1), 7).await, 7, 7);
    for number in 0..10 {
        take(&fence, &resource(number), 8).await.unwrap();
    }
}

/// A query for the functions that run with the privileges of their owner and that PUBLIC may
/// execute.
const OPEN: &str = "SELECT coalesce(string_agg(p.proname, ' '), '') FROM pg_proc AS p \
     WHERE p.pronamespace = 'tower_fence'::regnamespace AND has_function_privilege('public', p.oid, 'EXECUTE')";

#[tokio::test]
async fn fence_from_before_citus_is_blocked_on_the_workers() {
    let cluster = Cluster::apart().await;
    cluster.fence().await.migrate().await.unwrap();
    cluster
        .execute("CREATE ROLE writer; GRANT USAGE ON SCHEMA tower_fence TO writer; GRANT EXECUTE ON FUNCTION tower_fence.try_admit TO writer")
        .await;
    cluster.join().await;
    cluster.make_inventory().await;
    let fence = cluster.fence().await;
    assert!(
        fence.check().await.is_err(),
        "the check does not report the one-phase commit"
    );
    fence.migrate().await.unwrap();
    cluster.distribute().await;
    let fence = cluster.fence().await;
    for number in 0..10 {
        take(&fence, &resource(number), 7).await.unwrap();
        is_stale(take(&fence, &resource(number), 7).await, 7, 7);
    }
    for worker in &cluster.workers {
        let mut conn = worker.connect().await;
        let open: String = sqlx::query_scalar(OPEN).fetch_one(&mut conn).await.unwrap();
        assert_eq!(open, "");
        let admits = "SELECT has_function_privilege('writer', \
             'tower_fence.admit_within(text, bigint, boolean, text, text, boolean)', 'EXECUTE')";
        let admits: bool = read(&mut conn, admits).await;
        assert!(admits);
    }
}

#[tokio::test]
async fn an_idempotency_key_commits_with_the_write() {
    let cluster = Cluster::with_distributed_fence().await;
    let mut conn = cluster.connect().await;
    let once = async |conn: &mut PgConnection, key: &str, value: i64| -> String {
        let claim = "SELECT a.outcome FROM tower_fence.admit_once(\
             sha256('scope'), $1, sha256('request'), 60000, '1000', false, NULL, $2, false) AS a";
        let admit = "SELECT a.outcome FROM tower_fence.admit_within('sku-1', $1, false, '1000', '0', false) AS a";
        let claim = sqlx::query_scalar(claim).bind(key).bind(value);
        let outcome: String = claim.fetch_one(&mut *conn).await.unwrap();
        if outcome != "claimed" {
            return outcome;
        }
        let admit = sqlx::query_scalar(admit).bind(value);
        admit.fetch_one(conn).await.unwrap()
    };
    for (key, value, end, outcome) in [
        ("a", 1, "ROLLBACK", "admitted"),
        ("a", 1, "COMMIT", "admitted"),
        ("a", 2, "COMMIT", "found"),
        ("b", 1, "ROLLBACK", "stale"),
        ("b", 2, "COMMIT", "admitted"),
    ] {
        sqlx::raw_sql("BEGIN").execute(&mut conn).await.unwrap();
        assert_eq!(once(&mut conn, key, value).await, outcome, "{key} {value}");
        if outcome == "admitted" {
            let write = "UPDATE inventory SET n = n - 1 WHERE sku = 'sku-1'";
            sqlx::raw_sql(write).execute(&mut conn).await.unwrap();
            let store =
                "SELECT tower_fence.store_response(sha256('scope'), $1, 200::smallint, '', '')";
            let stored: bool = sqlx::query_scalar(store)
                .bind(key)
                .fetch_one(&mut conn)
                .await
                .unwrap();
            assert!(stored);
        }
        sqlx::Postgres::run(&mut conn, end).await;
    }
    let left = "SELECT n FROM inventory WHERE sku = 'sku-1'";
    assert_eq!(cluster.read::<i64>(left).await, STOCK - 2);
}

#[tokio::test]
async fn connections_are_reused_from_write_to_write() {
    let cluster = Cluster::with_distributed_fence().await;
    let fence = cluster
        .fence_with(|fence| fence.reuse_connections(true))
        .await;
    for value in 1..6 {
        take(&fence, &resource(1), value).await.unwrap();
        is_stale(take(&fence, &resource(1), value).await, value, value);
    }
    let left = "SELECT n FROM inventory WHERE sku = 'sku-1'";
    assert_eq!(cluster.read::<i64>(left).await, STOCK - 5);
}

#[tokio::test]
async fn a_write_takes_five_round_trips_to_its_worker() {
    let cluster = Cluster::with_distributed_fence().await;
    let fence = cluster.fence().await;
    take(&fence, &resource(1), 1).await.unwrap();
    let worker = &cluster.workers[cluster.worker_of("sku-1").await];
    execute(worker, "ALTER SYSTEM SET log_statement = 'all'").await;
    execute(worker, "SELECT pg_reload_conf()").await;
    let messages = || {
        let log = worker.log();
        // A session reads the setting between two statements, so its first write can be incomplete.
        let begins = log
            .split_once(";SAVEPOINT savepoint_")
            .map_or("", |(before, _)| before);
        let rest = log[begins.rfind('\n').unwrap_or(log.len())..].to_owned();
        let lines = rest.lines().filter(|line| {
            // This excludes the statements that the function itself runs on the worker.
            !line.contains("tower_fence.resources_")
                && (line.contains("LOG:  statement: ") || line.contains("LOG:  execute "))
        });
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    let mut value = 1;
    // The sessions of the worker read the setting when they are idle.
    eventually("the worker logs a complete write", async || {
        value += 1;
        take(&fence, &resource(1), value).await.unwrap();
        messages().iter().any(|line| line.ends_with("COMMIT"))
    })
    .await;
    let log = messages();
    let end = log
        .iter()
        .position(|line| line.ends_with("COMMIT"))
        .unwrap();
    let write: Vec<_> = log[..=end].iter().collect();
    assert_eq!(
        write.len(),
        5,
        "BEGIN, admission, write, RELEASE, COMMIT: {write:#?}"
    );
}

#[tokio::test]
async fn header_is_admitted_on_the_worker_of_its_resource() {
    let cluster = Cluster::with_distributed_fence().await;
    for number in [1, 2, 3] {
        let admit = format!(
            "BEGIN; SELECT tower_fence.admit_header('7;resource=\"sku-{number}\"', 'sku-{number}'); COMMIT"
        );
        cluster.try_execute(&admit).await.unwrap();
        let kept = format!("SELECT tower_fence.max_token('sku-{number}')");
        assert_eq!(cluster.read::<i64>(&kept).await, 7);
        let refused = cluster.try_execute(&admit).await.unwrap_err();
        assert_contains!(refused.to_string(), "was used already");
        // Citus does not delegate a call with a subquery. In this case, `admit` runs on the
        // coordinator, and the call inside it is delegated.
        let admit = format!("SELECT tower_fence.admit('sku-{number}', (SELECT 8))");
        cluster.try_execute(&admit).await.unwrap();
        assert_eq!(cluster.read::<i64>(&kept).await, 8);
    }
}
