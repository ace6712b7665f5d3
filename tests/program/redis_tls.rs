//! Redis over TLS: a single server and the master of sentinels, with their own authority and
//! certificates.

use std::net::SocketAddr;

use sqlx::Postgres;

use super::{
    program::{Served, name, run, words},
    redis_secrets::{MASTER, SENTINEL, grants, refuses, serve},
};
use crate::support::{
    certificates::Certificates,
    database::TestDatabase,
    ports::free_port,
    redis::{RedisServer, Sentinel},
};

/// Returns the options for a Redis with TLS on this port, which requires certificates of its
/// clients.
fn speaks_tls(certificates: &Certificates, port: u16) -> Vec<String> {
    let [cert, key, authority] = ["server.pem", "server.key", "authority.pem"]
        .map(|file| certificates.path(file).display().to_string());
    vec![
        format!("tls-port {port}"),
        format!("tls-cert-file {cert}"),
        format!("tls-key-file {key}"),
        format!("tls-ca-cert-file {authority}"),
        "tls-auth-clients yes".into(),
    ]
}

async fn redis_with_tls(certificates: &Certificates, more: &[&str]) -> (RedisServer, u16) {
    let port = free_port();
    let lines = speaks_tls(certificates, port);
    let options = format!("--{}", lines.join(" --"));
    let options = words(&options);
    (RedisServer::start(&[&options, more].concat()).await, port)
}

#[tokio::test]
async fn sentinels_and_their_master_are_reached_over_tls() {
    let (certificates, others) = (Certificates::make(), Certificates::make());
    let (cert, key) = certificates.another_server();
    let [authority, other] = [&certificates, &others].map(|made| made.path("authority.pem"));
    let secret = ["--requirepass", MASTER];
    let (_redis, master) = redis_with_tls(&certificates, &secret).await;
    let (db, port) = (Postgres::fresh(4).await, free_port());
    let mut lines = speaks_tls(&certificates, port);
    lines.extend([
        "port 0".to_owned(),
        "tls-replication yes".into(),
        format!("requirepass {SENTINEL}"),
        format!("sentinel auth-pass the-master {MASTER}"),
    ]);
    let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
    let _sentinel = Sentinel::start_with(port, SocketAddr::from(([127, 0, 0, 1], master)), &lines);
    let url = format!("rediss://:{SENTINEL}@127.0.0.1:{port}");
    let shown = [
        "--redis-cert-file",
        name(&cert),
        "--redis-key-file",
        name(&key),
    ];
    let shown = [&["--redis-master-tls"], &shown[..]].concat();
    let trusting = |file| [&shown[..], &["--redis-ca-file", name(file)]].concat();
    let right = trusting(&authority);
    grants(&serve(&db, &url, MASTER, &right).await).await;
    // The servers have another authority, the authorities of the system, no certificate, or no TLS
    // to the master.
    let wrong = trusting(&other);
    for options in [wrong, shown.clone()] {
        let server = serve(&db, &url, MASTER, &options).await;
        refuses(&server, "invalid peer certificate").await;
    }
    let without = ["--redis-master-tls", "--redis-ca-file", name(&authority)];
    refuses(&serve(&db, &url, MASTER, &without).await, "ertificate").await;
    refuses(&serve(&db, &url, MASTER, &right[1..]).await, "Redis at").await;
}

#[tokio::test]
async fn a_redis_alone_may_ask_for_a_certificate() {
    let (certificates, others) = (Certificates::make(), Certificates::make());
    let (cert, key) = certificates.another_server();
    let [authority, other] = [&certificates, &others].map(|made| made.path("authority.pem"));
    let secret = ["--requirepass", MASTER];
    let (_redis, port) = redis_with_tls(&certificates, &secret).await;
    let db = Postgres::fresh(4).await;
    // The scheme of a URL may be in capitals.
    let url = format!("REDISS://:{MASTER}@127.0.0.1:{port}");
    let variables = [
        ("TOWER_FENCE_DATABASE_URL", db.url.as_str()),
        ("TOWER_FENCE_REDIS_URL", url.as_str()),
        ("TOWER_FENCE_REDIS_CERT_FILE", name(&cert)),
        ("TOWER_FENCE_REDIS_KEY_FILE", name(&key)),
    ];
    let trusting = |file| [&variables[..], &[("TOWER_FENCE_REDIS_CA_FILE", name(file))]].concat();
    grants(&Served::start_with(&[], &trusting(&authority)).await).await;
    for scheme in ["REDISS", "valkeys"] {
        let url = url.replace("REDISS", scheme);
        let url = [("TOWER_FENCE_REDIS_URL", url.as_str())];
        let variables = [&trusting(&authority)[..], &url].concat();
        run(&["check"], &variables).await.is(0);
    }
    let server = Served::start_with(&[], &trusting(&other)).await;
    refuses(&server, "invalid peer certificate").await;
}

#[tokio::test]
async fn redis_over_tls_stores_the_leases() {
    let (db, certificates) = (Postgres::fresh(2).await, Certificates::make());
    let authority = certificates.path("authority.pem");
    let (_redis, port) = redis_with_tls(&certificates, &["--tls-auth-clients", "no"]).await;
    let url = format!("rediss://127.0.0.1:{port}");
    let variables = [
        ("TOWER_FENCE_DATABASE_URL", db.url.as_str()),
        ("TOWER_FENCE_REDIS_URL", &url),
        // Replaces the roots of the system for this process.
        ("SSL_CERT_FILE", name(&authority)),
    ];
    grants(&Served::start_with(&[], &variables).await).await;
    // An unknown authority is not trusted.
    let server = Served::start_with(&[], &variables[..2]).await;
    refuses(&server, "certificate").await;
}
