//! The leases in each store that the server supports.

use std::time::Duration;

use reqwest::Method;
use serde_json::{Value, json};
use sqlx::Postgres;
use tower_fence::{Resource, TokenKeys, header::FencingToken};

use super::program::{
    Served, ended, file, name, path, program, run, run_on, serving, under, words,
};
use crate::support::{
    certificates::Certificates,
    cluster::RedisCluster,
    database::{Fresh, TestDatabase},
    etcd::EtcdCluster,
    eventually,
    http::Answer,
    ports::free_port,
    proxy::Proxy,
    redis::{RedisServer, Sentinel, fresh_prefix, shared_node_urls, shared_url},
};

/// Acquires, renews, inspects, and releases a lease. Checks that older tokens are stale.
async fn grants_leases(server: &Served, db: &Fresh<Postgres>) {
    // The nodes of a quorum have little time for an answer. A retry with the same lease id requests
    // the same lease.
    let body = json!({"owner": "one", "lease_id": "a".repeat(22), "ttl_ms": 600_000});
    let granted = answered(async || server.post("/locks/sku-1", &body).await).await;
    assert_eq!(granted.status, 201, "{granted:?}{}", server.log());
    let lease = granted.json();
    assert!(lease["token"].as_i64().unwrap() > 1_000_000_000, "{lease}");
    let other = json!({"wait_ms": 10});
    let held = answered(async || server.post("/locks/sku-1", &other).await).await;
    held.is_problem(409, "lock-held");
    let request = |method| server.of_holder(method, &lease);
    let new_token = json!({"new_token": true});
    let renewed = async || Answer::to(request(Method::PUT).json(&new_token)).await;
    let renewed = answered(renewed).await.json();
    assert!(
        renewed["token"].as_i64() > lease["token"].as_i64(),
        "{renewed}"
    );
    let list: Value = answered(async || server.get("/locks").await).await.json();
    assert_eq!(list["leases"][0]["owner"], "one", "{list}");
    let highest_stale = db.number("SELECT tower_fence.max_token('sku-1')").await;
    assert_eq!(renewed["token"], highest_stale + 1);
    let released = answered(async || Answer::to(request(Method::DELETE)).await).await;
    // A retry of a release whose answer was lost finds no lease.
    assert!([204, 409].contains(&released.status), "{released:?}");
    let state = answered(async || server.get("/locks/sku-1").await).await;
    assert_eq!(state.json()["held"], false);
    let ready = answered(async || server.get("/readyz").await).await;
    assert_eq!(ready.status, 200);
}

/// Repeats a request until a store has answered.
async fn answered(request: impl AsyncFn() -> Answer) -> Answer {
    let mut last = None;
    eventually("the store answers", async || {
        let answer = request().await;
        let is_answered = answer.status != 503;
        last = Some(answer);
        is_answered
    })
    .await;
    last.unwrap()
}

async fn on_redis(db: &Fresh<Postgres>, mode: &str, urls: &str) -> Served {
    on_redis_with(db, mode, urls, &["--redis-master", "the-master"]).await
}

async fn on_redis_with(db: &Fresh<Postgres>, mode: &str, urls: &str, more: &[&str]) -> Served {
    let prefix = fresh_prefix();
    let store = ["--redis-mode", mode, "--redis-url", urls];
    let arguments = [&store, more, &["--redis-key-prefix", &prefix]].concat();
    Served::start(&db.url, &arguments).await
}

#[tokio::test]
async fn postgres_has_the_leases() {
    let db = Postgres::fresh(2).await;
    grants_leases(&Served::start(&db.url, &[]).await, &db).await;
}

#[tokio::test]
async fn a_redis_has_the_leases() {
    let db = Postgres::fresh(2).await;
    grants_leases(&on_redis(&db, "single", &shared_url()).await, &db).await;
}

