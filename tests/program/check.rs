//! `tower-fence check`: the configuration of a server, and its findings.

use serde_json::Value;
use sqlx::Postgres;

use super::program::{Ended, HOLDER, OPERATOR, file, path, run, run_on, secret_options};
use crate::support::{
    cluster::RedisCluster,
    database::TestDatabase,
    etcd::EtcdCluster,
    eventually,
    ports::free_port,
    redis::{RedisServer, shared_cluster_url, shared_node_urls},
};

/// The rights of a role that grants leases.
pub const ISSUER: &str = "GRANT USAGE ON SCHEMA tower_fence TO {role}; \
     GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA tower_fence TO {role}; \
     GRANT SELECT ON tower_fence.migrations, tower_fence.held_leases TO {role}";

/// A statement that makes the database read-only for new sessions.
pub const READ_ONLY: &str = "DO 'BEGIN EXECUTE format(\
     ''ALTER DATABASE %I SET default_transaction_read_only = on'', current_database()); END'";

/// Returns the levels of the findings on this subject.
fn levels<'a>(findings: &'a Value, subject: &str) -> Vec<&'a str> {
    let all = findings.as_array().unwrap().iter();
    all.filter(|finding| finding["subject"] == subject)
        .map(|finding| finding["level"].as_str().unwrap())
        .collect()
}

#[tokio::test]
async fn each_part_of_a_sound_configuration_is_reported() {
    let (db, redis) = (Postgres::fresh(2).await, RedisServer::start(&[]).await);
    let (holders, operators) = (file(HOLDER), file(OPERATOR));
    let secrets = secret_options(&holders, &operators);
    let url = redis.url();
    let variables = [
        ("TOWER_FENCE_DATABASE_URL", db.url.as_str()),
        ("TOWER_FENCE_LISTEN_URL", &db.url),
    ];
    for redis in [&[][..], &["--redis-url", &url]] {
        let arguments = [&["check"][..], &secrets, redis].concat();
        let checked = run(&arguments, &variables).await;
        checked.is(0);
        for text in [
            "clients with a secret (holders: 1, operators: 1)",
            "Postgres 1",
            "it points to the same database",
            "may execute all functions that a grant calls",
            "the lease store would accept a grant",
        ] {
            assert!(checked.stdout.contains(text), "{text:?}: {checked:?}");
        }
        assert_eq!(checked.stdout.contains(": Redis "), !redis.is_empty());
        assert_eq!(checked.stderr, "");
        for secret in [HOLDER, OPERATOR] {
            assert!(!checked.stdout.contains(secret), "{checked:?}");
        }
        let findings = run(&[&arguments[..], &["--json"]].concat(), &variables).await;
        for finding in findings.is(0).json().as_array().unwrap() {
            assert_eq!(finding["level"], "ok", "{finding}");
        }
    }
    let sql = "SELECT (SELECT count(*) FROM tower_fence.leases) + (SELECT count(*) FROM tower_fence.resources)";
    assert_eq!(db.number(sql).await, 0, "a check grants nothing");
}

#[tokio::test]
async fn missing_execute_rights_are_all_named() {
    let db = Postgres::fresh(2).await;
    let shop = db.role(ISSUER).await;
    let functions = "ON FUNCTION tower_fence.lease_renew, tower_fence.lease_end";
    db.execute(&format!("REVOKE EXECUTE {functions} FROM {}", shop.name))
        .await;
    let refused = run_on(&shop.url, &["check"]).await;
    let lacks = "lacks EXECUTE in the schema tower_fence on lease_end, lease_renew";
    refused.is(78).says(&format!("{} {lacks}", shop.name));
    db.execute(&format!("GRANT EXECUTE {functions} TO {}", shop.name))
        .await;
    run_on(&shop.url, &["check"]).await.is(0);
    db.execute(READ_ONLY).await;
    let findings = run_on(&shop.url, &["check", "--json"]).await.json();
    assert!(
        levels(&findings, "database").contains(&"problem"),
        "{findings}"
    );
}

#[tokio::test]
async fn database_without_another_epoch_grants_nothing() {
    let db = Postgres::fresh(2).await;
    run_on(&db.url, &["check"]).await.is(0);
    db.execute(
        "INSERT INTO tower_fence.epochs (partition, epoch) SELECT n, 999999 FROM generate_series(0, 255) AS n",
    )
    .await;
    let refused = run_on(&db.url, &["check"]).await;
    refused.is(78).says("the lease store: no token is left");
}

