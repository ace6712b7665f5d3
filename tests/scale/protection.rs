//! Protected tables that are distributed together with the fence.

use std::sync::atomic::{AtomicBool, AtomicI64, Ordering::SeqCst};

use sqlx::{PgConnection, Postgres, postgres::PgDatabaseError};
use tower_fence::{AdmitError, TokenUse};

use super::distributed::{is_stale, resource, take, token};
use crate::support::{
    citus::{Cluster, STOCK},
    database::TestDatabase,
    eventually,
    functions::execute,
};

async fn protected() -> Cluster {
    let cluster = Cluster::with_distributed_fence().await;
    cluster
        .execute(
            "SET citus.enable_unsafe_triggers = on; SELECT tower_fence.protect('inventory', '{sku}')",
        )
        .await;
    cluster
}

/// The SQLSTATE and the message of a refusal.
async fn refusal(conn: &mut PgConnection, sql: &str) -> (String, String) {
    let refused = execute(conn, sql).await.expect_err(sql);
    (refused.code, refused.message)
}

/// Returns a connection to the worker that has the shard of a resource, and the name of the shard.
async fn shard_of(cluster: &Cluster, sku: &str) -> (PgConnection, String) {
    let shard: i64 = cluster
        .read(&format!(
            "SELECT get_shard_id_for_distribution_column('inventory', '{sku}')"
        ))
        .await;
    let worker = &cluster.workers[cluster.worker_of(sku).await];
    (worker.connect().await, format!("inventory_{shard}"))
}

#[tokio::test]
async fn table_is_protected_only_if_its_guard_reads_the_fence() {
    let cluster = Cluster::with_distributed_fence().await;
    let set = "SET citus.enable_unsafe_triggers = on";
    for (protect, reason) in [
        (
            "SELECT tower_fence.protect('inventory', '{sku}')".to_owned(),
            set,
        ),
        (
            format!("{set}; SELECT tower_fence.protect('inventory', 'sku/{{sku}}')"),
            "the pattern of public.inventory must be {sku}",
        ),
        (
            format!(
                "{set}; SET citus.enable_ddl_propagation = off; SELECT tower_fence.protect('inventory', '{{sku}}')"
            ),
            "citus.enable_ddl_propagation = on",
        ),
        (
            format!(
                "CREATE SCHEMA \"App\"; CREATE TABLE \"App\".item (sku text COLLATE \"C\" PRIMARY KEY); \
                 SELECT create_distributed_table('\"App\".item', 'sku', colocate_with => 'inventory'); \
                 {set}; SELECT tower_fence.protect('\"App\".item', '{{sku}}')"
            ),
            "the name of its schema needs quotes",
        ),
    ] {
        let refused = cluster.try_execute(&protect).await.unwrap_err().to_string();
        assert_contains!(refused, reason);
    }
}

#[tokio::test]
async fn unadmitted_row_is_refused_on_its_worker() {
    let cluster = protected().await;
    let fence = cluster.fence().await;
    let mut conn = cluster.connect().await;
    let (mut on_worker, shard) = shard_of(&cluster, "sku-1").await;
    for sql in [
        "UPDATE inventory SET n = 0 WHERE sku = 'sku-1'",
        "UPDATE inventory SET n = 0",
        "INSERT INTO inventory VALUES ('sku-99', 1)",
        "INSERT INTO inventory SELECT sku || 'x', n FROM inventory",
        "DELETE FROM inventory WHERE sku = 'sku-1'",
    ] {
        let (code, message) = refusal(&mut conn, sql).await;
        assert_eq!(code, "TF428", "{sql}: {message}");
        assert_contains!(message, "public.inventory is written without");
    }
    let on_shard = format!("UPDATE {shard} SET n = 0");
    assert_eq!(refusal(&mut on_worker, &on_shard).await.0, "TF428");
    let write = sqlx::raw_sql("UPDATE inventory SET n = 0").execute(&mut conn);
    let refused = write.await.unwrap_err().into_database_error().unwrap();
    let hint = refused
        .downcast::<PgDatabaseError>()
        .hint()
        .map(str::to_owned);
    assert_contains!(hint.unwrap(), "tower_fence.unprotect()");
    let (code, message) = refusal(&mut conn, "TRUNCATE inventory").await;
    assert_eq!(code, "0A000", "{message}");

    take(&fence, &resource(1), 5).await.unwrap();
    is_stale(take(&fence, &resource(1), 5).await, 5, 5);
    let admit = "SELECT tower_fence.admit('sku-1', 6)";
    // Three admissions that do not count: one of another resource, one that was rolled back, and
    // one of an earlier transaction.
    for begin in [
        "SELECT tower_fence.admit('sku-2', 6)".to_owned(),
        format!("SAVEPOINT s; {admit}; ROLLBACK TO s"),
        format!("{admit}; COMMIT; BEGIN"),
    ] {
        let mut conn = cluster.connect().await;
        let begin = format!("BEGIN; {begin}");
        for statement in begin.split("; ") {
            Postgres::run(&mut conn, statement).await;
        }
        let write = "UPDATE inventory SET n = 0 WHERE sku = 'sku-1'";
        assert_eq!(refusal(&mut conn, write).await.0, "TF428", "{begin}");
    }
    let both = [(resource(1), token(9)), (resource(2), token(9))];
    let mut tx = fence.begin_all(&both, TokenUse::SingleUse).await.unwrap();
    let write = "UPDATE inventory SET n = n - 1 WHERE sku IN ('sku-1', 'sku-2')";
    sqlx::query(write).execute(&mut *tx).await.unwrap();
    tx.commit().await.unwrap();
    let left: String = cluster
        .read("SELECT string_agg(n::text, ' ' ORDER BY sku) FROM inventory WHERE sku IN ('sku-1', 'sku-2')")
        .await;
    assert_eq!(left, format!("{} {}", STOCK - 2, STOCK - 1));
}

