//! Idempotency keys over real HTTP, on both databases: repetitions, and two concurrent requests.

use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};

use axum::routing::post;
use sqlx::Postgres;
use tokio::time::timeout;
use tower_fence::{FenceLayer, FencedTx, Idempotency, PathParam};

use super::keyed::{Plan, is_call, keyed, max_token, records, start, start_with, write};
use crate::support::{
    database::{Fresh, TestDatabase, on_both_databases},
    eventually,
    http::{Answer, Server},
};

on_both_databases!(
    a_repeated_write_happens_once_and_is_answered_the_same,
    second_of_two_requests_waits_and_replays_the_first,
    second_of_two_requests_runs_if_the_first_failed,
    a_replay_does_not_wait_for_another_write,
    timed_out_wait_for_a_key_is_reported,
    each_wrong_key_has_its_answer,
    write_without_a_key_is_unaffected,
);

async fn a_repeated_write_happens_once_and_is_answered_the_same<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let server = start(&db).await;
    let first = write(&server, "/a/add", 5, "k").await;
    is_call(&first, 1, false);
    assert!(first.headers.contains_key("set-cookie"));
    // From here on, this process has cached that the token is stale.
    server.refuses("/a/add", 5, 412, "stale-token").await;
    // The request is repeated with the used token, with a superseded one, and with a newer one.
    for token in [5, 4, 6] {
        let again = write(&server, "/a/add", token, "k").await;
        is_call(&again, 1, true);
        assert_eq!(again.headers["content-type"], first.headers["content-type"]);
        assert!(!again.headers.contains_key("set-cookie"));
    }
    assert_eq!((db.entries().await, max_token(&db).await), (1, Some(5)));
    is_call(&write(&server, "/a/add", 6, "other").await, 2, false);
    // The record of a refused request is rolled back, so its key is new.
    let stale = write(&server, "/a/add", 5, "third").await;
    stale.is_problem(412, "stale-token");
    is_call(&write(&server, "/a/add", 7, "third").await, 3, false);
}

/// Starts two processes of the service.
async fn two_servers<DB: TestDatabase>(
    db: &Fresh<DB>,
    keys: Idempotency,
    plan: &Arc<Plan>,
) -> [Server; 2] {
    // Each fence has its own queue. On SQLite they share only the lock of the file.
    let fence = || db.fence_with(|fence| fence.lock_timeout(Duration::from_secs(2)));
    [
        start_with(fence(), keys.clone(), plan).await,
        start_with(fence(), keys, plan).await,
    ]
}

/// Starts a write, and returns when it waits at the gate.
async fn at_the_gate(server: &Server, plan: &Plan) -> tokio::task::JoinHandle<Answer> {
    let first = tokio::spawn(Answer::to(keyed(server, "/a/add", 5, "k")));
    eventually!(
        "the first request is at the gate",
        plan.calls.load(Relaxed) == 1
    );
    first
}

async fn second_of_two_requests_waits_and_replays_the_first<DB: TestDatabase>() {
    for same_process in [true, false] {
        let db = DB::fresh(4).await;
        let plan = Plan::new(0, 0);
        let [server, other] = two_servers(&db, Idempotency::optional(), &plan).await;
        let other = if same_process { &server } else { &other };
        let first = at_the_gate(&server, &plan).await;
        let mut second = tokio::spawn(Answer::to(keyed(other, "/a/add", 5, "k")));
        let early = timeout(Duration::from_millis(100), &mut second).await;
        assert!(early.is_err(), "the second request must wait: {early:?}");
        plan.gate.add_permits(2);
        is_call(&first.await.unwrap(), 1, false);
        is_call(&second.await.unwrap(), 1, true);
        assert_eq!(db.entries().await, 1);
    }
}

async fn second_of_two_requests_runs_if_the_first_failed<DB: TestDatabase>() {
    for same_process in [true, false] {
        let db = DB::fresh(4).await;
        let plan = Plan::new(1, 0);
        let [server, other] = two_servers(&db, Idempotency::optional(), &plan).await;
        let other = if same_process { &server } else { &other };
        let first = at_the_gate(&server, &plan).await;
        let second = tokio::spawn(Answer::to(keyed(other, "/a/add", 5, "k")));
        plan.gate.add_permits(2);
        assert_eq!(first.await.unwrap().status, 409);
        is_call(&second.await.unwrap(), 2, false);
        assert_eq!(db.entries().await, 1);
    }
}

