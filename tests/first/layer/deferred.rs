//! The deferred layer over real HTTP, on both databases: the handler admits the token, in a
//! transaction or in a single statement.

use std::{sync::Arc, time::Duration};

use axum::{
    Extension, Router,
    extract::{Path, Request},
    http::StatusCode,
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::post,
};
use sqlx::{AssertSqlSafe, Postgres};
use tokio::sync::{Notify, mpsc};
use tower_fence::{
    CommitError, Fence, FenceLayer, Idempotency, PathParam, PendingWrite, PgPendingWrite,
    fence::WriteError, layer::DatabaseError,
};

use crate::support::{
    database::{Fresh, TestDatabase, on_both_databases},
    fence::{resource, token, use_up},
    http::Server,
};

on_both_databases!(
    one_statement_writes_once_and_a_stale_one_is_refused,
    statement_without_a_row_keeps_its_token_and_refuses_older,
    refusal_of_the_handler_itself_costs_nothing,
    success_without_a_write_is_answered_500,
    transaction_begun_by_the_handler_belongs_to_the_layer,
    refusal_ignored_by_the_handler_is_not_a_success,
    failed_statement_refuses_older_tokens,
    statement_independent_of_the_fence_never_writes,
    failed_commit_is_not_a_success,
    committed_write_stays_whatever_the_handler_answers,
    second_use_of_a_pending_write_is_refused,
    write_that_escapes_the_handler_is_not_a_success,
);

pub const INSERT: &str = "INSERT INTO ledger SELECT 5 FROM fence RETURNING entry";

/// The last part of the path selects the action of the handler.
async fn handler<DB: TestDatabase>(
    pending: PendingWrite<DB>,
    Path((_, what)): Path<(String, String)>,
    Extension(go_on): Extension<Arc<Notify>>,
) -> Result<Response, DatabaseError> {
    let token = pending.claim().token.get();
    let insert = format!("INSERT INTO ledger SELECT {token} FROM fence RETURNING entry");
    let insert = AssertSqlSafe(Arc::<str>::from(insert));
    let written = match what.as_str() {
        "nothing" => return Ok("nothing".into_response()),
        "refuse" => return Ok(StatusCode::UNPROCESSABLE_ENTITY.into_response()),
        "insert" => pending.write::<()>(insert).await,
        "no-row" => {
            let no_row = "UPDATE stock SET n = 0 \
                 WHERE sku = 'no_row' AND EXISTS (SELECT 1 FROM fence) RETURNING n";
            pending.write::<()>(no_row).await
        }
        "swallow" => {
            let _ = pending.write::<()>(insert).await;
            return Ok("all is well".into_response());
        }
        "invalid" | "invalid-swallowed" => {
            let nowhere = "INSERT INTO nowhere SELECT 1 FROM fence RETURNING 1";
            let written = pending.write::<()>(nowhere).await;
            if what == "invalid-swallowed" {
                return Ok("all is well".into_response());
            }
            written
        }
        "independent" => {
            let independent = "INSERT INTO ledger VALUES (5) RETURNING entry";
            pending.write::<()>(independent).await
        }
        "defer" => {
            let orphan = "INSERT INTO child SELECT 99 FROM fence RETURNING parent";
            pending.write::<()>(orphan).await
        }
        "write-and-fail" => {
            pending.write::<()>(insert).await.unwrap();
            return Ok(StatusCode::CONFLICT.into_response());
        }
        "twice" => {
            let first = AssertSqlSafe(insert.0.clone());
            pending.clone().write::<()>(first).await.unwrap();
            pending.write::<()>(insert).await
        }
        "begin-twice" => {
            drop(pending.clone().begin().await.unwrap());
            drop(pending.begin().await.unwrap_err());
            return Ok(StatusCode::CONFLICT.into_response());
        }
        "spawn" => {
            let writing = async move {
                go_on.notified().await;
                let outcome = pending.write::<()>(insert).await;
                assert_matches!(outcome, Err(WriteError::Commit(_)));
                go_on.notify_one();
            };
            tokio::spawn(writing);
            return Ok("soon".into_response());
        }
        "linger" => {
            pending.write::<()>(insert).await.unwrap();
            std::future::pending().await
        }
        _ => {
            let mut tx = pending.begin().await?;
            DB::run(&mut tx, &format!("INSERT INTO ledger VALUES ({token})")).await;
            return Ok(match what.as_str() {
                "begin" => "begun".into_response(),
                "begin-and-linger" => std::future::pending().await,
                _ => StatusCode::CONFLICT.into_response(),
            });
        }
    };
    let rows = written?;
    Ok(match rows.len() {
        0 => StatusCode::CONFLICT.into_response(),
        rows => rows.to_string().into_response(),
    })
}

