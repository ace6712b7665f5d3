//! Idempotency keys over real HTTP, over both databases.

use std::{
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use axum::{
    Extension, Router,
    body::{Body, Bytes},
    http::{HeaderName, StatusCode, header},
    response::{IntoResponse, Response},
    routing::{any, get, post},
};
use futures_util::{StreamExt, stream};
use reqwest::RequestBuilder;
use tokio::{sync::Semaphore, time::timeout};
use tower_fence::{
    CommitError, Fence, FenceLayer, FencedTx, HeaderField, Idempotency, PathParam, Resource, Token,
};

use crate::support::{
    database::{Fresh, TestDatabase, on_both_databases},
    eventually,
    http::{Answer, Server},
};

on_both_databases!(
    a_repeated_write_happens_once_and_is_answered_the_same,
    a_key_belongs_to_one_request,
    a_nested_path_is_compared_whole,
    the_second_of_two_waits_for_the_first_and_replays_it,
    the_second_of_two_runs_where_the_first_failed,
    a_wait_that_runs_out_is_told,
    each_wrong_key_has_its_answer,
    a_write_without_a_key_is_as_before,
    a_failure_leaves_no_record,
    a_stale_token_leaves_no_record,
    a_response_that_cannot_be_stored_undoes_the_write,
    a_key_belongs_to_its_resource_or_to_its_scope,
    an_answer_is_for_whoever_has_sent_the_request,
    a_principal_may_be_named_otherwise,
    a_scope_of_ones_own_does_not_mix_resources,
    an_expired_key_is_new_and_the_token_still_counts,
    expired_keys_are_removed_and_no_others,
    a_handler_cannot_commit_without_its_record,
    a_handler_that_ended_its_transaction_by_hand_leaves_no_record,
    keys_go_with_several_resources,
);

/// How the handlers behave, and what they have seen.
struct Plan {
    calls: AtomicU64,
    /// How many of the first calls fail.
    failures: u64,
    gate: Semaphore,
}

impl Plan {
    fn new(failures: u64, gate: usize) -> Arc<Self> {
        Arc::new(Self {
            calls: AtomicU64::new(0),
            failures,
            gate: Semaphore::new(gate),
        })
    }
}

/// Writes an entry, waits at the gate, and answers with the number of the call.
async fn add<DB: TestDatabase>(mut tx: FencedTx<DB>, plan: Extension<Arc<Plan>>) -> Response {
    let call = plan.calls.fetch_add(1, Relaxed) + 1;
    DB::execute(&mut tx, &format!("INSERT INTO ledger VALUES ({call})"))
        .await
        .unwrap();
    plan.gate.acquire().await.unwrap().forget();
    if call <= plan.failures {
        return StatusCode::CONFLICT.into_response();
    }
    let headers = [
        (header::LOCATION, format!("/calls/{call}")),
        (header::SET_COOKIE, "secret".into()),
    ];
    (StatusCode::CREATED, headers, format!("call {call}")).into_response()
}

async fn long<DB: TestDatabase>(tx: FencedTx<DB>, plan: Extension<Arc<Plan>>) -> String {
    add(tx, plan).await;
    "x".repeat(101)
}

async fn streamed<DB: TestDatabase>(tx: FencedTx<DB>, plan: Extension<Arc<Plan>>) -> Body {
    add(tx, plan).await;
    Body::from_stream(
        stream::repeat("x".repeat(10))
            .map(Ok::<_, Infallible>)
            .take(11),
    )
}

async fn broken<DB: TestDatabase>(tx: FencedTx<DB>, plan: Extension<Arc<Plan>>) -> Body {
    add(tx, plan).await;
    Body::from_stream(stream::iter([Ok("x"), Err("broken")]))
}

async fn commit<DB: TestDatabase>(mut tx: FencedTx<DB>) -> StatusCode {
    DB::execute(&mut tx, "INSERT INTO ledger VALUES (1)")
        .await
        .unwrap();
    let outcome = tx.commit().await;
    assert!(
        matches!(outcome, Err(CommitError::Unrecorded)),
        "{outcome:?}"
    );
    StatusCode::OK
}

async fn by_hand<DB: TestDatabase>(mut tx: FencedTx<DB>) -> StatusCode {
    DB::execute(&mut tx, "INSERT INTO ledger VALUES (1); ROLLBACK")
        .await
        .unwrap();
    StatusCode::OK
}

async fn start_with<DB: TestDatabase>(
    fence: Fence<DB>,
    keys: Idempotency,
    plan: &Arc<Plan>,
) -> Server {
    let layer = FenceLayer::new(fence.clone(), PathParam("sku")).idempotent(keys.clone());
    let both = FenceLayer::new(fence, [PathParam("sku"), PathParam("to")]).idempotent(keys);
    let inner = || Router::new().route("/{sku}/inner", post(add::<DB>).route_layer(layer.clone()));
    let app = Router::new()
        .route("/{sku}/add", any(add::<DB>))
        .route("/{sku}/other", post(add::<DB>))
        .route("/{sku}/echo", post(|body: Bytes| async { body }))
        .route("/{sku}/read", get(|| async { "read" }))
        .route("/{sku}/long", post(long::<DB>))
        .route("/{sku}/streamed", post(streamed::<DB>))
        .route("/{sku}/broken", post(broken::<DB>))
        .route("/{sku}/commit", post(commit::<DB>))
        .route("/{sku}/by-hand", post(by_hand::<DB>))
        .route_layer(layer.clone())
        .route("/{sku}/to/{to}", post(add::<DB>).route_layer(both))
        .nest("/v1", inner())
        .nest("/v2", inner())
        .layer(Extension(plan.clone()));
    Server::start(app).await
}

async fn start<DB: TestDatabase>(db: &Fresh<DB>) -> Server {
    start_with(db.fence(), Idempotency::optional(), &Plan::new(0, 1_000)).await
}

fn keyed(server: &Server, path: &str, token: impl ToString, key: &str) -> RequestBuilder {
    let request = server.post(path).header("Fencing-Token", token.to_string());
    request.header("Idempotency-Key", format!("\"{key}\""))
}

async fn write(server: &Server, path: &str, token: i64, key: &str) -> Answer {
    Answer::to(keyed(server, path, token, key)).await
}

#[track_caller]
fn is_call(answer: &Answer, call: u64, replayed: bool) {
    let text = format!("call {call}");
    assert_eq!((answer.status, &answer.text), (201, &text), "{answer:?}");
    assert_eq!(answer.headers["location"], format!("/calls/{call}"));
    let expected = replayed.then_some("true");
    let replayed = answer.headers.get("idempotent-replayed");
    assert_eq!(replayed.map(|value| value.to_str().unwrap()), expected);
}

async fn max_token<DB: TestDatabase>(db: &Fresh<DB>) -> Option<i64> {
    let a = Resource::new("a").unwrap();
    db.fence().inspect(&a).await.unwrap()
}

async fn records<DB: TestDatabase>(db: &Fresh<DB>) -> i64 {
    db.number("SELECT count(*) FROM fence_idempotency_keys")
        .await
}

async fn a_repeated_write_happens_once_and_is_answered_the_same<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let server = start(&db).await;
    let first = write(&server, "/a/add", 5, "k").await;
    is_call(&first, 1, false);
    assert!(first.headers.contains_key("set-cookie"));
    // This process knows by now that the token is dead.
    let bare = server.write("/a/add", 5).await;
    bare.is_problem(412, "stale-token");
    // Under the token that was used up, under one that is outranked, and under a newer one.
    for token in [5, 4, 6] {
        let again = write(&server, "/a/add", token, "k").await;
        is_call(&again, 1, true);
        assert_eq!(again.headers["content-type"], first.headers["content-type"]);
        assert!(!again.headers.contains_key("set-cookie"));
    }
    assert_eq!((db.entries().await, max_token(&db).await), (1, Some(5)));
    is_call(&write(&server, "/a/add", 6, "other").await, 2, false);
    let stale = write(&server, "/a/add", 5, "third").await;
    stale.is_problem(412, "stale-token");
}

