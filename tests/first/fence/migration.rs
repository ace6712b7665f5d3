//! The tables of the fence: who makes them, and who only uses them.

use axum::{Router, routing::post};
use sqlx::{
    Postgres,
    postgres::{PgConnectOptions, PgPoolOptions},
};
use tower_fence::{
    AdmitError, Fence, FenceLayer, PathParam, PgFencedTx, Resource, Token, TokenUse,
};

use crate::support::{
    database::{Fresh, TestDatabase},
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
