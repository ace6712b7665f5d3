//! The tables of the fence: who makes them, and who only uses them.

use std::time::Duration;

use axum::{Router, routing::post};
use sqlx::{
    Connection, PgConnection, Postgres,
    postgres::{PgConnectOptions, PgPoolOptions},
};
use tokio::time::timeout;
use tower_fence::{
    AdmitError, Fence, FenceLayer, PathParam, PgFencedTx, Resource, Token, TokenUse,
};

use crate::support::{
    database::{Fresh, TestDatabase},
    eventually,
    functions::{admit, execute, is_refused},
    http::Server,
};

/// A role with no more rights than the documentation lists, and a fence that is used as this role.
async fn restricted(db: &Fresh<Postgres>) -> (String, Fence<Postgres>) {
    let role = format!("tower_fence_test_{:016x}", rand::random::<u64>());
    db.execute(&format!(
        "CREATE ROLE {role} LOGIN PASSWORD '{role}';
         REVOKE CREATE ON SCHEMA public FROM PUBLIC;
         GRANT USAGE ON SCHEMA public TO {role};
         GRANT SELECT ON _tower_fence_migrations, fence_epoch_source TO {role};
         GRANT SELECT, INSERT, UPDATE ON fence_resources, fence_epochs TO {role};
         GRANT SELECT, INSERT, UPDATE, DELETE ON fence_idempotency_keys TO {role};
         GRANT SELECT, UPDATE (lockable) ON fence_floors TO {role};
         GRANT INSERT ON ledger TO {role};"
    ))
    .await;
    let options: PgConnectOptions = db.url.parse().unwrap();
    let options = options.username(&role).password(&role);
    let pool = PgPoolOptions::new().max_connections(2);
    let pool = pool.connect_with(options).await.unwrap();
    (role, Fence::new(pool))
}

#[tokio::test]
async fn where_the_tables_are_current_no_right_to_make_any_is_needed() {
    let db = Postgres::fresh(2).await;
    let (role, fence) = restricted(&db).await;
    fence.migrate().await.unwrap();
    let sku = Resource::new("sku-1").unwrap();
    let tx = fence.begin(&sku, Token::new(1).unwrap(), TokenUse::SingleUse);
    let mut tx = tx.await.unwrap();
    Postgres::execute(&mut tx, "INSERT INTO ledger VALUES (1)")
        .await
        .unwrap();
    tx.commit().await.unwrap();
    assert_eq!(db.entries().await, 1);

    // Behind by a migration, it does not pass for current.
    db.execute("DELETE FROM _tower_fence_migrations WHERE version = (SELECT max(version) FROM _tower_fence_migrations)")
        .await;
    fence.migrate().await.unwrap_err();
    fence.get_pool().close().await;
    db.execute(&format!("DROP OWNED BY {role}; DROP ROLE {role}"))
        .await;
}

#[tokio::test]
async fn a_service_without_tables_is_misconfigured_and_says_what_to_do() {
    let db = Postgres::fresh(2).await;
    db.execute("DROP TABLE fence_resources").await;
    let server = |fence| async {
        let app = Router::new()
            .route("/{sku}", post(|_: PgFencedTx| async {}))
            .route_layer(FenceLayer::new(fence, PathParam("sku")));
        Server::start(app).await
    };
    let first_use = server(db.fence()).await;
    let known_schema = server(db.fence().schema("public")).await;
    for server in [first_use, known_schema] {
        let answer = server.write("/sku-1", 5).await;
        answer.is_problem(500, "misconfigured");
        assert!(answer.text.contains("Fence::migrate"), "{answer:?}");
        assert!(!answer.text.contains("fence_resources"), "{answer:?}");
    }
    let sku = Resource::new("sku-1").unwrap();
    let inspected = db.fence().inspect(&sku).await;
    assert!(
        matches!(inspected, Err(AdmitError::NotMigrated(_))),
        "{inspected:?}"
    );
}

