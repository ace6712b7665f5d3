//! The layer over real HTTP, over both databases.

use std::{convert::Infallible, sync::Arc, time::Duration};

use axum::{
    Extension, Router,
    body::{Body, Bytes},
    extract::Path,
    http::{HeaderName, StatusCode, request::Parts},
    response::{IntoResponse, Response},
    routing::{any, get, post},
};
use reqwest::header::HeaderValue;
use sqlx::Postgres;
use tokio::{sync::Notify, time::timeout};
use tower_fence::{
    Admitted, CommitError, Fence, FenceLayer, FencedTx, HeaderField, InvalidResource, PathParam,
    Resource, Token, TokenUse, layer::Rejection,
};

use crate::support::{
    database::{Fresh, Nested, TestDatabase, on_both_databases},
    eventually,
    http::{Answer, Server},
};

on_both_databases!(
    a_write_commits_with_the_fence_and_a_stale_one_is_refused,
    a_handler_that_ignores_the_transaction_is_protected,
    a_failed_handler_writes_nothing_keeps_its_token_and_kills_older_ones,
    a_panic_writes_nothing_and_kills_older_ones,
    a_handler_over_its_time_is_ended_and_kills_older_ones,
    a_swallowed_error_is_no_success,
    a_transaction_in_a_spawned_task_is_no_success,
    a_transaction_in_the_response_body_is_no_success,
    a_deferred_constraint_that_fails_at_commit_is_no_success,
    an_open_nested_transaction_is_no_success,
    a_handler_may_commit_by_itself,
    reusable_tokens_write_again,
    a_fenced_read_kills_older_writers_and_a_plain_read_does_not,
    each_wrong_token_has_its_answer,
    each_wrong_body_has_its_answer,
    a_slow_body_holds_nothing,
    resources_come_from_the_path_a_header_or_a_closure,
    a_layer_around_the_whole_router_fails_closed,
    a_busy_fence_says_when_to_come_back,
    a_handler_without_a_layer_is_told_what_is_missing,
    the_typed_error_reaches_an_outer_layer,
    a_read_that_needs_its_token_asks_for_it,
    two_layers_are_a_mistake_of_the_service,
);

type Plan = Arc<Shared>;

/// What the handlers and the test share.
#[derive(Default)]
struct Shared {
    done: Notify,
}

fn app<DB: TestDatabase>(fence: Fence<DB>, plan: Plan) -> Router {
    let layer = FenceLayer::new(fence.clone(), PathParam("sku"));
    Router::new()
        .route("/{sku}/add", any(add::<DB>))
        .route("/{sku}/plain", any(|| async { "plain" }))
        .route("/{sku}/fail", post(fail::<DB>))
        .route("/{sku}/panic", post(panic::<DB>))
        .route("/{sku}/slow", post(slow::<DB>))
        .route("/{sku}/swallow", post(swallow::<DB>))
        .route("/{sku}/spawn", post(spawn::<DB>))
        .route("/{sku}/stream", post(stream::<DB>))
        .route("/{sku}/defer", post(defer::<DB>))
        .route("/{sku}/lose", post(lose::<DB>))
        .route("/{sku}/forget", post(forget::<DB>))
        .route("/{sku}/commit", post(commit::<DB>))
        .route("/{sku}/linger", post(linger::<DB>))
        .route("/{sku}/echo", post(|body: Bytes| async { body }))
        .route("/{sku}/status/{status}", post(status))
        .route_layer(layer)
        .route("/unfenced", any(add::<DB>))
        .layer(Extension(plan))
}

async fn start<DB: TestDatabase>(db: &Fresh<DB>) -> Server {
    Server::start(app(db.fence(), Plan::default())).await
}

async fn insert<DB: TestDatabase>(tx: &mut FencedTx<DB>) {
    let entry = tx.admitted().token.get();
    DB::execute(tx, &format!("INSERT INTO ledger VALUES ({entry})"))
        .await
        .unwrap();
}

