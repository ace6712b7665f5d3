//! The example service as a process, on both pairs of stores.

use std::time::Duration;

use reqwest::Client;
use serde_json::{Value, json};
use sqlx::Postgres;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::support::{
    database::{Fresh, TestDatabase},
    eventually,
    http::Answer,
    process::Inventory,
    redis::RedisServer,
};

/// A service on Postgres and Redis, with both.
async fn on_servers() -> (Inventory, Fresh<Postgres>, RedisServer) {
    let (db, redis) = (Postgres::fresh(2).await, RedisServer::start(&[]).await);
    let variables = [
        ("DATABASE_URL", db.url.as_str()),
        ("REDIS_URL", &redis.url()),
    ];
    (Inventory::start(&variables).await, db, redis)
}

struct Caller<'a> {
    service: &'a Inventory,
    client: Client,
}

impl<'a> Caller<'a> {
    fn of(service: &'a Inventory) -> Self {
        Self {
            service,
            client: Client::new(),
        }
    }

    /// Acquires as soon as the lock is free, and returns the header value.
    async fn acquire(&self, sku: &str, ttl_ms: u64) -> String {
        let mut granted = String::new();
        eventually("the lock is granted", async || {
            let request = self.client.post(self.service.url(&format!("/locks/{sku}")));
            let answer = Answer::to(request.json(&json!({ "ttl_ms": ttl_ms }))).await;
            if answer.status == 201 {
                granted = answer.json()["fencing_token"].as_str().unwrap().to_owned();
            }
            answer.status == 201
        })
        .await;
        granted
    }

    async fn set(&self, sku: &str, stock: i64) {
        let token = self.acquire(sku, 100).await;
        let request = self
            .client
            .put(self.service.url(&format!("/inventory/{sku}")));
        let request = request
            .header("Fencing-Token", token)
            .json(&json!({ "stock": stock }));
        let answer = Answer::to(request).await;
        assert_eq!(answer.json(), json!({ "sku": sku, "stock": stock }));
    }

    async fn decrement(&self, sku: &str, token: &str, body: Value) -> Answer {
        let path = format!("/inventory/{sku}/decrement");
        let request = self.client.post(self.service.url(&path));
        Answer::to(request.header("Fencing-Token", token).json(&body)).await
    }

    async fn get(&self, path: &str) -> Answer {
        Answer::to(self.client.get(self.service.url(path))).await
    }
}

/// A lease runs out while its holder is paused; the successor writes; the holder wakes up.
async fn a_stale_writer_bounces(service: &Inventory) {
    let caller = Caller::of(service);
    caller.set("sku-1", 10).await;
    let first = caller.acquire("sku-1", 150).await;
    // The first holder is paused here, until its lease has run out and the second has it.
    let second = caller.acquire("sku-1", 30_000).await;

    let answer = caller
        .decrement("sku-1", &second, json!({ "quantity": 1 }))
        .await;
    assert_eq!(answer.status, 200);
    assert_eq!(answer.json(), json!({ "sku": "sku-1", "stock": 9 }));

    let refused = caller
        .decrement("sku-1", &first, json!({ "quantity": 1 }))
        .await;
    let problem = refused.is_problem(412, "stale-token");
    let number = |token: &str| token.split(';').next().unwrap().parse::<i64>().unwrap();
    assert!(number(&first) < number(&second));
    assert_eq!(problem["presented_token"], number(&first));
    assert_eq!(problem["max_token"], number(&second));
    assert_eq!(caller.get("/inventory/sku-1").await.json()["stock"], 9);

    // One line in the log says it all.
    let log = service.log();
    let lines: Vec<_> = log
        .lines()
        .filter(|line| line.contains("stale writer"))
        .collect();
    assert_eq!(lines.len(), 1, "{log}");
    for part in [
        "resource=sku-1".to_owned(),
        format!("presented_token={}", number(&first)),
        format!("max_token={}", number(&second)),
    ] {
        assert!(lines[0].contains(&part), "{part} is missing: {}", lines[0]);
    }
}

#[tokio::test]
async fn a_stale_writer_bounces_without_any_server() {
    let service = Inventory::start(&[]).await;
    a_stale_writer_bounces(&service).await;
    let stdout = service.stdout();
    assert!(
        stdout.contains("SQLite in ") && stdout.contains("in this process"),
        "{stdout}"
    );
    assert!(stdout.matches("curl ").count() >= 4, "{stdout}");
}

