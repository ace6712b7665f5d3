//! A COMMIT that fails leaves neither the write nor its token.
//!
//! Citus commits on the workers before it commits on the coordinator. Only if a table of the
//! coordinator is in the metadata does Citus find out first whether the coordinator can commit.

use sqlx::{AssertSqlSafe, Connection, Executor, PgPool};
use tower_fence::{AdmitError, Fence, Resource, Token, TokenUse};

use crate::support::citus::{Cluster, STOCK};

/// Returns whether the write of a failed COMMIT remains, and the highest token that remains.
async fn after_a_failed_commit(cluster: &Cluster, admit: &str, max_token: &str) -> (bool, i64) {
    // Each of two transactions reads what the other one writes. No serial order allows this, so the
    // second COMMIT fails.
    cluster
        .execute(
            "CREATE TABLE skew (id int PRIMARY KEY, n int); INSERT INTO skew VALUES (1, 0), (2, 0)",
        )
        .await;
    let (mut failing, mut other) = (cluster.connect().await, cluster.connect().await);
    for conn in [&mut failing, &mut other] {
        let begin = "BEGIN ISOLATION LEVEL SERIALIZABLE";
        conn.execute(begin).await.unwrap();
    }
    let admit = AssertSqlSafe(admit.to_owned());
    failing.execute(admit).await.unwrap();
    for (conn, id) in [(&mut failing, 1), (&mut other, 2)] {
        conn.execute("SELECT sum(n) FROM skew").await.unwrap();
        let write = sqlx::query("UPDATE skew SET n = 1 WHERE id = $1").bind(id);
        write.execute(conn).await.unwrap();
    }
    let write = "UPDATE inventory SET n = n - 1 WHERE sku = 'sku-1'";
    failing.execute(write).await.unwrap();
    other.execute("COMMIT").await.unwrap();
    let error = failing.execute("COMMIT").await.unwrap_err();
    let code = error.as_database_error().and_then(|error| error.code());
    assert_eq!(code.as_deref(), Some("40001"), "{error}");
    for conn in [failing, other] {
        conn.close().await.unwrap();
    }
    let stock = "SELECT n FROM inventory WHERE sku = 'sku-1'";
    let stock: i64 = cluster.read(stock).await;
    (stock < STOCK, cluster.read(max_token).await)
}

#[tokio::test]
async fn a_failed_commit_leaves_neither_write_nor_token() {
    let cluster = Cluster::with_fence().await;
    let admit = "SELECT tower_fence.admit('sku-1', 1)";
    let max_token = "SELECT coalesce(tower_fence.max_token('sku-1'), 0)";
    let left = after_a_failed_commit(&cluster, admit, max_token).await;
    assert_eq!(left, (false, 0));
}

/// The fence must not use a plain local table, as this test does.
#[tokio::test]
async fn plain_local_tables_leave_a_write_without_its_token() {
    let cluster = Cluster::start().await;
    cluster.make_inventory().await;
    cluster
        .execute("CREATE TABLE tokens (resource text PRIMARY KEY, max_token bigint NOT NULL)")
        .await;
    let admit = "INSERT INTO tokens VALUES ('sku-1', 1)";
    let max_token = "SELECT coalesce(max(max_token), 0) FROM tokens";
    let left = after_a_failed_commit(&cluster, admit, max_token).await;
    assert_eq!(left, (true, 0));
    cluster
        .execute("SELECT citus_add_local_table_to_metadata('tokens'); DROP TABLE skew")
        .await;
    cluster
        .execute(&format!("UPDATE inventory SET n = {STOCK}"))
        .await;
    let left = after_a_failed_commit(&cluster, admit, max_token).await;
    assert_eq!(left, (false, 0), "a table in the metadata of Citus");
}