async fn add<DB: TestDatabase>(mut tx: FencedTx<DB>, admitted: Admitted) -> String {
    assert_eq!(*tx.admitted(), admitted);
    insert(&mut tx).await;
    admitted.token.to_string()
}

async fn fail<DB: TestDatabase>(mut tx: FencedTx<DB>) -> StatusCode {
    insert(&mut tx).await;
    StatusCode::CONFLICT
}

async fn panic<DB: TestDatabase>(mut tx: FencedTx<DB>) -> StatusCode {
    insert(&mut tx).await;
    panic!("as planned");
}

async fn slow<DB: TestDatabase>(mut tx: FencedTx<DB>) -> StatusCode {
    insert(&mut tx).await;
    std::future::pending().await
}

async fn swallow<DB: TestDatabase>(mut tx: FencedTx<DB>) -> StatusCode {
    insert(&mut tx).await;
    let _ = DB::execute(&mut tx, "INSERT INTO nowhere VALUES (1)").await;
    StatusCode::OK
}

async fn spawn<DB: TestDatabase>(mut tx: FencedTx<DB>, plan: Extension<Plan>) -> StatusCode {
    insert(&mut tx).await;
    tokio::spawn(async move {
        plan.done.notified().await;
        let outcome = tx.commit().await;
        assert!(matches!(outcome, Err(CommitError::Escaped)), "{outcome:?}");
        plan.done.notify_one();
    });
    StatusCode::OK
}

async fn stream<DB: TestDatabase>(mut tx: FencedTx<DB>) -> Response {
    insert(&mut tx).await;
    let parts = futures_util::stream::iter([tx]).map(|_tx| Ok::<_, Infallible>("part"));
    Body::from_stream(parts).into_response()
}

async fn defer<DB: TestDatabase>(mut tx: FencedTx<DB>) -> StatusCode {
    insert(&mut tx).await;
    DB::execute(&mut tx, "INSERT INTO child VALUES (404)")
        .await
        .unwrap();
    StatusCode::OK
}

/// Loses its connection.
async fn lose<DB: TestDatabase>(mut tx: FencedTx<DB>) -> StatusCode {
    insert(&mut tx).await;
    let kill = "SELECT pg_terminate_backend(pg_backend_pid())";
    DB::execute(&mut tx, kill).await.unwrap_err();
    StatusCode::SERVICE_UNAVAILABLE
}

async fn forget<DB: TestDatabase>(mut tx: FencedTx<DB>) -> StatusCode {
    DB::nested(&mut tx, 1, Nested::Forget).await.unwrap();
    StatusCode::OK
}

async fn commit<DB: TestDatabase>(mut tx: FencedTx<DB>) -> StatusCode {
    insert(&mut tx).await;
    tx.commit().await.unwrap();
    StatusCode::IM_A_TEAPOT
}

async fn linger<DB: TestDatabase>(mut tx: FencedTx<DB>) -> StatusCode {
    insert(&mut tx).await;
    tx.commit().await.unwrap();
    std::future::pending().await
}

async fn status(Path((_, status)): Path<(String, u16)>) -> StatusCode {
    StatusCode::from_u16(status).unwrap()
}

use futures_util::StreamExt;

async fn max_token<DB: TestDatabase>(db: &Fresh<DB>) -> Option<i64> {
    db.fence()
        .inspect(&Resource::new("a").unwrap())
        .await
        .unwrap()
}

async fn a_write_commits_with_the_fence_and_a_stale_one_is_refused<DB: TestDatabase>() {
    let db = DB::fresh(4).await;
    let server = start(&db).await;
    let answer = server.write("/a/add", 2).await;
    assert_eq!((answer.status, answer.text.as_str()), (200, "2"));
    for token in [1, 2] {
        let problem = server
            .write("/a/add", token)
            .await
            .is_problem(412, "stale-token");
        assert_eq!(problem["resource"], "a");
        assert_eq!(problem["presented_token"], token);
        assert_eq!(problem["max_token"], 2);
    }
    assert_eq!(server.write("/b/add", 1).await.status, 200);
    assert_eq!(db.entries().await, 2);
}

