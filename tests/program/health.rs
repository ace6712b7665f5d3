//! The health and the metrics of the server.

use std::cell::Cell;

use futures_util::future::join_all;
use serde_json::{Value, json};
use sqlx::{Connection, PgConnection, Postgres};

use super::check::{ISSUER, READ_ONLY};
use super::program::{Served, file, path, run, run_on, serving};
use crate::support::{
    database::TestDatabase, etcd::EtcdCluster, eventually, http::Answer, postgres::PostgresServer,
    redis::RedisServer,
};

/// The reason that refers to an error in the log.
const HIDDEN: &str = "see the log of the server";

async fn becomes(server: &Served, status: u16) -> Answer {
    let mut last = None;
    eventually("readyz has this status", async || {
        let answer = server.get("/readyz").await;
        let is_there = answer.status == status;
        last = Some(answer);
        is_there
    })
    .await;
    last.unwrap()
}

#[tokio::test]
async fn server_is_ready_while_its_postgres_answers() {
    let mut postgres = PostgresServer::start(&[]).await;
    let server = Served::start(&postgres.url("postgres"), &["--migrate"]).await;
    let ready = becomes(&server, 200).await;
    assert_eq!(
        ready.json(),
        json!({"status": "ready", "database": "ok", "leases": "ok"})
    );
    assert_eq!(ready.headers["cache-control"], "no-store");
    let granted = server.post("/locks/a", &json!({})).await;
    assert_eq!(granted.status, 201, "{granted:?}");
    // A probe does not log a failover, because its transaction is rolled back.
    let url = postgres.url("postgres");
    let mut conn = PgConnection::connect(&url).await.unwrap();
    let fail_over = "UPDATE tower_fence.floors SET history = '1500000000'";
    Postgres::run(&mut conn, fail_over).await;
    run_on(&url, &["check"]).await.is(0);
    becomes(&server, 200).await;
    let reached = "has reached timeline 00000001";
    assert!(!postgres.log().contains(reached));
    let granted = server.post("/locks/b", &json!({})).await;
    assert_eq!(granted.status, 201, "{granted:?}");
    assert!(postgres.log().contains(reached));
    postgres.crash().await;
    let down = becomes(&server, 503).await.json();
    for store in ["database", "leases"] {
        assert_eq!(down[store], "unavailable", "{down}");
        let reason = &down["reasons"][store];
        assert!(reason == HIDDEN || reason == "no answer in time", "{down}");
    }
    server.logs("Connection refused").await;
    let alive = server.get("/healthz").await.json();
    assert_eq!(alive, json!({"status": "alive"}));
    let refused = server.post("/locks/a", &json!({})).await;
    refused.is_problem(503, "store-unavailable");
    postgres.restart().await;
    becomes(&server, 200).await;
}

#[tokio::test]
async fn server_is_ready_while_its_redis_answers() {
    let (db, mut redis) = (Postgres::fresh(2).await, RedisServer::start(&[]).await);
    let server = Served::start(&db.url, &["--redis-url", &redis.url()]).await;
    becomes(&server, 200).await;
    redis.kill();
    let down = becomes(&server, 503).await.json();
    assert_eq!(
        (&down["database"], &down["leases"]),
        (&json!("ok"), &json!("unavailable"))
    );
    assert_eq!(down["reasons"], json!({"leases": HIDDEN}));
    redis.start_again().await;
    becomes(&server, 200).await;
    let ready = || {
        let log = server.log();
        log.lines().filter(|line| line.ends_with(" ready")).count()
    };
    eventually!("readiness is logged again", ready() >= 2);
    assert_eq!(ready(), 2, "{}", server.log());
}

/// Waits until `/readyz` reports that a store is not ready, and the log contains the reason.
async fn names(server: &Served, store: &str, reason: &str) {
    // On a busy machine, the first check may fail for another reason, such as a timeout.
    eventually(
        "readyz names the store, and the log the reason",
        async || {
            let answer = server.get("/readyz").await;
            let is_named = answer.status == 503 && answer.json()["reasons"][store].is_string();
            is_named && server.log().contains(reason)
        },
    )
    .await;
}

