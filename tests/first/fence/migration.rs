//! The tables of the fence: the roles that create them, and the roles that only use them.

use std::{error::Error, time::Duration};

use futures_util::future::join_all;
use sqlx::{
    Connection, PgConnection, Postgres, Sqlite,
    postgres::{PgConnectOptions, PgPoolOptions},
};
use tokio::time::timeout;
use tower_fence::{AdmitError, Fence, Token};

use crate::support::{
    database::{Fresh, TestDatabase, read},
    eventually,
    fence::{resource, sku, token, use_up, write},
    functions::refuses,
};

/// Returns a role that may only write, and a fence that connects as this role.
async fn restricted(db: &Fresh<Postgres>) -> (String, Fence<Postgres>) {
    let rights = "GRANT USAGE ON SCHEMA tower_fence TO {role};
         GRANT SELECT ON tower_fence.migrations TO {role};
         GRANT SELECT, UPDATE (max_token, updated_at, admitted_by) ON tower_fence.resources TO {role};
         GRANT EXECUTE ON FUNCTION tower_fence.current_history, tower_fence.try_admit TO {role};
         GRANT INSERT ON ledger TO {role};";
    let role = db.role(rights).await;
    let fence = Fence::new(role.pool().await);
    (role.name, fence)
}

#[tokio::test]
async fn current_tables_need_no_create_right() {
    let db = Postgres::fresh(2).await;
    let (_, fence) = restricted(&db).await;
    fence.migrate().await.unwrap();
    write(&fence, 1).await.unwrap();
    assert_eq!(db.entries().await, 1);

    // A schema that lacks one migration is not regarded as current.
    let forget = "DELETE FROM tower_fence.migrations WHERE version = (SELECT max(version) FROM tower_fence.migrations)";
    db.execute(forget).await;
    fence.migrate().await.unwrap_err();
}

#[tokio::test]
async fn missing_tables_are_misconfigured_and_name_the_remedy() {
    let db = Postgres::fresh(2).await;
    db.execute("DROP TABLE tower_fence.resources").await;
    let elsewhere = db.fence_with(|fence| fence.schema("elsewhere").unwrap());
    for refused in [
        use_up(&elsewhere, &sku(), token(5)).await,
        use_up(&db.fence(), &sku(), Token::MAX).await,
        db.fence().inspect(&sku()).await.map(drop),
    ] {
        let Err(error @ AdmitError::NotMigrated(_)) = refused else {
            panic!("{refused:?}");
        };
        assert_contains!(error.to_string(), "Fence::migrate");
        let cause = error.source().expect("its cause");
        assert_contains!(cause.to_string(), "Fence::migrate");
    }
}

#[tokio::test]
async fn search_path_does_not_lead_migrate_to_another_schema() {
    let db = Postgres::fresh(2).await;
    db.fence().raise(&sku(), token(6)).await.unwrap();
    db.execute("CREATE SCHEMA app").await;
    let options: PgConnectOptions = db.url.parse().unwrap();
    let options = options.options([("search_path", "app")]);
    let pool = PgPoolOptions::new().connect_with(options).await.unwrap();
    let fence = Fence::new(pool);
    fence.migrate().await.unwrap();
    assert_eq!(fence.inspect(&sku()).await.unwrap(), Some(5));
    let made = "SELECT count(*) FROM pg_tables WHERE schemaname IN ('app', 'public') \
         AND tablename IN ('resources', 'migrations')";
    assert_eq!(db.number(made).await, 0);
    // The search path of the pool's sessions is unchanged.
    let path: String = read(fence.pool(), "SHOW search_path").await;
    assert_eq!(path, "app");
}

#[tokio::test]
async fn each_tenant_may_have_its_own_schema() {
    let db = Postgres::fresh(2).await;
    // One of the schemas already exists.
    db.execute("CREATE SCHEMA blue").await;
    for (tenant, value) in [("red", 7), ("blue", 3)] {
        let fence = db.fence_with(|fence| fence.schema(tenant).unwrap());
        fence.migrate().await.unwrap();
        fence.migrate().await.unwrap();
        fence.raise(&sku(), token(value)).await.unwrap();
        assert_eq!(fence.inspect(&sku()).await.unwrap(), Some(value - 1));
    }
    assert_eq!(db.fence().inspect(&sku()).await.unwrap(), None);

    // A role without the right to create a schema can use a schema that it owns.
    let (role, fence) = restricted(&db).await;
    let own = with_schema(&fence, "own");
    let refused = own.migrate().await.unwrap_err().to_string();
    assert_contains!(refused, "permission denied");
    db.execute(&format!("CREATE SCHEMA own AUTHORIZATION {role}"))
        .await;
    own.migrate().await.unwrap();
    own.raise(&sku(), token(5)).await.unwrap();
}