#[tokio::test]
async fn role_whose_only_fence_privilege_is_admit_can_write() {
    let cluster = protected().await;
    cluster
        .execute(
            "CREATE ROLE writer LOGIN; GRANT SELECT, UPDATE ON inventory TO writer; \
             GRANT USAGE ON SCHEMA tower_fence TO writer; \
             GRANT EXECUTE ON FUNCTION tower_fence.admit TO writer",
        )
        .await;
    let mut conn = cluster.connect().await;
    for statement in [
        "SET SESSION AUTHORIZATION writer",
        "BEGIN",
        "SELECT tower_fence.admit('sku-3', 1)",
        "UPDATE inventory SET n = n - 1 WHERE sku = 'sku-3'",
        "COMMIT",
    ] {
        sqlx::raw_sql(statement).execute(&mut conn).await.unwrap();
    }
    let write = "UPDATE inventory SET n = n - 1 WHERE sku = 'sku-3'";
    assert_eq!(refusal(&mut conn, write).await.0, "TF428");
    no_guard_is_public(&cluster).await;
}

async fn no_guard_is_public(cluster: &Cluster) {
    let open = "SELECT count(*) FROM pg_proc AS p WHERE p.proname LIKE 'fence\\_guard%' \
         AND has_function_privilege('public', p.oid, 'EXECUTE')";
    for node in cluster.workers.iter().chain([&cluster.coordinator]) {
        let mut conn = node.connect().await;
        let open: i64 = sqlx::query_scalar(open).fetch_one(&mut conn).await.unwrap();
        assert_eq!(open, 0);
    }
}

/// Citus 13.2 writes the names of functions without quotes when it sends REVOKE to the workers.
#[tokio::test]
async fn table_whose_name_needs_quotes_is_protected() {
    let cluster = Cluster::with_distributed_fence().await;
    let set = "SET citus.enable_unsafe_triggers = on";
    let mut conn = cluster.connect().await;
    for table in ["item", "\"Item\"", "\"a b-ü\""] {
        cluster
            .execute(&format!(
                "CREATE TABLE {table} (sku text COLLATE \"C\" PRIMARY KEY, n bigint NOT NULL); \
                 SELECT create_distributed_table('{table}', 'sku', colocate_with => 'inventory'); \
                 {set}; SELECT tower_fence.protect('{table}', '{{sku}}'); SELECT tower_fence.protect('{table}', '{{sku}}')"
            ))
            .await;
        let write = format!("INSERT INTO {table} VALUES ('sku-1', 1)");
        assert_eq!(refusal(&mut conn, &write).await.0, "TF428", "{table}");
        no_guard_is_public(&cluster).await;
        cluster
            .execute(&format!(
                "{set}; SELECT tower_fence.unprotect('{table}'); {write}"
            ))
            .await;
    }
}

#[tokio::test]
async fn guard_of_a_previous_owner_is_removed_from_moved_shards() {
    let cluster = protected().await;
    let from = cluster.worker_of("sku-1").await;
    cluster.move_shard("sku-1", 1 - from).await;
    cluster
        .execute(
            "CREATE ROLE heir; GRANT CREATE ON SCHEMA public TO heir; GRANT USAGE ON SCHEMA tower_fence TO heir; \
             GRANT EXECUTE ON FUNCTION tower_fence.require_admission TO heir; \
             ALTER TABLE inventory OWNER TO heir; SET citus.enable_unsafe_triggers = on; \
             SELECT tower_fence.protect('inventory', '{sku}')",
        )
        .await;
    let mut conn = cluster.connect().await;
    let write = "UPDATE inventory SET n = 0";
    assert_eq!(refusal(&mut conn, write).await.0, "TF428");
    cluster
        .execute(
            "SET citus.enable_unsafe_triggers = on; SELECT tower_fence.unprotect('inventory'); TRUNCATE inventory",
        )
        .await;
}