async fn a_replay_does_not_wait_for_another_write<DB: TestDatabase>() {
    let db = DB::fresh(4).await;
    let plan = Plan::new(0, 1);
    let [server, _other] = two_servers(&db, Idempotency::optional(), &plan).await;
    is_call(&write(&server, "/a/add", 5, "k").await, 1, false);
    let open = tokio::spawn(Answer::to(keyed(&server, "/a/add", 6, "other")));
    eventually!(
        "the other write is at the gate",
        plan.calls.load(Relaxed) == 2
    );
    is_call(&write(&server, "/a/add", 5, "k").await, 1, true);
    plan.gate.add_permits(1);
    is_call(&open.await.unwrap(), 2, false);
}

async fn timed_out_wait_for_a_key_is_reported<DB: TestDatabase>() {
    let short = Duration::from_millis(100);
    let db = DB::fresh(4).await;
    let plan = Plan::new(0, 0);
    let keys = Idempotency::optional().wait(short);
    let [server, other] = two_servers(&db, keys, &plan).await;
    let first = at_the_gate(&server, &plan).await;
    let second = write(&server, "/a/add", 5, "k").await;
    second.is_problem(409, "idempotency-in-flight");
    assert_eq!(second.headers["retry-after"], "1");
    let third = write(&other, "/a/add", 5, "k").await;
    if DB::ABORTS_ON_ERROR {
        third.is_problem(409, "idempotency-in-flight");
    } else {
        // SQLite has one lock for the whole database, and does not report its holder.
        third.is_problem(503, "fence-busy");
    }
    // The timeout for the resource is separate, so a request with another key waits longer than the
    // timeout for a key.
    let new = [&server, &other].map(|server| {
        let key = format!("new {}", server.addr);
        tokio::spawn(Answer::to(keyed(server, "/a/add", 6, &key)))
    });
    tokio::time::sleep(3 * short).await;
    let all_wait = new.iter().all(|new| !new.is_finished());
    assert!(all_wait, "the requests with another key must wait");
    plan.gate.add_permits(3);
    is_call(&first.await.unwrap(), 1, false);
    let mut statuses = vec![];
    for new in new {
        statuses.push(new.await.unwrap().status);
    }
    statuses.sort_unstable();
    // Both requests have the same token, and the later one is refused.
    assert_eq!(statuses, [201, 412]);
    is_call(&write(&server, "/a/add", 5, "k").await, 1, true);
}

async fn each_wrong_key_has_its_answer<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let plan = Plan::new(0, 1_000);
    let server = start_with(db.fence(), Idempotency::required(), &plan).await;
    let answer = server.write("/a/add", 5).await;
    answer.is_problem(400, "idempotency-key-required");
    let write = || server.post("/a/add").header("Fencing-Token", "5");
    let too_long = format!("\"{}\"", "k".repeat(256));
    for wrong in ["", "k", "1", "\"\"", "\"k", &too_long] {
        let answer = Answer::to(write().header("Idempotency-Key", wrong)).await;
        answer.is_problem(400, "malformed-idempotency-key");
    }
    let twice = write()
        .header("Idempotency-Key", "\"a\"")
        .header("Idempotency-Key", "\"b\"");
    let answer = Answer::to(twice).await;
    answer.is_problem(400, "malformed-idempotency-key");
    assert_eq!((max_token(&db).await, records(&db).await), (None, 0));
    // A key does not replace a token, and a read needs no key.
    let no_token = server.post("/a/add").header("Idempotency-Key", "\"k\"");
    Answer::to(no_token).await.is_problem(428, "token-required");
    let read = server.get("/a/read").header("Fencing-Token", "5");
    assert_eq!(Answer::to(read).await.text, "read");
}

async fn write_without_a_key_is_unaffected<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let server = start(&db).await;
    assert_eq!(server.write("/a/add", 5).await.status, 201);
    server.refuses("/a/add", 5, 412, "stale-token").await;
    assert_eq!(server.write("/a/long", 6).await.text.len(), 101);
    assert_eq!(records(&db).await, 0);
    // With a key, the handler still gets the complete body.
    let echo = keyed(&server, "/a/echo", 7, "k").body("x".repeat(50_000));
    assert_eq!(Answer::to(echo).await.text.len(), 50_000);
}

#[tokio::test]
async fn unfinished_copy_aborts_the_transaction_of_a_key() {
    let db = Postgres::fresh(2).await;
    let handler = async |mut tx: FencedTx<Postgres>| {
        drop(tx.copy_in_raw("COPY ledger FROM STDIN").await.unwrap());
    };
    let layer = FenceLayer::new(db.fence(), PathParam("r")).idempotent(Idempotency::optional());
    let server = Server::at("/{r}", post(handler).route_layer(layer)).await;
    let refused = write(&server, "/r", 5, "k").await;
    refused.is_problem(500, "transaction-aborted");
}
