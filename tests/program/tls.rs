//! TLS between clients and the server.

use std::{fs, process::Command};

use serde_json::json;
use sqlx::Postgres;

use super::program::{HOLDER, OPERATOR, Served, file, name, path, run, run_on, secret_options};
use crate::support::{
    certificates::Certificates, database::TestDatabase, eventually, http::Answer,
};

#[tokio::test]
async fn clients_and_subcommands_reach_the_server_over_tls() {
    let (db, certificates) = (Postgres::fresh(2).await, Certificates::make());
    let (holders, operators) = (file(HOLDER), file(OPERATOR));
    let [cert, key, authority] =
        ["server.pem", "server.key", "authority.pem"].map(|file| certificates.path(file));
    let tls = ["--tls-cert-file", name(&cert), "--tls-key-file", name(&key)];
    let arguments = [tls, secret_options(&holders, &operators)].concat();
    let mut server = Served::start(&db.url, &arguments).await.with_secret(HOLDER);
    assert!(server.url.starts_with("https://"), "{}", server.url);
    // A client that does not trust the authority is not served, and neither is a client without
    // TLS.
    let untrusted = server.client.get(server.url("/healthz"));
    untrusted.send().await.unwrap_err();
    let line = server.line("TLS handshake failed").await;
    assert_contains!(line, "peer=127.0.0.1:");
    let plain = format!("http://{}/healthz", server.addr());
    assert!(server.client.get(plain).send().await.is_err());
    server.client = certificates.client();
    assert_eq!(server.post("/locks/sku-1", &json!({})).await.status, 201);

    let variables = [
        ("TOWER_FENCE_URL", server.url.as_str()),
        ("TOWER_FENCE_CA_FILE", name(&authority)),
        ("TOWER_FENCE_SECRET", OPERATOR),
    ];
    let leases = run(&["leases"], &variables).await;
    assert!(leases.is(0).stdout.contains("sku-1"), "{leases:?}");
    let trusts_no_authority = [variables[0], variables[2]];
    let refused = run(&["leases"], &trusts_no_authority).await;
    refused.is(69).says("certificate");
    // The authorities of the file replace those of the system.
    let others = Certificates::make();
    let other = others.path("authority.pem");
    let of_system = ("SSL_CERT_FILE", name(&authority));
    let replaced = ("TOWER_FENCE_CA_FILE", name(&other));
    let empty = file("");
    let no_authority = ("TOWER_FENCE_CA_FILE", path(&empty));
    let trusts_nothing = [&trusts_no_authority[..], &[no_authority]].concat();
    let refused = run(&["leases"], &trusts_nothing).await;
    refused.is(78).says("it contains no certificate");
    let trusts_the_system = [variables[0], variables[2], of_system];
    run(&["leases"], &trusts_the_system).await.is(0);
    let refused = run(&["leases"], &[&trusts_the_system[..], &[replaced]].concat()).await;
    refused.is(69).says("certificate");

    // After SIGHUP, the server presents another certificate of the same authority.
    let others = certificates.another_server();
    let serial = async || {
        let connection = certificates.client().get(server.url("/healthz"));
        Answer::to(connection).await.status
    };
    assert_eq!(serial().await, 200);
    fs::write(&cert, "no certificate").unwrap();
    server.signal("-HUP");
    server.logs("it contains no certificate").await;
    assert_eq!(serial().await, 200);
    fs::copy(&others.0, &cert).unwrap();
    fs::copy(&others.1, &key).unwrap();
    server.signal("-HUP");
    let addr = server.addr();
    eventually!(
        "the server uses the other certificate",
        certificates.shown_by(addr) == fs::read_to_string(&others.0).unwrap()
    );
    assert_eq!(serial().await, 200);
}

#[tokio::test]
async fn invalid_tls_files_are_refused() {
    let certificates = Certificates::make();
    let [cert, key, other] =
        ["server.pem", "server.key", "authority.key"].map(|file| certificates.path(file));
    let text = file("not PEM");
    for (cert, key, why) in [
        (name(&cert), name(&other), "with its key"),
        (path(&text), name(&key), "it contains no certificate"),
        (name(&cert), path(&text), "it contains no private key"),
        (name(&cert), "/nowhere", "/nowhere: No such file"),
    ] {
        let arguments = ["serve", "--tls-cert-file", cert, "--tls-key-file", key];
        let refused = run_on("postgres://127.0.0.1:1/shop", &arguments).await;
        refused.is(78).says(why);
    }
}

#[tokio::test]
async fn expired_certificate_is_reported() {
    let (db, certificates) = (Postgres::fresh(2).await, Certificates::make());
    let [cert, key, old] =
        ["server.pem", "server.key", "old.pem"].map(|file| certificates.path(file));
    // The certificate expires in the second in which it is created.
    let mut expire = Command::new("openssl");
    expire.args(["x509", "-days", "0", "-in", name(&cert)]);
    expire.args(["-signkey", name(&key), "-out", name(&old)]);
    assert!(expire.status().unwrap().success());
    let expired = "the certificate has expired, so clients refuse it";
    let options = |cert| ["--tls-cert-file", cert, "--tls-key-file", name(&key)];
    let found = async |cert| {
        let checked = run_on(&db.url, &[&["check"][..], &options(cert)].concat()).await;
        assert_eq!(checked.stderr, "");
        checked.is(0).stdout.contains(expired)
    };
    eventually!("the certificate has expired", found(name(&old)).await);
    assert!(!found(name(&cert)).await);
    let server = Served::start(&db.url, &options(name(&cert))).await;
    server.signal("-HUP");
    server.logs("reloaded").await;
    assert!(!server.log().contains(expired), "{}", server.log());
    fs::copy(&old, &cert).unwrap();
    server.signal("-HUP");
    server.logs(expired).await;
    let server = Served::start(&db.url, &options(name(&old))).await;
    server.logs(expired).await;
}