/// The owner of the schema could replace functions that the migrating role executes.
#[tokio::test]
async fn schema_of_another_role_is_refused() {
    let db = Postgres::fresh(3).await;
    let (owner, fence) = restricted(&db).await;
    let (member, of_member) = restricted(&db).await;
    db.execute(&format!(
        "CREATE SCHEMA own AUTHORIZATION {owner}; GRANT {owner} TO {member}"
    ))
    .await;
    let expected = format!("the schema own belongs to the role {owner}");
    let is_refused = async |fence: &Fence<Postgres>| {
        let refused = fence.migrate().await.unwrap_err().to_string();
        assert!(refused.contains(&expected), "{refused}");
    };
    let of_superuser = db.fence_with(|fence| fence.schema("own").unwrap());
    let of_member = with_schema(&of_member, "own");
    is_refused(&of_superuser).await;
    is_refused(&of_member).await;
    let mut conn = PgConnection::connect(&db.url).await.unwrap();
    let refused = refuses(&mut conn, &of_superuser.schema_sql(), "42501").await;
    assert!(refused.message.starts_with(&expected), "{refused:?}");

    // This role is the owner after SET ROLE.
    let options = of_member.pool().connect_options();
    let options = options.as_ref().clone().options([("role", &owner)]);
    let pool = PgPoolOptions::new().connect_with(options).await.unwrap();
    let of_owner = with_schema(&Fence::new(pool.clone()), "own");
    of_owner.migrate().await.unwrap();
    pool.close().await;
    // A superuser must not read these tables, because the owner can replace them by views.
    is_refused(&of_superuser).await;
    of_member.migrate().await.unwrap();
    // A role that could have created the schema expects to be its owner.
    db.execute(&format!(
        "DO $$ BEGIN EXECUTE format('GRANT CREATE ON DATABASE %I TO {member}', current_database()); END $$"
    ))
    .await;
    is_refused(&of_member).await;

    for pool in [fence.pool(), of_member.pool()] {
        pool.close().await;
    }
    db.execute(&format!(
        "DROP OWNED BY {owner}, {member} CASCADE; DROP ROLE {owner}, {member}"
    ))
    .await;
}

/// Returns another fence over the same pool.
fn with_schema(fence: &Fence<Postgres>, schema: &str) -> Fence<Postgres> {
    let builder = Fence::builder().schema(schema).unwrap();
    builder.build(fence.pool().clone())
}

/// Each process of a service may call `migrate` when it starts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_migrations_all_succeed() {
    let db = Postgres::fresh(8).await;
    for schema in ["red", "blue", "green"] {
        let fences: [_; 8] =
            std::array::from_fn(|_| db.fence_with(|fence| fence.schema(schema).unwrap()));
        // The second time, the tables are current.
        for round in 0..3 {
            if round == 2 {
                // This is the state after a dump was loaded without privileges.
                let grant = format!("GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA {schema} TO PUBLIC");
                db.execute(&grant).await;
            }
            for migrated in join_all(fences.iter().map(Fence::migrate)).await {
                migrated.unwrap();
            }
        }
    }
}

#[tokio::test]
async fn schema_names_that_would_need_quotes_are_refused() {
    let longest = "x".repeat(63);
    for name in ["a", "_1", "tenant_7", &longest] {
        assert!(Fence::<Postgres>::builder().schema(name).is_ok(), "{name}");
    }
    let too_long = "x".repeat(64);
    for name in [
        "",
        "Shop",
        "odd \"name",
        "a.b",
        "7th",
        "pg_shop",
        "caf\u{e9}",
        &too_long,
    ] {
        assert!(Fence::<Postgres>::builder().schema(name).is_err(), "{name}");
    }
}

/// If a role cannot write the migration history, the error names the fault of the history, and not
/// the missing privilege to create tables.
#[tokio::test]
async fn mismatched_migration_history_is_named() {
    let db = Postgres::fresh(2).await;
    let (_, fence) = restricted(&db).await;
    for (change, expected) in [
        ("checksum = '\\x00' WHERE version = 2", "modified"),
        ("version = 99 WHERE version = 2", "missing"),
        ("success = false WHERE version = 99", "partially applied"),
    ] {
        let change = format!("UPDATE tower_fence.migrations SET {change}");
        db.execute(&change).await;
        let error = fence.migrate().await.unwrap_err().to_string();
        assert_contains!(error, expected);
    }
}