async fn a_key_belongs_to_one_request<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let server = start(&db).await;
    let request = |path: &str| keyed(&server, path, 5, "k");
    is_call(
        &Answer::to(request("/a/add?x=1").body("body")).await,
        1,
        false,
    );
    let put = server.client.put(server.url("/a/add?x=1"));
    let put = put
        .header("Fencing-Token", "5")
        .header("Idempotency-Key", "\"k\"");
    for other in [
        put.body("body"),
        request("/a/other?x=1").body("body"),
        request("/a/add?x=2").body("body"),
        request("/a/add").body("body"),
        request("/a/add?x=1").body("Body"),
        request("/a/add?x=1"),
    ] {
        let answer = Answer::to(other).await;
        answer.is_problem(422, "idempotency-mismatch");
    }
    is_call(
        &Answer::to(request("/a/add?x=1").body("body")).await,
        1,
        true,
    );
    assert_eq!(db.entries().await, 1);
}

async fn a_nested_path_is_compared_whole<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let server = start(&db).await;
    is_call(&write(&server, "/v1/a/inner", 5, "k").await, 1, false);
    let other = write(&server, "/v2/a/inner", 5, "k").await;
    other.is_problem(422, "idempotency-mismatch");
}

/// Two processes of the service.
async fn two_servers<DB: TestDatabase>(
    db: &Fresh<DB>,
    keys: Idempotency,
    plan: &Arc<Plan>,
) -> [Server; 2] {
    // Each fence has a queue of its own. On SQLite the lock of the file is all that they share.
    let fence = || db.fence().lock_wait(Duration::from_secs(2));
    [
        start_with(fence(), keys.clone(), plan).await,
        start_with(fence(), keys, plan).await,
    ]
}