/// A line break at the end of a prefix must not separate the leases of two servers.
#[tokio::test]
async fn blanks_around_a_key_prefix_have_no_effect() {
    let (db, prefix) = (Postgres::fresh(2).await, fresh_prefix());
    let urls = file(&format!("# the cache\n{}\n", shared_url()));
    let serve = async |prefix: &str| {
        let urls = ["--redis-url-file", path(&urls)];
        let arguments = [&urls[..], &["--redis-key-prefix", prefix]].concat();
        Served::start(&db.url, &arguments).await
    };
    let (one, other) = (serve(&prefix).await, serve(&format!(" {prefix}\n")).await);
    let lease = json!({"ttl_ms": 600_000});
    assert_eq!(one.post("/locks/sku-1", &lease).await.status, 201);
    let held = other.post("/locks/sku-1", &lease).await;
    held.is_problem(409, "lock-held");
    let log = other.log();
    let place = format!(", prefix {prefix} ");
    for text in [&place, " schema=tower_fence ", " announce=true "] {
        assert_contains!(log, text);
    }
}

#[tokio::test]
async fn the_master_of_sentinels_has_the_leases() {
    let (db, redis) = (Postgres::fresh(2).await, RedisServer::start(&[]).await);
    let sentinel = Sentinel::start(&redis);
    let server = on_redis(&db, "sentinel", &sentinel.url()).await;
    eventually!(
        "the sentinel knows the master",
        server.get("/readyz").await.status == 200
    );
    grants_leases(&server, &db).await;
}

#[tokio::test]
async fn a_cluster_of_several_nodes_has_the_leases() {
    let (db, cluster) = (Postgres::fresh(2).await, RedisCluster::start().await);
    let server = on_redis(&db, "cluster", &cluster.urls().join(", ")).await;
    grants_leases(&server, &db).await;
}

#[tokio::test]
async fn a_quorum_has_the_leases() {
    let db = Postgres::fresh(2).await;
    let urls = shared_node_urls().join(" ");
    let server = on_redis(&db, "quorum", &urls).await;
    grants_leases(&server, &db).await;
    let arguments = ["check", "--redis-mode", "quorum", "--redis-url", &urls];
    eventually("the check reports what it has checked", async || {
        // On a busy machine, a node may answer too late.
        let checked = run_on(&db.url, &arguments).await;
        checked.stdout.contains("a test write to each node")
    })
    .await;
}

#[tokio::test]
async fn failed_node_of_a_quorum_is_logged_and_counted() {
    let (db, mut third) = (Postgres::fresh(2).await, RedisServer::start(&[]).await);
    let [one, two] = [0, 1].map(|n| shared_node_urls()[n].clone());
    let urls = [one, two, third.url()].join(" ");
    let server = on_redis(&db, "quorum", &urls).await;
    let failed = "a node of the quorum has failed";
    let metric = "tower_fence_quorum_nodes_failed";
    third.kill();
    let port = third.addr().port().to_string();
    eventually("the failure is reported", async || {
        answered(async || server.get("/locks/sku-1").await).await;
        let log = server.log();
        let is_third = |line: &str| line.contains(failed) && line.contains(&port);
        // On a busy machine, the other nodes may fail as well.
        let metrics = server.get("/metrics").await.text;
        let is_counted = |line: &str| line.starts_with(metric) && !line.ends_with(" 0");
        log.lines().any(is_third) && metrics.lines().any(is_counted)
    })
    .await;
}

/// Each node answers after a quarter of a second.
#[tokio::test]
async fn timeout_of_distant_nodes_can_be_longer() {
    let db = Postgres::fresh(2).await;
    let mut proxies = vec![];
    for url in shared_node_urls() {
        let addr = url.replace("redis://", "").parse().unwrap();
        proxies.push(Proxy::delaying(addr, Duration::from_millis(125)).await);
    }
    let urls: Vec<_> = proxies
        .iter()
        .map(|proxy| proxy.url("redis://127.0.0.1"))
        .collect();
    let more = ["--redis-node-timeout", "2s"];
    let server = on_redis_with(&db, "quorum", &urls.join(" "), &more).await;
    grants_leases(&server, &db).await;
}

