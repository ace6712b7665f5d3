//! A client that disconnects while its handler is in the middle of a statement.

use std::time::Duration;

use axum::{Router, routing::post};
use sqlx::{Executor, PgPool, Postgres};
use tokio::time::Instant;
use tower_fence::{FenceBuilder, FenceLayer, PathParam, PgFencedTx, Resource, Token, TokenUse};

use crate::{database::Fresh, http::Server};

/// The maximum time until the session has ended. The server detects a disconnect within two
/// seconds, but a busy machine may take longer.
pub const BOUND: Duration = Duration::from_secs(20);

/// The statements during which the client disconnects, each with a description.
const MIDST: [(&str, &str); 3] = [
    ("asleep", "SELECT pg_sleep(60)"),
    (
        "waiting for a row lock",
        "UPDATE stock SET n = n + 1 WHERE sku = 'locked'",
    ),
    (
        "in a long UPDATE",
        "UPDATE stock SET n = (SELECT count(*) FROM generate_series(1, 2000000000)) WHERE sku = 'free'",
    ),
];

/// Disconnects a client while its handler runs each kind of statement. Checks that the row is
/// unlocked, the session has ended, and the token can be used. With `exhausted`, no other
/// connection of the pool is available.
pub async fn leaves_no_lock_and_no_session(
    db: &Fresh<Postgres>,
    settings: FenceBuilder<Postgres>,
    pool: PgPool,
    exhausted: bool,
) {
    // These timeouts are too long to end the statement during the test.
    let fence = settings
        .hold_timeout(Duration::from_secs(120))
        .lock_timeout(Duration::from_secs(120))
        .build(pool.clone());
    let (resource, one) = (Resource::new("r").unwrap(), Token::new(1).unwrap());
    // This raise creates the row. It fails if an earlier call has already created the row.
    let _ = fence.raise(&resource, one).await;
    db.execute("DELETE FROM stock; INSERT INTO stock VALUES ('locked', 0), ('free', 0)")
        .await;
    let mut locker = db.pool.begin().await.unwrap();
    locker
        .execute("SELECT FROM stock WHERE sku = 'locked' FOR UPDATE")
        .await
        .unwrap();
    for (midst, statement) in MIDST {
        let handler = move |mut tx: PgFencedTx| async move {
            tx.execute("INSERT INTO ledger VALUES (1)").await.unwrap();
            tx.execute(statement).await.unwrap();
        };
        let app = Router::new()
            .route("/{r}", post(handler))
            .route_layer(FenceLayer::new(fence.clone(), PathParam("r")));
        let server = Server::start(app).await;
        let request = server.post("/r").header("Fencing-Token", "5").send();
        let client = tokio::spawn(request);
        let active = format!(
            "SELECT coalesce(max(pid), 0)::bigint FROM pg_stat_activity \
             WHERE datname = current_database() AND state = 'active' AND query = $q${statement}$q$"
        );
        eventually!("the statement runs", db.number(&active).await > 0);
        let session = db.number(&active).await;
        let session = format!("SELECT count(*) FROM pg_stat_activity WHERE pid = {session}");
        let row = "SELECT count(*) FROM (SELECT FROM tower_fence.resources WHERE resource = 'r' \
                   FOR UPDATE SKIP LOCKED) AS r";
        assert_eq!(db.number(row).await, 0, "{midst}: the row is not locked");
        let mut held = Vec::new();
        while exhausted && held.len() + 1 < pool.options().get_max_connections() as usize {
            held.push(pool.acquire().await.unwrap());
        }

        let began = Instant::now();
        client.abort();
        eventually!("the row is unlocked", db.number(row).await == 1);
        let unlocked = began.elapsed();
        eventually!("the session has ended", db.number(&session).await == 0);
        let gone = began.elapsed();
        println!(
            "{midst}, exhausted: {exhausted}: unlocked after {unlocked:?}, gone after {gone:?}"
        );
        assert!(gone < BOUND, "{midst}, exhausted: {exhausted}: {gone:?}");
        assert_eq!(db.entries().await, 0);
        let token = Token::new(5).unwrap();
        let tx = fence.begin(&resource, token, TokenUse::Reusable).await;
        tx.unwrap().commit().await.unwrap();
    }
    locker.rollback().await.unwrap();
    pool.close().await;
}