/// Starts a write that waits at the gate, and waits until it is there.
async fn at_the_gate(server: &Server, plan: &Plan) -> tokio::task::JoinHandle<Answer> {
    let first = tokio::spawn(Answer::to(keyed(server, "/a/add", 5, "k")));
    eventually("the first is at the gate", async || {
        plan.calls.load(Relaxed) == 1
    })
    .await;
    first
}

async fn the_second_of_two_waits_for_the_first_and_replays_it<DB: TestDatabase>() {
    for same_process in [true, false] {
        let db = DB::fresh(4).await;
        let plan = Plan::new(0, 0);
        let [server, other] = two_servers(&db, Idempotency::optional(), &plan).await;
        let other = if same_process { &server } else { &other };
        let first = at_the_gate(&server, &plan).await;
        let mut second = tokio::spawn(Answer::to(keyed(other, "/a/add", 5, "k")));
        let early = timeout(Duration::from_millis(100), &mut second).await;
        assert!(early.is_err(), "it must wait: {early:?}");
        plan.gate.add_permits(2);
        is_call(&first.await.unwrap(), 1, false);
        is_call(&second.await.unwrap(), 1, true);
        assert_eq!(db.entries().await, 1);
    }
}

async fn the_second_of_two_runs_where_the_first_failed<DB: TestDatabase>() {
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

async fn a_wait_that_runs_out_is_told<DB: TestDatabase>() {
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
        // SQLite has one lock for all, and does not say who holds it.
        third.is_problem(503, "fence-busy");
    }
    // The resource has a limit of its own: another key waits longer than that.
    let new = [&server, &other].map(|server| {
        let key = format!("new {}", server.addr);
        tokio::spawn(Answer::to(keyed(server, "/a/add", 6, &key)))
    });
    tokio::time::sleep(3 * short).await;
    assert!(new.iter().all(|new| !new.is_finished()), "they must wait");
    plan.gate.add_permits(3);
    is_call(&first.await.unwrap(), 1, false);
    let mut statuses = vec![];
    for new in new {
        statuses.push(new.await.unwrap().status);
    }
    statuses.sort_unstable();
    // The same token for both: one of them was later.
    assert_eq!(statuses, [201, 412]);
    is_call(&write(&server, "/a/add", 5, "k").await, 1, true);
}

async fn each_wrong_key_has_its_answer<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let plan = Plan::new(0, 1_000);
    let server = start_with(db.fence(), Idempotency::required(), &plan).await;
    let bare = server.write("/a/add", 5).await;
    bare.is_problem(400, "idempotency-key-required");
    let write = || server.post("/a/add").header("Fencing-Token", "5");
    for wrong in [
        "",
        "k",
        "1",
        "\"\"",
        "\"k",
        &format!("\"{}\"", "k".repeat(256)),
    ] {
        let answer = Answer::to(write().header("Idempotency-Key", wrong)).await;
        answer.is_problem(400, "malformed-idempotency-key");
    }
    let twice = write()
        .header("Idempotency-Key", "\"a\"")
        .header("Idempotency-Key", "\"b\"");
    let answer = Answer::to(twice).await;
    answer.is_problem(400, "malformed-idempotency-key");
    assert_eq!((max_token(&db).await, records(&db).await), (None, 0));
    // A key is no substitute for a token, and a read needs none.
    let no_token = server.post("/a/add").header("Idempotency-Key", "\"k\"");
    Answer::to(no_token).await.is_problem(428, "token-required");
    let read = server.get("/a/read").header("Fencing-Token", "5");
    assert_eq!(Answer::to(read).await.text, "read");
}