#[tokio::test]
async fn a_storm_of_stale_writers_is_a_few_lines_in_the_log() {
    let service = Inventory::start(&[]).await;
    let caller = Caller::of(&service);
    let stale = caller.acquire("sku-1", 100).await;
    caller.set("sku-1", 10).await;
    let storm = async || {
        let body = json!({ "quantity": 1 });
        let refused = caller.decrement("sku-1", &stale, body).await;
        refused.is_problem(412, "stale-token");
    };
    let began = std::time::Instant::now();
    for _ in 0..100 {
        futures_util::future::join_all((0..10).map(|_| storm())).await;
    }
    // The next line tells of those that came behind the last one.
    tokio::time::sleep(Duration::from_millis(1_100)).await;
    storm().await;
    let seconds = began.elapsed().as_secs();
    let log = service.log();
    let suppressed = log
        .lines()
        .filter(|line| line.contains("stale writer"))
        .map(|line| {
            let (_, behind) = line.split_once("suppressed=").expect("it says how many");
            let digits = behind.find(|c: char| !c.is_ascii_digit());
            let digits = &behind[..digits.unwrap_or(behind.len())];
            digits.parse::<u64>().unwrap()
        });
    let suppressed: Vec<_> = suppressed.collect();
    let lines = suppressed.len() as u64;
    assert!((2..=seconds + 2).contains(&lines), "{lines} in {seconds} s");
    assert_eq!(lines + suppressed.iter().sum::<u64>(), 1_001, "{log}");
}

#[tokio::test]
async fn a_stale_writer_bounces_on_postgres_and_redis() {
    let (service, db, _redis) = on_servers().await;
    a_stale_writer_bounces(&service).await;
    let stdout = service.stdout();
    assert!(
        stdout.contains("Postgres") && stdout.contains("Redis"),
        "{stdout}"
    );
    if let Some(password) = reqwest::Url::parse(&db.url).unwrap().password() {
        assert!(!stdout.contains(password) && !service.log().contains(password));
    }
}

#[tokio::test]
async fn each_call_answers_as_documented() {
    let service = Inventory::start(&[]).await;
    let caller = Caller::of(&service);
    assert_eq!(caller.get("/healthz").await.status, 200);
    caller
        .get("/inventory/sku-1")
        .await
        .is_problem(404, "not-found");
    for path in ["/inventory/%00", "/inventory/%FF"] {
        let problem = caller.get(path).await.is_problem(422, "invalid-request");
        assert_eq!(problem["field"], "resource");
    }
    let token = caller.acquire("sku-1", 30_000).await;
    let decrement = async |body: Value| caller.decrement("sku-1", &token, body).await;
    decrement(json!({ "quantity": 1 }))
        .await
        .is_problem(404, "not-found");

    let put = caller
        .client
        .put(service.url("/inventory/sku-1"))
        .header("Fencing-Token", &token);
    assert_eq!(
        Answer::to(put.json(&json!({ "stock": 3 }))).await.status,
        200
    );
    // The token was single-use.
    decrement(json!({ "quantity": 1 }))
        .await
        .is_problem(412, "stale-token");

    caller.set("sku-2", 3).await;
    let token = caller.acquire("sku-2", 30_000).await;
    let decrement = async |body: Value| caller.decrement("sku-2", &token, body).await;
    let problem = decrement(json!({ "quantity": 4 }))
        .await
        .is_problem(409, "out-of-stock");
    assert_eq!(problem["stock"], 3);
    for body in [
        json!({ "quantity": 0 }),
        json!({ "quantity": -1 }),
        json!({ "quantity": 1.5 }),
        json!({ "quantity": 4_294_967_296_u64 }),
        json!({}),
        json!(7),
        json!({ "quantity": "1" }),
        json!({ "quantity": 1, "price": 2 }),
    ] {
        decrement(body).await.is_problem(422, "invalid-request");
    }
    // All of those failures have left the token usable.
    assert_eq!(decrement(json!({ "quantity": 3 })).await.json()["stock"], 0);
}

#[tokio::test]
async fn a_transfer_takes_from_one_and_gives_to_another_or_does_neither() {
    let service = Inventory::start(&[]).await;
    let caller = Caller::of(&service);
    let transfer = async |path: &str, tokens: &[&str], quantity: i64| {
        let request = caller.client.post(service.url(path));
        let request = request.header("Fencing-Token", tokens.join(", "));
        Answer::to(request.json(&json!({ "quantity": quantity }))).await
    };
    caller.set("sku-1", 5).await;
    let one = caller.acquire("sku-1", 30_000).await;
    let two = caller.acquire("sku-2", 30_000).await;
    let there = "/inventory/sku-1/transfer/sku-2";
    let answer = transfer(there, &[&one, &two], 2).await;
    answer.is_problem(404, "not-found");
    let put = caller.client.put(service.url("/inventory/sku-2"));
    let put = put
        .header("Fencing-Token", &two)
        .json(&json!({ "stock": 1 }));
    assert_eq!(Answer::to(put).await.status, 200);

    // The token of sku-2 is used up: the whole transfer is refused, and the problem says why.
    let answer = transfer(there, &[&one, &two], 2).await;
    let problem = answer.is_problem(412, "stale-token");
    assert_eq!(problem["resource"], "sku-2");

    let same = "/inventory/sku-1/transfer/sku-1";
    let problem = transfer(same, &[&one], 2)
        .await
        .is_problem(422, "invalid-request");
    assert_eq!(problem["field"], "to");
    transfer(there, &[&one], 2)
        .await
        .is_problem(428, "token-required");

    // A fresh token for sku-2, of another issuer: any higher integer counts.
    let two = r#"999000000000;resource="sku-2""#;
    let answer = transfer(there, &[&one, two], 6).await;
    assert_eq!(answer.is_problem(409, "out-of-stock")["stock"], 5);
    let answer = transfer(there, &[two, &one], 2).await;
    let expected = json!({
        "from": { "sku": "sku-1", "stock": 3 },
        "to": { "sku": "sku-2", "stock": 3 },
    });
    assert_eq!(answer.json(), expected);
}

