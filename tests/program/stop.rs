//! The shutdown of the server.

use std::{
    fs::{self, File},
    io::Write,
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    time::Duration,
};

use reqwest::{Method, Response};
use serde_json::json;
use sqlx::{Connection, PgConnection, Postgres};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    task::{JoinHandle, JoinSet},
    time::{sleep, timeout},
};

use super::{
    command::{Notes, are_waiting, end},
    program::{OPERATOR, Served, name, program, serving},
};
use crate::support::{
    certificates::Certificates,
    database::{Fresh, TestDatabase},
    eventually,
    http::Answer,
    process::Process,
};

/// Returns a connection that has locked the row of `sku-1`, for which a grant must wait.
async fn blocked(db: &Fresh<Postgres>) -> PgConnection {
    let mut conn = PgConnection::connect(&db.url).await.unwrap();
    let sql = "INSERT INTO tower_fence.resources (resource, max_token, partition, history) \
               VALUES ('sku-1', 1, tower_fence.partition_of('sku-1'), tower_fence.current_history()) \
               ON CONFLICT (resource) DO NOTHING; BEGIN; \
               SELECT * FROM tower_fence.resources WHERE resource = 'sku-1' FOR UPDATE";
    Postgres::run(&mut conn, sql).await;
    conn
}

/// A renewal that waits for the row of `sku-1`.
struct Renewal {
    row: PgConnection,
    answer: JoinHandle<reqwest::Result<Response>>,
}

impl Renewal {
    async fn under_way(server: &Served, db: &Fresh<Postgres>) -> Self {
        let lease = server.post("/locks/sku-1", &json!({})).await.json();
        let row = blocked(db).await;
        // A new token raises the fence, so it waits for the row.
        let renewal = server.of_holder(Method::PUT, &lease);
        let answer = tokio::spawn(renewal.json(&json!({"new_token": true})).send());
        db.waits_for_lock().await;
        Self { row, answer }
    }

    /// Returns the answer to the renewal.
    async fn answered(self) -> Answer {
        Answer::read(self.answer.await.unwrap().unwrap()).await
    }
}

#[tokio::test]
async fn waiters_are_answered_when_the_server_stops() {
    let db = Postgres::fresh(4).await;
    for signal in ["-TERM", "-INT"] {
        let mut server = Served::start(&db.url, &["--drain", "10m"]).await;
        let holder = server.post("/locks/sku-1", &json!({})).await.json();
        let waiters = [1, 2, 3].map(|_| {
            let request = server.request(Method::POST, "/locks/sku-1");
            tokio::spawn(Answer::to(request.json(&json!({"wait_ms": 60_000}))))
        });
        are_waiting(&server, 3).await;
        server.signal(signal);
        for waiter in waiters {
            let answer = waiter.await.unwrap();
            answer.is_problem(503, "server-busy");
        }
        assert!(server.exit().await.success());
        // The queue is empty, and the holder still has the lease.
        let waiters = "SELECT count(*) FROM tower_fence.waiters";
        assert_eq!(db.number(waiters).await, 0);
        let server = Served::start(&db.url, &[]).await;
        let release = server.of_holder(Method::DELETE, &holder);
        assert_eq!(Answer::to(release).await.status, 204);
    }
}

