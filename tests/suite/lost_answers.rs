//! COMMIT whose answer is lost: what is claimed is there, and what is not known is not claimed.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering::Relaxed},
    },
};

use axum::{Router, routing::post};
use sqlx::{Postgres, postgres::PgPoolOptions};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};
use tower_fence::{CommitError, Fence, FenceLayer, FencedTx, PathParam, Resource, Token, TokenUse};

use crate::support::{
    database::{Fresh, TestDatabase},
    http::Server,
};

/// Where a connection is cut.
const NOWHERE: u8 = 0;
const BEFORE_THE_ANSWER: u8 = 1;
const AFTER_COMMIT_WAS_CONFIRMED: u8 = 2;

/// Passes everything on, but cuts the connection at the answer to COMMIT.
async fn cutting_proxy(to: SocketAddr, cut: Arc<AtomicU8>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let server = TcpStream::connect(to).await.unwrap();
            let (mut from_client, mut to_client) = client.into_split();
            let (mut from_server, mut to_server) = server.into_split();
            tokio::spawn(async move {
                let _ = tokio::io::copy(&mut from_client, &mut to_server).await;
            });
            let cut = cut.clone();
            tokio::spawn(async move {
                let mut buffer = vec![0; 64 * 1024];
                while let Ok(length @ 1..) = from_server.read(&mut buffer).await {
                    let answer = &buffer[..length];
                    let tag = b"COMMIT\0";
                    let at = answer.windows(tag.len()).position(|window| window == tag);
                    let end = match (at, cut.load(Relaxed)) {
                        (None, _) | (_, NOWHERE) => None,
                        (Some(_), BEFORE_THE_ANSWER) => Some(0),
                        (Some(at), _) => Some(at + tag.len()),
                    };
                    let pass = &answer[..end.unwrap_or(length)];
                    if to_client.write_all(pass).await.is_err() || end.is_some() {
                        return;
                    }
                }
            });
        }
    });
    addr
}

/// A fence whose connections go through the proxy.
async fn cut_fence(db: &Fresh<Postgres>) -> (Fence<Postgres>, Arc<AtomicU8>) {
    let mut url = reqwest::Url::parse(&db.url).unwrap();
    let server = url.socket_addrs(|| Some(5432)).unwrap()[0];
    let cut = Arc::new(AtomicU8::new(NOWHERE));
    let proxy = cutting_proxy(server, cut.clone()).await;
    url.set_ip_host(proxy.ip()).unwrap();
    url.set_port(Some(proxy.port())).unwrap();
    let pool = PgPoolOptions::new()
        .max_connections(2)
        .connect(url.as_str())
        .await;
    (Fence::new(pool.unwrap()), cut)
}

async fn write(mut tx: FencedTx) {
    let entry = tx.admitted().token;
    Postgres::execute(&mut tx, &format!("INSERT INTO ledger VALUES ({entry})"))
        .await
        .unwrap();
}

#[tokio::test]
async fn an_answer_that_was_lost_is_an_unknown_outcome() {
    let db = Postgres::fresh(2).await;
    let (fence, cut) = cut_fence(&db).await;
    let app = Router::new()
        .route("/{sku}", post(write))
        .route_layer(FenceLayer::new(fence, PathParam("sku")));
    let server = Server::start(app).await;
    assert_eq!(server.write("/a", 1).await.status, 200);

    cut.store(BEFORE_THE_ANSWER, Relaxed);
    let answer = server.write("/a", 2).await;
    answer.is_problem(503, "outcome-unknown");
    cut.store(NOWHERE, Relaxed);
    // Here it was written. The same request again finds its token used, and applies nothing twice.
    assert_eq!(db.entries().await, 2);
    server.write("/a", 2).await.is_problem(412, "stale-token");
    assert_eq!(server.write("/a", 3).await.status, 200);
    assert_eq!(db.entries().await, 3);
}

#[tokio::test]
async fn a_confirmed_commit_is_a_success_whatever_comes_after_it() {
    let db = Postgres::fresh(2).await;
    let (fence, cut) = cut_fence(&db).await;
    let sku = Resource::new("sku-1").unwrap();
    for (value, at) in [(1, AFTER_COMMIT_WAS_CONFIRMED), (2, BEFORE_THE_ANSWER)] {
        let token = Token::new(value).unwrap();
        let mut tx = fence.begin(&sku, token, TokenUse::SingleUse).await.unwrap();
        Postgres::execute(&mut tx, &format!("INSERT INTO ledger VALUES ({value})"))
            .await
            .unwrap();
        cut.store(at, Relaxed);
        let outcome = tx.commit().await;
        cut.store(NOWHERE, Relaxed);
        if at == AFTER_COMMIT_WAS_CONFIRMED {
            outcome.unwrap();
        } else {
            assert!(
                matches!(outcome, Err(CommitError::OutcomeUnknown(_))),
                "{outcome:?}"
            );
        }
        assert_eq!(db.entries().await, value);
    }
}