#[tokio::test]
async fn server_is_not_ready_while_postgres_refuses_grants() {
    let postgres = PostgresServer::start(&[]).await;
    let url = postgres.url("postgres");
    run_on(&url, &["migrate"]).await.is(0);
    let mut conn = PgConnection::connect(&url).await.unwrap();
    let mut sql = async |sql: &str| Postgres::run(&mut conn, sql).await;
    sql("CREATE ROLE shop LOGIN PASSWORD 'pw'").await;
    sql(&ISSUER.replace("{role}", "shop")).await;
    sql("REVOKE EXECUTE ON FUNCTION tower_fence.lease_ask FROM shop").await;
    let mut shop = reqwest::Url::parse(&url).unwrap();
    shop.set_username("shop").unwrap();
    shop.set_password(Some("pw")).unwrap();
    let server = Served::start(shop.as_str(), &[]).await;
    let denied = "permission denied for function lease_ask";
    names(&server, "leases", denied).await;
    sql("GRANT EXECUTE ON FUNCTION tower_fence.lease_ask TO shop").await;
    becomes(&server, 200).await;
    sql("ALTER SYSTEM SET default_transaction_read_only = on").await;
    sql("SELECT pg_reload_conf()").await;
    names(&server, "leases", "read-only transaction").await;
    sql("SET default_transaction_read_only = off").await;
    sql("ALTER SYSTEM RESET default_transaction_read_only").await;
    sql("SELECT pg_reload_conf()").await;
    becomes(&server, 200).await;
    // The message of Postgres names the role.
    sql("ALTER ROLE shop NOLOGIN").await;
    sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'shop'").await;
    eventually("the refused login is hidden", async || {
        let answer = server.get("/readyz").await;
        for hidden in ["shop", " at line "] {
            assert!(!answer.text.contains(hidden), "{answer:?}");
        }
        answer.json()["reasons"] == json!({"database": HIDDEN, "leases": HIDDEN})
    })
    .await;
    let complete = r#"role \"shop\" is not permitted to log in"#;
    server.logs(complete).await;
    // A health check grants nothing.
    let sql = "SELECT (SELECT count(*) FROM tower_fence.leases) + (SELECT count(*) FROM tower_fence.resources)";
    assert_eq!(Postgres::number(&mut conn, sql).await.unwrap(), 0);
}

#[tokio::test]
async fn server_is_not_ready_while_its_grants_fail() {
    let postgres = PostgresServer::start(&[]).await;
    let url = postgres.url("postgres");
    let server = Served::start(&url, &["--migrate"]).await;
    becomes(&server, 200).await;
    let mut conn = PgConnection::connect(&url).await.unwrap();
    let mut sql = async |sql: &str| Postgres::run(&mut conn, sql).await;
    // Grants that wait for a transaction on their own resource do not show that grants of other
    // resources fail.
    sql(
        "INSERT INTO tower_fence.resources (resource, max_token, partition, history) \
         VALUES ('hot', 1, tower_fence.partition_of('hot'), tower_fence.current_history())",
    )
    .await;
    sql("BEGIN; SELECT FROM tower_fence.resources WHERE resource = 'hot' FOR UPDATE").await;
    let grant = async |resource: &str| server.post(resource, &json!({})).await;
    for refused in join_all(["/locks/hot"; 3].map(grant)).await {
        refused.is_problem(503, "store-unavailable");
    }
    assert_eq!(server.get("/readyz").await.status, 200);
    sql("COMMIT").await;
    // The standby is unreachable, so each COMMIT waits for it. A read does not detect this.
    sql("ALTER SYSTEM SET synchronous_standby_names = 'away'").await;
    sql("SELECT pg_reload_conf()").await;
    // The server reloads its configuration with a delay.
    let number = Cell::new(0);
    eventually("a grant fails", async || {
        number.set(number.get() + 1);
        grant(&format!("/locks/{}", number.get())).await.status == 503
    })
    .await;
    for refused in join_all(["/locks/a", "/locks/b", "/locks/c"].map(grant)).await {
        refused.is_problem(503, "store-unavailable");
    }
    names(&server, "leases", "grants have failed").await;
    sql("ALTER SYSTEM RESET synchronous_standby_names").await;
    sql("SELECT pg_reload_conf()").await;
    eventually!("a grant succeeds", grant("/locks/d").await.status == 201);
    becomes(&server, 200).await;
}

