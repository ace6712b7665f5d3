//! The workers and the service of `examples/clients`, against the program.

use std::process::Command;

use serde_json::json;
use sqlx::Postgres;

use super::{
    drivers::{TABLE, built},
    program::Served,
};
use crate::support::{
    database::{Fresh, TestDatabase},
    http::{Answer, client},
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
}

impl Shop {
    async fn open() -> Self {
        let db = Postgres::fresh(1).await;
        db.execute(TABLE).await;
        let program = Served::start(&db.url, &[]).await;
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
        let mut request = client().put(url).json(&json!({ "stock": stock }));
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

/// An operator broke the lease while the worker was paused, so the worker has not noticed the loss
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
    assert!(log.contains("stale-token"), "{log}");
    shop.has_nine().await;
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
    late_write_is_refused
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

#[tokio::test]
async fn failed_commit_of_the_service_makes_older_tokens_stale() {
    let shop = Shop::open().await;
    let deadlock = "CREATE FUNCTION deadlock() RETURNS trigger LANGUAGE plpgsql \
             AS 'BEGIN RAISE deadlock_detected; END'; \
         CREATE CONSTRAINT TRIGGER deadlock AFTER UPDATE ON inventory \
             DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION deadlock()";
    shop.db.execute(deadlock).await;
    let failed = shop.put("sku-1", 9, &["7"]).await;
    failed.is_problem(503, "fence-busy");
    let older = shop.put("sku-1", 9, &["6"]).await;
    older.is_problem(412, "stale-token");
    shop.db.execute("DROP TRIGGER deadlock ON inventory").await;
    // The token was not used.
    assert_eq!(shop.put("sku-1", 9, &["7"]).await.status, 200);
    shop.has_nine().await;
}