#[tokio::test]
async fn guard_refuses_writes_after_its_table_leaves_the_fence() {
    let cluster = protected().await;
    cluster
        .execute(
            "SET citus.enable_unsafe_triggers = on; \
             SELECT alter_distributed_table('inventory', colocate_with => 'none')",
        )
        .await;
    let mut conn = cluster.connect().await;
    sqlx::raw_sql("BEGIN; SELECT tower_fence.admit('sku-1', 5)")
        .execute(&mut conn)
        .await
        .unwrap();
    let write = "UPDATE inventory SET n = 0 WHERE sku = 'sku-1'";
    let (code, message) = refusal(&mut conn, write).await;
    assert_eq!(code, "55000", "{message}");
    assert_contains!(message, "not a shard that is colocated");
}

#[tokio::test]
async fn an_owner_writes_without_admissions_while_the_protection_is_off() {
    let cluster = protected().await;
    let mut conn = cluster.connect().await;
    for statement in [
        "SET citus.enable_unsafe_triggers = on",
        "BEGIN",
        "SELECT tower_fence.unprotect('inventory')",
        "UPDATE inventory SET n = n - 1",
        "SELECT tower_fence.protect('inventory', '{sku}')",
        "COMMIT",
    ] {
        sqlx::raw_sql(statement).execute(&mut conn).await.unwrap();
    }
    let write = "UPDATE inventory SET n = n - 1";
    assert_eq!(refusal(&mut conn, write).await.0, "TF428");
    let (_, message) = refusal(&mut conn, "SELECT tower_fence.bypass('a reason')").await;
    assert_contains!(message, "Call unprotect()");
    let unprotect = "SELECT tower_fence.unprotect('inventory')";
    Postgres::run(&mut conn, "RESET citus.enable_unsafe_triggers").await;
    let (_, message) = refusal(&mut conn, unprotect).await;
    assert_contains!(message, "citus.enable_unsafe_triggers = on");
    let set =
        "SET citus.enable_unsafe_triggers = on; SET citus.enable_ddl_propagation = off; COMMIT";
    sqlx::raw_sql(set).execute(&mut conn).await.unwrap();
    let (_, message) = refusal(&mut conn, unprotect).await;
    assert_contains!(message, "citus.enable_ddl_propagation = on");
}

#[tokio::test]
async fn a_protected_shard_that_moves_keeps_its_guard() {
    let cluster = protected().await;
    let fence = cluster.fence().await;
    take(&fence, &resource(1), 1).await.unwrap();
    let (from, ended, written) = (
        cluster.worker_of("sku-1").await,
        AtomicBool::new(false),
        AtomicI64::new(1),
    );
    // During the move, Citus replays concurrent writes on the other worker.
    let name = resource(1);
    let writer = async {
        while !ended.load(SeqCst) {
            let value = written.load(SeqCst) + 1;
            let begun = fence.begin(&name, token(value), TokenUse::SingleUse);
            match begun.await {
                Ok(mut tx) => {
                    let write = "UPDATE inventory SET n = n - 1 WHERE sku = 'sku-1'";
                    match sqlx::query(write).execute(&mut *tx).await {
                        Ok(_) => {
                            tx.commit().await.unwrap();
                            written.store(value, SeqCst);
                        }
                        // The move waits for this transaction, which waits for the move.
                        Err(error) => assert!(error.to_string().contains("deadlock"), "{error}"),
                    }
                }
                // The shard has moved.
                Err(AdmitError::Stale(_) | AdmitError::Unavailable(_) | AdmitError::Busy(_)) => {
                    tokio::task::yield_now().await;
                }
                Err(error) => panic!("{error:?}"),
            }
        }
    };
    let mover = async {
        eventually!("some writes are acknowledged", written.load(SeqCst) > 5);
        let before = written.load(SeqCst);
        cluster.move_shard("sku-1", 1 - from).await;
        ended.store(true, SeqCst);
        before
    };
    let (before, ()) = tokio::join!(mover, writer);
    let written = written.load(SeqCst);
    assert!(written > before, "no write during the move");
    let left: i64 = cluster
        .read("SELECT n FROM inventory WHERE sku = 'sku-1'")
        .await;
    assert_eq!(left, STOCK - written);
    assert_eq!(cluster.worker_of("sku-1").await, 1 - from);
    let (mut on_worker, shard) = shard_of(&cluster, "sku-1").await;
    let write = format!("UPDATE {shard} SET n = 0 WHERE sku = 'sku-1'");
    assert_eq!(refusal(&mut on_worker, &write).await.0, "TF428");
    take(&fence, &resource(1), 1_000_000).await.unwrap();
    // Citus has copied each trigger to the shard, even one that the other shards do not have.
    let unprotect =
        "SET citus.enable_unsafe_triggers = on; SELECT tower_fence.unprotect('inventory')";
    cluster.execute(unprotect).await;
    let (mut on_worker, _) = shard_of(&cluster, "sku-1").await;
    Postgres::run(&mut on_worker, &write).await;
}