async fn a_handler_that_ignores_the_transaction_is_protected<DB: TestDatabase>() {
    let db = DB::fresh(4).await;
    let server = start(&db).await;
    assert_eq!(server.write("/a/plain", 2).await.text, "plain");
    server
        .write("/a/plain", 2)
        .await
        .is_problem(412, "stale-token");
    for status in [500, 600, 999] {
        assert_eq!(
            server.write(&format!("/a/status/{status}"), 3).await.status,
            status
        );
        assert_eq!(max_token(&db).await, Some(2));
    }
    for status in [204, 302] {
        assert_eq!(
            server
                .write(&format!("/a/status/{status}"), status)
                .await
                .status,
            status
        );
        assert_eq!(max_token(&db).await, Some(status.into()));
    }
}

/// What holds after each failure under token 5: nothing is written, 4 is dead, 5 still writes.
async fn nothing_but_the_fence_has_moved<DB: TestDatabase>(db: &Fresh<DB>, server: &Server) {
    assert_eq!(max_token(db).await, Some(4));
    assert_eq!(db.entries().await, 0);
    server
        .write("/a/add", 4)
        .await
        .is_problem(412, "stale-token");
    assert_eq!(server.write("/a/add", 5).await.status, 200);
    assert_eq!(db.entries().await, 1);
}

async fn a_failed_handler_writes_nothing_keeps_its_token_and_kills_older_ones<DB: TestDatabase>() {
    let db = DB::fresh(1).await;
    let server = start(&db).await;
    assert_eq!(server.write("/a/fail", 5).await.status, 409);
    nothing_but_the_fence_has_moved(&db, &server).await;
    // A failure that comes late lowers nothing.
    assert_eq!(server.write("/a/status/500", 6).await.status, 500);
    assert_eq!(max_token(&db).await, Some(5));
}

async fn a_panic_writes_nothing_and_kills_older_ones<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let server = start(&db).await;
    let request = server.post("/a/panic").header("Fencing-Token", "5");
    request
        .send()
        .await
        .expect_err("the connection is closed without an answer");
    nothing_but_the_fence_has_moved(&db, &server).await;
}

async fn a_handler_over_its_time_is_ended_and_kills_older_ones<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let fence = db.fence().hold_limit(Duration::from_millis(200));
    let server = Server::start(app(fence, Plan::default())).await;
    let answer = server.write("/a/slow", 5).await;
    answer.is_problem(503, "handler-timeout");
    assert_eq!(answer.headers["retry-after"], "1");
    nothing_but_the_fence_has_moved(&db, &server).await;
    // Where it had committed by itself, nobody says that nothing was written.
    server
        .write("/a/linger", 6)
        .await
        .is_problem(503, "outcome-unknown");
    assert_eq!(db.entries().await, 2);
}

#[tokio::test]
async fn a_handler_that_lost_its_connection_kills_older_ones_through_another() {
    let db = Postgres::fresh(2).await;
    let server = start(&db).await;
    assert_eq!(server.write("/a/lose", 5).await.status, 503);
    nothing_but_the_fence_has_moved(&db, &server).await;
}

async fn a_swallowed_error_is_no_success<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let server = start(&db).await;
    let answer = server.write("/a/swallow", 5).await;
    if DB::ABORTS_ON_ERROR {
        answer.is_problem(500, "transaction-aborted");
        nothing_but_the_fence_has_moved(&db, &server).await;
    } else {
        // SQLite undoes the failed statement alone: what is claimed is there.
        assert_eq!((answer.status, db.entries().await), (200, 1));
    }
}

