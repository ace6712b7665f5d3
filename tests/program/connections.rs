//! Slow clients, large requests, and many connections.

use std::time::Duration;

use futures_util::future::join_all;
use reqwest::Method;
use serde_json::json;
use sqlx::Postgres;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpSocket, TcpStream},
    task::JoinHandle,
    time::{sleep, timeout},
};

use super::program::{HOLDER, OPERATOR, Served, file, name, path, secret_options, serving};
use crate::support::{certificates::Certificates, database::Fresh, eventually, http::Answer};

/// Sends this text, and reads until the server closes the connection.
async fn exchanged(stream: &mut TcpStream, text: &str) -> String {
    // The server may close the connection before it has read the whole text.
    let _ = stream.write_all(text.as_bytes()).await;
    let mut answer = vec![];
    let reading = stream.read_to_end(&mut answer);
    let read = timeout(Duration::from_secs(20), reading).await;
    let _ = read.expect("the connection stays open");
    String::from_utf8_lossy(&answer).into_owned()
}

#[tokio::test]
async fn connection_with_an_unfinished_request_head_is_closed() {
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
async fn connection_with_an_unfinished_handshake_is_closed() {
    let certificates = Certificates::make();
    let [cert, key] = ["server.pem", "server.key"].map(|file| certificates.path(file));
    let tls = ["--tls-cert-file", name(&cert), "--tls-key-file", name(&key)];
    let (_db, server) = serving(&[&tls[..], &["--client-timeout", "300ms"]].concat()).await;
    for beginning in ["", "\x16\x03\x01"] {
        let mut silent = server.connect().await;
        assert_eq!(exchanged(&mut silent, beginning).await, "");
    }
}

#[tokio::test]
async fn oversized_requests_are_refused() {
    let (_db, server) = serving(&[]).await;
    let mut stream = server.connect().await;
    let head = format!(
        "GET /locks/sku-1 HTTP/1.1\r\nHost: localhost\r\nX-Long: {}\r\n\r\n",
        "a".repeat(20_000)
    );
    let answer = exchanged(&mut stream, &head).await;
    assert!(answer.starts_with("HTTP/1.1 431"), "{answer}");
    let body = json!({"owner": "a".repeat(20_000)});
    let refused = server.post("/locks/sku-1", &body).await;
    refused.is_problem(413, "body-too-large");
    assert_eq!(server.get("/locks/sku-1").await.json()["held"], false);
}

/// Sends a request on an open connection, and reads the answer.
async fn asks(stream: &mut TcpStream) {
    let request = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n";
    stream.write_all(request).await.unwrap();
    assert!(stream.read(&mut [0; 1_000]).await.unwrap() > 0);
}

/// Sends a request that waits for `sku-1`.
fn waiter(server: &Served) -> JoinHandle<reqwest::Result<reqwest::Response>> {
    let request = server.request(Method::POST, "/locks/sku-1");
    tokio::spawn(request.json(&json!({"wait_ms": 60_000})).send())
}

async fn waiting(db: &Fresh<Postgres>, count: i64) {
    eventually!(
        "the requests wait",
        db.number("SELECT count(*) FROM tower_fence.waiters").await == count
    );
}

#[tokio::test]
async fn waiters_do_not_block_other_requests() {
    // Without a limit of their own, waiters may use half of the connections.
    for limit in ["--max-waiting=3", "--max-connections=6"] {
        let limits = ["--max-requests=2", "--max-waiting-per-caller=100", limit];
        let (db, server) = serving(&limits).await;
        let lease = server.post("/locks/sku-1", &json!({})).await.json();
        let waiters = [1, 2, 3, 4, 5, 6].map(|_| waiter(&server));
        waiting(&db, 3).await;
        let renew = server.of_holder(Method::PUT, &lease);
        let renewed = Answer::to(renew.json(&json!({}))).await;
        assert_eq!(renewed.status, 200, "{renewed:?}");
        assert_eq!(server.get("/locks/sku-1").await.status, 200);
        let broken = server.post("/locks/sku-1/break", &json!({})).await;
        assert_eq!(broken.status, 204, "{broken:?}");
        waiters.iter().for_each(JoinHandle::abort);
        // A request whose client disconnects leaves the queue.
        waiting(&db, 0).await;
    }
}

#[tokio::test]
async fn waiters_above_the_limit_are_refused() {
    let limits = ["--max-waiting", "2", "--max-waiting-per-caller", "2"];
    let (db, server) = serving(&limits).await;
    server.post("/locks/sku-1", &json!({})).await;
    let waiters = [1, 2].map(|_| waiter(&server));
    waiting(&db, 2).await;
    let wait = json!({"wait_ms": 1_000});
    let refused = server.post("/locks/sku-1", &wait).await;
    refused.is_problem(503, "server-busy");
    assert_eq!(refused.headers["retry-after"], "1");
    let refused = "refused a request: the limit on requests that wait for leases is reached";
    let line = server.line(refused).await;
    assert_contains!(line, "WARN");
    assert_contains!(line, "peer=127.0.0.1:");
    waiters.iter().for_each(JoinHandle::abort);
    eventually!(
        "the queue has room again",
        server.post("/locks/sku-2", &json!({})).await.status != 503
    );
}

/// The store keeps positions for clients that may retry: one for each five of `max-waiting`.
#[tokio::test]
async fn the_limit_of_waiters_also_applies_to_the_store() {
    let (db, server) = serving(&["--max-waiting", "5"]).await;
    for resource in ["/locks/kept", "/locks/left"] {
        server.post(resource, &json!({"ttl_ms": 600_000})).await;
    }
    let waiters = "SELECT coalesce(sum(CASE resource WHEN 'kept' THEN 1 ELSE 10 END), 0) \
                   FROM tower_fence.waiters";
    // On a busy machine, the first position may also expire before the second one is removed.
    eventually("only the first position is kept", async || {
        for resource in ["/locks/kept", "/locks/left"] {
            let body = json!({"wait_ms": 10, "lease_id": "a".repeat(22)});
            let answer = server.post(resource, &body).await;
            answer.is_problem(409, "lock-held");
        }
        let mut kept = 11;
        eventually("the second position is removed", async || {
            kept = db.number(waiters).await;
            kept < 10
        })
        .await;
        kept == 1
    })
    .await;
}

#[tokio::test]
async fn waiters_of_one_caller_leave_room_for_others() {
    let holders = file(&format!("{HOLDER}\nanother-{HOLDER}\n"));
    let secrets = ["--holder-secrets-file", path(&holders)];
    let (db, server) = serving(&[&secrets[..], &["--max-waiting", "4"]].concat()).await;
    let server = server.with_secret(HOLDER);
    server.post("/locks/sku-1", &json!({})).await;
    let waiters = [1, 2].map(|_| waiter(&server));
    waiting(&db, 2).await;
    let wait = json!({"wait_ms": 1_000});
    let refused = server.post("/locks/sku-1", &wait).await;
    refused.is_problem(503, "server-busy");
    let server = server.with_secret(&format!("another-{HOLDER}"));
    assert_eq!(server.post("/locks/sku-2", &json!({})).await.status, 201);
    waiters.iter().for_each(JoinHandle::abort);
}

#[tokio::test]
async fn requests_with_slow_bodies_leave_room_for_others() {
    let another = format!("another-{HOLDER}");
    let (holders, operators) = (file(&format!("{HOLDER}\n{another}\n")), file(OPERATOR));
    let secrets = secret_options(&holders, &operators);
    let (_db, server) = serving(&[&secrets[..], &["--max-requests", "5"]].concat()).await;
    let server = server.with_secret(HOLDER);
    let lease = server.post("/locks/sku-1", &json!({})).await.json();
    let head = format!(
        "PUT /locks/sku-2 HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {another}\r\n\
         Content-Type: application/json\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n"
    );
    let mut slow = vec![];
    for _ in 0..5 {
        let mut stream = server.connect().await;
        stream.write_all(head.as_bytes()).await.unwrap();
        // The server waits for the body.
        let mut interim = [0; 25];
        stream.read_exact(&mut interim).await.unwrap();
        assert_eq!(&interim, b"HTTP/1.1 100 Continue\r\n\r\n");
        slow.push(stream);
    }
    let renew = server.of_holder(Method::PUT, &lease);
    let renewed = Answer::to(renew.json(&json!({}))).await;
    assert_eq!(renewed.status, 200, "{renewed:?}");
    let server = server.with_secret(OPERATOR);
    assert_eq!(server.get("/locks").await.status, 200);
    // The slow requests are answered, too. They have no lease id.
    for mut stream in slow {
        stream.write_all(b"{}").await.unwrap();
        let mut answer = [0; 12];
        stream.read_exact(&mut answer).await.unwrap();
        assert_eq!(&answer, b"HTTP/1.1 422");
    }
}

#[tokio::test]
async fn thousand_idle_connections_block_no_client() {
    let (_db, server) = serving(&[]).await;
    let mut idle = vec![];
    for _ in 0..1_000 {
        idle.push(server.connect().await);
    }
    let open = async || server.metric("tower_fence_server_connections").await;
    eventually!("all connections are open", open().await > 1_000);
    assert_eq!(server.post("/locks/sku-1", &json!({})).await.status, 201);
    drop(idle);
    eventually!("all connections are closed", open().await < 10);
}

#[tokio::test]
async fn silent_connection_is_closed_for_a_new_one() {
    let (db, server) = serving(&["--max-connections", "8", "--client-timeout", "10m"]).await;
    server.post("/locks/sku-1", &json!({})).await;
    let waiter = waiter(&server);
    waiting(&db, 1).await;
    let mut silent = vec![];
    for _ in 0..10 {
        silent.push(server.connect().await);
    }
    assert_eq!(server.post("/locks/sku-2", &json!({})).await.status, 201);
    let limit = server.metric("tower_fence_server_connections_limit").await;
    assert_eq!(limit, 8);
    server.logs("the limit on connections is reached").await;
    // The connection with a request was kept.
    server.post("/locks/sku-1/break", &json!({})).await;
    assert_eq!(waiter.await.unwrap().unwrap().status(), 201);
}

/// Sends requests without reading an answer. The answers are long, and fill the buffers of both
/// sides immediately.
async fn unread(server: &Served) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(2_048).unwrap();
    let mut stream = socket.connect(server.addr()).await.unwrap();
    let requests = "GET /locks/openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n".repeat(1_000);
    stream.write_all(requests.as_bytes()).await.unwrap();
    stream
}

