//! A client that writes its whole body before it reads still receives the reason of a refusal.

use std::{
    io::{Read, Write},
    net::{Shutdown, SocketAddr, TcpStream},
    time::Duration,
};

use axum::{Router, routing::post};
use sqlx::Sqlite;
use tower_fence::{FenceLayer, Idempotency, PathParam, TokenKey, TokenKeys, token_keys::KeyId};

use crate::support::{database::TestDatabase, http::Server};

const MIB: usize = 1024 * 1024;

/// Sends a request with a body of this length. Reads the answer only after the whole body was sent.
async fn write_all_then_read(
    addr: SocketAddr,
    path: &str,
    headers: &str,
    length: usize,
) -> std::io::Result<String> {
    let head = format!(
        "POST {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n{headers}Content-Length: {length}\r\n\r\n"
    );
    let send = move || {
        let mut stream = TcpStream::connect(addr)?;
        stream.write_all(head.as_bytes())?;
        stream.write_all(&vec![b'x'; length])?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    };
    tokio::task::spawn_blocking(send).await.unwrap()
}

async fn start(wait: Duration) -> (Server, crate::support::database::Fresh<Sqlite>) {
    let db = Sqlite::fresh(2).await;
    let layer = FenceLayer::new(db.fence(), PathParam("r"))
        .body_limit_bytes(4 * MIB)
        .body_timeout(wait);
    let key = TokenKey::new(KeyId::new("a").unwrap(), [7; 32]).unwrap();
    let keys = TokenKeys::new([key]).unwrap();
    let write = || post(|| async {}).get(|| async {});
    let signed = layer.clone().verify_with(keys);
    let keyed = layer.clone().idempotent(Idempotency::required());
    let app = Router::new()
        .route("/{r}", write().route_layer(layer))
        .route("/signed/{r}", write().route_layer(signed))
        .route("/keys/{r}", write().route_layer(keyed));
    (Server::start(app).await, db)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_early_refusal_of_a_large_body_is_seen() {
    let (server, _db) = start(Duration::from_secs(10)).await;
    assert_eq!(server.write("/r", 9).await.status, 200);
    // From here on, the cache refuses the token before the body is read.
    assert_eq!(server.write("/r", 8).await.status, 412);
    for (path, headers, status) in [
        ("/r", "Fencing-Token: 8\r\n", 412),
        ("/r", "", 428),
        ("/r", "Fencing-Token: x\r\n", 400),
        ("/r", "Fencing-Token: 10;resource=\"s\"\r\n", 403),
        ("/signed/r", "Fencing-Token: 10\r\n", 403),
        ("/keys/r", "Fencing-Token: 10\r\n", 400),
    ] {
        for length in [MIB, 3 * MIB] {
            for _ in 0..3 {
                let answer = write_all_then_read(server.addr, path, headers, length).await;
                let answer = answer.unwrap_or_else(|error| panic!("{path}: {status}: {error}"));
                let expected = format!("HTTP/1.1 {status} ");
                assert!(answer.starts_with(&expected), "{path}: {answer}");
            }
        }
    }
    // This body is longer than the limit.
    let answer = write_all_then_read(server.addr, "/r", "Fencing-Token: 10\r\n", 6 * MIB).await;
    assert!(answer.unwrap().starts_with("HTTP/1.1 413 "));
}

/// A client that waits for `100 Continue`, or that never finishes its body, receives its answer
/// without the rest of the body.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refusal_does_not_wait_for_a_stalled_body() {
    let (server, _db) = start(Duration::from_millis(200)).await;
    assert_eq!(server.write("/r", 9).await.status, 200);
    assert_eq!(server.write("/r", 8).await.status, 412);
    let addr = server.addr;
    let ask = move |headers: &'static str| {
        let mut stream = TcpStream::connect(addr).unwrap();
        let head = format!("POST /r HTTP/1.1\r\nHost: a\r\nFencing-Token: 8\r\n{headers}\r\n");
        stream.write_all(head.as_bytes()).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(30)))
            .unwrap();
        let mut answer = [0; 13];
        stream.read_exact(&mut answer).unwrap();
        stream.shutdown(Shutdown::Both).unwrap();
        String::from_utf8(answer.into()).unwrap()
    };
    for headers in [
        "Content-Length: 1000000\r\nExpect: 100-continue\r\n",
        "Content-Length: 1000000\r\n",
        // These bodies are longer than the layer ever reads.
        "Content-Length: 1000000000000\r\n",
        "Transfer-Encoding: chunked\r\n",
    ] {
        let answer = tokio::task::spawn_blocking(move || ask(headers)).await;
        assert_eq!(answer.unwrap(), "HTTP/1.1 412 ", "{headers}");
    }
}
