//! Writes through the layer, on both databases: which of them commit, and the state after a
//! failure.

use std::time::Duration;

use sqlx::Postgres;
use tower_fence::TokenUse;

use super::handlers::{Plan, app, max_token, nothing_but_the_fence_has_moved, start};
use crate::support::{
    database::{TestDatabase, on_both_databases},
    eventually,
    fence::{resource, token},
    http::{Answer, Server},
};

on_both_databases!(
    write_commits_with_the_fence_and_stale_write_is_refused,
    failed_handler_keeps_its_token_and_refuses_older_tokens,
    panic_writes_nothing_and_refuses_older_tokens,
    timed_out_handler_is_ended_and_refuses_older_tokens,
    a_handler_may_commit_by_itself,
    write_does_not_wait_for_a_handler_that_has_committed,
    busy_fence_is_answered_with_retry_after,
);

async fn write_commits_with_the_fence_and_stale_write_is_refused<DB: TestDatabase>() {
    let db = DB::fresh(4).await;
    let server = start(&db).await;
    let answer = server.write("/a/add", 2).await;
    assert_eq!((answer.status, answer.text.as_str()), (200, "2"));
    for token in [1, 2] {
        let problem = server.refuses("/a/add", token, 412, "stale-token").await;
        assert_eq!(problem["resource"], "a");
        assert_eq!(problem["presented_token"], token);
        assert_eq!(problem["max_token"], 2);
    }
    assert_eq!(server.write("/b/add", 1).await.status, 200);
    assert_eq!(db.entries().await, 2);
}

async fn failed_handler_keeps_its_token_and_refuses_older_tokens<DB: TestDatabase>() {
    let db = DB::fresh(1).await;
    let server = start(&db).await;
    assert_eq!(server.write("/a/fail", 5).await.status, 409);
    nothing_but_the_fence_has_moved(&db, &server).await;
    // A late failure does not lower the fence.
    assert_eq!(server.write("/a/status/500", 6).await.status, 500);
    assert_eq!(max_token(&db).await, Some(5));
}

async fn panic_writes_nothing_and_refuses_older_tokens<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let server = start(&db).await;
    let request = server.post("/a/panic").header("Fencing-Token", "5");
    request.send().await.expect_err("the request was answered");
    nothing_but_the_fence_has_moved(&db, &server).await;
}

async fn timed_out_handler_is_ended_and_refuses_older_tokens<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let fence = db.fence_with(|fence| fence.hold_timeout(Duration::from_secs(1)));
    let server = Server::start(app(fence, Plan::default())).await;
    let answer = server.write("/a/slow", 5).await;
    answer.is_problem(503, "handler-timeout");
    assert_eq!(answer.headers["retry-after"], "1");
    nothing_but_the_fence_has_moved(&db, &server).await;
    // If the handler has already committed, the answer does not claim that nothing was written.
    server.refuses("/a/linger", 6, 503, "outcome-unknown").await;
    assert_eq!(db.entries().await, 2);
}

#[tokio::test]
async fn handler_without_connection_raises_the_fence_through_another() {
    let db = Postgres::fresh(2).await;
    let server = start(&db).await;
    assert_eq!(server.write("/a/lose", 5).await.status, 503);
    nothing_but_the_fence_has_moved(&db, &server).await;
}

async fn a_handler_may_commit_by_itself<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let server = start(&db).await;
    assert_eq!(server.write("/a/commit", 5).await.status, 418);
    assert_eq!((db.entries().await, max_token(&db).await), (1, Some(5)));
}

async fn write_does_not_wait_for_a_handler_that_has_committed<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let server = start(&db).await;
    let request = server.post("/a/linger").header("Fencing-Token", "5");
    let lingering = tokio::spawn(Answer::to(request));
    eventually!("the handler has committed", db.entries().await == 1);
    assert_eq!(server.write("/a/add", 6).await.status, 200);
    assert!(!lingering.is_finished());
}

async fn busy_fence_is_answered_with_retry_after<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let fence = db.fence_with(|fence| fence.lock_timeout(Duration::from_millis(50)));
    let server = Server::start(app(fence, Plan::default())).await;
    let (other, name) = (db.fence(), resource("a"));
    let tx = other.begin(&name, token(5), TokenUse::SingleUse);
    let tx = tx.await.unwrap();
    let answer = server.write("/a/add", 6).await;
    answer.is_problem(503, "fence-busy");
    assert_eq!(answer.headers["retry-after"], "1");
    tx.commit().await.unwrap();
    assert_eq!(server.write("/a/add", 6).await.status, 200);
}