#[tokio::test]
async fn clients_that_never_read_occupy_no_connection() {
    const MOST: usize = 4;
    let most = MOST.to_string();
    let (_db, server) = serving(&["--max-connections", &most, "--client-timeout", "10m"]).await;
    let mut stalled = vec![];
    for _ in 0..2 {
        stalled.extend(join_all([(); MOST].map(|()| unread(&server))).await);
        // Until then, the server may be answering requests.
        sleep(Duration::from_secs(4)).await;
        // The server may close an idle connection at any time, so the holder opens a new one.
        let holder = server.request(Method::POST, "/locks/sku-1");
        let holder = holder.header("Connection", "close").json(&json!({}));
        let answer = timeout(Duration::from_secs(10), Answer::to(holder)).await;
        let answer = answer.expect("the request of the holder is answered");
        assert!([201, 409].contains(&answer.status), "{answer:?}");
    }
}

#[tokio::test]
async fn silent_connection_is_closed_before_an_idle_one() {
    let (_db, server) = serving(&["--max-connections", "2"]).await;
    // The server accepts the connections in this order, so it accepts the silent one before it
    // answers the idle one.
    let (mut silent, mut idle) = (server.connect().await, server.connect().await);
    asks(&mut idle).await;
    sleep(Duration::from_secs(1)).await;
    assert_eq!(server.get("/healthz").await.status, 200);
    assert_eq!(exchanged(&mut silent, "").await, "");
    asks(&mut idle).await;
}