/// A schema that comes before that of the tables in the search path, as one of the user's name does,
/// gets no tables of its own: what is dead stays dead.
#[tokio::test]
async fn tables_that_the_search_path_has_are_not_made_again_in_another_schema() {
    let db = Postgres::fresh(2).await;
    let sku = Resource::new("sku-1").unwrap();
    db.fence()
        .raise(&sku, Token::new(6).unwrap())
        .await
        .unwrap();
    db.execute("CREATE SCHEMA app").await;
    let options: PgConnectOptions = db.url.parse().unwrap();
    let options = options.options([("search_path", "app, public")]);
    let pool = PgPoolOptions::new().connect_with(options).await.unwrap();
    let fence = Fence::new(pool);
    fence.migrate().await.unwrap();
    assert_eq!(fence.inspect(&sku).await.unwrap(), Some(5));
    let made = "SELECT count(*) FROM pg_tables WHERE schemaname = 'app'";
    assert_eq!(db.number(made).await, 0);
    // And no session of the pool has another search path than before.
    let path: String = sqlx::query_scalar("SHOW search_path")
        .fetch_one(fence.get_pool())
        .await
        .unwrap();
    assert_eq!(path, "app, public");
}

#[tokio::test]
async fn each_tenant_may_have_tables_in_a_schema_of_its_own() {
    let db = Postgres::fresh(2).await;
    db.execute("CREATE SCHEMA red; CREATE SCHEMA blue").await;
    let sku = Resource::new("sku-1").unwrap();
    for (tenant, token) in [("red", 7), ("blue", 3)] {
        let fence = db.fence().schema(tenant);
        fence.migrate().await.unwrap();
        fence.migrate().await.unwrap();
        fence.raise(&sku, Token::new(token).unwrap()).await.unwrap();
        assert_eq!(fence.inspect(&sku).await.unwrap(), Some(token - 1));
    }
    assert_eq!(db.fence().inspect(&sku).await.unwrap(), None);
    db.fence().schema("nowhere").migrate().await.unwrap_err();
}