#[tokio::test]
async fn server_is_not_ready_while_redis_refuses_grants() {
    let (db, redis) = (Postgres::fresh(2).await, RedisServer::start(&[]).await);
    let server = Served::start(&db.url, &["--redis-url", &redis.url()]).await;
    becomes(&server, 200).await;
    let send = async |command: &str| redis.command(&command.split(' ').collect::<Vec<_>>()).await;
    #[rustfmt::skip]
    let rows = [
        ("CONFIG SET maxmemory 1", "OOM", "CONFIG SET maxmemory 0"),
        ("CONFIG SET min-replicas-to-write 1", "NOREPLICAS", "CONFIG SET min-replicas-to-write 0"),
        ("REPLICAOF 127.0.0.1 1", "read only replica", "REPLICAOF NO ONE"),
        ("ACL SETUSER default -set", "script", "ACL SETUSER default +set"),
    ];
    for (fault, reason, end) in rows {
        send(fault).await;
        names(&server, "leases", reason).await;
        send(end).await;
        becomes(&server, 200).await;
    }
    // The epochs of these leases are in the database.
    db.execute(READ_ONLY).await;
    let server = Served::start(&db.url, &["--redis-url", &redis.url()]).await;
    names(&server, "database", "read-only transaction").await;
}

/// The check of etcd only reads, so it does not detect that the user is not allowed to write.
#[tokio::test]
async fn server_is_not_ready_while_etcd_refuses_grants() {
    let (db, cluster) = (Postgres::fresh(2).await, EtcdCluster::start(1).await);
    cluster.add_user_with("READ", "reader", "p4ssw0rd").await;
    let (url, password) = (cluster.urls().remove(0), file("p4ssw0rd"));
    let password = path(&password);
    let options =
        format!("--etcd-url {url} --etcd-username reader --etcd-password-file {password}");
    let server = Served::start(&db.url, &Vec::from_iter(options.split(' '))).await;
    becomes(&server, 200).await;
    for resource in ["/locks/a", "/locks/b", "/locks/c"] {
        let refused = server.post(resource, &json!({})).await;
        refused.is_problem(500, "misconfigured");
    }
    let hidden = format!("the last 3 grants have failed: {HIDDEN}");
    eventually!(
        "readyz reports the failed grants",
        server.get("/readyz").await.json()["reasons"] == json!({"leases": hidden})
    );
    let answer = "it answered: etcdserver: permission denied";
    server.logs(answer).await;
    // No further grant fails, because a load balancer sends no requests to a server that is not
    // ready. The failures therefore expire.
    becomes(&server, 200).await;
}

#[tokio::test]
async fn server_waits_for_its_database_but_not_its_tables() {
    let mut postgres = PostgresServer::start(&[]).await;
    let url = postgres.url("postgres");
    postgres.stop().await;
    let mut server = Served::start(&url, &[]).await;
    let down = becomes(&server, 503).await.json();
    assert_eq!(down["database"], "unavailable");
    postgres.restart().await;
    assert_eq!(server.exit().await.code(), Some(78));
    assert_contains!(server.log(), "run `tower-fence migrate`");
    let database = [("TOWER_FENCE_DATABASE_URL", url.as_str())];
    for command in [
        &["serve", "--listen", "127.0.0.1:0"][..],
        &["reset", "sku-1", "--to", "5", "--yes"],
        &["check"],
        &["run", "--resource", "a", "--direct", "--", "true"],
    ] {
        let refused = run(command, &database).await;
        refused.is(78).says("run `tower-fence migrate`");
    }
    run(&["migrate"], &database).await.is(0);
    postgres.stop().await;
    let server = Served::start(&url, &[]).await;
    becomes(&server, 503).await;
    postgres.restart().await;
    becomes(&server, 200).await;
    // With `--migrate`, the server does not start without its database.
    postgres.crash().await;
    let arguments = ["serve", "--migrate", "--listen", "127.0.0.1:0"];
    let refused = run_on(&url, &arguments).await;
    refused
        .is(69)
        .says("cannot connect to the database postgres on 127.0.0.1");
}

