//! The whole schema as one script, for applications that migrate with another tool.

use sqlx::{AssertSqlSafe, Pool, Postgres, Sqlite, sqlite::SqlitePoolOptions};
use tower_fence::Fence;

use crate::support::{
    database::{Fresh, TestDatabase, read},
    fence::{is_stale, write},
    process::{Process, psql},
};

/// Returns each row of the migration history, and all other properties that differ between schemas.
async fn described(pool: &Pool<Postgres>) -> Vec<String> {
    let describe = "SELECT concat_ws(' ', version, description, success, encode(checksum, 'hex'), \
             installed_on, execution_time) FROM tower_fence.migrations \
         UNION ALL SELECT concat_ws(' ', table_name, column_name, data_type, is_nullable, \
             column_default, collation_name) FROM information_schema.columns \
             WHERE table_schema = 'tower_fence' \
         UNION ALL SELECT indexdef FROM pg_indexes WHERE schemaname = 'tower_fence' \
         UNION ALL SELECT concat_ws(' ', oid::regclass, relkind, relacl) FROM pg_class \
             WHERE relnamespace = 'tower_fence'::regnamespace \
         UNION ALL SELECT concat_ws(' ', oid::regprocedure, prosecdef, provolatile, proacl, \
             proconfig, prosrc) FROM pg_proc WHERE pronamespace = 'tower_fence'::regnamespace \
         UNION ALL SELECT concat('source ', id) FROM tower_fence.epoch_source ORDER BY 1";
    sqlx::query_scalar(describe).fetch_all(pool).await.unwrap()
}

/// Returns the description without the values that differ between runs.
async fn made(pool: &Pool<Postgres>) -> Vec<String> {
    let forget = "UPDATE tower_fence.migrations SET installed_on = 'epoch', execution_time = 0; \
         UPDATE tower_fence.epoch_source SET id = ''";
    sqlx::raw_sql(forget).execute(pool).await.unwrap();
    described(pool).await
}

async fn emptied() -> Fresh<Postgres> {
    let db = Postgres::fresh(2).await;
    db.execute("DROP SCHEMA tower_fence CASCADE").await;
    db
}

#[tokio::test]
async fn after_the_script_migrate_changes_nothing_on_postgres() {
    let by_hand = emptied().await;
    by_hand.execute(&by_hand.fence().schema_sql()).await;
    let before = described(&by_hand.pool).await;
    let fence = by_hand.fence();
    fence.migrate().await.unwrap();
    assert_eq!(described(&by_hand.pool).await, before);
    write(&fence, 5).await.unwrap();
    is_stale(write(&fence, 5).await, 5, 5);
    assert_eq!(by_hand.entries().await, 1);

    let by_migrate = Postgres::fresh(1).await;
    assert_eq!(made(&by_hand.pool).await, made(&by_migrate.pool).await);
}

#[tokio::test]
async fn script_restores_the_search_path_of_its_transaction() {
    let db = emptied().await;
    let mut tx = db.pool.begin().await.unwrap();
    let script = format!(
        "SET LOCAL search_path = public, pg_temp; {}",
        db.fence().schema_sql()
    );
    Postgres::run(&mut tx, &script).await;
    let path: String = read(&mut *tx, "SELECT current_setting('search_path')").await;
    assert_eq!(path, "public, pg_temp");
}

#[tokio::test]
async fn migrate_applies_the_steps_that_a_database_lacks() {
    let migrated = Postgres::fresh(1).await;
    let script = migrated.fence().schema_sql();
    let by_migrate = made(&migrated.pool).await;
    for version in 2..=3 {
        let (older, newer) = script
            .split_once(&format!("-- Version {version}: "))
            .unwrap();
        for by_hand in [true, false] {
            let db = emptied().await;
            db.execute(older).await;
            if by_hand {
                db.execute(&format!("-- {newer}")).await;
            }
            db.fence().migrate().await.unwrap();
            assert_eq!(made(&db.pool).await, by_migrate, "from {version}");
        }
    }
}

/// The two parts are applied in separate transactions of one session, as by a migration tool that
/// replays both in an empty database.
#[tokio::test]
async fn upgrade_by_hand_keeps_privileges_and_the_search_path() {
    let db = emptied().await;
    let script = db.fence().schema_sql();
    let (older, newer) = script.split_once("-- Version 4: ").unwrap();
    let (_, rights) = newer.split_once("-1);\n").unwrap();
    let role = db.role("").await.name;
    let mut conn = db.pool.acquire().await.unwrap();
    for part in [
        format!("SET search_path = public; {older}{rights}"),
        format!(
            "GRANT EXECUTE ON FUNCTION tower_fence.max_token TO {role}; \
             GRANT SELECT ON tower_fence.resources TO {role}"
        ),
        format!("BEGIN; -- {newer}; INSERT INTO ledger (entry) VALUES (1); COMMIT"),
    ] {
        Postgres::run(&mut conn, &part).await;
    }
    let kept = format!(
        "SELECT has_function_privilege('{role}', 'tower_fence.max_token(text)', 'EXECUTE') \
         AND has_table_privilege('{role}', 'tower_fence.resources', 'SELECT')"
    );
    let kept: bool = read(&db.pool, &kept).await;
    assert!(kept);
}

#[tokio::test]
async fn after_the_script_migrate_changes_nothing_on_sqlite() {
    let pool = |max| SqlitePoolOptions::new().max_connections(max);
    let by_hand = pool(1).connect("sqlite::memory:").await.unwrap();
    let script = Fence::new(by_hand.clone()).schema_sql();
    sqlx::raw_sql(AssertSqlSafe(script))
        .execute(&by_hand)
        .await
        .unwrap();
    let history = "SELECT concat_ws(' ', version, description, success, hex(checksum), \
         installed_on) FROM tower_fence_migrations";
    let history = async |pool: &Pool<Sqlite>| -> Vec<String> {
        sqlx::query_scalar(history).fetch_all(pool).await.unwrap()
    };
    let before = history(&by_hand).await;
    let fence = Fence::new(by_hand.clone());
    fence.migrate().await.unwrap();
    assert_eq!(history(&by_hand).await, before);
    sqlx::raw_sql("CREATE TABLE ledger (entry BIGINT)")
        .execute(&by_hand)
        .await
        .unwrap();
    write(&fence, 5).await.unwrap();
    is_stale(write(&fence, 5).await, 5, 5);

    let by_migrate = Sqlite::fresh(1).await;
    let columns = async |pool: &Pool<Sqlite>| -> Vec<String> {
        let columns = "SELECT concat_ws(' ', m.name, c.name, c.type, c.\"notnull\", c.dflt_value, c.pk) \
             FROM sqlite_master AS m JOIN pragma_table_info(m.name) AS c \
             WHERE m.name LIKE '%fence%' ORDER BY 1";
        sqlx::query_scalar(columns).fetch_all(pool).await.unwrap()
    };
    let made = columns(&by_hand).await;
    assert!(made.len() > 15, "{made:?}");
    assert_eq!(made, columns(&by_migrate.pool).await);
}

#[tokio::test]
async fn psql_applies_the_script() {
    let db = emptied().await;
    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().join("schema.sql");
    std::fs::write(&script, db.fence().schema_sql()).unwrap();
    let mut command = psql(&db.url);
    command
        .args(["-1", "-v", "ON_ERROR_STOP=1", "-f"])
        .arg(script);
    let mut psql = Process::run(command);
    let status = psql.exit().await;
    assert!(status.success() && psql.log().is_empty(), "{}", psql.log());
    db.fence().migrate().await.unwrap();
}
