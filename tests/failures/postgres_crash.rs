//! Postgres servers with `synchronous_commit=off` that crash.

use axum::{
    Router,
    body::Body,
    http::{Request, request::Parts},
    routing::get,
};
use sqlx::{Executor, PgPool, Postgres, postgres::PgConnectOptions};
use tower::ServiceExt;
use tower_fence::{
    Fence, FenceLayer, Resource, Token, TokenUse,
    announce::{Announce, LeaseDigest},
    epochs::{Epoch, Epochs},
};

use super::answered;
use crate::support::{eventually, postgres::PostgresServer};

/// Starts a server with `synchronous_commit=off`, which waits for its disk only on request. At
/// another `wal_level`, a background process logs the running transactions at some time after each
/// start, and thereby makes the server write its log.
pub async fn lazy_server() -> PostgresServer {
    let lazy = ["synchronous_commit=off", "wal_writer_delay=10000"];
    let quiet = ["wal_level=minimal", "max_wal_senders=0"];
    PostgresServer::start(&[lazy, quiet].concat()).await
}

fn named(name: &str) -> Resource {
    Resource::new(name).unwrap()
}

/// Makes the server write its log now, so that its next write of the log is ten seconds away.
/// Returns the token for the next write to a known resource, which adds little to the log. If a
/// server has whole pages to write, it soon writes them together with all earlier records.
async fn before_a_loss(fence: &Fence<Postgres>) -> Token {
    let (lost, pool) = (named("lost"), fence.pool());
    let max_token = fence.inspect(&lost).await.unwrap().unwrap_or(0);
    let next = Token::new(max_token + 2).unwrap();
    fence.raise(&lost, next).await.unwrap();
    let written = async || {
        let bytes = "SELECT (pg_current_wal_flush_lsn() - '0/0')::bigint";
        let bytes: i64 = sqlx::query_scalar(bytes).fetch_one(pool).await.unwrap();
        bytes
    };
    let before = written().await;
    let pages = "SELECT pg_logical_emit_message(true, 'pages', repeat('x', 30000))";
    pool.execute(pages).await.unwrap();
    eventually!("the log is written", written().await > before);
    next
}

/// Crashes the server. Checks that the crash loses a write that does not wait for the disk, because
/// the application set `synchronous_commit` to `off`.
async fn crash(
    server: &mut PostgresServer,
    fence: Fence<Postgres>,
    next: Token,
) -> Fence<Postgres> {
    let lost = named("lost");
    let tx = fence.begin(&lost, next, TokenUse::SingleUse).await;
    tx.unwrap().commit().await.unwrap();
    fence.pool().close().await;
    server.crash().await;
    server.restart().await;
    let after = answered::fence(server).await;
    // If the crash loses nothing, it proves nothing.
    let found = after.inspect(&lost).await.unwrap();
    assert_eq!(found, Some(next.get() - 1));
    after
}

#[tokio::test]
async fn epoch_survives_a_crash_of_postgres_without_synchronous_commit() {
    let mut server = lazy_server().await;
    let before = answered::fence(&server).await;
    before.migrate().await.unwrap();
    before.next_epoch(7, Epoch::FIRST).await.unwrap();
    let next = before_a_loss(&before).await;
    let epoch = before.next_epoch(7, Epoch::FIRST).await.unwrap();
    let after = crash(&mut server, before, next).await;
    let again = after.next_epoch(7, Epoch::FIRST).await.unwrap();
    assert!(again > epoch, "epoch {epoch} was assigned twice");
    after.pool().close().await;
}

#[tokio::test]
async fn raise_survives_a_crash_of_postgres_without_synchronous_commit() {
    let mut server = lazy_server().await;
    let mut fence = answered::fence(&server).await;
    fence.migrate().await.unwrap();
    let (token, lease) = (Token::new(9).unwrap(), LeaseDigest::of("the-lease"));
    for before in ["unknown", "raised", "admitted a moment ago"] {
        for raised in ["raise", "announcement", "fenced read"] {
            let name = named(&format!("{raised}, {before}"));
            if before == "raised" {
                fence.raise(&name, Token::new(5).unwrap()).await.unwrap();
            }
            let next = before_a_loss(&fence).await;
            // The raise changes nothing in this case, but it must flush the log, because a crash
            // would otherwise undo the admission.
            if before == "admitted a moment ago" {
                let tx = fence.begin(&name, token, TokenUse::Reusable).await;
                tx.unwrap().commit().await.unwrap();
            }
            match raised {
                "raise" => fence.raise(&name, token).await.unwrap(),
                "announcement" => fence.announce(&name, token, &lease, false).await.unwrap(),
                _ => {
                    let read = {
                        let name = name.to_string();
                        FenceLayer::new(fence.clone(), move |_: &Parts| Resource::new(&name))
                    };
                    let app: Router = Router::new()
                        .route("/", get(async || "read"))
                        .route_layer(read);
                    let request = Request::get("/").header("Fencing-Token", token.get());
                    let answer = app.oneshot(request.body(Body::empty()).unwrap());
                    assert_eq!(answer.await.unwrap().status(), 200);
                }
            }
            fence = crash(&mut server, fence, next).await;
            let max_token = fence.inspect(&name).await.unwrap();
            assert_eq!(max_token, Some(8), "{name}");
        }
    }
    fence.pool().close().await;
}

/// The raise waits for the disk, but has no change of its own to write.
#[tokio::test]
async fn raise_flushes_the_admission_of_an_asynchronous_session() {
    let mut server = lazy_server().await;
    let lazy = answered::fence(&server).await;
    lazy.migrate().await.unwrap();
    let options: PgConnectOptions = server.url("postgres").parse().unwrap();
    let options = options.options([("synchronous_commit", "on")]);
    let durable = Fence::new(PgPool::connect_with(options).await.unwrap());
    let (name, token) = (named("admitted by another session"), Token::new(9).unwrap());
    durable.raise(&name, Token::new(5).unwrap()).await.unwrap();
    let next = before_a_loss(&lazy).await;
    let tx = lazy.begin(&name, token, TokenUse::Reusable).await;
    tx.unwrap().commit().await.unwrap();
    durable.raise(&name, token).await.unwrap();
    durable.pool().close().await;
    let after = crash(&mut server, lazy, next).await;
    let max_token = after.inspect(&name).await.unwrap();
    assert_eq!(max_token, Some(8), "an older token was admitted again");
    after.pool().close().await;
}