#[tokio::test]
async fn etcd_has_the_leases() {
    let (db, cluster) = (Postgres::fresh(2).await, EtcdCluster::start(3).await);
    let urls = cluster.urls().join(", ");
    grants_leases(&Served::start(&db.url, &["--etcd-url", &urls]).await, &db).await;
    let checked = run_on(&db.url, &["check", "--etcd-url", &urls]).await;
    assert_eq!(checked.is(0).stdout.matches(": etcd 3.").count(), 3);
    // The check of etcd only reads.
    assert!(checked.stdout.contains("the lease store answers reads"));
}

#[tokio::test]
async fn etcd_is_reached_without_a_proxy() {
    let (db, cluster) = (Postgres::fresh(2).await, EtcdCluster::start(1).await);
    let proxy = format!("http://127.0.0.1:{}", free_port());
    let mut command = program();
    command
        .args(["check", "--etcd-url", &cluster.urls()[0]])
        .env("TOWER_FENCE_DATABASE_URL", &db.url)
        .env_remove("no_proxy")
        .env_remove("NO_PROXY")
        .envs([("http_proxy", &proxy), ("ALL_PROXY", &proxy)]);
    ended(command).await.is(0);
    // The target of a redirect would receive the password.
    let redirecting = Proxy::redirecting(cluster.addr(), &cluster.urls()[0]).await;
    let url = redirecting.url(&cluster.urls()[0]);
    run_on(&db.url, &["check", "--etcd-url", &url]).await.is(78);
}

#[tokio::test]
async fn etcd_with_tls_certificates_and_a_user_has_the_leases() {
    let (db, certificates) = (Postgres::fresh(2).await, Certificates::make());
    let cluster = EtcdCluster::start_with_tls(&certificates).await;
    cluster.add_user("locks", "p4ssw0rd").await;
    let (url, password) = (cluster.urls().remove(0), file("p4ssw0rd"));
    let authority = certificates.path("authority.pem");
    let certificate = |of: &str| {
        let [cert, key] = ["pem", "key"].map(|kind| certificates.path(&format!("{of}.{kind}")));
        format!(
            "--etcd-cert-file {} --etcd-key-file {}",
            name(&cert),
            name(&key)
        )
    };
    let mut arguments = format!("--etcd-url {url} --etcd-ca-file {}", name(&authority));
    let check = async |arguments: &str| {
        let arguments = format!("check {arguments}");
        run_on(&db.url, &words(&arguments)).await
    };
    check(&arguments).await.is(78).says("fatal alert");
    // The authorities of the file replace those of the system.
    let others = Certificates::make();
    let other = others.path("authority.pem");
    let of_system = [
        ("TOWER_FENCE_DATABASE_URL", db.url.as_str()),
        ("SSL_CERT_FILE", name(&authority)),
    ];
    let untrusted = ["check", "--etcd-url", &url, "--etcd-ca-file", name(&other)];
    let untrusted = run(&untrusted, &of_system).await;
    untrusted.is(78).says("invalid peer certificate");
    arguments += &format!(
        " --etcd-username locks --etcd-password-file {} ",
        path(&password)
    );
    let named = check(&(arguments.clone() + &certificate("server"))).await;
    named
        .is(78)
        .says("the client certificate has a common name");
    arguments += &certificate("client");
    grants_leases(&Served::start(&db.url, &words(&arguments)).await, &db).await;
    std::fs::write(password.path(), "hunter2").unwrap();
    let checked = check(&arguments).await;
    checked.is(78).says("authentication failed");
    assert!(!format!("{checked:?}").contains("hunter2"), "{checked:?}");
}

