//! The workers and the service of `examples/clients`, against the program.

use std::{collections::HashMap, process::Command};

use axum::Router;
use futures_util::future::join_all;
use http::{StatusCode, Uri};
use reqwest::Client;
use serde_json::json;
use sqlx::{Connection, PgConnection, Postgres};

use super::{
    drivers::{TABLE, built},
    program::{HOLDER, OPERATOR, Served, serving_with_secrets},
};
use crate::support::{
    database::{Fresh, TestDatabase},
    http::{Answer, Server, client},
    process::Process,
    repository,
};

fn python() -> Command {
    let mut command = Command::new(built("python/bin/python"));
    command.arg("examples/clients/worker.py");
    command
}

fn go() -> Command {
    Command::new(built("clients/worker"))
}

/// Returns the command of the worker in TypeScript. It runs in the process of `node` itself, so
/// that signals reach it.
fn typescript() -> Command {
    let mut command = Command::new("node");
    command
        .arg("--import")
        .arg(built("prisma/node_modules/tsx/dist/loader.mjs"))
        .arg("examples/clients/worker.mts");
    command
}

/// A database with a stock of 10, the program, and the service.
struct Shop {
    db: Fresh<Postgres>,
    program: Served,
    service: Process,
    client: Client,
}

impl Shop {
    async fn open() -> Self {
        let (db, program) = serving_with_secrets().await;
        db.execute(TABLE).await;
        // Operators may break leases.
        let program = program.with_secret(OPERATOR);
        let mut command = Command::new("sh");
        command
            .args(["-c", "exec \"$0\" -m uvicorn --port 0 service:app 2>&1"])
            .arg(built("python/bin/python"))
            .env("DATABASE_URL", &db.url)
            .env("PYTHONDONTWRITEBYTECODE", "1");
        let mut service = Process::run_in(&repository().join("examples/clients"), command);
        service.prints("(Press CTRL+C to quit)", 1).await;
        Self {
            db,
            program,
            service,
            client: client(),
        }
    }

    fn service_url(&self) -> String {
        let log = self.service.stdout();
        let (_, url) = log.split_once("running on ").unwrap();
        url.split_once(' ').unwrap().0.to_owned()
    }

    /// Starts a worker with a lease of `ttl_ms`, which works for `work_ms` between its read and its
    /// write.
    fn start(&self, mut worker: Command, ttl_ms: u64, work_ms: u64) -> Process {
        worker
            .env("TOWER_FENCE_URL", &self.program.url)
            .env("TOWER_FENCE_SECRET", HOLDER)
            .env("SERVICE_URL", self.service_url())
            .env("TTL_MS", ttl_ms.to_string())
            .env("WORK_MS", work_ms.to_string());
        Process::run(worker)
    }

    /// Runs a worker that writes 9.
    async fn write_nine(&self, worker: Command) {
        let mut worker = self.start(worker, 30_000, 0);
        let status = worker.exit().await;
        assert!(status.success(), "{}{}", worker.stdout(), worker.log());
        self.has_nine().await;
    }

    /// Writes a stock through the service.
    async fn put(&self, sku: &str, stock: i64, tokens: &[&str]) -> Answer {
        let url = format!("{}/inventory/{sku}", self.service_url());
        let mut request = self.client.put(url).json(&json!({ "stock": stock }));
        for token in tokens {
            request = request.header("Fencing-Token", *token);
        }
        Answer::to(request).await
    }

    async fn has_nine(&self) {
        let stock = "SELECT stock FROM inventory WHERE sku = 'sku-1'";
        assert_eq!(self.db.number(stock).await, 9);
    }
}

/// The work of the first worker takes longer than the TTL. A second worker waits until the first
/// one has released the lease.
async fn writes_under_a_renewed_lease(worker: fn() -> Command) {
    let shop = Shop::open().await;
    let mut first = shop.start(worker(), 4_000, 6_000);
    first.prints("the stock is 10", 1).await;
    let second = shop.start(worker(), 30_000, 0);
    for (mut worker, stock) in [(first, 9), (second, 8)] {
        let status = worker.exit().await;
        assert!(status.success(), "{}{}", worker.stdout(), worker.log());
        let line = format!("the stock is {stock} now\n");
        assert!(worker.stdout().ends_with(&line), "{}", worker.stdout());
    }
    let lease = shop.program.get("/locks/sku-1").await.json();
    assert_eq!(lease["held"], false);
}

