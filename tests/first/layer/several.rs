//! Several resources in one write: either all tokens are admitted or none, and the locks never
//! cause a deadlock.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use axum::{
    Router,
    extract::{Path, State},
    http::{StatusCode, request::Parts},
    routing::{any, post},
};
use futures_util::{StreamExt, stream};
use sqlx::{PgConnection, Postgres};
use tower_fence::{
    AdmitError, Admitted, Fence, FenceLayer, FencedTx, InvalidResource, PathParam, PgFencedTx,
    Resource, TokenUse, layer::Refusal,
};

use crate::{
    contract::{resource, token},
    support::{
        database::{Fresh, TestDatabase, on_both_databases, pool_of},
        http::{Answer, Server},
    },
};

on_both_databases!(
    all_tokens_are_admitted_and_each_of_them_is_used,
    one_stale_token_refuses_the_write_and_is_named,
    a_failed_handler_raises_every_resource,
    a_fenced_read_raises_every_resource,
    each_wrong_list_has_its_answer,
    a_resource_that_is_named_twice_counts_once,
    without_http_all_are_admitted_or_none,
);

const BOTH: [PathParam; 2] = [PathParam("from"), PathParam("to")];

/// Returns the header value with tokens for `a` and `b`.
fn field(a: i64, b: i64) -> String {
    format!(r#"{a};resource="a", {b};resource="b""#)
}

async fn max_tokens<DB: TestDatabase>(db: &Fresh<DB>) -> [Option<i64>; 2] {
    let fence = db.fence();
    [
        fence.inspect(&resource("a")).await.unwrap(),
        fence.inspect(&resource("b")).await.unwrap(),
    ]
}

/// Returns the admitted tokens in the order of the request, and writes one entry.
async fn add<DB: TestDatabase>(mut tx: FencedTx<DB>, all: Admitted) -> String {
    assert_eq!(*tx.admitted(), all);
    assert_eq!(
        (all.resource(), all.token()),
        (&all[0].resource, all[0].token)
    );
    let entry = all.token();
    DB::run(&mut tx, &format!("INSERT INTO ledger VALUES ({entry})")).await;
    let all = all
        .iter()
        .map(|one| format!("{}={}", one.resource, one.token));
    all.collect::<Vec<_>>().join(" ")
}

async fn fail<DB: TestDatabase>(mut tx: FencedTx<DB>) -> StatusCode {
    DB::run(&mut tx, "INSERT INTO ledger VALUES (0)").await;
    StatusCode::CONFLICT
}

async fn start<DB: TestDatabase>(db: &Fresh<DB>) -> Server {
    let read = |all: Option<Admitted>| async move { all.map_or(0, |all| all.len()).to_string() };
    let listed = |parts: &Parts| -> Result<Vec<Resource>, InvalidResource> {
        let names = parts.uri.query().unwrap_or_default().split_terminator(',');
        names.map(Resource::new).collect()
    };
    let app = Router::new()
        .route("/{from}/{to}/add", post(add::<DB>))
        .route("/{from}/{to}/fail", post(fail::<DB>))
        .route("/{from}/{to}/read", any(read))
        .route_layer(FenceLayer::new(db.fence(), BOTH))
        .merge(
            Router::new()
                .route("/listed", post(add::<DB>))
                .route_layer(FenceLayer::new(db.fence(), listed)),
        );
    Server::start(app).await
}

async fn all_tokens_are_admitted_and_each_of_them_is_used<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let server = start(&db).await;
    let answer = server.write("/b/a/add", field(42, 7)).await;
    assert_eq!((answer.status, answer.text.as_str()), (200, "b=7 a=42"));
    assert_eq!(max_tokens(&db).await, [Some(42), Some(7)]);
    let answer = server.write(
        "/listed?a,b,c",
        r#"1;resource="c", 43;resource="a", 8;resource="b""#,
    );
    assert_eq!(answer.await.text, "a=43 b=8 c=1");
    assert_eq!(db.entries().await, 2);
}

