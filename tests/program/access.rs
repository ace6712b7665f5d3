//! The rights of holders, of operators, and of requests without a secret.

use std::time::{Duration, Instant};

use reqwest::Method;
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Executor, Postgres};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::program::{
    HOLDER, OPERATOR, Served, file, path, run, run_on, secret_options, serving,
    serving_with_secrets, words,
};
use crate::support::{database::TestDatabase, eventually, http::Answer};

async fn asked(server: &Served, secret: Option<&str>, method: Method, path: &str) -> Answer {
    let request = server.client.request(method, server.url(path));
    Answer::to(match secret {
        Some(secret) => request.bearer_auth(secret),
        None => request,
    })
    .await
}

#[tokio::test]
async fn a_request_needs_a_secret_that_the_server_knows() {
    let db = Postgres::fresh(2).await;
    let (holders, operators) = (file(&format!("# of 2026\n{HOLDER}\n")), file(OPERATOR));
    let server = Served::start(&db.url, &secret_options(&holders, &operators)).await;
    let began = Instant::now();
    for (secret, challenge) in [
        (None, r#"Bearer realm="tower-fence""#),
        (
            Some("another-secret-of-holders"),
            r#"Bearer realm="tower-fence", error="invalid_token""#,
        ),
    ] {
        for (method, path) in [
            (Method::POST, "/locks/sku-1"),
            (Method::GET, "/locks/sku-1"),
            (Method::DELETE, "/locks/sku-1"),
            (Method::POST, "/locks/sku-1/break"),
            (Method::GET, "/locks"),
            (Method::GET, "/locks/openapi.json"),
        ] {
            let refused = asked(&server, secret, method, path).await;
            refused.is_problem(401, "unauthorized");
            assert_eq!(refused.headers["www-authenticate"], challenge);
        }
    }
    for (secret, resource) in [(HOLDER, "/locks/sku-1"), (OPERATOR, "/locks/sku-2")] {
        let granted = asked(&server, Some(secret), Method::POST, resource).await;
        assert_eq!(granted.status, 201, "{granted:?}");
    }
    for path in ["/healthz", "/readyz", "/metrics"] {
        eventually!(
            "the route needs no secret",
            asked(&server, None, Method::GET, path).await.status == 200
        );
    }
    let refused = server
        .line("refused a request without a known secret")
        .await;
    assert_contains!(refused, "peer=127.0.0.1:");
    assert_contains!(refused, "\"/locks/sku-1\"");
    let log = server.log();
    assert!(!log.contains("another-secret"), "{log}");
    // There is at most one line per second.
    let lines = log.matches("refused a request").count() as u64;
    assert!(lines <= 1 + began.elapsed().as_secs(), "{log}");
    let metrics = asked(&server, None, Method::GET, "/metrics").await.text;
    let counted = r#"tower_fence_server_refused_total{problem="unauthorized"} 12"#;
    assert_contains!(metrics, counted);
}

#[tokio::test]
async fn operator_routes_are_closed_to_holders() {
    let (_db, server) = serving_with_secrets().await;
    let granted = asked(&server, Some(HOLDER), Method::POST, "/locks/sku-1").await;
    assert_eq!(granted.status, 201);
    for (method, path) in [
        (Method::GET, "/locks"),
        (Method::GET, "/locks?limit=1"),
        (Method::POST, "/locks/sku-1/break"),
        (Method::POST, "/locks/a%2Fbreak/break"),
    ] {
        let refused = asked(&server, Some(HOLDER), method, path).await;
        refused.is_problem(403, "operators-only");
    }
    let logged = "refused a request for operators that has the secret of a holder";
    let line = server.line(logged).await;
    assert_contains!(line, "peer=127.0.0.1:");
    assert_contains!(line, "\"/locks\"");
    assert!(!server.log().contains(HOLDER), "{}", server.log());
    let list = asked(&server, Some(OPERATOR), Method::GET, "/locks").await;
    assert_eq!(list.json()["leases"][0]["resource"], "sku-1");
    let broken = asked(&server, Some(OPERATOR), Method::POST, "/locks/sku-1/break").await;
    assert_eq!(broken.status, 204);
}

#[tokio::test]
async fn console_is_for_operators_and_browsers_request_the_secret() {
    let (_db, server) = serving_with_secrets().await;
    for (path, scheme) in [
        ("/console", "Basic "),
        ("/console/", "Basic "),
        // A browser would ask for a password at each request of an open page.
        ("/console/api/leases", "Bearer "),
    ] {
        let is_refused = |answer: Answer| {
            answer.is_problem(401, "unauthorized");
            let challenge = answer.headers["www-authenticate"].to_str().unwrap();
            assert!(challenge.starts_with(scheme), "{path}: {challenge}");
        };
        is_refused(asked(&server, None, Method::GET, path).await);
        let with_password = async |password: &str| {
            let request = server.client.get(server.url(path));
            Answer::to(request.basic_auth("anybody", Some(password))).await
        };
        // After 403, a browser would not ask for another password.
        is_refused(with_password(HOLDER).await);
        is_refused(with_password("another-secret-of-operators").await);
        assert_eq!(with_password(OPERATOR).await.status, 200, "{path}");
        let denied = asked(&server, Some(HOLDER), Method::GET, path).await;
        denied.is_problem(403, "operators-only");
    }
    // Browsers send a stored password automatically, so no route for holders accepts one.
    let request = server.client.post(server.url("/locks/sku-1"));
    let refused = Answer::to(request.basic_auth("anybody", Some(OPERATOR))).await;
    refused.is_problem(401, "unauthorized");
}

#[tokio::test]
async fn log_names_the_operator_of_each_change() {
    let (_db, server) = serving_with_secrets().await;
    let lease = async || {
        let granted = asked(&server, Some(HOLDER), Method::POST, "/locks/sku-1").await;
        granted.json()["token"].clone()
    };
    let change = async |call: &str, user: &str, token: &Value| {
        let request = server.client.post(server.url(call));
        let body = json!({ "resource": "sku-1", "token": token });
        let changed = request.basic_auth(user, Some(OPERATOR)).json(&body);
        assert_eq!(Answer::to(changed).await.status, 204, "{call}");
    };
    let first = lease().await;
    change("/console/api/break", "anna\nWARN \x1b[0m", &first).await;
    // A user may enter the secret in the wrong field.
    change("/console/api/break", OPERATOR, &lease().await).await;
    change("/console/api/reset", "bert", &lease().await).await;
    let broken = asked(&server, Some(OPERATOR), Method::POST, "/locks/sku-1/break").await;
    assert_eq!(broken.status, 204);
    eventually!(
        "all changes are in the log",
        server.log().matches("operator{").count() == 4
    );
    let log = server.log();
    let changes = log.lines().filter(|line| line.contains("operator{"));
    let changes: Vec<_> = changes.collect();
    assert_eq!(changes.len(), 4, "{log}");
    for (line, user, said) in [
        (
            changes[0],
            r#" user="anna\nWARN \u{1b}[0m"}"#,
            "broke a lease from the console",
        ),
        (changes[1], "}", "broke a lease from the console"),
        (changes[2], r#" user="bert"}"#, "the fence was reset"),
        (changes[3], "}", "broke a lease"),
    ] {
        let (_, rest) = line.split_once(" WARN operator{peer=127.0.0.1:").unwrap();
        let rest = rest.trim_start_matches(|digit: char| digit.is_ascii_digit());
        assert!(rest.starts_with(user) && rest.contains(said), "{line}");
    }
    let before = format!("before={}", first.as_i64().unwrap() + 1);
    assert!(changes[2].contains(&before), "{log}");
    assert!(!log.contains(OPERATOR), "{log}");
}

#[tokio::test]
async fn change_is_logged_even_if_the_operator_disconnects() {
    let (db, server) = serving_with_secrets().await;
    let granted = asked(&server, Some(HOLDER), Method::POST, "/locks/sku-1").await;
    let body = json!({ "resource": "sku-1", "token": granted.json()["token"] });
    for (call, table, log) in [
        ("break", "leases", "broke a lease"),
        ("reset", "resources", "the fence was reset"),
    ] {
        let mut locked = db.pool.begin().await.unwrap();
        let lock = format!("SELECT FROM tower_fence.{table} WHERE resource = 'sku-1' FOR UPDATE");
        locked.execute(AssertSqlSafe(lock)).await.unwrap();
        let url = server.url(&format!("/console/api/{call}"));
        let request = server.client.post(url).basic_auth("anna", Some(OPERATOR));
        let request = request.json(&body).timeout(Duration::from_millis(300));
        assert!(request.send().await.unwrap_err().is_timeout());
        locked.rollback().await.unwrap();
        server.logs(log).await;
    }
    assert_eq!(server.log().matches(r#"user="anna""#).count(), 2);
}

#[tokio::test]
async fn without_secrets_the_server_listens_only_on_loopback() {
    let db = Postgres::fresh(2).await;
    for address in ["0.0.0.0:0", "[::]:0"] {
        let refused = run_on(&db.url, &["serve", "--listen", address]).await;
        refused.is(78).says("--allow-anyone");
        refused.says("TOWER_FENCE_HOLDER_SECRETS_FILE");
    }
    let arguments = ["--listen", "0.0.0.0:0", "--allow-anyone"];
    let server = Served::start(&db.url, &arguments).await;
    assert!(server.url.starts_with("http://0.0.0.0:"));
    let request = server.client.get(server.url("/locks"));
    let named = Answer::to(request.header("Host", "locks.example")).await;
    assert_eq!(named.status, 200, "{named:?}");
    let secret = file(OPERATOR);
    let arguments = format!(
        "--listen 0.0.0.0:0 --operator-secrets-file {}",
        path(&secret)
    );
    let mut server = Served::start(&db.url, &words(&arguments)).await;
    server.logs("unencrypted").await;
    server.signal("-TERM");
    assert!(server.exit().await.success());
}

/// The server refuses requests of a page whose host name resolves to this machine.
#[tokio::test]
async fn without_secrets_the_server_accepts_only_local_host_names() {
    let (_db, server) = serving(&[]).await;
    let list = async |host: &str| {
        let request = server.client.get(server.url("/locks"));
        Answer::to(request.header("Host", host)).await
    };
    let refused = list("evil.example:4120").await;
    refused.is_problem(403, "operators-only");
    let logged = "refused a request whose Host is neither an IP address nor localhost";
    server.logs(logged).await;
    for (target, hosts) in [
        ("/locks", &["127.0.0.1", "evil.example"][..]),
        ("/locks", &["evil.example", "127.0.0.1"]),
        ("/locks", &[""]),
        ("/locks", &["évil.example"]),
        ("http://evil.example/locks", &["127.0.0.1"]),
    ] {
        let hosts: String = hosts
            .iter()
            .map(|host| format!("Host: {host}\r\n"))
            .collect();
        let request = format!("GET {target} HTTP/1.1\r\n{hosts}Connection: close\r\n\r\n");
        let (mut stream, mut answer) = (server.connect().await, String::new());
        stream.write_all(request.as_bytes()).await.unwrap();
        stream.read_to_string(&mut answer).await.unwrap();
        let refused = ["HTTP/1.1 403", "HTTP/1.1 400"];
        let is_refused = refused.iter().any(|status| answer.starts_with(status));
        assert!(is_refused, "{request}: {answer}");
    }
    for host in ["localhost:4120", "127.0.0.1:1", "[::1]:4120", "[::1]"] {
        assert_eq!(list(host).await.json()["leases"], json!([]), "{host}");
    }
}

#[tokio::test]
async fn sighup_reloads_the_secrets() {
    let db = Postgres::fresh(2).await;
    let (holders, operators) = (file(HOLDER), file(OPERATOR));
    let keys = file(&format!("k1:{}", "5e".repeat(32)));
    let secrets = secret_options(&holders, &operators);
    let arguments = [&secrets[..], &["--token-key-file", path(&keys)]].concat();
    let server = Served::start(&db.url, &arguments).await;
    let status = async |secret: &str| {
        let answer = asked(&server, Some(secret), Method::GET, "/locks/sku-1");
        answer.await.status
    };
    let next = "the-next-secret-of-holders";
    std::fs::write(holders.path(), next).unwrap();
    assert_eq!((status(HOLDER).await, status(next).await), (200, 401));
    server.signal("-HUP");
    eventually!("the next secret is accepted", status(next).await == 200);
    assert_eq!((status(HOLDER).await, status(OPERATOR).await), (401, 200));
    // An invalid file changes nothing.
    std::fs::write(holders.path(), "short").unwrap();
    server.signal("-HUP");
    server.logs("too short").await;
    assert_eq!(status(next).await, 200);
    std::fs::write(holders.path(), next).unwrap();
    server.signal("-HUP");
    // Only two of three reloads read valid secrets. No certificate is configured.
    let all = r#"reloaded what="secrets of clients, token keys""#;
    let reloads = |of| server.log().matches(of).count();
    eventually!("the third reload is logged", reloads(all) >= 2);
    let of_keys = r#"reloaded what="token keys""#;
    assert_eq!((reloads(all), reloads(of_keys)), (2, 1));
    let log = server.log();
    assert!(!log.contains("environment"), "{log}");
    // A reload checks the permissions of each file with secrets, as the start does.
    let all_may_read = std::os::unix::fs::PermissionsExt::from_mode(0o644);
    std::fs::set_permissions(keys.path(), all_may_read).unwrap();
    assert!(!server.log().contains("every user of this machine can read"));
    server.signal("-HUP");
    server.logs("every user of this machine can read").await;
}

#[tokio::test]
async fn secret_of_both_roles_is_reported() {
    let db = Postgres::fresh(2).await;
    let both = file(OPERATOR);
    let server = Served::start(&db.url, &secret_options(&both, &both)).await;
    let warning = "clients with it have the rights of operators";
    server.logs(warning).await;
    let list = asked(&server, Some(OPERATOR), Method::GET, "/locks").await;
    assert_eq!(list.status, 200, "{list:?}");
}

/// The read hangs, as on a file system whose server is unreachable.
#[tokio::test]
async fn temporarily_unreadable_file_delays_no_request() {
    let db = Postgres::fresh(2).await;
    let (holders, operators) = (file(HOLDER), file(OPERATOR));
    let mut server = Served::start(&db.url, &secret_options(&holders, &operators)).await;
    std::fs::remove_file(holders.path()).unwrap();
    let mut make = std::process::Command::new("mkfifo");
    assert!(make.arg(holders.path()).status().unwrap().success());
    for _ in 0..3 {
        server.signal("-HUP");
        assert_eq!(server.get("/healthz").await.status, 200);
    }
    server.signal("-TERM");
    assert!(server.exit().await.success());
}

#[tokio::test]
async fn invalid_secret_files_are_refused() {
    let db = Postgres::fresh(2).await;
    let variables = [("TOWER_FENCE_DATABASE_URL", db.url.as_str())];
    for (text, why) in [
        ("", "the secrets of holders contains no secret"),
        (
            "hunter2-1234567",
            "line 1 of the secrets of holders is too short",
        ),
        (
            "# one\nwith a blank 0123456789",
            "line 2 of the secrets of holders has a blank",
        ),
    ] {
        let secrets = file(text);
        let serve = ["serve", "--holder-secrets-file", path(&secrets)];
        let refused = run(&serve, &variables).await;
        refused.is(78).says(why);
        assert!(!refused.stderr.contains("hunter2") && !refused.stderr.contains("0123456789"));
    }
    let missing = ["serve", "--holder-secrets-file", "/nowhere/secrets"];
    let refused = run(&missing, &variables).await;
    refused.is(78).says("/nowhere/secrets: No such file");
    // Setting both the variable and the file is an error.
    let both = [("TOWER_FENCE_HOLDER_SECRETS", HOLDER), variables[0]];
    let secrets = file(HOLDER);
    let refused = run(&["serve", "--holder-secrets-file", path(&secrets)], &both).await;
    refused.is(78).says("both set");
}

#[tokio::test]
async fn environment_secrets_work_and_world_readable_files_warn() {
    let db = Postgres::fresh(2).await;
    let operators = file(OPERATOR);
    let all_may_read = std::os::unix::fs::PermissionsExt::from_mode(0o644);
    std::fs::set_permissions(operators.path(), all_may_read).unwrap();
    let variables = [
        ("TOWER_FENCE_DATABASE_URL", db.url.as_str()),
        ("TOWER_FENCE_HOLDER_SECRETS", HOLDER),
        ("TOWER_FENCE_OPERATOR_SECRETS_FILE", path(&operators)),
    ];
    let server = Served::start_with(&[], &variables).await;
    let server = server.with_secret(HOLDER);
    let granted: Value = server.post("/locks/sku-1", &json!({})).await.json();
    assert_eq!(granted["token"], 1_000_000_001);
    server.logs("every user of this machine can read").await;
    // A reload does not change a secret in a variable.
    assert!(!server.log().contains("not read again"));
    server.signal("-HUP");
    server.logs(r#"reloaded what="secrets of clients""#).await;
    let kept = r#"not read again: restart the server variable="TOWER_FENCE_HOLDER_SECRETS""#;
    server.logs(kept).await;
    assert_eq!(server.log().matches("not read again").count(), 1);
}