async fn a_write_without_a_key_is_as_before<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let server = start(&db).await;
    assert_eq!(server.write("/a/add", 5).await.status, 201);
    let again = server.write("/a/add", 5).await;
    again.is_problem(412, "stale-token");
    assert_eq!(server.write("/a/long", 6).await.text.len(), 101);
    assert_eq!(records(&db).await, 0);
    // With a key the handler still gets the whole body.
    let echo = keyed(&server, "/a/echo", 7, "k").body("x".repeat(50_000));
    assert_eq!(Answer::to(echo).await.text.len(), 50_000);
}

async fn a_failure_leaves_no_record<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let plan = Plan::new(2, 1_000);
    let server = start_with(db.fence(), Idempotency::optional(), &plan).await;
    for _ in 0..2 {
        assert_eq!(write(&server, "/a/add", 5, "k").await.status, 409);
        assert_eq!((records(&db).await, db.entries().await), (0, 0));
        assert_eq!(max_token(&db).await, Some(4));
    }
    is_call(&write(&server, "/a/add", 5, "k").await, 3, false);
    is_call(&write(&server, "/a/add", 5, "k").await, 3, true);
}

async fn a_stale_token_leaves_no_record<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let server = start(&db).await;
    is_call(&write(&server, "/a/add", 5, "k").await, 1, false);
    let stale = write(&server, "/a/add", 5, "new").await;
    stale.is_problem(412, "stale-token");
    is_call(&write(&server, "/a/add", 6, "new").await, 2, false);
}

async fn a_response_that_cannot_be_stored_undoes_the_write<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let keys = Idempotency::optional().response_limit_bytes(100);
    let server = start_with(db.fence(), keys, &Plan::new(0, 1_000)).await;
    for path in ["/a/long", "/a/streamed", "/a/broken"] {
        let answer = write(&server, path, 5, "k").await;
        answer.is_problem(500, "response-not-stored");
        assert_eq!((records(&db).await, db.entries().await), (0, 0));
        assert_eq!(max_token(&db).await, Some(4));
    }
    is_call(&write(&server, "/a/add", 5, "k").await, 4, false);
}

async fn a_key_belongs_to_its_resource_or_to_its_scope<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let server = start(&db).await;
    is_call(&write(&server, "/a/add", 5, "k").await, 1, false);
    is_call(&write(&server, "/b/add", 5, "k").await, 2, false);

    let tenant = HeaderName::from_static("x-tenant");
    let keys = Idempotency::optional().scope(HeaderField(tenant));
    let server = start_with(db.fence(), keys, &Plan::new(0, 1_000)).await;
    let write = |path: &str, tenant: &str| {
        Answer::to(keyed(&server, path, 9, "t").header("X-Tenant", tenant))
    };
    db.execute("DELETE FROM ledger").await;
    is_call(&write("/a/add", "acme").await, 1, false);
    is_call(&write("/a/add", "acme").await, 1, true);
    write("/b/add", "acme")
        .await
        .is_problem(422, "idempotency-mismatch");
    write("/a/add", "other")
        .await
        .is_problem(412, "stale-token");
    let nobody = Answer::to(keyed(&server, "/a/add", 9, "t")).await;
    assert_eq!(
        nobody.is_problem(422, "invalid-request")["field"],
        "x-tenant"
    );
}

async fn an_answer_is_for_whoever_has_sent_the_request<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let server = start(&db).await;
    let send = |token: i64, authorization: &'static [&'static str]| {
        let request = keyed(&server, "/a/add", token, "k");
        let request = authorization.iter().fold(request, |request, line| {
            request.header("Authorization", *line)
        });
        Answer::to(request)
    };
    is_call(&send(5, &["Bearer alice"]).await, 1, false);
    is_call(&send(5, &["Bearer alice"]).await, 1, true);
    // The same request with the same key, but for who sends it.
    for stranger in [
        &[][..],
        &["Bearer bob"],
        &["Bearer alice", ""],
        &["Bearer", "alice"],
        &["bearer alice"],
    ] {
        for token in [5, 1] {
            let answer = send(token, stranger).await;
            answer.is_problem(412, "stale-token");
        }
    }
    is_call(&send(6, &["Bearer bob"]).await, 2, false);
    is_call(&send(1, &["Bearer alice"]).await, 1, true);
}