async fn a_transaction_in_a_spawned_task_is_no_success<DB: TestDatabase>() {
    let db = DB::fresh(4).await;
    let fence = db.fence().lock_wait(Duration::from_millis(300));
    let plan = Plan::default();
    let server = Server::start(app(fence, plan.clone())).await;
    server
        .write("/a/spawn", 5)
        .await
        .is_problem(500, "transaction-escaped");
    // Only now the task goes on: its commit is refused.
    plan.done.notify_one();
    let refused = timeout(Duration::from_secs(10), plan.done.notified());
    refused.await.expect("the task's commit was not refused");
    if DB::ABORTS_ON_ERROR {
        nothing_but_the_fence_has_moved(&db, &server).await;
    } else {
        // SQLite has no server that could end the task's transaction from outside.
        assert_eq!(db.entries().await, 0);
        eventually("the lock is free", async || {
            server.write("/a/add", 5).await.status == 200
        })
        .await;
    }
}

async fn a_transaction_in_the_response_body_is_no_success<DB: TestDatabase>() {
    let db = DB::fresh(4).await;
    let fence = db.fence().lock_wait(Duration::from_millis(300));
    let server = Server::start(app(fence, Plan::default())).await;
    server
        .write("/a/stream", 5)
        .await
        .is_problem(500, "transaction-escaped");
    assert_eq!(db.entries().await, 0);
    assert_eq!(server.write("/a/add", 5).await.status, 200);
}

async fn a_deferred_constraint_that_fails_at_commit_is_no_success<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let server = start(&db).await;
    server
        .write("/a/defer", 5)
        .await
        .is_problem(500, "transaction-aborted");
    nothing_but_the_fence_has_moved(&db, &server).await;
}

async fn an_open_nested_transaction_is_no_success<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let server = start(&db).await;
    server
        .write("/a/forget", 5)
        .await
        .is_problem(500, "transaction-aborted");
    nothing_but_the_fence_has_moved(&db, &server).await;
}

async fn a_handler_may_commit_by_itself<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let server = start(&db).await;
    assert_eq!(server.write("/a/commit", 5).await.status, 418);
    assert_eq!((db.entries().await, max_token(&db).await), (1, Some(5)));
}

async fn reusable_tokens_write_again<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let layer = FenceLayer::new(db.fence(), PathParam("sku")).reusable();
    let app = Router::new()
        .route("/{sku}/plain", post(|| async {}))
        .route_layer(layer);
    let server = Server::start(app).await;
    for _ in 0..3 {
        assert_eq!(server.write("/a/plain", 5).await.status, 200);
    }
    server
        .write("/a/plain", 4)
        .await
        .is_problem(412, "stale-token");
}

async fn a_fenced_read_kills_older_writers_and_a_plain_read_does_not<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let server = start(&db).await;
    assert_eq!(Answer::to(server.get("/a/plain")).await.text, "plain");
    assert_eq!(max_token(&db).await, None);
    let read = || server.get("/a/plain").header("Fencing-Token", "5");
    assert_eq!(Answer::to(read()).await.text, "plain");
    assert_eq!(max_token(&db).await, Some(4));
    server
        .write("/a/plain", 4)
        .await
        .is_problem(412, "stale-token");
    assert_eq!(server.write("/a/plain", 5).await.status, 200);
    Answer::to(read()).await.is_problem(412, "stale-token");
}

