//! What the server says of itself.

use serde_json::{Value, json};
use sqlx::Postgres;

use super::program::{Served, run};
use crate::support::{
    database::TestDatabase, eventually, http::Answer, postgres::PostgresServer, redis::RedisServer,
};

async fn becomes(server: &Served, status: u16) -> Answer {
    let mut last = None;
    eventually("it says so", async || {
        let answer = server.get("/readyz").await;
        let is_there = answer.status == status;
        last = Some(answer);
        is_there
    })
    .await;
    last.unwrap()
}

#[tokio::test]
async fn it_is_ready_while_its_postgres_answers() {
    let mut postgres = PostgresServer::start(&[]).await;
    let server = Served::start(&postgres.url("postgres"), &["--migrate"]).await;
    let ready = becomes(&server, 200).await;
    assert_eq!(
        ready.json(),
        json!({"status": "ready", "database": "ok", "leases": "ok"})
    );
    assert_eq!(ready.headers["cache-control"], "no-store");
    postgres.crash().await;
    let down = becomes(&server, 503).await.json();
    let expected =
        json!({"status": "unavailable", "database": "unavailable", "leases": "unavailable"});
    assert_eq!(down, expected);
    assert_eq!(
        server.get("/healthz").await.json(),
        json!({"status": "alive"})
    );
    server
        .post("/locks/a", &json!({}))
        .await
        .is_problem(503, "store-unavailable");
    postgres.restart().await;
    becomes(&server, 200).await;
}

#[tokio::test]
async fn it_is_ready_while_its_redis_answers() {
    let (db, mut redis) = (Postgres::fresh(2).await, RedisServer::start(&[]).await);
    let server = Served::start(&db.url, &["--redis-url", &redis.url()]).await;
    becomes(&server, 200).await;
    redis.kill();
    let down = becomes(&server, 503).await.json();
    let expected = json!({"status": "unavailable", "database": "ok", "leases": "unavailable"});
    assert_eq!(down, expected);
    redis.start_again().await;
    becomes(&server, 200).await;
}

/// It starts, says what is missing, and needs no restart once that is there.
#[tokio::test]
async fn it_starts_before_its_database_and_its_tables() {
    let mut postgres = PostgresServer::start(&[]).await;
    let url = postgres.url("postgres");
    postgres.stop().await;
    let server = Served::start(&url, &[]).await;
    assert_eq!(
        becomes(&server, 503).await.json()["database"],
        "unavailable"
    );
    postgres.restart().await;
    eventually("the database answers", async || {
        server.get("/readyz").await.json()["database"] == "ok"
    })
    .await;
    assert_eq!(server.get("/readyz").await.json()["leases"], "unavailable");
    assert!(
        server.log().contains("run `tower-fence migrate`"),
        "{}",
        server.log()
    );
    let database = [("TOWER_FENCE_DATABASE_URL", url.as_str())];
    for command in [
        &["reset", "sku-1", "--to", "5", "--yes"][..],
        &["run", "--direct", "--", "true"],
    ] {
        let refused = run(command, &database).await;
        refused.is(69).says("run `tower-fence migrate`");
    }
    run(&["migrate"], &database).await.is(0);
    becomes(&server, 200).await;
    // With `--migrate` there is no start without it.
    postgres.crash().await;
    let variables = [("TOWER_FENCE_DATABASE_URL", url.as_str())];
    let arguments = ["serve", "--migrate", "--listen", "127.0.0.1:0"];
    run(&arguments, &variables)
        .await
        .is(69)
        .says("no database postgres on 127.0.0.1");
}

#[tokio::test]
async fn metrics_count_leases_and_name_no_resource() {
    let db = Postgres::fresh(2).await;
    let server = Served::start(&db.url, &[]).await;
    server.post("/locks/sku-1", &json!({})).await;
    server
        .post("/locks/sku-1", &json!({}))
        .await
        .is_problem(409, "lock-held");
    let metrics = server.get("/metrics").await;
    assert_eq!(metrics.headers["content-type"], "text/plain; version=0.0.4");
    for line in [
        "tower_fence_leases_granted_total 1",
        r#"tower_fence_lease_refused_total{problem="lock-held"} 1"#,
        r#"tower_fence_lease_wait_seconds_bucket{le="60"} 1"#,
        "tower_fence_server_connections ",
    ] {
        assert!(metrics.text.contains(line), "{line}: {}", metrics.text);
    }
    assert!(!metrics.text.contains("sku-1"));
}

#[tokio::test]
async fn each_line_of_a_json_log_is_an_object() {
    let db = Postgres::fresh(2).await;
    let arguments = ["--log-format", "json", "--log", "info,tower_fence=debug"];
    let mut server = Served::start(&db.url, &arguments).await;
    server.post("/locks/sku-1", &json!({})).await;
    eventually("it is ready", async || server.log().contains("ready")).await;
    server.signal("-TERM");
    assert!(server.exit().await.success());
    let log = server.log();
    let lines: Vec<Value> = log
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|_| panic!("{line}")))
        .collect();
    let messages: Vec<_> = lines
        .iter()
        .filter_map(|line| line["message"].as_str())
        .collect();
    for message in ["started", "ready", "answered", "stopped"] {
        assert!(messages.contains(&message), "{message}: {log}");
    }
    let answered = lines
        .iter()
        .find(|line| line["message"] == "answered")
        .unwrap();
    assert_eq!(
        (&answered["method"], &answered["status"]),
        (&json!("POST"), &json!(201))
    );
}
