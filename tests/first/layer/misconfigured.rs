//! A database that is not set up for the fence. The response is 500, because a retry does not help,
//! and the log names the fault.

use axum::{
    Router,
    routing::{get, post},
};
use serde_json::json;
use sqlx::{PgPool, Postgres};
use tower_fence::{
    Fence, FenceLayer, PathParam, PendingWrite, PgFencedTx, PgPendingWrite,
    fence::WriteError,
    issuer,
    layer::DatabaseError,
    lease::{MemoryLeases, PostgresLeases},
};

use crate::support::{
    database::{TestDatabase, on_both_databases},
    http::{Answer, Server},
    log::Log,
    redis::{connect_shared, fresh_prefix},
};

/// All rights that the fence needs.
const RIGHTS: &str = "GRANT USAGE ON SCHEMA tower_fence TO {role};
    GRANT ALL ON ALL TABLES IN SCHEMA tower_fence TO {role};
    GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA tower_fence TO {role};";

/// Starts the layer, and issuers over three stores whose epochs come from the fence.
async fn start(pool: PgPool) -> Server {
    let fence = Fence::new(pool);
    let redis = connect_shared(fence.clone(), &fresh_prefix()).await;
    let postgres = PostgresLeases::new(fence.clone());
    let app = Router::new()
        .route("/write/{r}", post(|| async {}).get(|| async { "read" }))
        .route_layer(FenceLayer::new(fence.clone(), PathParam("r")))
        .route("/", get(|| async {}))
        .nest("/postgres", issuer::router(postgres))
        .nest("/memory", issuer::router(MemoryLeases::new(fence)))
        .nest("/redis", issuer::router(redis));
    Server::start(app).await
}

const ISSUERS: &[&str] = &["/postgres/r", "/memory/r", "/redis/r"];
const EPOCHS: &[&str] = &["/memory/r", "/redis/r"];
const LAYER: &[&str] = &["/write/r"];
const ALL: &[&str] = &["/write/r", "/postgres/r", "/memory/r", "/redis/r"];

/// Statements that damage the database, the paths that then answer `misconfigured`, and the text
/// that the log contains.
#[rustfmt::skip]
const FAULTS: &[(&str, &[&str], &str)] = &[
    ("REVOKE UPDATE ON tower_fence.resources FROM {role}", LAYER, "table resources"),
    (
        "REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA tower_fence FROM {role}",
        ALL,
        "permission denied for function",
    ),
    ("REVOKE USAGE ON SCHEMA tower_fence FROM {role}", ALL, "USAGE on the schema tower_fence"),
    ("DROP TABLE tower_fence.resources CASCADE", ALL, "call `Fence::migrate`"),
    ("DROP TABLE tower_fence.leases CASCADE", &["/postgres/r"], "tower_fence.leases"),
    ("DROP TABLE tower_fence.epochs CASCADE", EPOCHS, "tower_fence.epochs"),
    ("ALTER TABLE tower_fence.resources ENABLE ROW LEVEL SECURITY", LAYER, "row-level security"),
    (
        // A crash of the server empties unlogged tables.
        "ALTER TABLE tower_fence.resources SET UNLOGGED; ALTER TABLE tower_fence.leases SET UNLOGGED; \
         ALTER TABLE tower_fence.queues SET UNLOGGED",
        ALL,
        "unlogged tables leases, queues, resources",
    ),
    (
        // The policy applies to the owner as well, so the owner's functions do not see the rows
        // either.
        "ALTER TABLE tower_fence.floors ENABLE ROW LEVEL SECURITY; ALTER TABLE tower_fence.floors FORCE ROW LEVEL SECURITY; \
         UPDATE tower_fence.floors SET history = 'another'; ALTER TABLE tower_fence.floors OWNER TO {role}; \
         DO $$ DECLARE f regprocedure; BEGIN \
             FOR f IN SELECT oid FROM pg_proc WHERE pronamespace = 'tower_fence'::regnamespace AND prokind = 'f' LOOP \
                 EXECUTE format('ALTER FUNCTION %s OWNER TO {role}', f); \
             END LOOP; \
         END $$",
        ALL,
        "row-level security",
    ),
    ("DELETE FROM tower_fence.floors", ALL, "restored in part"),
    (
        // Aurora without logical replication.
        "CREATE OR REPLACE FUNCTION tower_fence.current_history() RETURNS text LANGUAGE plpgsql AS $$ BEGIN \
             RAISE object_not_in_prerequisite_state USING MESSAGE = 'wal_level must be set to ''logical'''; \
         END $$",
        ALL,
        "wal_level must be set",
    ),
];