async fn each_wrong_token_has_its_answer<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let server = start(&db).await;
    for method in ["POST", "PUT", "PATCH", "DELETE", "ODD"] {
        let request = server
            .client
            .request(method.parse().unwrap(), server.url("/a/plain"));
        Answer::to(request).await.is_problem(428, "token-required");
    }
    server
        .write("/a/plain", "")
        .await
        .is_problem(428, "token-required");
    for wrong in [
        "x",
        "0",
        "-1",
        "1.0",
        "1000000000000000",
        "\"1\"",
        "(1)",
        "1,",
        "1, 2",
        "1 2",
        "1;",
        "1;resource=a",
        "1;resource=\"\"",
        "1;mac=1",
        "1;resource=\"a\", 2;resource=\"a\"",
        "1;resource=\"a\", 2;resource=\"b\"",
    ] {
        server
            .write("/a/plain", wrong)
            .await
            .is_problem(400, "malformed-token");
    }
    for wrong in [&b"1\xff"[..], b"\xc3\xa9"] {
        let value = HeaderValue::from_bytes(wrong).unwrap();
        let request = server.post("/a/plain").header("Fencing-Token", value);
        Answer::to(request).await.is_problem(400, "malformed-token");
    }
    let two_lines = server
        .post("/a/plain")
        .header("Fencing-Token", "1")
        .header("Fencing-Token", "2");
    Answer::to(two_lines)
        .await
        .is_problem(400, "malformed-token");
    // A safe method need not carry one, but what it carries must be right.
    let read = server.get("/a/plain").header("Fencing-Token", "x");
    Answer::to(read).await.is_problem(400, "malformed-token");
    for wrong in [
        "1;resource=\"b\"",
        "1;resource=\"A\"",
        "1;resource=%\"%c3%a9\"",
    ] {
        server
            .write("/a/plain", wrong)
            .await
            .is_problem(403, "wrong-resource");
    }
    // Nothing of this has moved the fence.
    assert_eq!(max_token(&db).await, None);
    assert_eq!(
        server
            .write("/a/plain", "1;resource=\"a\";mac=:AQI=:;x")
            .await
            .status,
        200
    );
    let cafe = "1;resource=%\"caf%c3%a9\"";
    assert_eq!(server.write("/caf%C3%A9/plain", cafe).await.status, 200);
}

async fn each_wrong_body_has_its_answer<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let layer = FenceLayer::new(db.fence(), PathParam("sku"))
        .body_limit_bytes(100)
        .body_wait(Duration::from_millis(200));
    let echo = post(|body: Bytes| async { body });
    let app = Router::new().route("/{sku}/echo", echo).route_layer(layer);
    let server = Server::start(app).await;
    let send = |body: reqwest::Body| {
        let request = server.post("/a/echo").header("Fencing-Token", "1");
        Answer::to(request.body(body))
    };
    let stream = |chunks: usize, pause: Duration| {
        let chunks = futures_util::stream::iter(0..chunks).then(move |_| async move {
            tokio::time::sleep(pause).await;
            Ok::<_, Infallible>("0123456789")
        });
        Body::from_stream(chunks)
    };
    let problem = send(vec![b'x'; 101].into())
        .await
        .is_problem(413, "body-too-large");
    assert_eq!(problem["limit_bytes"], 100);
    let chunked = |body: Body| reqwest::Body::wrap_stream(body.into_data_stream());
    send(chunked(stream(11, Duration::ZERO)))
        .await
        .is_problem(413, "body-too-large");
    send(chunked(stream(9, Duration::from_millis(50))))
        .await
        .is_problem(408, "body-timeout");
    assert_eq!(max_token(&db).await, None);
    assert_eq!(send(vec![b'x'; 100].into()).await.text, "x".repeat(100));
}

async fn a_slow_body_holds_nothing<DB: TestDatabase>() {
    let db = DB::fresh(1).await;
    let server = start(&db).await;
    let (go_on, gate) = tokio::sync::oneshot::channel::<()>();
    let body = futures_util::stream::once(async {
        gate.await.unwrap();
        Ok::<_, Infallible>("late")
    });
    let slow = server.post("/a/echo").header("Fencing-Token", "9");
    let slow = tokio::spawn(Answer::to(slow.body(reqwest::Body::wrap_stream(body))));
    // With one connection in the pool, these would hang if the slow one held it.
    for token in 1..=3 {
        assert_eq!(server.write("/a/add", token).await.status, 200);
    }
    go_on.send(()).unwrap();
    assert_eq!(slow.await.unwrap().text, "late");
}