#[tokio::test]
async fn tokens_are_signed_if_a_key_is_set() {
    let db = Postgres::fresh(2).await;
    let text = format!("k1:{}", "0f".repeat(32));
    let key = file(&text);
    let server = Served::start(&db.url, &["--token-key-file", path(&key)]).await;
    let lease = server.post("/locks/sku-1", &json!({})).await.json();
    let signed: FencingToken = lease["fencing_token"].as_str().unwrap().parse().unwrap();
    let keys: TokenKeys = text.parse().unwrap();
    assert_eq!(keys.verify(&signed), Ok(&Resource::new("sku-1").unwrap()));
    // After SIGHUP, the server signs with another key.
    let next = format!("k2:{}", "1e".repeat(32));
    std::fs::write(key.path(), &next).unwrap();
    server.signal("-HUP");
    eventually("the next key signs", async || {
        let body = json!({"lease_id": "a".repeat(22)});
        let lease = server.post("/locks/sku-2", &body).await;
        lease.text.contains("k2")
    })
    .await;
}

#[tokio::test]
async fn invalid_configuration_is_refused_before_the_server_listens() {
    let database = |text| ("TOWER_FENCE_DATABASE_URL", text);
    let good = database("postgres://127.0.0.1:1/shop");
    let redis = |text| ("TOWER_FENCE_REDIS_URL", text);
    let password = ("TOWER_FENCE_ETCD_PASSWORD", "hunter2");
    let comment = file("# redis://a\n");
    #[rustfmt::skip]
    let rows = [
        (vec![], vec![], 78, "set TOWER_FENCE_DATABASE_URL"),
        (vec![], vec![database("mysql://a/b")], 78, "must begin with postgres://"),
        (vec![], vec![database("postgres://a:b:c/d")], 78, "invalid database URL"),
        (vec!["--redis-mode", "cluster"], vec![good], 78, "set TOWER_FENCE_REDIS_URL"),
        (vec![], vec![good, redis("redis://a redis://b")], 78, "TOWER_FENCE_REDIS_MODE"),
        (
            vec!["--redis-mode", "quorum"], vec![good, redis("redis://a redis://b")], 78,
            "an odd number of nodes from 3 to 15",
        ),
        (vec![], vec![good, redis("http://a")], 78, "invalid Redis"),
        (
            vec!["--redis-key-prefix", "a b"], vec![good, redis("redis://a")], 78,
            "must be one or more characters of A-Z a-z 0-9",
        ),
        (
            vec!["--etcd-url", "http://a", "--etcd-key-prefix", "a b"], vec![good], 78,
            "must be one or more characters of A-Z a-z 0-9",
        ),
        (vec!["--announce", "false"], vec![good], 78, "only if the leases are in Redis or etcd"),
        (vec![], vec![good, redis(",")], 78, "contains no URL"),
        (vec!["--redis-url-file", path(&comment)], vec![good], 78, "contains no URL"),
        (vec!["--etcd-url", ","], vec![good], 78, "contains no URL"),
        (vec!["--database-url-file", path(&comment)], vec![], 78, "contains no URL"),
        (vec!["--listen-url-file", path(&comment)], vec![good], 78, "contains no URL"),
        (vec!["--etcd-url", "http://a"], vec![good, redis("redis://a")], 78, "both Redis and etcd"),
        (
            vec![], vec![good, ("TOWER_FENCE_ETCD_URL", "http://me:hunter2@a")], 78,
            "TOWER_FENCE_ETCD_PASSWORD",
        ),
        (
            vec!["--etcd-url", "http://a", "--etcd-username", "me"], vec![good], 78,
            "without a password",
        ),
        (vec!["--etcd-url", "http://a"], vec![good, password], 78, "without a user"),
        (vec!["--etcd-username", "me"], vec![good], 78, "set TOWER_FENCE_ETCD_URL"),
        (vec!["--etcd-key-prefix", "a"], vec![good], 78, "set TOWER_FENCE_ETCD_URL"),
        (
            vec!["--redis-mode", "sentinel"], vec![good, redis("redis://a rediss://b")], 78,
            "either all sentinels must use TLS, or none",
        ),
        (
            vec!["--redis-mode", "cluster"], vec![good, redis("redis://a redis://b/3")], 78,
            "must not name a database other than 0",
        ),
        (vec![], vec![good, password], 78, "set TOWER_FENCE_ETCD_URL"),
        (vec!["--redis-ca-file", "a"], vec![good, redis("")], 78, "set TOWER_FENCE_REDIS_URL"),
        (vec!["--redis-key-prefix", "a"], vec![good], 78, "set TOWER_FENCE_REDIS_URL"),
        (vec!["--redis-node-timeout", "1s"], vec![good], 78, "set TOWER_FENCE_REDIS_URL"),
        (
            vec!["--redis-node-timeout", "1s"], vec![good, redis("redis://a")], 78,
            "only for quorum mode",
        ),
        (vec!["--etcd-url", "ftp://a"], vec![good], 78, "invalid etcd"),
        (
            vec!["--redis-url", "redis://a", "--redis-url-file", "b"], vec![good], 78,
            "set only one of them",
        ),
        (vec!["--ttl", "11m"], vec![good], 78, "--max-ttl"),
        (vec!["--ttl", "30"], vec![good], 64, "500ms, 30s, 5m, 2h"),
        (vec!["--idle-timeout", "400000000000years"], vec![good], 64, "at most 100 years"),
        (vec!["--client-timeout", "0s"], vec![good], 64, "must be above 0"),
        (vec!["--listen", "4120"], vec![good], 78, "127.0.0.1:4120"),
        (vec!["--listen", "http://localhost:4120"], vec![good], 78, "127.0.0.1:4120"),
        // The name server may answer later.
        (
            vec!["--listen", "no-such-host.invalid:4120"], vec![good], 69,
            "cannot listen on no-such-host.invalid:4120: ",
        ),
        (vec!["--log", "a=b=c"], vec![good], 78, "log filter"),
        (vec!["--tls-cert-file", "a"], vec![good], 64, "--tls-key-file"),
        (vec!["--secret", "hunter2"], vec![good], 64, "--secret"),
        (
            vec!["--database-connections", "0"], vec![good], 64,
            "--database-connections (TOWER_FENCE_DATABASE_CONNECTIONS): it must be in 1..",
        ),
    ];
    for (arguments, variables, status, why) in rows {
        let arguments = [vec!["serve"], arguments].concat();
        let refused = run(&arguments, &variables).await;
        refused.is(status).says(why);
        assert_eq!(refused.stdout, "", "{refused:?}");
    }
}