#[tokio::test]
async fn waiter_whose_body_arrives_late_does_not_delay_the_stop() {
    let (_db, mut server) = serving(&["--drain", "60s"]).await;
    server.post("/locks/sku-1", &json!({})).await;
    let mut stream = server.connect().await;
    let head = "POST /locks/sku-1 HTTP/1.1\r\nHost: localhost\r\n\
                Content-Type: application/json\r\nContent-Length: 17\r\nExpect: 100-continue\r\n\r\n";
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut interim = [0; 25];
    stream.read_exact(&mut interim).await.unwrap();
    server.signal("-TERM");
    // A waiter whose body has arrived would be answered by now.
    sleep(Duration::from_millis(1_500)).await;
    stream.write_all(br#"{"wait_ms":60000}"#).await.unwrap();
    let mut answer = [0; 12];
    let reading = timeout(Duration::from_secs(20), stream.read_exact(&mut answer)).await;
    reading.expect("the request waits in the queue").unwrap();
    assert_eq!(&answer, b"HTTP/1.1 503");
    assert!(server.exit().await.success());
}

#[tokio::test]
async fn request_in_progress_is_answered_when_the_server_stops() {
    let (db, mut server) = serving(&[]).await;
    let mut renewal = Renewal::under_way(&server, &db).await;
    let mut idle = server.connect().await;
    server.signal("-TERM");
    // Connections without a request are closed, and no new one is accepted.
    assert!(matches!(idle.read(&mut [0]).await, Ok(0) | Err(_)));
    assert!(TcpStream::connect(server.addr()).await.is_err());
    Postgres::run(&mut renewal.row, "COMMIT").await;
    let renewed = renewal.answered().await;
    assert_eq!(renewed.status, 200, "{renewed:?}");
    assert!(server.exit().await.success());
}

#[tokio::test]
async fn unfinished_requests_are_answered_at_the_stop_timeout() {
    let (db, mut server) = serving(&["--drain", "100ms"]).await;
    let renewal = Renewal::under_way(&server, &db).await;
    server.signal("-TERM");
    renewal.answered().await.is_problem(503, "server-busy");
    assert!(server.exit().await.success());
}

#[tokio::test]
async fn second_signal_ends_the_server_immediately() {
    let (db, mut server) = serving(&["--drain", "10m"]).await;
    let renewal = Renewal::under_way(&server, &db).await;
    server.signal("-TERM");
    server.logs("stopping").await;
    server.signal("-TERM");
    assert_eq!(server.exit().await.code(), Some(1));
    let log = server.log();
    assert_contains!(log, "stopped immediately by a second signal");
    assert!(renewal.answer.await.unwrap().is_err());
}

#[tokio::test]
async fn a_signal_ends_a_migration_that_waits() {
    let db = Postgres::fresh(4).await;
    let mut other = PgConnection::connect(&db.url).await.unwrap();
    let pid = Postgres::number(&mut other, "SELECT pg_backend_pid()::bigint");
    let pid = pid.await.unwrap();
    Postgres::run(&mut other, "BEGIN; LOCK TABLE tower_fence.migrations").await;
    for (arguments, status) in [
        (&["serve", "--migrate", "--listen", "127.0.0.1:0"][..], 0),
        (&["migrate"], 143),
    ] {
        let mut command = program();
        command
            .args(arguments)
            .env("TOWER_FENCE_DATABASE_URL", &db.url);
        let process = Process::run(command);
        let reason = format!("lock of process {pid} ");
        eventually!("the reason is logged", process.log().contains(&reason));
        process.signal("-TERM");
        end(process).await.is(status);
    }
}

/// An unhandled SIGHUP would end the server, and systemd would not restart it.
#[tokio::test]
async fn reload_during_the_start_does_not_end_the_server() {
    let (db, notes) = (Postgres::fresh(2).await, Notes::new());
    let secrets = notes.path("operators");
    let mut make = Command::new("mkfifo");
    let made = make.args(["-m", "600"]).arg(&secrets).status();
    assert!(made.unwrap().success());
    // The server waits for the end of this file while it starts.
    let mut options = File::options();
    let mut pipe = options.read(true).write(true).open(&secrets).unwrap();
    let mut command = program();
    command
        .args(["serve", "--listen", "127.0.0.1:0"])
        .args(["--operator-secrets-file", name(&secrets)])
        .env("TOWER_FENCE_DATABASE_URL", &db.url);
    let mut process = Process::run(command);
    let files = format!("/proc/{}/fd", process.id());
    eventually("the server reads the secrets", async || {
        let files = fs::read_dir(&files).unwrap().flatten();
        let mut names = files.filter_map(|file| fs::read_link(file.path()).ok());
        names.any(|name| name == secrets)
    })
    .await;
    process.signal("-HUP");
    pipe.write_all(OPERATOR.as_bytes()).unwrap();
    drop(pipe);
    process.prints("tower-fence listens on ", 1).await;
    process.signal("-TERM");
    assert!(process.exit().await.success(), "{}", process.log());
}

#[tokio::test]
async fn grant_waiting_for_the_database_is_answered_at_stop() {
    let (db, mut server) = serving(&[]).await;
    let mut row = blocked(&db).await;
    let request = server.request(Method::POST, "/locks/sku-1");
    let mut answer = tokio::spawn(Answer::to(request.json(&json!({}))));
    db.waits_for_lock().await;
    server.signal("-TERM");
    // A request in the queue would be answered within this time.
    let early = timeout(Duration::from_millis(1_500), &mut answer).await;
    assert!(early.is_err(), "{early:?}");
    Postgres::run(&mut row, "COMMIT").await;
    let granted = answer.await.unwrap();
    assert_eq!(granted.status, 201, "{granted:?}");
    assert!(server.exit().await.success());
}

#[tokio::test]
async fn unfinished_requests_do_not_delay_the_stop() {
    let (db, certificates) = (Postgres::fresh(2).await, Certificates::make());
    let [cert, key] = ["server.pem", "server.key"].map(|file| certificates.path(file));
    let times = ["--drain", "10m", "--client-timeout", "10m"];
    let tls = ["--tls-cert-file", name(&cert), "--tls-key-file", name(&key)];
    let head = b"POST /locks/sku-1 HTTP/1.1\r\nHost: local";
    for (arguments, bytes) in [
        (times.to_vec(), &head[..]),
        (times.to_vec(), b""),
        ([times, tls].concat(), b""),
        ([times, tls].concat(), b"\x16\x03\x01"),
    ] {
        let mut server = Served::start(&db.url, &arguments).await;
        let mut unfinished = server.connect().await;
        unfinished.write_all(bytes).await.unwrap();
        if !server.url.starts_with("https") {
            // By now, the server has accepted the connection.
            assert_eq!(server.get("/healthz").await.status, 200);
        }
        server.signal("-TERM");
        assert!(server.exit().await.success(), "{}", server.log());
    }
}

#[tokio::test]
async fn requests_are_served_until_the_drain_delay_is_over() {
    let (_db, mut server) = serving(&["--drain-delay", "10m"]).await;
    let ready = async || server.get("/readyz").await;
    eventually!("the server is ready", ready().await.status == 200);
    server.signal("-TERM");
    eventually!("the server stops", ready().await.text.contains("stopping"));
    let granted = server.post("/locks/sku-1", &json!({})).await;
    assert_eq!(granted.status, 201, "{granted:?}");
    assert_eq!(granted.headers["connection"], "close");
    // A second signal takes effect immediately.
    server.signal("-TERM");
    assert_eq!(server.exit().await.code(), Some(1));
}

/// Sends a request, and returns whether the answer asks to close the connection. Returns `None` if
/// the server refused the connection, and an error if the server did not answer the request.
async fn requested(
    stream: &mut Option<TcpStream>,
    addr: std::net::SocketAddr,
) -> Result<Option<bool>, String> {
    let conn = match stream {
        Some(conn) => conn,
        None => match TcpStream::connect(addr).await {
            Ok(conn) => stream.insert(conn),
            Err(_) => return Ok(None),
        },
    };
    let failed = |error: std::io::Error| error.to_string();
    let request = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n";
    conn.write_all(request).await.map_err(failed)?;
    let mut answer = vec![];
    // The body is an object.
    while !answer.ends_with(b"}") {
        if conn.read_buf(&mut answer).await.map_err(failed)? == 0 {
            return Err(format!("closed after {}", answer.escape_ascii()));
        }
    }
    let text = String::from_utf8_lossy(&answer).to_lowercase();
    Ok(Some(text.contains("connection: close")))
}

#[tokio::test]
async fn no_request_under_load_is_reset_by_a_stop() {
    let (_db, mut server) = serving(&[]).await;
    let (addr, answered) = (server.addr(), Arc::new(AtomicU32::new(0)));
    let mut clients = JoinSet::new();
    for client in 0..16 {
        let answered = Arc::clone(&answered);
        clients.spawn(async move {
            let mut stream = None;
            loop {
                let Some(closes) = requested(&mut stream, addr).await? else {
                    return Ok::<_, String>(());
                };
                answered.fetch_add(1, Relaxed);
                if closes || client % 2 == 0 {
                    stream = None;
                }
            }
        });
    }
    eventually!("the load is running", answered.load(Relaxed) > 200);
    server.signal("-TERM");
    while let Some(client) = clients.join_next().await {
        assert_eq!(client.unwrap(), Ok(()));
    }
    assert!(server.exit().await.success());
}