async fn resources_come_from_the_path_a_header_or_a_closure<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let resource = |admitted: Admitted| async move { admitted.resource.to_string() };
    let tenant = HeaderField(HeaderName::from_static("x-tenant"));
    let query = |parts: &Parts| -> Result<Resource, InvalidResource> {
        Resource::new(parts.uri.query().unwrap_or_default())
    };
    let app = Router::new()
        .route("/path/{id}", post(resource))
        .route_layer(FenceLayer::new(db.fence(), PathParam("id")))
        .merge(
            Router::new()
                .route("/header", post(resource))
                .route_layer(FenceLayer::new(db.fence(), tenant)),
        )
        .merge(
            Router::new()
                .route("/query", post(resource))
                // Beside `route_layer`, `layer` works as well.
                .layer(FenceLayer::new(db.fence(), query)),
        );
    let server = Server::start(app).await;

    assert_eq!(server.write("/path/a%2Fb%20c", 1).await.text, "a/b c");
    for path in [
        "/path/%00",
        "/path/%FF",
        &format!("/path/{}", "x".repeat(256)),
    ] {
        let problem = server
            .write(path, 1)
            .await
            .is_problem(422, "invalid-request");
        assert_eq!(problem["field"], "resource");
    }
    let header = || server.post("/header").header("Fencing-Token", "1");
    assert_eq!(
        Answer::to(header().header("X-Tenant", "acme")).await.text,
        "acme"
    );
    let twice = header()
        .header("X-Tenant", "acme")
        .header("X-Tenant", "other");
    for request in [header(), twice] {
        let problem = Answer::to(request).await.is_problem(422, "invalid-request");
        assert_eq!(problem["field"], "x-tenant");
    }
    assert_eq!(server.write("/query?x=1", 1).await.text, "x=1");
    server
        .write("/query", 1)
        .await
        .is_problem(422, "invalid-request");
}

async fn a_layer_around_the_whole_router_fails_closed<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let layer = FenceLayer::new(db.fence(), PathParam("sku"));
    let app = Router::new()
        .route("/{sku}/plain", any(|| async { "plain" }))
        .route("/fixed", any(|| async { "fixed" }))
        .layer(layer.clone());
    let server = Server::start(app.clone()).await;
    assert_eq!(server.write("/a/plain", 1).await.text, "plain");
    server
        .write("/a/plain", 1)
        .await
        .is_problem(412, "stale-token");
    server
        .write("/no/such/route", 1)
        .await
        .is_problem(404, "unknown-route");
    Answer::to(server.post("/no/such/route"))
        .await
        .is_problem(404, "unknown-route");
    assert_eq!(Answer::to(server.get("/no/such/route")).await.status, 404);
    // A route without the parameter is a mistake in the service.
    server
        .write("/fixed", 1)
        .await
        .is_problem(500, "misconfigured");
    assert_eq!(Answer::to(server.get("/fixed")).await.text, "fixed");

    // Outside the router no route is known yet: no write gets through unchecked.
    let outside = Router::new().fallback_service(
        tower::ServiceBuilder::new()
            .layer(layer)
            .service(Router::new().route("/{sku}/plain", any(|| async { "plain" }))),
    );
    let server = Server::start(outside).await;
    server
        .write("/a/plain", 9)
        .await
        .is_problem(404, "unknown-route");
}

async fn a_busy_fence_says_when_to_come_back<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let fence = db.fence().lock_wait(Duration::from_millis(50));
    let server = Server::start(app(fence, Plan::default())).await;
    let sku = Resource::new("a").unwrap();
    let five = Token::new(5).unwrap();
    let tx = db
        .fence()
        .begin(&sku, five, TokenUse::SingleUse)
        .await
        .unwrap();
    let answer = server.write("/a/add", 6).await;
    answer.is_problem(503, "fence-busy");
    assert_eq!(answer.headers["retry-after"], "1");
    tx.commit().await.unwrap();
    assert_eq!(server.write("/a/add", 6).await.status, 200);
}