async fn a_principal_may_be_named_otherwise<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let keys = Idempotency::optional().principal(|parts| {
        let user = parts.headers.get("x-user");
        user.map(|user| user.as_bytes().to_vec())
            .unwrap_or_default()
    });
    let server = start_with(db.fence(), keys, &Plan::new(0, 1_000)).await;
    let send = |user: &'static str, authorization: &'static str| {
        let request = keyed(&server, "/a/add", 5, "k").header("X-User", user);
        Answer::to(request.header("Authorization", authorization))
    };
    is_call(&send("alice", "Bearer 1").await, 1, false);
    // Under an access token that is new.
    is_call(&send("alice", "Bearer 2").await, 1, true);
    let other = send("bob", "Bearer 1").await;
    other.is_problem(412, "stale-token");
}

async fn a_scope_of_ones_own_does_not_mix_resources<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let tenant = HeaderField(HeaderName::from_static("x-tenant"));
    let sku = HeaderField(HeaderName::from_static("x-sku"));
    let layer = FenceLayer::new(db.fence(), sku);
    let app = Router::new()
        .route("/add", post(add::<DB>))
        .route_layer(layer.idempotent(Idempotency::optional().scope(tenant)))
        .layer(Extension(Plan::new(0, 1_000)));
    let server = Server::start(app).await;
    let write = |sku: &'static str| {
        let request = keyed(&server, "/add", 5, "k").header("X-Tenant", "acme");
        Answer::to(request.header("X-Sku", sku))
    };
    is_call(&write("sku-1").await, 1, false);
    let other = write("sku-2").await;
    other.is_problem(422, "idempotency-mismatch");
    is_call(&write("sku-1").await, 1, true);
}

async fn an_expired_key_is_new_and_the_token_still_counts<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let keys = Idempotency::optional().ttl(Duration::from_millis(1));
    let server = start_with(db.fence(), keys, &Plan::new(0, 1_000)).await;
    is_call(&write(&server, "/a/add", 5, "k").await, 1, false);
    tokio::time::sleep(Duration::from_millis(20)).await;
    let stale = write(&server, "/a/add", 5, "k").await;
    stale.is_problem(412, "stale-token");
    // Another request than before: the old record is replaced whole.
    let new = keyed(&server, "/a/other", 6, "k").body("new");
    is_call(&Answer::to(new).await, 2, false);
    assert_eq!(records(&db).await, 1);
    // The longest time there is.
    let keys = Idempotency::optional().ttl(Duration::MAX);
    let server = start_with(db.fence(), keys, &Plan::new(0, 1_000)).await;
    db.execute("DELETE FROM ledger").await;
    is_call(&write(&server, "/a/add", 7, "long").await, 1, false);
    is_call(&write(&server, "/a/add", 7, "long").await, 1, true);
}

async fn expired_keys_are_removed_and_no_others<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let server = start(&db).await;
    is_call(&write(&server, "/a/add", 5, "k").await, 1, false);
    let past = if DB::ABORTS_ON_ERROR {
        "now() - interval '1 second'"
    } else {
        "1"
    };
    db.execute(&format!(
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 2500) \
         INSERT INTO fence_idempotency_keys (scope, key, fingerprint, expires_at) \
         SELECT scope, 'old ' || i, fingerprint, {past} FROM fence_idempotency_keys, n"
    ))
    .await;
    assert_eq!(records(&db).await, 2_501);
    assert_eq!(db.fence().remove_expired_keys().await.unwrap(), 2_500);
    assert_eq!(db.fence().remove_expired_keys().await.unwrap(), 0);
    is_call(&write(&server, "/a/add", 5, "k").await, 1, true);
}

async fn a_handler_cannot_commit_without_its_record<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let server = start(&db).await;
    let answer = write(&server, "/a/commit", 5, "k").await;
    answer.is_problem(500, "transaction-aborted");
    assert_eq!((records(&db).await, db.entries().await), (0, 0));
    assert_eq!(max_token(&db).await, Some(4));
}

async fn a_handler_that_ended_its_transaction_by_hand_leaves_no_record<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let server = start(&db).await;
    let answer = write(&server, "/a/by-hand", 5, "k").await;
    answer.is_problem(500, "transaction-aborted");
    assert_eq!((records(&db).await, db.entries().await), (0, 0));
    is_call(&write(&server, "/a/add", 5, "k").await, 1, false);
}

async fn keys_go_with_several_resources<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let server = start(&db).await;
    let tokens = r#"5;resource="a", 7;resource="b""#;
    for replayed in [false, true] {
        let answer = Answer::to(keyed(&server, "/a/to/b", tokens, "k")).await;
        is_call(&answer, 1, replayed);
    }
    let other = Answer::to(keyed(&server, "/b/to/a", tokens, "k")).await;
    other.is_problem(422, "idempotency-mismatch");
    assert_eq!(max_token(&db).await, Some(Token::new(5).unwrap().get()));
}