#[tokio::test]
async fn metrics_count_leases_and_name_no_resource() {
    let (_db, server) = serving(&[]).await;
    server.post("/locks/sku-1", &json!({})).await;
    let refused = server.post("/locks/sku-1", &json!({})).await;
    refused.is_problem(409, "lock-held");
    let metrics = server.get("/metrics").await;
    assert_eq!(metrics.headers["content-type"], "text/plain; version=0.0.4");
    for line in [
        "tower_fence_leases_granted_total 1",
        r#"tower_fence_lease_refused_total{problem="lock-held"} 1"#,
        r#"tower_fence_lease_wait_seconds_bucket{le="60"} 1"#,
        "tower_fence_server_connections ",
        // These counters exist before their first event.
        r#"tower_fence_lease_refused_total{problem="fence-exhausted"} 0"#,
        r#"tower_fence_server_refused_total{problem="server-busy"} 0"#,
    ] {
        assert!(metrics.text.contains(line), "{line}: {}", metrics.text);
    }
    assert!(!metrics.text.contains("sku-1"));
}

#[tokio::test]
async fn reason_for_the_exit_is_an_object_in_a_json_log() {
    let serve = ["serve", "--operator-secrets-file", "/nowhere/secrets"];
    for log in ["info", "off"] {
        let options = ["--log-format", "json", "--log", log];
        let ended = run(&[&serve[..], &options].concat(), &[]).await;
        let line: Value = serde_json::from_str(&ended.is(78).stderr).unwrap();
        assert_eq!(
            (&line["level"], &line["status"]),
            (&json!("ERROR"), &json!(78))
        );
        let reason = line["message"].as_str().unwrap();
        assert!(reason.contains("/nowhere/secrets: No such file"), "{line}");
    }
}

#[tokio::test]
async fn each_line_of_a_json_log_is_an_object() {
    let db = Postgres::fresh(2).await;
    let arguments = ["--log-format", "json", "--log", "info,tower_fence=debug"];
    let mut server = Served::start(&db.url, &arguments).await;
    server.post("/locks/sku-1", &json!({})).await;
    server.logs(r#""message":"ready""#).await;
    server.signal("-TERM");
    assert!(server.exit().await.success());
    let log = server.log();
    let lines = log.lines().map(serde_json::from_str);
    let lines: Vec<Value> = lines.collect::<Result<_, _>>().expect(&log);
    let find = |message| lines.iter().find(|line| line["message"] == message);
    for message in ["started", "ready", "stopped"] {
        assert!(find(message).is_some(), "{message}: {log}");
    }
    let answered = find("answered").expect(&log);
    assert_eq!(answered["method"], "POST");
    assert_eq!(answered["status"], 201);
}

#[tokio::test]
async fn events_are_in_the_log_and_on_the_console() {
    let (_db, server) = serving(&["--log", "info,tower_fence::event=trace"]).await;
    for n in 0..20 {
        server.post(&format!("/locks/sku-{n}"), &json!({})).await;
    }
    assert_eq!(server.log().matches(r#"event="granted""#).count(), 20);
    let feed = server.client.get(server.url("/console/api/events"));
    let mut feed = feed.send().await.unwrap();
    let first = feed.chunk().await.unwrap().unwrap();
    let events = String::from_utf8(first.into()).unwrap();
    let granted = events.matches(r#""kind":"granted""#);
    assert_eq!(granted.count(), 20, "{events}");
}