pub fn app<DB: TestDatabase>(fence: Fence<DB>, go_on: Arc<Notify>) -> Router {
    let layer = FenceLayer::new(fence, PathParam("r")).deferred();
    Router::new()
        .route("/{r}/{what}", post(handler::<DB>))
        .route_layer(layer.idempotent(Idempotency::optional()))
        .layer(Extension(go_on))
}

pub async fn start<DB: TestDatabase>(db: &Fresh<DB>) -> Server {
    Server::start(app(db.fence(), Arc::default())).await
}

pub async fn max_token<DB: TestDatabase>(db: &Fresh<DB>) -> Option<i64> {
    db.fence().inspect(&resource("r")).await.unwrap()
}

async fn one_statement_writes_once_and_a_stale_one_is_refused<DB: TestDatabase>() {
    let db = DB::fresh(4).await;
    let server = start(&db).await;
    for token in [2, 3, 7] {
        let answer = server.write("/r/insert", token).await;
        assert_eq!((answer.status, answer.text.as_str()), (200, "1"));
        assert_eq!(max_token(&db).await, Some(token));
    }
    // The refusals come from the cache, and from the database.
    for server in [&server, &server, &start(&db).await] {
        for token in [7, 1] {
            let problem = server.write("/r/insert", token).await;
            let problem = problem.is_problem(412, "stale-token");
            assert_eq!(problem["max_token"], 7);
            assert_eq!(problem["presented_token"], token);
        }
    }
    assert_eq!(db.entries().await, 3);
}

async fn statement_without_a_row_keeps_its_token_and_refuses_older<DB: TestDatabase>() {
    let db = DB::fresh(4).await;
    let server = start(&db).await;
    for _ in 0..2 {
        assert_eq!(server.write("/r/no-row", 5).await.status, 409);
        assert_eq!(max_token(&db).await, Some(4));
    }
    server.refuses("/r/insert", 4, 412, "stale-token").await;
    assert_eq!(server.write("/r/insert", 5).await.status, 200);
}

async fn refusal_of_the_handler_itself_costs_nothing<DB: TestDatabase>() {
    let db = DB::fresh(1).await;
    let server = start(&db).await;
    // The only connection is in use.
    let taken = db.pool.acquire().await.unwrap();
    assert_eq!(server.write("/r/refuse", 5).await.status, 422);
    drop(taken);
    assert_eq!(max_token(&db).await, None);
}

async fn success_without_a_write_is_answered_500<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let server = start(&db).await;
    let answer = server.write("/r/nothing", 5).await;
    answer.is_problem(500, "misconfigured");
    assert!(answer.text.contains("PendingWrite"), "{answer:?}");
    assert_eq!(max_token(&db).await, None);
}

async fn transaction_begun_by_the_handler_belongs_to_the_layer<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let server = start(&db).await;
    assert_eq!(server.write("/r/begin-and-fail", 5).await.status, 409);
    assert_eq!((db.entries().await, max_token(&db).await), (0, Some(4)));
    assert_eq!(server.write("/r/begin", 5).await.text, "begun");
    assert_eq!((db.entries().await, max_token(&db).await), (1, Some(5)));
    for server in [&server, &start(&db).await] {
        server.refuses("/r/begin", 5, 412, "stale-token").await;
    }
    assert_eq!(db.entries().await, 1);
}

async fn refusal_ignored_by_the_handler_is_not_a_success<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    assert_eq!(start(&db).await.write("/r/swallow", 5).await.status, 200);
    let answer = start(&db).await.write("/r/swallow", 4).await;
    answer.is_problem(412, "stale-token");
    assert_eq!(db.entries().await, 1);
}