#[tokio::test]
async fn metrics_tell_what_happened() {
    let service = Inventory::start(&[]).await;
    let caller = Caller::of(&service);
    let first = caller.acquire("a", 100).await;
    caller.set("a", 10).await;
    let stale = caller.decrement("a", &first, json!({ "quantity": 1 }));
    stale.await.is_problem(412, "stale-token");
    let metrics = caller.get("/metrics").await.text;
    for line in [
        "tower_fence_admitted_total{kind=\"write\"} 1",
        "tower_fence_refused_total{problem=\"stale-token\"} 1",
        "tower_fence_leases_granted_total 2",
        "tower_fence_epochs_begun_total 1",
        "tower_fence_hold_seconds_count 1",
        "tower_fence_admission_seconds_count 2",
        "tower_fence_lease_wait_seconds_count 2",
    ] {
        assert!(metrics.contains(line), "{line} is not in\n{metrics}");
    }
    assert!(!metrics.contains("\"a\""), "a resource became a label");
}

#[tokio::test]
async fn a_write_may_be_repeated_under_its_key() {
    let service = Inventory::start(&[]).await;
    let caller = Caller::of(&service);
    caller.set("sku-1", 10).await;
    let token = caller.acquire("sku-1", 30_000).await;
    for replayed in [None, Some("true")] {
        let request = caller
            .client
            .post(service.url("/inventory/sku-1/decrement"))
            .header("Fencing-Token", &token)
            .header("Idempotency-Key", "\"order-7\"");
        let answer = Answer::to(request.json(&json!({ "quantity": 1 }))).await;
        assert_eq!(answer.json()["stock"], 9);
        let mark = answer.headers.get("idempotent-replayed");
        assert_eq!(mark.map(|value| value.to_str().unwrap()), replayed);
    }
}

#[tokio::test]
async fn health_follows_the_stores() {
    let (service, _db, mut redis) = on_servers().await;
    let caller = Caller::of(&service);
    assert_eq!(caller.get("/healthz").await.status, 200);
    redis.kill();
    caller
        .get("/healthz")
        .await
        .is_problem(503, "store-unavailable");
    redis.start_again().await;
    eventually("it is healthy", async || {
        caller.get("/healthz").await.status == 200
    })
    .await;
}

#[tokio::test]
async fn writes_go_on_without_redis_but_no_lease_is_granted() {
    let (service, _db, mut redis) = on_servers().await;
    let caller = Caller::of(&service);
    caller.set("sku-1", 10).await;
    let token = caller.acquire("sku-1", 30_000).await;
    redis.kill();
    let refused = caller.client.post(service.url("/locks/sku-2"));
    Answer::to(refused)
        .await
        .is_problem(503, "store-unavailable");
    let answer = caller
        .decrement("sku-1", &token, json!({ "quantity": 1 }))
        .await;
    assert_eq!(answer.json()["stock"], 9);
}

#[tokio::test]
async fn a_signal_lets_the_writes_under_way_finish() {
    for signal in ["-INT", "-TERM"] {
        let mut service = Inventory::start(&[]).await;
        let caller = Caller::of(&service);
        caller.set("sku-1", 10).await;
        let token = caller.acquire("sku-1", 30_000).await;

        // Half of the request is sent, then the signal comes, then the rest.
        let addr = service.url.strip_prefix("http://").unwrap();
        let mut stream = tokio::net::TcpStream::connect(addr).await.unwrap();
        let body = r#"{"quantity":1}"#;
        let head = format!(
            "POST /inventory/sku-1/decrement HTTP/1.1\r\nHost: x\r\nFencing-Token: {token}\r\n\
             Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{}",
            body.len(),
            &body[..5],
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        tokio::time::sleep(Duration::from_millis(100)).await;
        service.signal(signal);
        eventually("it stops", async || service.log().contains("stopping")).await;
        stream.write_all(&body.as_bytes()[5..]).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        assert!(answer.ends_with(r#"{"sku":"sku-1","stock":9}"#), "{answer}");
        assert_eq!(service.exit().await.code(), Some(0));
    }
}

#[tokio::test]
async fn tokens_go_on_after_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let url = format!("sqlite:{}", folder.path().join("inventory.db").display());
    let mut last = 0;
    for _ in 0..3 {
        let service = Inventory::start(&[("DATABASE_URL", &url)]).await;
        let token = Caller::of(&service).acquire("sku-1", 30_000).await;
        let number = token.split(';').next().unwrap().parse::<i64>().unwrap();
        assert!(number > last, "{number} is not above {last}");
        last = number;
        // Killed, not stopped: the lease was still held.
    }
}