/// During an upgrade, processes of the old version may start after the migration.
#[tokio::test]
async fn tables_of_a_newer_version_are_left_unchanged_on_postgres() {
    let db = Postgres::fresh(2).await;
    db.execute(
        "INSERT INTO tower_fence.migrations (version, description, success, checksum, execution_time) \
         VALUES (99, 'newer', true, '\\x00', 1); CREATE FUNCTION tower_fence.newer() RETURNS integer LANGUAGE sql AS 'SELECT 1'",
    )
    .await;
    db.fence().migrate().await.unwrap();
    let open =
        "SELECT has_function_privilege('public', 'tower_fence.newer()', 'EXECUTE')::int::bigint";
    assert_eq!(db.number(open).await, 1);
    db.fence().raise(&sku(), token(5)).await.unwrap();
    // An earlier migration is missing.
    db.execute("DELETE FROM tower_fence.migrations WHERE version = 2")
        .await;
    let refused = db.fence().migrate().await.unwrap_err().to_string();
    assert!(refused.contains("migration 99"), "{refused}");
}

#[tokio::test]
async fn tables_of_a_newer_version_are_left_unchanged_on_sqlite() {
    let db = Sqlite::fresh(1).await;
    db.execute(
        "INSERT INTO tower_fence_migrations (version, description, success, checksum, execution_time) \
         VALUES (99, 'newer', true, X'00', 1)",
    )
    .await;
    db.fence().migrate().await.unwrap();
}

/// Returns the fault of a fence at its first use, if there is one.
async fn flaw(fence: &Fence<Postgres>) -> Option<String> {
    let checked = fence.check().await;
    match use_up(
        fence,
        &resource(&format!("{:x}", rand::random::<u128>())),
        token(5),
    )
    .await
    {
        Err(AdmitError::Misconfigured(cause)) => {
            assert_matches!(checked, Err(AdmitError::Misconfigured(_)));
            Some(cause.to_string())
        }
        outcome => {
            outcome.and(checked).unwrap();
            None
        }
    }
}

#[tokio::test]
async fn row_security_on_tables_of_the_fence_is_misconfigured() {
    let db = Postgres::fresh(2).await;
    let (role, fence) = restricted(&db).await;
    let grant = format!("GRANT EXECUTE ON FUNCTION tower_fence.catch_up TO {role}");
    db.execute(&grant).await;
    assert_eq!(flaw(&fence).await, None);
    for (change, hidden_from_all) in [("ENABLE", false), ("FORCE", true)] {
        let change = format!("ALTER TABLE tower_fence.resources {change} ROW LEVEL SECURITY");
        db.execute(&change).await;
        // The fence is new, because a fence caches the result of its check.
        let again = with_schema(&fence, "tower_fence");
        let found = flaw(&again).await.unwrap_or_default();
        let hides = "row-level security hides rows of resources in the schema tower_fence";
        assert_contains!(found, hides);
        assert_eq!(flaw(&db.fence()).await.is_some(), hidden_from_all);
    }

    // The functions run as their owner.
    db.execute(&format!(
        "ALTER TABLE tower_fence.resources DISABLE ROW LEVEL SECURITY; CREATE SCHEMA own AUTHORIZATION {role}; \
         GRANT ALL ON SCHEMA own TO {role}"
    ))
    .await;
    let own = with_schema(&fence, "own");
    own.migrate().await.unwrap();
    let mut conn = own.pool().acquire().await.unwrap();
    let hide = "SELECT own.admit('sku-1', 900); UPDATE own.floors SET floor = 800; \
         ALTER TABLE own.resources ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY; \
         CREATE POLICY low ON own.resources USING (max_token < 500) WITH CHECK (true)";
    Postgres::run(&mut conn, hide).await;
    refuses(&mut conn, "SELECT own.reset('sku-1', 100)", "42501").await;
    let hide = "ALTER TABLE own.floors ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY";
    Postgres::run(&mut conn, hide).await;
    let refused = refuses(&mut conn, "SELECT own.admit('sku-1', 5)", "42501").await;
    assert_contains!(refused.message, "row-level security");
    drop(conn);
}