/// Who may not write the history is told what is wrong with it, and not that something may not be made.
#[tokio::test]
async fn a_history_that_does_not_fit_is_named_as_what_it_is() {
    let db = Postgres::fresh(2).await;
    let (role, fence) = restricted(&db).await;
    let wrong = [
        (
            "UPDATE _tower_fence_migrations SET checksum = '\\x00' WHERE version = 2",
            "modified",
        ),
        (
            "UPDATE _tower_fence_migrations SET version = 99 WHERE version = 2",
            "missing",
        ),
        (
            "UPDATE _tower_fence_migrations SET success = false WHERE version = 99",
            "partially applied",
        ),
    ];
    for (statement, expected) in wrong {
        db.execute(statement).await;
        let error = fence.migrate().await.unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    fence.get_pool().close().await;
    db.execute(&format!("DROP OWNED BY {role}; DROP ROLE {role}"))
        .await;
}

/// What is wrong with a fence at its first use, if anything is.
async fn flaw(fence: &Fence<Postgres>) -> Option<String> {
    let sku = Resource::new("sku-1").unwrap();
    let checked = fence.check().await;
    let token = Token::new(rand::random_range(1..1_000_000)).unwrap();
    match fence.begin(&sku, token, TokenUse::SingleUse).await {
        Err(AdmitError::Misconfigured(cause)) => {
            assert!(
                matches!(checked, Err(AdmitError::Misconfigured(_))),
                "{checked:?}"
            );
            Some(cause.to_string())
        }
        outcome => {
            outcome.unwrap();
            checked.unwrap();
            None
        }
    }
}

#[tokio::test]
async fn row_security_on_tables_of_the_fence_is_misconfigured() {
    let db = Postgres::fresh(2).await;
    let (role, fence) = restricted(&db).await;
    db.execute(&format!(
        "GRANT EXECUTE ON FUNCTION fence_catch_up TO {role}"
    ))
    .await;
    assert_eq!(flaw(&fence).await, None);
    for (change, hidden_from_all) in [
        (
            "ALTER TABLE fence_resources ENABLE ROW LEVEL SECURITY",
            false,
        ),
        ("ALTER TABLE fence_resources FORCE ROW LEVEL SECURITY", true),
    ] {
        db.execute(change).await;
        // A fence keeps what it has found.
        let again = fence.clone().schema("public");
        let found = flaw(&again).await.unwrap_or_default();
        assert!(
            found.contains("row-level security hides rows of fence_resources"),
            "{found}"
        );
        assert_eq!(flaw(&db.fence()).await.is_some(), hidden_from_all);
    }
    let app = Router::new()
        .route("/{sku}", post(|_: PgFencedTx| async {}))
        .route_layer(FenceLayer::new(db.fence(), PathParam("sku")));
    let answer = Server::start(app).await.write("/sku-1", 5).await;
    answer.is_problem(500, "misconfigured");

    // The functions run as the owner.
    db.execute(&format!(
        "ALTER TABLE fence_resources DISABLE ROW LEVEL SECURITY; CREATE SCHEMA own AUTHORIZATION {role}; \
         GRANT ALL ON SCHEMA own TO {role}"
    ))
    .await;
    let own = fence.clone().schema("own");
    own.migrate().await.unwrap();
    let mut conn = own.get_pool().acquire().await.unwrap();
    execute(
        &mut conn,
        "SET search_path = own; ALTER TABLE fence_floors ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY",
    )
    .await
    .unwrap();
    let refused = is_refused(admit(&mut conn, "sku-1", 5).await, "42501");
    assert!(
        refused.message.contains("row-level security"),
        "{refused:?}"
    );
    drop(conn);
    fence.get_pool().close().await;
    db.execute(&format!("DROP OWNED BY {role} CASCADE; DROP ROLE {role}"))
        .await;
}

/// Any role can take the advisory lock under which sqlx migrates.
#[tokio::test]
async fn migrate_gives_up_waiting_for_locks() {
    let db = Postgres::fresh(3).await;
    // As if there was a version to be migrated to.
    db.execute("ALTER TABLE _tower_fence_migrations RENAME TO elsewhere")
        .await;
    let waiting = "SELECT count(*) FROM pg_stat_activity \
         WHERE datname = current_database() AND wait_event_type = 'Lock'";
    let advisory = "SELECT (l.classid::bigint << 32) | l.objid::bigint FROM pg_locks AS l \
         JOIN pg_database AS d ON d.oid = l.database \
         WHERE d.datname = current_database() AND l.locktype = 'advisory'";
    // Held up by a table, it has that lock.
    let mut stranger = PgConnection::connect(&db.url).await.unwrap();
    let make = "BEGIN; CREATE TABLE _tower_fence_migrations (version bigint)";
    execute(&mut stranger, make).await.unwrap();
    let first = tokio::spawn({
        let fence = db.fence();
        async move { fence.migrate().await }
    });
    eventually("migrate waits", async || db.number(waiting).await > 0).await;
    let number = db.number(advisory).await;
    first.abort();
    _ = first.await;
    execute(&mut stranger, "ROLLBACK").await.unwrap();
    eventually("the lock is free", async || {
        let free = format!("SELECT pg_try_advisory_lock({number})::int::bigint");
        Postgres::number(&mut stranger, &free).await.unwrap() == 1
    })
    .await;
    let refused = timeout(Duration::from_secs(60), db.fence().migrate()).await;
    let refused = refused.expect("migrate waits without limit").unwrap_err();
    assert!(refused.to_string().contains("lock timeout"), "{refused}");
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
            format!("the encoding of the database is {encoding}, and the fence needs UTF8");
        assert!(refused.contains(&expected), "{refused}");
    }
}

/// Functions without which no failover is noticed: missing is one thing, failing is another.
#[tokio::test]
async fn only_missing_wal_functions_switch_failovers_off() {
    let db = Postgres::fresh(2).await;
    let role = format!("tower_fence_test_{:016x}", rand::random::<u64>());
    db.execute(&format!(
        "CREATE ROLE {role} LOGIN PASSWORD '{role}'; CREATE SCHEMA own AUTHORIZATION {role}; \
         REVOKE EXECUTE ON FUNCTION pg_walfile_name FROM PUBLIC"
    ))
    .await;
    let options: PgConnectOptions = db.url.parse().unwrap();
    let options = options.username(&role).password(&role);
    let pool = PgPoolOptions::new().max_connections(2);
    let pool = pool.connect_with(options).await.unwrap();
    let fence = Fence::new(pool).schema("own");
    let refused = fence.migrate().await.unwrap_err().to_string();
    assert!(
        refused.contains("permission denied for function pg_walfile_name"),
        "{refused}"
    );
    db.execute("ALTER FUNCTION pg_walfile_name(pg_lsn) RENAME TO pg_walfile_name_elsewhere")
        .await;
    fence.migrate().await.unwrap();
    let unnoticed = "SELECT count(*) FROM own.fence_floors WHERE history = ''";
    assert_eq!(db.number(unnoticed).await, 256);
    fence.get_pool().close().await;
    db.execute(&format!("DROP OWNED BY {role} CASCADE; DROP ROLE {role}"))
        .await;
}