/// The worker is paused until its lease has expired and another worker has written.
async fn stops_when_its_lease_is_lost(worker: fn() -> Command) {
    let shop = Shop::open().await;
    let mut paused = shop.start(worker(), 3_000, 600_000);
    paused.prints("the stock is 10", 1).await;
    paused.signal("-STOP");
    shop.write_nine(worker()).await;
    paused.signal("-CONT");
    assert_eq!(paused.exit().await.code(), Some(1));
    let log = paused.log();
    assert!(log.ends_with("the lease is lost: stopped\n"), "{log}");
    shop.has_nine().await;
}

/// An operator broke the lease while the worker was paused, so the worker has not detected the loss
/// when it writes.
async fn late_write_is_refused(worker: fn() -> Command) {
    let shop = Shop::open().await;
    let mut paused = shop.start(worker(), 600_000, 10_000);
    paused.prints("the stock is 10", 1).await;
    paused.signal("-STOP");
    let broken = shop.program.post("/locks/sku-1/break", &json!({})).await;
    assert_eq!(broken.status, 204, "{broken:?}");
    shop.write_nine(worker()).await;
    paused.signal("-CONT");
    assert_eq!(paused.exit().await.code(), Some(1), "{}", paused.stdout());
    let log = paused.log();
    assert!(log.starts_with("refused with 412: "), "{log}");
    assert_contains!(log, "stale-token");
    shop.has_nine().await;
}

/// A client that follows a redirect may send a GET, and treat the response as a lease or as a
/// successful write.
async fn follows_no_redirect(worker: fn() -> Command) {
    let shop = Shop::open().await;
    for name in ["TOWER_FENCE_URL", "SERVICE_URL"] {
        let mut urls = HashMap::from([
            ("TOWER_FENCE_URL", shop.program.url.clone()),
            ("SERVICE_URL", shop.service_url()),
        ]);
        let to = urls[name].clone();
        let redirect = move |uri: Uri| async move {
            let location = format!("{}{uri}", to.trim_end_matches('/'));
            (StatusCode::MOVED_PERMANENTLY, [("location", location)])
        };
        let moved = Server::start(Router::new().fallback(redirect)).await;
        urls.insert(name, moved.url(""));
        let mut command = worker();
        command.envs(urls).env("WORK_MS", "0");
        command.env("TOWER_FENCE_SECRET", HOLDER);
        let mut worker = Process::run(command);
        assert_eq!(worker.exit().await.code(), Some(1), "{}", worker.stdout());
        let log = worker.log();
        assert!(log.starts_with("refused with 301: "), "{name}: {log}");
    }
}

macro_rules! workers {
    ($($behavior:ident),*) => {$(
        mod $behavior {
            #[tokio::test]
            async fn python() {
                super::$behavior(super::python).await;
            }

            #[tokio::test]
            async fn go() {
                super::$behavior(super::go).await;
            }

            #[tokio::test]
            async fn typescript() {
                super::$behavior(super::typescript).await;
            }
        }
    )*};
}

workers!(
    writes_under_a_renewed_lease,
    stops_when_its_lease_is_lost,
    late_write_is_refused,
    follows_no_redirect
);

#[tokio::test]
async fn service_refuses_requests_without_a_valid_token() {
    let shop = Shop::open().await;
    let write = async |tokens: &[&str]| shop.put("sku-1", 9, tokens).await;
    write(&[]).await.is_problem(428, "token-required");
    write(&["7, x"]).await.is_problem(400, "malformed-token");
    write(&["7;resource=\"sku-2\""])
        .await
        .is_problem(403, "wrong-resource");
    // Several lines of a field form one list.
    let tokens = ["7;resource=\"sku-2\"", "7;resource=\"sku-1\""];
    assert_eq!(write(&tokens).await.status, 200);
    shop.has_nine().await;
    let stale = write(&["6"]).await.is_problem(412, "stale-token");
    assert_eq!([&stale["presented_token"], &stale["max_token"]], [6, 7]);
}

#[tokio::test]
async fn service_refuses_invalid_names_and_stocks() {
    let shop = Shop::open().await;
    for (sku, stock) in [("a%00b", 9), ("a%0Ab", 9), ("sku-1", -1)] {
        assert_eq!(shop.put(sku, stock, &["7"]).await.status, 422, "{sku}");
    }
    assert_eq!(shop.put("sku-1", i64::MAX, &["7"]).await.status, 200);
}