/// Any role can take the advisory lock under which sqlx migrates.
#[tokio::test]
async fn migrate_gives_up_waiting_for_locks() {
    let db = Postgres::fresh(3).await;
    // This makes one migration appear to be missing.
    db.execute("ALTER TABLE tower_fence.migrations RENAME TO elsewhere")
        .await;
    let advisory = "SELECT (l.classid::bigint << 32) | l.objid::bigint FROM pg_locks AS l \
         JOIN pg_database AS d ON d.oid = l.database \
         WHERE d.datname = current_database() AND l.locktype = 'advisory'";
    // The migration waits for a table while it holds the advisory lock.
    let mut stranger = PgConnection::connect(&db.url).await.unwrap();
    let make = "BEGIN; CREATE TABLE tower_fence.migrations (version bigint)";
    Postgres::run(&mut stranger, make).await;
    let fence = db.fence();
    let first = tokio::spawn(async move { fence.migrate().await });
    db.waits_for_lock().await;
    let number = db.number(advisory).await;
    first.abort();
    _ = first.await;
    Postgres::run(&mut stranger, "ROLLBACK").await;
    let free = format!("SELECT pg_try_advisory_lock({number})::int::bigint");
    eventually!(
        "the lock is free",
        Postgres::number(&mut stranger, &free).await.unwrap() == 1
    );
    let refused = timeout(Duration::from_secs(60), db.fence().migrate()).await;
    let refused = refused.expect("migrate waits without limit").unwrap_err();
    assert_contains!(refused.to_string(), "lock timeout");
}

#[tokio::test]
async fn encodings_other_than_utf8_are_refused() {
    let db = Postgres::fresh(1).await;
    for encoding in ["LATIN1", "SQL_ASCII"] {
        let name = format!("{}_{:08x}", encoding.to_lowercase(), rand::random::<u32>());
        db.execute(&format!(
            "CREATE DATABASE {name} ENCODING '{encoding}' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0"
        ))
        .await;
        let options: PgConnectOptions = db.url.parse().unwrap();
        let pool = PgPoolOptions::new().max_connections(1);
        let pool = pool.connect_with(options.database(&name)).await.unwrap();
        let refused = Fence::new(pool.clone()).migrate().await;
        pool.close().await;
        db.execute(&format!("DROP DATABASE {name}")).await;
        let refused = refused.unwrap_err().to_string();
        let expected =
            format!("tower-fence needs a database with the encoding UTF8, not {encoding}");
        assert_contains!(refused, &expected);
    }
}

/// A migration would revoke the privileges of the application's roles on these objects.
#[tokio::test]
async fn schema_with_objects_of_the_application_is_refused() {
    let db = Postgres::fresh(1).await;
    for (schema, object) in [
        ("shop", "TABLE shop.orders (id bigint)"),
        ("words", "DOMAIN words.name AS text"),
        (
            "tools",
            "FUNCTION tools.one() RETURNS integer LANGUAGE sql AS 'SELECT 1'",
        ),
    ] {
        let set_up = format!("CREATE SCHEMA {schema}; CREATE {object}");
        db.execute(&set_up).await;
        let fence = db.fence_with(|fence| fence.schema(schema).unwrap());
        let refused = fence.migrate().await.unwrap_err().to_string();
        let expected = format!("the schema {schema} has objects that do not belong to the fence");
        assert_contains!(refused, &expected);
    }
}

#[tokio::test]
async fn restored_tables_without_rows_are_refused_with_the_remedy() {
    let db = Postgres::fresh(1).await;
    db.execute("TRUNCATE tower_fence.migrations, tower_fence.floors, tower_fence.epoch_source")
        .await;
    let refused = db.fence().migrate().await.unwrap_err().to_string();
    assert_contains!(refused, "no migration history");
    assert!(!refused.contains("do not belong"), "{refused}");
}

/// Otherwise the identity of a restored database would depend on the order of the rows.
#[tokio::test]
async fn second_source_of_epochs_is_refused() {
    let db = Postgres::fresh(1).await;
    let mut conn = db.pool.acquire().await.unwrap();
    let second = "INSERT INTO tower_fence.epoch_source (id) VALUES ('second')";
    refuses(&mut conn, second, "23505").await;
}