#[tokio::test]
async fn fence_with_citus_installed_later_needs_a_migration() {
    let cluster = Cluster::start().await;
    let fence = cluster.fence().await;
    fence.migrate().await.unwrap();
    fence.check().await.unwrap();
    for state in [
        // The state of a cluster that was created around an existing fence.
        "DROP TRIGGER fence_two_phases ON tower_fence.resources",
        // The state after the dump of a cluster was restored in another cluster.
        "SELECT undistribute_table('tower_fence.commit_marks')",
    ] {
        cluster.execute(state).await;
        let sku = Resource::new("sku-1").unwrap();
        let refused = format!("{:?}", fence.check().await.unwrap_err());
        assert_contains!(refused, "Citus");
        let fresh = cluster.fence().await;
        let value = Token::new(rand::random_range(1..1_000_000)).unwrap();
        let refused = fresh.begin(&sku, value, TokenUse::SingleUse).await;
        assert!(matches!(refused, Err(AdmitError::Misconfigured(_))));
        fence.migrate().await.unwrap();
        fence.check().await.unwrap();
        let fresh = cluster.fence().await;
        let admitted = fresh.begin(&sku, value, TokenUse::SingleUse).await;
        drop(admitted.unwrap());
    }
}

/// A program that was started before the nodes were added does not check the fence again. Clients
/// that use only SQL never check it.
#[tokio::test]
async fn fence_created_before_the_nodes_refuses_every_write() {
    let cluster = Cluster::apart().await;
    cluster.execute("CREATE EXTENSION citus").await;
    let fence = cluster.fence().await;
    fence.migrate().await.unwrap();
    let sku = Resource::new("sku-1").unwrap();
    let take = async |value: i64| {
        let begun = fence.begin(&sku, Token::new(value).unwrap(), TokenUse::SingleUse);
        begun.await?.commit().await.unwrap();
        Ok::<_, AdmitError>(())
    };
    take(1).await.unwrap();
    cluster.join().await;
    assert_matches!(take(2).await, Err(AdmitError::Misconfigured(_)));
    let calls = [
        "SELECT tower_fence.admit('sku-1', 2)",
        "SELECT tower_fence.raise('sku-2', 2)",
        "SELECT tower_fence.next_epoch(1::smallint, 1)",
        "SELECT tower_fence.bypass('a reason')",
    ];
    for call in calls {
        let refused = cluster.try_execute(call).await.expect_err(call);
        let refused = refused.as_database_error().unwrap();
        assert_eq!(refused.code().as_deref(), Some("55000"), "{refused}");
        assert_contains!(
            refused.message(),
            "this server is the coordinator of a Citus cluster"
        );
    }
    fence.migrate().await.unwrap();
    take(2).await.unwrap();
    for call in calls {
        cluster
            .try_execute(&call.replace('2', "3"))
            .await
            .expect(call);
    }
}

/// With schema-based sharding, Citus places the tables of each new schema on one worker.
#[tokio::test]
async fn schema_of_a_fence_is_not_placed_on_a_worker() {
    let cluster = Cluster::start().await;
    cluster
        .execute("ALTER DATABASE postgres SET citus.enable_schema_based_sharding = on")
        .await;
    let first = cluster.fence().await;
    first.migrate().await.unwrap();
    first.check().await.unwrap();
    let second = cluster
        .fence_with(|fence| fence.schema("second").unwrap())
        .await;
    let mut conn = cluster.connect().await;
    conn.execute("BEGIN").await.unwrap();
    let script = AssertSqlSafe(second.schema_sql());
    sqlx::raw_sql(script).execute(&mut conn).await.unwrap();
    let setting: String = sqlx::query_scalar("SHOW citus.enable_schema_based_sharding")
        .fetch_one(&mut conn)
        .await
        .unwrap();
    assert_eq!(setting, "on");
    conn.execute("COMMIT").await.unwrap();
    second.check().await.unwrap();
}

#[tokio::test]
async fn fence_on_a_worker_is_refused() {
    let cluster = Cluster::with_fence().await;
    let worker = PgPool::connect(&cluster.workers[0].url("postgres"))
        .await
        .unwrap();
    let fence = Fence::new(worker);
    let refused = format!("{:?}", fence.migrate().await.unwrap_err());
    assert!(
        refused.contains("coordinator") || refused.contains("worker"),
        "{refused}"
    );
    assert!(fence.check().await.is_err());
}
