//! Transactions that a handler behind a deferred layer begins and passes to a task.

use std::{sync::Arc, time::Duration};

use axum::{Extension, Router, extract::Path, http::StatusCode, routing::post};
use sqlx::{Executor, Postgres};
use tokio::{
    join,
    sync::Notify,
    time::{sleep, timeout},
};
use tower_fence::{
    Fence, FenceLayer, PathParam, PgFencedTx, PgPendingWrite, fence::CommitError, layer::Refusal,
};

use crate::support::{
    PATIENCE,
    database::{TestDatabase, WAITING_FOR_LOCK, pool_of},
    fence::{begin, sku},
    http::Server,
};

#[derive(Clone, Default)]
struct Signals {
    go_on: Arc<Notify>,
    done: Arc<Notify>,
}

/// The last part of the path selects the action of the handler.
async fn handler(
    pending: PgPendingWrite,
    Path((_, what)): Path<(String, String)>,
    Extension(signals): Extension<Signals>,
) -> Result<StatusCode, Refusal> {
    let Signals { go_on, done } = signals;
    match what.as_str() {
        // Begins in a task, and answers while the task waits.
        "begin-in-a-task" => {
            tokio::spawn(async move {
                let begun = pending.begin().await;
                if let Ok(tx) = begun {
                    let written = write(tx).await;
                    panic!("begun after the answer: {written:?}");
                }
                done.notify_one();
            });
            go_on.notified().await;
            Ok(StatusCode::OK)
        }
        // Begins, and passes the transaction to a task.
        "keep-in-a-task" => {
            let tx = pending.begin().await?;
            tokio::spawn(async move {
                go_on.notified().await;
                let refused = write(tx).await;
                assert!(refused.is_err(), "{refused:?}");
                done.notify_one();
            });
            Ok(StatusCode::OK)
        }
        "begin-and-wait" => {
            let _tx = pending.begin().await?;
            done.notify_one();
            go_on.notified().await;
            Ok(StatusCode::CONFLICT)
        }
        _ => pending.begin().await.map(|_tx| StatusCode::OK),
    }
}

async fn write(mut tx: PgFencedTx) -> Result<(), CommitError> {
    let _ = tx.execute("INSERT INTO ledger VALUES (1)").await;
    tx.commit().await
}

async fn start(fence: Fence<Postgres>, signals: &Signals) -> Server {
    let layer = FenceLayer::new(fence, PathParam("r")).deferred();
    let app = Router::new().route("/{r}/{what}", post(handler));
    Server::start(app.route_layer(layer).layer(Extension(signals.clone()))).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn begin_after_the_response_is_refused() {
    let db = Postgres::fresh(4).await;
    let signals = Signals::default();
    let fence = db.fence_with(|fence| fence.lock_timeout(PATIENCE));
    let server = start(fence, &signals).await;
    // Another process has locked the row.
    let blocker = db.fence_with(|fence| fence.hold_timeout(2 * PATIENCE));
    let blocker = begin(&blocker, 4).await;
    let answer = async {
        let answer = server.write("/sku-1/begin-in-a-task", 5).await;
        answer.is_problem(500, "misconfigured");
    };
    let answered_meanwhile = async {
        db.waits_for_lock().await;
        signals.go_on.notify_one();
    };
    join!(answer, answered_meanwhile);
    drop(blocker);
    let refused = timeout(PATIENCE, signals.done.notified());
    refused.await.expect("the task was not refused");
    assert_eq!(db.entries().await, 0);
    assert_eq!(db.fence().inspect(&sku()).await.unwrap(), None);
    // The refused task has left no lock.
    assert_eq!(server.write("/sku-1/begin", 5).await.status, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn transaction_kept_by_a_background_task_is_ended() {
    let db = Postgres::fresh(4).await;
    let signals = Signals::default();
    // If the layer did not end the transaction, it would last longer than the test.
    let fence = db.fence_with(|fence| fence.hold_timeout(2 * PATIENCE));
    let server = start(fence, &signals).await;
    let answer = server.write("/r/keep-in-a-task", 5).await;
    answer.is_problem(500, "transaction-escaped");
    let answer = server.write("/r/begin", 5).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    signals.go_on.notify_one();
    let refused = timeout(PATIENCE, signals.done.notified());
    refused.await.expect("the task's commit was not refused");
    assert_eq!(db.entries().await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_requests_wait_behind_a_begin_without_a_connection() {
    let db = Postgres::fresh(2).await;
    let signals = Signals::default();
    let pool = pool_of(&db.url, 3).await;
    let fence = Fence::builder()
        .lock_timeout(PATIENCE)
        .hold_timeout(PATIENCE)
        .build(pool);
    let server = start(fence, &signals).await;
    let first = server.write("/r/begin-and-wait", 5);
    let others = async {
        signals.done.notified().await;
        let write = |token| server.write("/r/begin", token);
        let meanwhile = async {
            for _ in 0..20 {
                assert_eq!(db.number(WAITING_FOR_LOCK).await, 0);
                sleep(Duration::from_millis(10)).await;
            }
            signals.go_on.notify_one();
        };
        join!(write(6), write(7), write(8), meanwhile)
    };
    let (first, others) = join!(first, others);
    assert_eq!(first.status, 409);
    for answer in [others.0, others.1, others.2] {
        // The requests are served in any order.
        assert!([200, 412].contains(&answer.status), "{answer:?}");
    }
}