async fn failed_statement_refuses_older_tokens<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let server = start(&db).await;
    for what in ["/r/invalid", "/r/invalid-swallowed"] {
        server.refuses(what, 5, 500, "transaction-aborted").await;
        assert_eq!(max_token(&db).await, Some(4));
    }
    assert_eq!(server.write("/r/insert", 5).await.status, 200);
}

async fn statement_independent_of_the_fence_never_writes<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let server = start(&db).await;
    let answer = server.write("/r/independent", 5).await;
    answer.is_problem(500, "misconfigured");
    assert_eq!((db.entries().await, max_token(&db).await), (0, None));
}

async fn failed_commit_is_not_a_success<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let server = start(&db).await;
    for _ in 0..2 {
        let answer = server.write("/r/defer", 5).await;
        answer.is_problem(500, "transaction-aborted");
        assert_eq!(max_token(&db).await, Some(4));
        assert_eq!(db.count("child").await, 0);
    }
}

async fn committed_write_stays_whatever_the_handler_answers<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let server = start(&db).await;
    assert_eq!(server.write("/r/write-and-fail", 5).await.status, 409);
    assert_eq!((db.entries().await, max_token(&db).await), (1, Some(5)));
}

async fn second_use_of_a_pending_write_is_refused<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let server = start(&db).await;
    let answer = server.write("/r/twice", 5).await;
    answer.is_problem(500, "transaction-escaped");
    assert_eq!((db.entries().await, max_token(&db).await), (1, Some(5)));
    // A repeated call of the handler does not continue the transaction of the first call.
    assert_eq!(server.write("/r/begin-twice", 6).await.status, 409);
}

async fn write_that_escapes_the_handler_is_not_a_success<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let go_on = Arc::<Notify>::default();
    let server = Server::start(app(db.fence(), go_on.clone())).await;
    server.refuses("/r/spawn", 5, 500, "misconfigured").await;
    go_on.notify_one();
    tokio::time::sleep(Duration::from_millis(50)).await;
    go_on.notified().await;
    assert_eq!((db.entries().await, max_token(&db).await), (0, None));
}

/// A value that notifies the test when it is dropped.
struct Gone(Arc<Notify>);

impl Drop for Gone {
    fn drop(&mut self) {
        self.0.notify_one();
    }
}

/// A task of the handler continues with the transaction after the client has disconnected and the
/// handler has ended.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_task_that_outlives_its_client_commits_nothing() {
    let (gone, go_on) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (report, mut outcome) = mpsc::unbounded_channel();
    let spawned = Arc::new(Notify::new());
    let handler = {
        let (go_on, spawned) = (Arc::clone(&go_on), Arc::clone(&spawned));
        async move |pending: PgPendingWrite| {
            let mut tx = pending.begin().await.unwrap();
            let insert = sqlx::query("INSERT INTO ledger VALUES (5)");
            insert.execute(&mut *tx).await.unwrap();
            tokio::spawn(async move {
                go_on.notified().await;
                report.send(tx.commit().await)
            });
            spawned.notify_one();
            std::future::pending::<StatusCode>().await
        }
    };
    let db = Postgres::fresh(3).await;
    let layer = FenceLayer::new(db.fence(), PathParam("r")).deferred();
    let outermost = {
        let gone = Arc::clone(&gone);
        middleware::from_fn(move |request: Request, next: Next| {
            let gone = Gone(Arc::clone(&gone));
            async move {
                let _gone = gone;
                next.run(request).await
            }
        })
    };
    let write = post(handler).route_layer(layer).layer(outermost);
    let server = Server::at("/{r}", write).await;
    let request = server.post("/r").header("Fencing-Token", "2").send();
    let request = tokio::spawn(request);
    spawned.notified().await;
    request.abort();
    gone.notified().await;
    // The transaction of the task ends, so that a successor does not wait for it.
    use_up(&db.fence(), &resource("r"), token(3)).await.unwrap();
    go_on.notify_one();
    let outcome = outcome.recv().await.unwrap();
    assert_matches!(outcome, Err(CommitError::Escaped));
    assert_eq!(db.entries().await, 0);
}
