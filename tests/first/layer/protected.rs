//! Handlers that write to a protected table, in each mode of the layer.

use axum::{
    Extension, Router,
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::post,
};
use sqlx::{AssertSqlSafe, Postgres};
use tower_fence::{
    FenceLayer, Idempotency, PathParam, PgFencedTx, PgPendingWrite,
    layer::{DatabaseError, Refusal},
};

use crate::support::{
    database::{Fresh, TestDatabase},
    http::{Answer, Server},
    log::Log,
};

/// The resource of the row that a handler writes.
#[derive(Clone, Copy)]
struct Writes(&'static str);

impl Writes {
    fn statement(self) -> AssertSqlSafe<String> {
        let Self(sku) = self;
        AssertSqlSafe(format!("UPDATE stock SET n = n + 1 WHERE sku = '{sku}'"))
    }
}

async fn write(writes: Extension<Writes>, mut tx: PgFencedTx) -> Result<StatusCode, DatabaseError> {
    sqlx::query(writes.statement()).execute(&mut *tx).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn swallow(writes: Extension<Writes>, tx: PgFencedTx) -> StatusCode {
    let _ = write(writes, tx).await;
    StatusCode::NO_CONTENT
}

async fn begin(writes: Extension<Writes>, pending: PgPendingWrite) -> Result<StatusCode, Response> {
    let tx = pending.begin().await.map_err(Refusal::into_response)?;
    let written = write(writes, tx).await;
    written.map_err(DatabaseError::into_response)
}

async fn at_once(
    writes: Extension<Writes>,
    pending: PgPendingWrite,
) -> Result<StatusCode, Response> {
    let AssertSqlSafe(statement) = writes.statement();
    let statement = AssertSqlSafe(format!(
        "{statement} AND EXISTS (SELECT FROM fence) RETURNING n"
    ));
    let written = pending.write::<(i64,)>(statement).await;
    let written = written.map_err(IntoResponse::into_response)?;
    assert_eq!(written.len(), 1);
    Ok(StatusCode::NO_CONTENT)
}

/// Leaves the write to a trigger that fires at COMMIT.
async fn later(
    Extension(Writes(sku)): Extension<Writes>,
    mut tx: PgFencedTx,
) -> Result<StatusCode, DatabaseError> {
    sqlx::query("INSERT INTO later VALUES ($1)")
        .bind(sku)
        .execute(&mut *tx)
        .await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn nothing(_: PgFencedTx) -> StatusCode {
    StatusCode::NO_CONTENT
}

async fn start(db: &Fresh<Postgres>, writes: Writes) -> Server {
    let layer = FenceLayer::new(db.fence(), PathParam("r"));
    let hooked = layer.clone().on_begin(move |_, conn| {
        Box::pin(async move {
            sqlx::query(writes.statement()).execute(conn).await?;
            Ok(())
        })
    });
    let both = FenceLayer::new(db.fence(), [PathParam("r"), PathParam("s")]);
    let (reusable, deferred) = (layer.clone().reusable(), layer.clone().deferred());
    let keys = |layer: FenceLayer<_, _>| layer.idempotent(Idempotency::optional());
    let (keyed, deferred_keyed) = (keys(layer.clone()), keys(deferred.clone()));
    let app = Router::new()
        .route("/{r}/eager", post(write).route_layer(layer.clone()))
        .route("/{r}/reusable", post(write).route_layer(reusable))
        .route("/{r}/keys", post(write).route_layer(keyed))
        .route("/{r}/begin", post(begin).route_layer(deferred.clone()))
        .route("/{r}/at-once", post(at_once).route_layer(deferred))
        .route(
            "/{r}/at-once-keys",
            post(at_once).route_layer(deferred_keyed),
        )
        .route("/{r}/{s}/several", post(write).route_layer(both))
        .route("/{r}/later", post(later).route_layer(layer.clone()))
        .route("/{r}/hook", post(nothing).route_layer(hooked.clone()))
        .route(
            "/{r}/hook-at-once",
            post(at_once).route_layer(hooked.deferred()),
        )
        .route("/{r}/swallow", post(swallow).route_layer(layer));
    Server::start(app.layer(Extension(writes))).await
}

async fn with_stock() -> Fresh<Postgres> {
    let db = Postgres::fresh(4).await;
    db.execute(
        "INSERT INTO stock VALUES ('mine', 0), ('others', 0); SELECT tower_fence.protect('stock', '{sku}'); \
         CREATE TABLE later (sku TEXT); \
         CREATE FUNCTION later() RETURNS trigger LANGUAGE plpgsql AS \
             'BEGIN UPDATE stock SET n = n + 1 WHERE sku = NEW.sku; RETURN NULL; END'; \
         CREATE CONSTRAINT TRIGGER later AFTER INSERT ON later DEFERRABLE INITIALLY DEFERRED \
             FOR EACH ROW EXECUTE FUNCTION later()",
    )
    .await;
    db
}

const ROUTES: [&str; 10] = [
    "eager",
    "reusable",
    "keys",
    "begin",
    "at-once",
    "at-once-keys",
    "and/several",
    "later",
    "hook",
    "hook-at-once",
];

async fn ask(server: &Server, route: &str, token: i64) -> Answer {
    let mut tokens = format!("{token};resource=\"mine\"");
    if route == "and/several" {
        tokens += &format!(", {token};resource=\"and\"");
    }
    let request = server.post(&format!("/mine/{route}"));
    let request = request.header("Fencing-Token", tokens);
    Answer::to(request.header("Idempotency-Key", format!("\"{token}\""))).await
}

#[tokio::test]
async fn admitted_write_succeeds_in_each_mode() {
    let db = with_stock().await;
    let server = start(&db, Writes("mine")).await;
    let mut token = 0;
    for route in ROUTES.into_iter().chain(ROUTES) {
        token += 1;
        let answer = ask(&server, route, token).await;
        assert_eq!(answer.status, 204, "{route}: {answer:?}");
    }
    // One route writes twice, because its hook writes too.
    let written = "SELECT n FROM stock WHERE sku = 'mine'";
    assert_eq!(db.number(written).await, 2 * 11);
}

#[tokio::test]
async fn unadmitted_write_is_refused_and_named_only_in_the_log() {
    let db = with_stock().await;
    // The whole test runs in this thread.
    let (log, _guard) = Log::of_this_thread("info");
    let server = start(&db, Writes("others")).await;
    for (token, route) in (1..).zip(ROUTES.into_iter().chain(ROUTES)) {
        log.take();
        let answer = ask(&server, route, token).await;
        answer.is_problem(500, "unfenced-write");
        let is_named = ["stock", "others"].map(|name| answer.text.contains(name));
        assert_eq!(is_named, [false; 2], "{answer:?}");
        let lines = log.take();
        let names_it = "public.stock is written without an admission of others";
        let is_error = |line: &str| line.contains("ERROR") && line.contains(names_it);
        assert!(lines.lines().any(is_error), "{route}: {lines}");
    }
    // At COMMIT, the first error is no longer known.
    let answer = ask(&server, "swallow", 100).await;
    answer.is_problem(500, "transaction-aborted");
    assert_eq!(db.number("SELECT sum(n)::bigint FROM stock").await, 0);
}