#[tokio::test]
async fn settings_of_plpgsql_do_not_make_migrate_fail() {
    let db = Postgres::fresh(1).await;
    let options: PgConnectOptions = db.url.parse().unwrap();
    let options = options.options([
        ("plpgsql.extra_errors", "all"),
        ("plpgsql.variable_conflict", "use_variable"),
    ]);
    let pool = PgPoolOptions::new().connect_with(options).await.unwrap();
    let builder = Fence::builder().schema("strict").unwrap();
    builder.build(pool).migrate().await.unwrap();
}

/// A REVOKE by the owner does not remove what another role has granted.
#[tokio::test]
async fn privileges_that_another_role_has_granted_to_public_are_revoked() {
    let db = Postgres::fresh(1).await;
    let (role, second) = (db.role("").await.name, db.role("").await.name);
    let bypass = "EXECUTE ON FUNCTION tower_fence.bypass(text)";
    let create = "CREATE ON SCHEMA tower_fence";
    db.execute(&format!(
        "GRANT USAGE ON SCHEMA tower_fence TO {role}, {second}; \
         GRANT {bypass} TO {role} WITH GRANT OPTION; GRANT {create} TO {role} WITH GRANT OPTION; \
         SET ROLE {role}; GRANT {create} TO PUBLIC; GRANT {bypass} TO {second} WITH GRANT OPTION; \
         SET ROLE {second}; GRANT {bypass} TO PUBLIC; RESET ROLE"
    ))
    .await;
    let granted = async |to: &str| {
        db.number(&format!(
            "SELECT count(*) FROM aclexplode((SELECT proacl FROM pg_proc WHERE oid = 'tower_fence.bypass'::regproc) \
             || (SELECT nspacl FROM pg_namespace WHERE nspname = 'tower_fence')) AS r \
             WHERE r.privilege_type IN ('EXECUTE', 'CREATE') AND r.grantee = {to}"
        ))
        .await
    };
    assert_eq!(granted("0").await, 2);
    db.fence().migrate().await.unwrap();
    assert_eq!(granted("0").await, 0);
    assert_eq!(granted(&format!("'{role}'::regrole")).await, 2);
}

/// Without the timeline, failovers cannot be detected. The operator must accept this explicitly.
#[tokio::test]
async fn hidden_timeline_fails_migrate_unless_failover_detection_is_off() {
    let db = Postgres::fresh(2).await;
    let own = "CREATE SCHEMA own AUTHORIZATION {role}; \
         REVOKE EXECUTE ON FUNCTION pg_walfile_name FROM PUBLIC";
    let pool = db.role(own).await.pool().await;
    let fence = Fence::builder().schema("own").unwrap().build(pool);
    let refused = fence.migrate().await.unwrap_err().to_string();
    let undetected = "no failover can be detected: permission denied for function pg_walfile_name";
    assert_contains!(refused, undetected);
    let builder = Fence::builder().schema("own").unwrap();
    let undetected = builder.failover_detection(false);
    let undetected = undetected.build(fence.pool().clone());
    undetected.migrate().await.unwrap();
    assert_eq!(db.count("own.floors WHERE history = ''").await, 256);
    // The choice is stored.
    fence.migrate().await.unwrap();
    use_up(&fence, &sku(), token(5)).await.unwrap();
    assert_eq!(fence.inspect(&sku()).await.unwrap(), Some(5));
}

/// Managed services keep their timeline when they restore data, so it does not show a failover.
#[tokio::test]
async fn kept_timeline_fails_migrate_unless_failover_detection_is_off() {
    for (sign, named) in [
        (
            "SET allow_system_table_mods = on; \
             CREATE FUNCTION pg_catalog.aurora_version() RETURNS text LANGUAGE sql AS 'SELECT ''17.4'''",
            "Aurora cluster",
        ),
        (
            "DO $$ BEGIN EXECUTE \
                 format('ALTER DATABASE %I SET neon.timeline_id = ''1''', current_database()); END $$",
            "branch of Neon",
        ),
    ] {
        let db = Postgres::fresh(1).await;
        db.execute("DROP SCHEMA tower_fence CASCADE").await;
        db.execute(sign).await;
        let pool = PgPoolOptions::new().connect(&db.url).await.unwrap();
        let refused = Fence::new(pool.clone()).migrate().await.unwrap_err();
        assert!(refused.to_string().contains(named), "{refused}");
        let undetected = Fence::builder().failover_detection(false).build(pool);
        undetected.migrate().await.unwrap();
        let unnoticed = "tower_fence.floors WHERE history = ''";
        assert_eq!(db.count(unnoticed).await, 256);
        undetected.pool().close().await;
    }
}