#[tokio::test]
async fn node_of_a_quorum_that_answers_but_is_unusable_is_a_note() {
    let (db, nodes) = (Postgres::fresh(2).await, shared_node_urls());
    let (full, replica, silent) = (
        RedisServer::start(&["--maxmemory", "1"]).await,
        RedisServer::start(&[]).await,
        RedisServer::start(&[]).await,
    );
    let port = free_port().to_string();
    replica.command(&["REPLICAOF", "127.0.0.1", &port]).await;
    let without_info = ["ACL", "SETUSER", "default", "-info"];
    silent.command(&without_info).await;
    let refused = "cannot be used: ";
    for (third, reason) in [(&replica, "a replica"), (&silent, refused), (&full, "OOM")] {
        let third = third.url();
        let urls = [&nodes[0], &nodes[1], &third].map(String::as_str).join(" ");
        let arguments = ["check", "--redis-mode", "quorum", "--redis-url", &urls];
        eventually("the check ends as expected", async || {
            // A node of a busy machine may answer too late.
            let checked = run_on(&db.url, &arguments).await;
            let is_note = |line: &str| line.starts_with("note") && line.contains(reason);
            checked.status == 0 && checked.stdout.lines().any(is_note)
        })
        .await;
    }
    let down = format!("redis://127.0.0.1:{port}");
    for third in [&replica.url(), &down] {
        let urls = [&nodes[0], &full.url(), third]
            .map(String::as_str)
            .join(" ");
        let arguments = ["check", "--redis-mode", "quorum", "--redis-url", &urls];
        eventually("a majority that cannot be used is a problem", async || {
            let checked = run_on(&db.url, &arguments).await;
            checked.status == 78 && checked.stderr.contains("OOM")
        })
        .await;
    }
}

/// Only one master of a cluster has the key that `/readyz` writes to.
#[tokio::test]
async fn master_that_refuses_writes_is_a_problem() {
    let (db, cluster) = (Postgres::fresh(2).await, RedisCluster::start().await);
    let url = cluster.urls().remove(0);
    let arguments = ["check", "--redis-mode", "cluster", "--redis-url", &url];
    run_on(&db.url, &arguments).await.is(0);
    for tag in ["{0}", "{1}", "{212}"] {
        let (master, _) = cluster.shard_of(tag).await;
        let master = &cluster.nodes[master];
        let replicas = async |number| {
            let set = ["CONFIG", "SET", "min-replicas-to-write", number];
            master.command(&set).await;
        };
        replicas("2").await;
        run_on(&db.url, &arguments).await.is(78).says("NOREPLICAS");
        replicas("0").await;
    }
}

#[tokio::test]
async fn unreachable_member_is_a_note_if_enough_others_answer() {
    let (db, mut cluster) = (Postgres::fresh(2).await, EtcdCluster::start(3).await);
    cluster.kill(0);
    cluster.is_up().await;
    let (etcd, nodes) = (cluster.urls().join(", "), shared_node_urls());
    let gone = format!("redis://127.0.0.1:{}", free_port());
    let also_gone = format!("redis://127.0.0.1:{}", free_port());
    let majority = [&nodes[0], &nodes[1], &gone].map(String::as_str).join(" ");
    let minority = [&nodes[0], &gone, &also_gone].map(String::as_str).join(" ");
    let redis_cluster = format!("{gone} {}", shared_cluster_url());
    let redis = |mode, urls| vec!["--redis-mode", mode, "--redis-url", urls];
    #[rustfmt::skip]
    let rows = [
        (vec!["--etcd-url", &etcd], "etcd", vec!["note", "ok", "ok"], 0),
        (redis("quorum", &majority), "redis", vec!["ok", "ok", "note"], 0),
        (redis("quorum", &minority), "redis", vec!["ok", "problem", "problem"], 78),
        (redis("cluster", &redis_cluster), "redis", vec!["note", "ok"], 0),
    ];
    for (options, subject, found, status) in rows {
        let arguments = [vec!["check", "--json"], options].concat();
        let mut checked = Ended::default();
        // A node of a busy machine may answer too late.
        eventually("the check ends as expected", async || {
            checked = run_on(&db.url, &arguments).await;
            checked.status == status && levels(&checked.json(), subject) == found
        })
        .await;
        // The findings are the only messages about servers that are down.
        assert!(!checked.stderr.contains("redis::"), "{checked:?}");
    }
}