#[tokio::test]
async fn missing_rights_and_tables_are_500_and_logged() {
    // The whole test runs in this thread.
    let (log, _guard) = Log::of_this_thread("warn,tower_fence::event=trace");
    let event = r#"event="refused" problem="misconfigured" resource="r""#;
    let mut others = vec![];
    for (fault, misconfigured, named) in FAULTS {
        let db = Postgres::fresh(2).await;
        let role = db.role(RIGHTS).await;
        db.execute(&fault.replace("{role}", &role.name)).await;
        let server = start(role.pool().await).await;
        for path in *misconfigured {
            log.take();
            let request = server.post(path).header("Fencing-Token", "5");
            let request = match ISSUERS.contains(path) {
                true => request.json(&json!({ "ttl_ms": 30_000 })),
                false => request,
            };
            let answer = Answer::to(request).await;
            let lines = log.take();
            let errors: String = lines
                .lines()
                .filter(|line| line.contains("ERROR"))
                .collect();
            if answer.status != 500
                || !answer.text.contains("#misconfigured")
                || answer.headers.contains_key("retry-after")
                || answer.text.contains("tower_fence.")
                || !errors.contains(named)
                || !(ISSUERS.contains(path) || errors.contains("fence{route=\"/"))
                || !(ISSUERS.contains(path) || lines.contains(event))
                // The log must not contain a line number of the server's C code.
                || errors.contains(" at line ")
            {
                others.push(format!("{fault}: {path}: {answer:?} {lines}"));
            }
        }
    }
    assert!(others.is_empty(), "{}", others.join("\n"));
}

on_both_databases!(a_statement_with_too_few_arguments_is_500);

async fn a_statement_with_too_few_arguments_is_500<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let handler = async |pending: PendingWrite<DB>| -> Result<(), WriteError> {
        let insert = "INSERT INTO ledger SELECT $1 + $2 FROM fence RETURNING entry";
        pending.write::<()>(insert).await?;
        Ok(())
    };
    let layer = FenceLayer::new(db.fence(), PathParam("r")).deferred();
    let answer = Server::at("/{r}", post(handler).route_layer(layer))
        .await
        .write("/r", 5)
        .await;
    answer.is_problem(500, "transaction-aborted");
    assert!(!answer.headers.contains_key("retry-after"), "{answer:?}");
}

/// The handler reads a number as text. The write is committed, and the response does not claim
/// otherwise.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_of_another_type_do_not_deny_the_write() {
    async fn handler(pending: PgPendingWrite) -> Result<(), WriteError> {
        let insert = sqlx::query("INSERT INTO ledger SELECT 5 FROM fence RETURNING entry");
        pending.write::<(String,)>(insert).await?;
        Ok(())
    }
    let db = Postgres::fresh(2).await;
    let layer = FenceLayer::new(db.fence(), PathParam("r")).deferred();
    let answer = Server::at("/{r}", post(handler).route_layer(layer))
        .await
        .write("/r", 5)
        .await;
    answer.is_problem(500, "rows-unreadable");
    assert_eq!(db.entries().await, 1);
}

/// Wrong arguments are a bug in one statement, and not a reason to close its connection.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_arguments_of_a_handler_keep_its_connection() {
    async fn handler(mut tx: PgFencedTx) -> Result<(), DatabaseError> {
        let insert = sqlx::query("INSERT INTO ledger VALUES ($1::bigint + $2::bigint)");
        insert.bind(5_i64).execute(&mut *tx).await?;
        Ok(())
    }
    let db = Postgres::fresh(1).await;
    let layer = FenceLayer::new(db.fence(), PathParam("r"));
    let server = Server::at("/{r}", post(handler).route_layer(layer)).await;
    let backend = async || db.number("SELECT pg_backend_pid()::bigint").await;
    let before = backend().await;
    server.refuses("/r", 5, 500, "transaction-aborted").await;
    assert_eq!(backend().await, before);
}
