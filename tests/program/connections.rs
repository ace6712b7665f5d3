//! Slow clients, large requests, and many of them.

use std::time::Duration;

use serde_json::json;
use sqlx::Postgres;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use super::program::Served;
use crate::support::{
    database::{Fresh, TestDatabase},
    eventually,
    http::Answer,
};

/// Sends this, and reads until the server closes the connection.
async fn exchanged(stream: &mut TcpStream, text: &str) -> String {
    // The server may have enough before the end.
    let _ = stream.write_all(text.as_bytes()).await;
    let mut answer = vec![];
    let reading = stream.read_to_end(&mut answer);
    let read = tokio::time::timeout(Duration::from_secs(20), reading).await;
    let _ = read.expect("the connection stays open");
    String::from_utf8_lossy(&answer).into_owned()
}

async fn serving(arguments: &[&str]) -> (Fresh<Postgres>, Served) {
    let db = Postgres::fresh(2).await;
    let server = Served::start(&db.url, arguments).await;
    (db, server)
}

async fn metric(server: &Served, name: &str) -> String {
    let metrics = server.get("/metrics").await.text;
    let line = metrics.lines().find(|line| line.starts_with(name));
    let line = line.unwrap_or_else(|| panic!("no {name}: {metrics}"));
    line.rsplit_once(' ').unwrap().1.to_owned()
}

#[tokio::test]
async fn a_client_that_does_not_finish_its_head_is_sent_away() {
    let (_db, server) = serving(&["--client-timeout", "300ms"]).await;
    for head in ["", "POST /locks/sku-1 HTTP/1.1\r\nHost: localhost\r\n"] {
        let mut slow = server.connect().await;
        let answer = exchanged(&mut slow, head).await;
        assert!(
            answer.is_empty() || answer.starts_with("HTTP/1.1 408"),
            "{answer}"
        );
    }
}

#[tokio::test]
async fn what_is_too_large_is_refused() {
    let (_db, server) = serving(&[]).await;
    let mut stream = server.connect().await;
    let head = format!(
        "GET /locks/sku-1 HTTP/1.1\r\nHost: localhost\r\nX-Long: {}\r\n\r\n",
        "a".repeat(20_000)
    );
    let answer = exchanged(&mut stream, &head).await;
    assert!(answer.starts_with("HTTP/1.1 431"), "{answer}");
    let body = json!({"owner": "a".repeat(20_000)});
    server
        .post("/locks/sku-1", &body)
        .await
        .is_problem(413, "body-too-large");
    assert_eq!(server.get("/locks/sku-1").await.json()["held"], false);
}

#[tokio::test]
async fn more_requests_than_the_limit_are_sent_away() {
    let (db, server) = serving(&["--max-requests", "2"]).await;
    server.post("/locks/sku-1", &json!({})).await;
    let wait = json!({"wait_ms": 60_000});
    let waiters = [1, 2].map(|_| {
        let request = server.request(reqwest::Method::POST, "/locks/sku-1");
        tokio::spawn(request.json(&wait).send())
    });
    eventually("both wait", async || {
        db.number("SELECT count(*) FROM fence_waiters").await == 2
    })
    .await;
    let refused = server.get("/locks/sku-2").await;
    refused.is_problem(503, "server-busy");
    assert_eq!(refused.headers["retry-after"], "1");
    // What looks after the server is served all the same.
    assert_eq!(server.get("/readyz").await.status, 200);
    waiters.iter().for_each(tokio::task::JoinHandle::abort);
    eventually("they have left", async || {
        server.get("/locks/sku-2").await.status == 200
    })
    .await;
}

#[tokio::test]
async fn a_thousand_idle_connections_keep_nobody_out() {
    let (_db, server) = serving(&[]).await;
    let mut idle = vec![];
    for _ in 0..1_000 {
        idle.push(server.connect().await);
    }
    let metric = async || metric(&server, "tower_fence_server_connections").await;
    eventually("all of them are open", async || {
        metric().await.parse::<u32>().unwrap() > 1_000
    })
    .await;
    assert_eq!(server.post("/locks/sku-1", &json!({})).await.status, 201);
    drop(idle);
    eventually("all of them are closed", async || {
        metric().await.parse::<u32>().unwrap() < 10
    })
    .await;
}

/// With as many as there may be, the next one waits for the end of one.
#[tokio::test]
async fn connections_above_the_limit_wait() {
    let (_db, server) = serving(&["--max-connections", "1", "--client-timeout", "500ms"]).await;
    let _idle = server.connect().await;
    assert_eq!(server.get("/healthz").await.status, 200);
}

#[tokio::test]
async fn a_route_that_is_none_is_a_problem() {
    let (_db, server) = serving(&[]).await;
    for path in ["/", "/lock/sku-1", "/locks/sku-1/brake", "/openapi.json"] {
        server.get(path).await.is_problem(404, "unknown-route");
    }
    let patch = server.client.patch(server.url("/locks/sku-1"));
    assert_eq!(Answer::to(patch).await.status, 405);
}