async fn a_handler_without_a_layer_is_told_what_is_missing<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let server = start(&db).await;
    let problem = server
        .write("/unfenced", 1)
        .await
        .is_problem(500, "misconfigured");
    assert!(
        problem["detail"]
            .as_str()
            .unwrap()
            .contains("route_layer(FenceLayer::new(")
    );
    // A safe method has no transaction, fenced or not.
    for token in [None, Some("5")] {
        let mut read = server.get("/a/add");
        if let Some(token) = token {
            read = read.header("Fencing-Token", token);
        }
        Answer::to(read).await.is_problem(500, "misconfigured");
    }
}

async fn the_typed_error_reaches_an_outer_layer<DB: TestDatabase>() {
    async fn restyle(response: Response) -> Response {
        let Some(rejection) = response.extensions().get::<Rejection>() else {
            return response;
        };
        let stale = rejection.stale().map_or(0, |stale| stale.max_token);
        (StatusCode::IM_A_TEAPOT, stale.to_string()).into_response()
    }
    let db = DB::fresh(2).await;
    let app = app(db.fence(), Plan::default()).layer(axum::middleware::map_response(restyle));
    let server = Server::start(app).await;
    assert_eq!(server.write("/a/plain", 5).await.status, 200);
    let answer = server.write("/a/plain", 4).await;
    assert_eq!((answer.status, answer.text.as_str()), (418, "5"));
    assert_eq!(server.write("/a/plain", "").await.text, "0");
}

async fn a_read_that_needs_its_token_asks_for_it<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let strict = |admitted: Admitted| async move { admitted.token.to_string() };
    let lenient = |admitted: Option<Admitted>| async move { format!("{:?}", admitted.is_some()) };
    let app = Router::new()
        .route("/{sku}/strict", get(strict))
        .route("/{sku}/lenient", get(lenient))
        .route_layer(FenceLayer::new(db.fence(), PathParam("sku")));
    let server = Server::start(app).await;
    Answer::to(server.get("/a/strict"))
        .await
        .is_problem(428, "token-required");
    assert_eq!(Answer::to(server.get("/a/lenient")).await.text, "false");
    for (path, text) in [("/a/strict", "5"), ("/a/lenient", "true")] {
        let read = server.get(path).header("Fencing-Token", "5");
        assert_eq!(Answer::to(read).await.text, text);
    }
}

async fn two_layers_are_a_mistake_of_the_service<DB: TestDatabase>() {
    let db = DB::fresh(4).await;
    let layer = FenceLayer::new(db.fence(), PathParam("sku"));
    let app = Router::new()
        .route("/{sku}/plain", post(|| async {}))
        .route_layer(layer.clone())
        .route_layer(layer);
    let server = Server::start(app).await;
    server
        .write("/a/plain", 5)
        .await
        .is_problem(500, "misconfigured");
    assert_eq!(max_token(&db).await, Some(4));
}

/// The statement of a handler whose client went away ends with it, and so does the row lock.
#[tokio::test]
async fn a_statement_that_was_cut_off_does_not_keep_the_lock() {
    async fn sleepy(mut tx: FencedTx) {
        let _ = Postgres::execute(&mut tx, "SELECT pg_sleep(60)").await;
    }
    let db = Postgres::fresh(4).await;
    let fence = db.fence().hold_limit(Duration::from_secs(2));
    let app = Router::new()
        .route("/{sku}/sleepy", post(sleepy))
        .route("/{sku}/plain", post(|| async {}))
        .route_layer(FenceLayer::new(fence, PathParam("sku")));
    let server = Server::start(app).await;
    let gone = server.post("/a/sleepy").header("Fencing-Token", "5");
    timeout(Duration::from_millis(300), gone.send())
        .await
        .unwrap_err();
    // Within the wait for the row lock, which is 5 s.
    assert_eq!(server.write("/a/plain", 5).await.status, 200);
    // The same where the handler runs out of its time.
    server
        .write("/a/sleepy", 7)
        .await
        .is_problem(503, "handler-timeout");
    server
        .write("/a/plain", 6)
        .await
        .is_problem(412, "stale-token");
    assert_eq!(server.write("/a/plain", 7).await.status, 200);
}