async fn one_stale_token_refuses_the_write_and_is_named<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let server = start(&db).await;
    assert_eq!(server.write("/a/b/add", field(5, 50)).await.status, 200);
    for (a, b, name, presented, max) in [(6, 50, "b", 50, 50), (4, 60, "a", 4, 5)] {
        for path in ["/a/b/add", "/b/a/add"] {
            let problem = server.refuses(path, field(a, b), 412, "stale-token").await;
            assert_eq!(problem["resource"], name);
            assert_eq!(problem["presented_token"], presented);
            assert_eq!(problem["max_token"], max);
        }
    }
    // The other resource is unchanged: neither an admission nor a raise has changed it.
    assert_eq!(max_tokens(&db).await, [Some(5), Some(50)]);
    assert_eq!(db.entries().await, 1);
    assert_eq!(server.write("/a/b/add", field(6, 51)).await.status, 200);
}

async fn a_failed_handler_raises_every_resource<DB: TestDatabase>() {
    let db = DB::fresh(1).await;
    let server = start(&db).await;
    assert_eq!(server.write("/a/b/fail", field(5, 50)).await.status, 409);
    assert_eq!(max_tokens(&db).await, [Some(4), Some(49)]);
    assert_eq!(db.entries().await, 0);
    assert_eq!(server.write("/a/b/add", field(5, 50)).await.status, 200);
}

async fn a_fenced_read_raises_every_resource<DB: TestDatabase>() {
    let db = DB::fresh(1).await;
    let server = start(&db).await;
    let plain = server.get("/a/b/read");
    assert_eq!(Answer::to(plain).await.text, "0");
    let read = |a, b| server.get("/a/b/read").header("Fencing-Token", field(a, b));
    assert_eq!(Answer::to(read(5, 50)).await.text, "2");
    assert_eq!(max_tokens(&db).await, [Some(4), Some(49)]);
    let problem = Answer::to(read(6, 49)).await.is_problem(412, "stale-token");
    assert_eq!(problem["resource"], "b");
}