#[tokio::test]
async fn misspelt_variables_are_reported() {
    let db = Postgres::fresh(2).await;
    let variables = [
        ("TOWER_FENCE_DATABASE_URL", db.url.as_str()),
        ("TOWER_FENCE_HOLDER_SECRET_FILE", "/nonexistent"),
        ("TOWER_FENCE_REDIS_CA", "/nonexistent"),
        ("TOWER_FENCE_TLS_CERT", "/nonexistent"),
        ("TOWER_FENCE_TLS_KEY", "/nonexistent"),
        ("TOWER_FENCE_SECRET", "a-secret-of-this-client"),
        ("TOWER_FENCE_RESOURCE", "sku-1"),
        // Kubernetes sets these variables for services named `tower-fence` and `tower-fence-redis`.
        ("TOWER_FENCE_SERVICE_HOST", "10.0.0.1"),
        ("TOWER_FENCE_PORT_4120_TCP", "tcp://10.0.0.1:4120"),
        ("TOWER_FENCE_REDIS_SERVICE_HOST", "10.0.0.2"),
        ("TOWER_FENCE_REDIS_PORT", "tcp://10.0.0.2:6379"),
    ];
    let checked = run(&["check"], &variables).await;
    let notes = checked.is(0).stdout.lines();
    let notes: Vec<_> = notes.filter(|line| line.starts_with("note ")).collect();
    assert_eq!(notes.len(), 4, "{checked:?}");
    for (note, (name, _)) in notes.iter().zip(&variables[1..]) {
        assert_contains!(note, &format!("{name} is not a setting"));
    }
}

#[tokio::test]
async fn one_invalid_part_hides_no_other_part() {
    let (db, other) = (Postgres::fresh(2).await, Postgres::fresh(2).await);
    let nobody = format!("127.0.0.1:{}", free_port());
    let (gone, redis) = (
        format!("postgres://me:hunter2@{nobody}/shop"),
        format!("redis://:hunter2@{nobody}"),
    );
    let weak = file("short");
    let arguments = ["check", "--json", "--operator-secrets-file", path(&weak)];
    let variables = [
        ("TOWER_FENCE_DATABASE_URL", gone.as_str()),
        ("TOWER_FENCE_REDIS_URL", &redis),
        ("TOWER_FENCE_TTL", "1h"),
    ];
    let checked = run(&arguments, &variables).await;
    let findings = checked.is(78).json();
    for subject in ["secrets", "redis", "database"] {
        assert_eq!(levels(&findings, subject), ["problem"], "{findings}");
    }
    assert_eq!(levels(&findings, "tls"), ["ok"], "{findings}");
    assert!(!checked.stdout.contains("hunter2"), "{findings}");
    let elsewhere = [
        ("TOWER_FENCE_DATABASE_URL", db.url.as_str()),
        ("TOWER_FENCE_LISTEN_URL", &other.url),
    ];
    let refused = run(&["check"], &elsewhere).await;
    refused
        .is(78)
        .says("it does not point to the same database");
    let refused = run(&["check", "--listen", "0.0.0.0:0"], &elsewhere[..1]).await;
    refused.is(78).says("without a secret");
    let refused = run(&["check", "--ttl", "1h"], &elsewhere[..1]).await;
    refused.is(78).says("--ttl");
    let pooling = ["--migrate", "--transaction-pooling"];
    for (arguments, says) in [
        (&pooling[..], "set --listen-url"),
        (&["--log", "info,=="], "invalid log filter"),
        (&["--log", "warning"], "`warning` must be a level"),
    ] {
        let serve = [&["serve", "--listen", "127.0.0.1:0"], arguments].concat();
        run(&serve, &elsewhere[..1]).await.is(78).says(says);
        let checked = run(&[&["check"], arguments].concat(), &elsewhere[..1]).await;
        checked.is(78).says("problem  ").says(says);
        assert_contains!(checked.stdout, "would accept a grant");
    }
    let variables = [elsewhere[0], ("TOWER_FENCE_LOG", "info,==")];
    let checked = run(&["check", "--json"], &variables).await;
    let findings: Value = serde_json::from_str(&checked.is(78).stdout).unwrap();
    assert_contains!(findings.to_string(), "invalid log filter");
}