#[tokio::test]
async fn a_port_in_use_is_named() {
    let (db, server) = serving(&[]).await;
    let addr = server.addr().to_string();
    let second = run_on(&db.url, &["serve", "--listen", &addr]).await;
    let reason = format!("cannot listen on {addr}: Address already in use");
    second.is(69).says(&reason);
    // `check` as a health check passes while the server has the port.
    let checked = run_on(&db.url, &["check", "--listen", &addr]).await;
    let note = format!("{addr}: the port is in use");
    assert!(checked.is(0).stdout.contains(&note), "{checked:?}");
}

#[tokio::test]
async fn address_of_another_machine_is_refused() {
    let db = Postgres::fresh(2).await;
    let reason = "cannot listen on 192.0.2.1:4120: Cannot assign requested address";
    for (command, status) in [("serve", 69), ("check", 78)] {
        let arguments = [command, "--allow-anyone", "--listen", "192.0.2.1:4120"];
        let refused = run_on(&db.url, &arguments).await;
        refused.is(status).says(reason);
    }
}

/// A restart cannot correct the missing privilege.
#[tokio::test]
async fn port_that_needs_a_privilege_is_refused_with_the_remedy() {
    // In a new network namespace, ports below 1024 are privileged.
    let unprivileged = words("unshare --net setpriv --bounding-set=-net_bind_service");
    for command in ["serve", "check"] {
        let mut started = under(&unprivileged);
        started
            .args([command, "--allow-anyone", "--listen", "0.0.0.0:80"])
            .env("TOWER_FENCE_DATABASE_URL", "postgres://127.0.0.1:1/shop");
        let refused = ended(started).await;
        refused
            .is(78)
            .says("cannot listen on 0.0.0.0:80: Permission denied");
        refused.says("AmbientCapabilities=CAP_NET_BIND_SERVICE");
    }
}
