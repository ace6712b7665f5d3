//! Answers of a handler that claim more than was committed, on both databases.

use std::time::Duration;

use tokio::time::timeout;

use super::handlers::{Plan, app, nothing_but_the_fence_has_moved, start};
use crate::support::{
    database::{TestDatabase, on_both_databases},
    eventually,
    http::Server,
};

on_both_databases!(
    transaction_in_a_spawned_task_is_not_a_success,
    transaction_in_the_response_body_is_not_a_success,
    transaction_that_cannot_commit_is_not_a_success,
);

async fn transaction_in_a_spawned_task_is_not_a_success<DB: TestDatabase>() {
    let db = DB::fresh(4).await;
    let fence = db.fence_with(|fence| fence.lock_timeout(Duration::from_millis(300)));
    let plan = Plan::default();
    let server = Server::start(app(fence, plan.clone())).await;
    let answer = server.write("/a/spawn", 5).await;
    answer.is_problem(500, "transaction-escaped");
    // The task continues only now, and its commit is refused.
    plan.done.notify_one();
    let refused = timeout(Duration::from_secs(10), plan.done.notified());
    refused.await.expect("the task's commit was not refused");
    if DB::ABORTS_ON_ERROR {
        nothing_but_the_fence_has_moved(&db, &server).await;
    } else {
        // SQLite has no server that could end the transaction of the task.
        assert_eq!(db.entries().await, 0);
        eventually!(
            "the lock is free",
            server.write("/a/add", 5).await.status == 200
        );
    }
}

/// The body of the response holds the only connection of the pool.
async fn transaction_in_the_response_body_is_not_a_success<DB: TestDatabase>() {
    let db = DB::fresh(1).await;
    let server = start(&db).await;
    let answer = server.write("/a/stream", 5).await;
    answer.is_problem(500, "transaction-escaped");
    nothing_but_the_fence_has_moved(&db, &server).await;
}

/// A deferred constraint fails, or a nested transaction is open.
async fn transaction_that_cannot_commit_is_not_a_success<DB: TestDatabase>() {
    for path in ["/a/defer", "/a/forget"] {
        let db = DB::fresh(2).await;
        let server = start(&db).await;
        server.refuses(path, 5, 500, "transaction-aborted").await;
        nothing_but_the_fence_has_moved(&db, &server).await;
    }
}