/// The service answers with this problem after a COMMIT during which the statement was executed.
async fn failed_commit_is_answered_with(problem: &str, statement: &str) {
    let shop = Shop::open().await;
    let trigger = format!(
        "CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql \
             AS 'BEGIN {statement}; RETURN NULL; END'; \
         CREATE CONSTRAINT TRIGGER fail AFTER UPDATE ON inventory \
             DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION fail()"
    );
    shop.db.execute(&trigger).await;
    let failed = shop.put("sku-1", 9, &["7"]).await;
    failed.is_problem(503, problem);
    let older = shop.put("sku-1", 9, &["6"]).await;
    older.is_problem(412, "stale-token");
    shop.db.execute("DROP TRIGGER fail ON inventory").await;
    // The token was not used.
    assert_eq!(shop.put("sku-1", 9, &["7"]).await.status, 200);
    shop.has_nine().await;
}

#[tokio::test]
async fn failed_commit_of_the_service_makes_older_tokens_stale() {
    failed_commit_is_answered_with("fence-busy", "RAISE deadlock_detected").await;
}

/// A handler that catches the error of a statement, after which Postgres answers COMMIT with a
/// ROLLBACK.
const CARELESS_HANDLER: &str = "
import service

try:
    with service.fenced('sku-1', ['7']) as session:
        session.execute(service.text('UPDATE inventory SET stock = 9'))
        try:
            session.execute(service.text('SELECT 1 / 0'))
        except service.DBAPIError:
            pass
except service.Refusal as refusal:
    print(refusal.problem['type'])
else:
    print('the write is reported as a success')
";

#[tokio::test]
async fn caught_error_in_the_service_is_no_success() {
    let shop = Shop::open().await;
    let mut command = Command::new(built("python/bin/python"));
    command
        .args(["-c", CARELESS_HANDLER])
        .env("DATABASE_URL", &shop.db.url)
        .env("PYTHONDONTWRITEBYTECODE", "1");
    let mut handler = Process::run_in(&repository().join("examples/clients"), command);
    handler.exit().await;
    let (printed, log) = (handler.stdout(), handler.log());
    assert!(
        printed.ends_with("#transaction-aborted\n"),
        "{printed}{log}"
    );
    let older = shop.put("sku-1", 9, &["6"]).await;
    older.is_problem(412, "stale-token");
    assert_eq!(shop.put("sku-1", 9, &["7"]).await.status, 200);
    shop.has_nine().await;
}

#[tokio::test]
async fn lost_commit_of_the_service_is_an_unknown_outcome() {
    let end = "PERFORM pg_terminate_backend(pg_backend_pid())";
    failed_commit_is_answered_with("outcome-unknown", end).await;
}

/// The requests outnumber the threads of the service, and the connections of its pool.
#[tokio::test]
async fn service_completes_a_hundred_concurrent_writes() {
    let shop = &Shop::open().await;
    let writes = (0..100).map(|n| async move {
        let sku = format!("many-{n}");
        shop.put(&sku, 9, &["7"]).await.status
    });
    assert_eq!(join_all(writes).await, [200; 100]);
}

#[tokio::test]
async fn service_answers_an_outage_of_its_database_with_503() {
    let shop = Shop::open().await;
    let (server, name) = shop.db.url.rsplit_once('/').unwrap();
    let mut other = PgConnection::connect(&format!("{server}/postgres"))
        .await
        .unwrap();
    let mut execute = async |sql: String| Postgres::run(&mut other, &sql).await;
    assert_eq!(shop.put("sku-1", 8, &["7"]).await.status, 200);
    execute(format!("ALTER DATABASE {name} ALLOW_CONNECTIONS false")).await;
    execute(format!(
        "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity WHERE datname = '{name}'"
    ))
    .await;
    // The first write is sent on a lost connection. The second one cannot open a new connection.
    for _ in 0..2 {
        let refused = shop.put("sku-1", 9, &["8"]).await;
        refused.is_problem(503, "store-unavailable");
        assert_eq!(refused.headers["retry-after"], "1");
    }
    execute(format!("ALTER DATABASE {name} ALLOW_CONNECTIONS true")).await;
    assert_eq!(shop.put("sku-1", 9, &["8"]).await.status, 200);
    shop.has_nine().await;
}