async fn each_wrong_list_has_its_answer<DB: TestDatabase>() {
    let db = DB::fresh(1).await;
    let server = start(&db).await;
    let write = |tokens: &'static str| server.write("/a/b/add", tokens);
    write("").await.is_problem(428, "token-required");
    let missing = write(r#"1;resource="a""#).await;
    assert_eq!(missing.is_problem(428, "token-required")["resource"], "b");
    // The vectors of the header have the other wrong lists.
    write("1").await.is_problem(400, "malformed-token");
    let other = write(r#"1;resource="a", 2;resource="c""#).await;
    other.is_problem(403, "wrong-resource");
    let nothing = server.write("/listed", 1).await;
    assert_eq!(
        nothing.is_problem(422, "invalid-request")["field"],
        "resource"
    );
    assert_eq!(max_tokens(&db).await, [None, None]);
}

async fn a_resource_that_is_named_twice_counts_once<DB: TestDatabase>() {
    let db = DB::fresh(1).await;
    let server = start(&db).await;
    assert_eq!(server.write("/a/a/add", 5).await.text, "a=5");
    assert_eq!(
        server.write("/a/a/add", r#"6;resource="a""#).await.text,
        "a=6"
    );
    let twice = server.write("/a/a/add", r#"7;resource="a", 8;resource="a""#);
    twice.await.is_problem(400, "malformed-token");
}

async fn without_http_all_are_admitted_or_none<DB: TestDatabase>() {
    let db = DB::fresh(1).await;
    let fence = db.fence();
    let begin = async |tokens: &[(&str, i64)]| {
        let named = tokens
            .iter()
            .map(|(name, value)| (resource(name), token(*value)));
        let named: Vec<_> = named.collect();
        fence.begin_all(&named, TokenUse::SingleUse).await
    };
    let tx = begin(&[("b", 7), ("a", 42), ("b", 7)]).await.unwrap();
    assert_eq!((tx.admitted().token(), tx.admitted().len()), (token(7), 2));
    tx.commit().await.unwrap();
    assert_eq!(max_tokens(&db).await, [Some(42), Some(7)]);
    for tokens in [[("a", 43), ("b", 7)], [("b", 9), ("b", 8)]] {
        let refused = begin(&tokens).await;
        assert_matches!(refused, Err(AdmitError::Stale(_)));
    }
    assert_eq!(max_tokens(&db).await, [Some(42), Some(7)]);
    // The other admission of the refused transaction was rolled back, and its token is not cached
    // as stale.
    begin(&[("b", 9)]).await.unwrap().commit().await.unwrap();
    let nothing = begin(&[]).await;
    assert_matches!(nothing, Err(AdmitError::NoResource));
}

const TRANSFERS: usize = 1_000;

/// Moves one item from `from` to `to`, protected only by the locks of the fence.
async fn move_one(conn: &mut PgConnection, from: &str, to: &str) {
    let level = |sku: &str| format!("SELECT n FROM stock WHERE sku = '{sku}'");
    let one = Postgres::number(conn, &level(from)).await.unwrap();
    let other = Postgres::number(conn, &level(to)).await.unwrap();
    for (sku, n) in [(from, one - 1), (to, other + 1)] {
        let set = format!("UPDATE stock SET n = {n} WHERE sku = '{sku}'");
        Postgres::run(conn, &set).await;
    }
    Postgres::run(conn, "INSERT INTO moves VALUES (1)").await;
}

/// Runs transfers, half of them in each direction. Returns the number of refusals. The first
/// refusal ends the transfers.
async fn transfers(app: impl Fn(Fence<Postgres>) -> Router) -> u64 {
    let db = Postgres::fresh(2).await;
    db.execute("INSERT INTO stock VALUES ('a', 5000), ('b', 5000); CREATE TABLE moves (n BIGINT)")
        .await;
    // These two pools share only the database, like those of two processes.
    let mut servers = vec![];
    for _ in 0..2 {
        let fence = Fence::new(pool_of(&db.url, 16).await);
        servers.push(Server::start(app(fence)).await);
    }
    let refused = AtomicU64::new(0);
    let (servers, refused_ref) = (&servers, &refused);
    stream::iter(0..TRANSFERS)
        .for_each_concurrent(16, |n| async move {
            if refused_ref.load(Relaxed) > 0 {
                return;
            }
            let path = ["/a/b/transfer", "/b/a/transfer"][n % 2];
            let answer = servers[n / 2 % 2].write(path, field(1, 1)).await;
            if answer.status != 200 {
                // Only a deadlock, or a wait behind a deadlock, causes a refusal.
                println!("{answer:?}");
                assert_eq!(answer.status, 503, "{answer:?}");
                refused_ref.fetch_add(1, Relaxed);
            }
        })
        .await;
    let refused = refused.into_inner();
    println!("{refused} of {TRANSFERS} transfers were refused");
    assert_eq!(
        db.number("SELECT CAST(sum(n) AS BIGINT) FROM stock").await,
        10_000
    );
    let moves = db.number("SELECT count(*) FROM moves").await;
    assert!(refused > 0 || moves == TRANSFERS as i64, "{moves} moves");
    refused
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_transfers_in_both_directions_never_deadlock() {
    async fn transfer(mut tx: PgFencedTx, Path((from, to)): Path<(String, String)>) {
        move_one(&mut tx, &from, &to).await;
    }
    let refused = transfers(|fence| {
        Router::new()
            .route("/{from}/{to}/transfer", post(transfer))
            .route_layer(FenceLayer::new(fence, BOTH).reusable())
    });
    assert_eq!(refused.await, 0);
}

/// The same transfers detect a guard that takes its locks in the order of the request.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn test_detects_locks_in_request_order() {
    async fn transfer(
        State(fence): State<Fence<Postgres>>,
        Path((from, to)): Path<(String, String)>,
    ) -> Result<(), Refusal> {
        let first = resource(&from);
        let mut tx = fence.begin(&first, token(1), TokenUse::Reusable).await?;
        let second = resource(&to);
        fence
            .admit(&mut tx, &second, token(1), TokenUse::Reusable)
            .await?;
        move_one(&mut tx, &from, &to).await;
        Ok(tx.commit().await?)
    }
    let refused = transfers(|fence| {
        Router::new()
            .route("/{from}/{to}/transfer", post(transfer))
            .with_state(fence)
    });
    assert!(
        refused.await > 0,
        "the workload found no deadlock, so it proves nothing"
    );
}