#[tokio::test]
async fn clients_that_never_send_a_body_occupy_no_connection() {
    let (_db, server) = serving(&["--max-connections", "2"]).await;
    let mut slow = vec![];
    for _ in 0..2 {
        let mut stream = server.connect().await;
        let head = "POST /locks/sku-1 HTTP/1.1\r\nHost: localhost\r\n\
                    Content-Type: application/json\r\nContent-Length: 2\r\n\r\n";
        stream.write_all(head.as_bytes()).await.unwrap();
        slow.push(stream);
    }
    // The time to send a body is 10 s.
    let answer = Answer::to(server.request(Method::GET, "/healthz"));
    let answer = timeout(Duration::from_secs(7), answer).await;
    assert_eq!(answer.expect("a slow connection is closed").status, 200);
}

#[tokio::test]
async fn a_new_connection_waits_while_each_has_a_request() {
    let (db, server) = serving(&["--max-connections", "1"]).await;
    server.post("/locks/sku-1", &json!({})).await;
    let waiter = waiter(&server);
    waiting(&db, 1).await;
    let next = tokio::spawn(Answer::to(server.request(Method::GET, "/healthz")));
    db.execute("SELECT tower_fence.break_lease('sku-1')").await;
    assert_eq!(waiter.await.unwrap().unwrap().status(), 201);
    assert_eq!(next.await.unwrap().status, 200);
}

#[tokio::test]
async fn connection_may_idle_longer_than_the_head_timeout() {
    let (_db, server) = serving(&["--client-timeout", "200ms"]).await;
    let mut idle = server.connect().await;
    asks(&mut idle).await;
    // A silent connection that is opened later is closed in the meantime.
    let mut silent = server.connect().await;
    exchanged(&mut silent, "").await;
    asks(&mut idle).await;
}

#[tokio::test]
async fn idle_connection_is_closed_after_its_timeout() {
    let (_db, server) = serving(&["--idle-timeout", "200ms"]).await;
    let mut idle = server.connect().await;
    let request = "GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n";
    let answer = exchanged(&mut idle, request).await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

#[tokio::test]
async fn unknown_route_is_answered_with_a_problem() {
    let (_db, server) = serving(&[]).await;
    for path in ["/", "/lock/sku-1", "/locks/sku-1/brake", "/openapi.json"] {
        server.get(path).await.is_problem(404, "unknown-route");
    }
    let patch = server.client.patch(server.url("/locks/sku-1"));
    assert_eq!(Answer::to(patch).await.status, 405);
}
