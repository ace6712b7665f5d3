//! Handlers that report errors with status 200, and refusals in the application's own format.

use axum::{
    Extension, Json, Router,
    extract::Path,
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::post,
};
use serde_json::json;
use tower_fence::{
    FenceLayer, FencedTx, Idempotency, PathParam, PendingWrite,
    layer::{DatabaseError, Refusal, Rollback},
};

use super::{
    handlers::{insert, max_token},
    keyed::{keyed, records},
};
use crate::support::{
    database::{Fresh, TestDatabase, on_both_databases},
    fence::{resource, token},
    http::{Answer, Server},
};

on_both_databases!(
    an_error_with_status_200_is_rolled_back,
    error_with_status_200_is_not_stored_with_its_key,
    committed_statement_stays_whatever_the_response_says,
    refusals_have_the_format_of_the_application,
);

/// Writes, and answers 200 with an error, which an extension or a header reports.
async fn handle<DB: TestDatabase>(
    mut tx: FencedTx<DB>,
    Path((_, outcome)): Path<(String, String)>,
) -> Response {
    insert(&mut tx).await;
    match &*outcome {
        "rollback" => (Extension(Rollback), "error").into_response(),
        "grpc-error" => ([("grpc-status", "5")], "error").into_response(),
        "grpc-ok" => ([("grpc-status", "0")], "written").into_response(),
        "conflict" => StatusCode::CONFLICT.into_response(),
        _ => "written".into_response(),
    }
}

fn layer<DB: TestDatabase>(db: &Fresh<DB>) -> FenceLayer<DB, PathParam> {
    FenceLayer::new(db.fence(), PathParam("r")).commit_if(|response| {
        let status = response.headers().get("grpc-status");
        status.is_none_or(|status| status == "0")
    })
}

async fn start<DB: TestDatabase>(layer: FenceLayer<DB, PathParam>) -> Server {
    Server::at("/{r}/{outcome}", post(handle::<DB>).route_layer(layer)).await
}

async fn an_error_with_status_200_is_rolled_back<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let server = start(layer(&db)).await;
    for (token, outcome) in [(5, "rollback"), (7, "grpc-error")] {
        let answer = server.write(&format!("/a/{outcome}"), token).await;
        assert_eq!((answer.status, &*answer.text), (200, "error"));
        // Older tokens are stale.
        assert_eq!(max_token(&db).await, Some(token - 1));
        assert_eq!(db.entries().await, 0);
        let older = server.write("/a/written", token - 1).await;
        older.is_problem(412, "stale-token");
    }
    // The token is still usable, and a response without an error commits.
    assert_eq!(server.write("/a/written", 7).await.text, "written");
    assert_eq!(server.write("/a/grpc-ok", 8).await.text, "written");
    assert_eq!(db.entries().await, 2);
    // `commit_if` does not commit an error status.
    assert_eq!(server.write("/a/conflict", 9).await.status, 409);
    assert_eq!(db.entries().await, 2);
}

async fn error_with_status_200_is_not_stored_with_its_key<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let server = start(layer(&db).idempotent(Idempotency::required())).await;
    for outcome in ["rollback", "grpc-error"] {
        for _ in 0..2 {
            let path = format!("/a/{outcome}");
            let answer = Answer::to(keyed(&server, &path, 5, outcome)).await;
            assert_eq!(answer.text, "error");
            assert!(!answer.headers.contains_key("idempotent-replayed"));
        }
    }
    assert_eq!((records(&db).await, db.entries().await), (0, 0));
    for replayed in [false, true] {
        let answer = Answer::to(keyed(&server, "/a/grpc-ok", 5, "ok")).await;
        assert_eq!(answer.text, "written");
        assert_eq!(answer.headers.contains_key("idempotent-replayed"), replayed);
    }
    assert_eq!((records(&db).await, db.entries().await), (1, 1));
}

async fn committed_statement_stays_whatever_the_response_says<DB: TestDatabase>() {
    async fn handle<DB: TestDatabase>(pending: PendingWrite<DB>) -> impl IntoResponse {
        pending.write::<()>(super::deferred::INSERT).await.unwrap();
        (Extension(Rollback), "error")
    }
    let db = DB::fresh(2).await;
    let layer = layer(&db).deferred();
    let server = Server::at("/{r}", post(handle::<DB>).route_layer(layer)).await;
    assert_eq!(server.write("/a", 5).await.text, "error");
    assert_eq!(db.entries().await, 1);
    assert_eq!(max_token(&db).await, Some(5));
}

async fn refusals_have_the_format_of_the_application<DB: TestDatabase>() {
    async fn begin<DB: TestDatabase>(pending: PendingWrite<DB>) -> Result<(), Refusal> {
        insert(&mut pending.begin().await?).await;
        Ok(())
    }
    async fn fail() -> DatabaseError {
        sqlx::Error::PoolTimedOut.into()
    }
    let db = DB::fresh(2).await;
    let layer = layer(&db).map_refusal(|refusal, problem| {
        let message = refusal.to_string();
        let code = refusal.problem_type().name();
        let status = problem.status().as_u16();
        Json(json!({ "errors": [{ "message": message, "code": code, "status": status }] }))
            .into_response()
    });
    let app = Router::new()
        .route("/{r}/{outcome}", post(handle::<DB>))
        .route("/{r}/busy", post(fail))
        .route_layer(layer.clone())
        .route(
            "/deferred/{r}/begin",
            post(begin::<DB>).route_layer(layer.deferred()),
        );
    let server = Server::start(app).await;
    let refused = |answer: Answer| {
        assert_eq!(answer.status, 200, "{answer:?}");
        assert_eq!(answer.headers["content-type"], "application/json");
        assert_eq!(answer.headers["cache-control"], "no-store");
        answer.json()["errors"][0].clone()
    };

    assert_eq!(server.write("/a/written", 5).await.text, "written");
    let stale = refused(server.write("/a/written", 4).await);
    assert_eq!(stale["message"], "token 4 for a is not newer than 5");
    let stale = (stale["code"].clone(), stale["status"].clone());
    assert_eq!(stale, (json!("stale-token"), json!(412)));
    let missing = refused(Answer::to(server.post("/a/written")).await);
    assert_eq!(missing["code"], "token-required");
    // The handler's own answer is unchanged.
    assert_eq!(server.write("/a/conflict", 6).await.status, 409);

    // A handler's statement failed for a reason of the database.
    let busy = refused(server.write("/a/busy", 7).await);
    assert_eq!(
        (&busy["code"], &busy["status"]),
        (&json!("fence-busy"), &json!(503))
    );

    // Another process causes this refusal, and the handler returns it.
    db.fence().raise(&resource("b"), token(9)).await.unwrap();
    let stale = refused(server.write("/deferred/b/begin", 8).await);
    assert_eq!(stale["message"], "token 8 for b was used already");
    assert_eq!(server.write("/deferred/b/begin", 9).await.status, 200);
}
