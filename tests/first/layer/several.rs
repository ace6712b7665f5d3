//! Several resources in one write: either all tokens are admitted or none, and the locks never
//! cause a deadlock.

use axum::{
    Router,
    http::{StatusCode, request::Parts},
    routing::{any, post},
};
use sqlx::Postgres;
use tower_fence::{
    AdmitError, Admitted, FenceLayer, FencedTx, InvalidResource, PathParam, Resource, TokenUse,
};

use crate::{
    contract::{resource, token},
    support::{
        database::{Fresh, TestDatabase, on_both_databases},
        http::{Answer, Server},
    },
};

on_both_databases!(
    all_tokens_are_admitted_and_each_of_them_is_used,
    one_stale_token_refuses_the_write_and_is_named,
    a_failed_handler_raises_every_resource,
    a_fenced_read_raises_every_resource,
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
    let first = (&all[0].resource, all[0].token);
    assert_eq!((all.resource(), all.token()), first);
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
        .route_layer(FenceLayer::new(db.fence(), BOTH));
    let listed = post(add::<DB>).route_layer(FenceLayer::new(db.fence(), listed));
    Server::start(app.route("/listed", listed)).await
}

async fn all_tokens_are_admitted_and_each_of_them_is_used<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let server = start(&db).await;
    let answer = server.write("/b/a/add", field(42, 7)).await;
    assert_eq!((answer.status, answer.text.as_str()), (200, "b=7 a=42"));
    assert_eq!(max_tokens(&db).await, [Some(42), Some(7)]);
    let three = r#"1;resource="c", 43;resource="a", 8;resource="b""#;
    let answer = server.write("/listed?a,b,c", three).await;
    assert_eq!(answer.text, "a=43 b=8 c=1");
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
    // The vectors of the header have the other wrong lists.
    server.refuses("/a/b/add", 7, 400, "malformed-token").await;
    let problem = server.refuses("/listed", 7, 422, "invalid-request").await;
    assert_eq!(problem["field"], "resource");
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

/// Otherwise, two writes could each wait for the other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_are_locked_in_the_order_of_their_names() {
    let names = ["a", "b"].map(resource);
    for (held, free) in [(0, 1), (1, 0)] {
        for order in [[0, 1], [1, 0]] {
            let db = Postgres::fresh(6).await;
            let fence = db.fence();
            for name in &names {
                fence.raise(name, token(1)).await.unwrap();
            }
            let holder = fence.begin(&names[held], token(1), TokenUse::Reusable);
            let holder = holder.await.unwrap();
            let both = order.map(|n| (names[n].clone(), token(1)));
            // Within one fence, the second write would not wait in the database.
            let fence = db.fence();
            let second =
                tokio::spawn(async move { fence.begin_all(&both, TokenUse::Reusable).await });
            db.waits_for_lock().await;
            let unlocked = format!(
                "(SELECT FROM tower_fence.resources WHERE resource = '{}' FOR UPDATE SKIP LOCKED) AS r",
                names[free]
            );
            // A write that waits for `b` has locked `a`.
            let unlocked = db.count(&unlocked).await == 1;
            assert_eq!(unlocked, held == 0, "{order:?}");
            drop(holder);
            drop(second.await.unwrap().unwrap());
        }
    }
}
