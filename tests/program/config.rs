//! The settings of a server in a file, and `tower-fence config`.

use serde_json::json;
use sqlx::Postgres;

use super::program::{OPERATOR, Served, file, path, run};
use crate::support::{database::TestDatabase, ports::free_port};

#[tokio::test]
async fn file_provides_settings_that_are_given_nowhere_else() {
    let settings = file(
        "ttl = \"20s\"\nmax-wait = \"40s\"\nmigrate = true\nmax-requests = 7\nannounce = false\n\
         redis-ca-file = \"/etc/ca.pem\"\n",
    );
    let config = ["config", "--config", path(&settings), "--max-wait", "50s"];
    let variables = [
        ("TOWER_FENCE_TTL", "25s"),
        ("TOWER_FENCE_MAX_TTL", "1h"),
        ("TOWER_FENCE_OPERATOR_SECRETS", OPERATOR),
        ("TOWER_FENCE_DATABASE_URL", "postgres://me:hunter2@db/shop"),
        // These variables have no effect.
        ("DATABASE_URL", "postgres://db/other"),
        ("TOWER_FENCE_MISSPELT", "1"),
        ("TOWER_FENCE_REDIS_CA", "/etc/other.pem"),
    ];
    let printed = run(&config, &variables).await;
    for line in [
        "ttl = \"25s\"  # environment",
        "max-ttl = \"1h\"  # environment",
        "max-wait = \"50s\"  # command line",
        "migrate = true  # file",
        "max-requests = 7  # file",
        "announce = false  # file",
        "redis-ca-file = \"/etc/ca.pem\"  # file",
        "listen = \"127.0.0.1:4120\"  # default",
        "# TOWER_FENCE_DATABASE_URL is set in the environment and not shown",
    ] {
        let has = printed.is(0).stdout.lines().any(|printed| printed == line);
        assert!(has, "{line}: {printed:?}");
    }
    for absent in [OPERATOR, "hunter2", "# DATABASE_URL", "MISSPELT"] {
        assert!(!printed.stdout.contains(absent), "{printed:?}");
    }
    // The output is itself a file of settings.
    let again = file(&printed.stdout);
    let again = run(&["config", "--config", path(&again)], &[]).await;
    assert_contains!(again.is(0).stdout, "max-wait = \"50s\"  # file");
}

/// A server must not start without the secrets that its configuration file names.
#[tokio::test]
async fn secret_in_the_file_is_kept_despite_a_blank_variable() {
    let settings = "operator-secrets-file = \"/etc/operators\"\nredis-key-prefix = \"shop\"\n";
    let settings = file(settings);
    for blank in ["", " ", "\n"] {
        let variables = [
            ("TOWER_FENCE_OPERATOR_SECRETS", blank),
            ("TOWER_FENCE_REDIS_KEY_PREFIX", blank),
        ];
        let printed = run(&["config", "--config", path(&settings)], &variables).await;
        for line in [
            "operator-secrets-file = \"/etc/operators\"  # file",
            "redis-key-prefix = \"shop\"  # file",
        ] {
            assert!(printed.is(0).stdout.contains(line), "{printed:?}");
        }
    }
}

#[tokio::test]
async fn blank_variables_count_as_missing() {
    let names = [
        "TOWER_FENCE_CONFIG",
        "TOWER_FENCE_MIGRATE",
        "TOWER_FENCE_HOLDER_SECRETS_FILE",
        "TOWER_FENCE_ETCD_USERNAME",
        "TOWER_FENCE_TTL",
        "TOWER_FENCE_MAX_WAITING_PER_CALLER",
        "TOWER_FENCE_LOG",
    ];
    let unset = run(&["config"], &[]).await;
    for blank in ["", " "] {
        let printed = run(&["config"], &names.map(|name| (name, blank))).await;
        assert_eq!(printed.is(0).stdout, unset.is(0).stdout);
    }
}

#[tokio::test]
async fn invalid_variable_is_named_without_its_value() {
    for (variable, says) in [
        ("TOWER_FENCE_TTL", "500ms, 30s, 5m, 2h"),
        ("TOWER_FENCE_MIGRATE", "--migrate"),
        ("TOWER_FENCE_REDIS_MODE", "sentinel"),
        ("TOWER_FENCE_MAX_REQUESTS", "--max-requests"),
    ] {
        let refused = run(&["config"], &[(variable, "hunter2")]).await;
        refused.is(64).says(variable).says(says);
        assert!(!refused.stderr.contains("hunter2"), "{refused:?}");
    }
    let large = run(&["config"], &[("TOWER_FENCE_MAX_REQUESTS", "12345678")]).await;
    large.is(64).says("TOWER_FENCE_MAX_REQUESTS");
    large.says("1..1000000");
    assert!(!large.stderr.contains("12345678"), "{large:?}");
    // The option belongs to the command.
    let command = ["run", "--resource", "a", "./backup", "--ttl", "5"];
    let refused = run(&command, &[("TOWER_FENCE_TTL", "hunter2")]).await;
    refused.is(64).says("TOWER_FENCE_TTL");
    assert!(!refused.stderr.contains("hunter2"), "{refused:?}");
    let said = ["config", "--ttl", "soon"];
    let refused = run(&said, &[("TOWER_FENCE_TTL", "30s")]).await;
    let says = "invalid value of --ttl (TOWER_FENCE_TTL): ";
    refused.is(64).says(says);
}

#[tokio::test]
async fn text_that_looks_like_a_number_is_printed_as_text() {
    for text in ["007", "+5", "true"] {
        let line = format!("redis-key-prefix = \"{text}\"  # ");
        let arguments = ["config", "--redis-key-prefix", text, "--max-requests", "7"];
        let printed = run(&arguments, &[]).await;
        let stdout = &printed.is(0).stdout;
        assert_contains!(stdout, &line);
        assert_contains!(stdout, "max-requests = 7  # ");
        let again = file(stdout);
        let again = run(&["config", "--config", path(&again)], &[]).await;
        assert_contains!(again.is(0).stdout, &line);
    }
}

#[tokio::test]
async fn only_a_url_with_a_password_is_withheld() {
    let url = "postgres://me:hunter2@db/shop";
    let arguments = format!(
        "config --database-url {url} --etcd-url http://me@etcd:2379 --redis-key-prefix shop@eu \
         --operator-secrets-file /etc/locks@2/operators"
    );
    let printed = run(&Vec::from_iter(arguments.split(' ')), &[]).await;
    for line in [
        "# database-url is set and not shown",
        "etcd-url = \"http://me@etcd:2379\"  # command line",
        "redis-key-prefix = \"shop@eu\"  # command line",
        "operator-secrets-file = \"/etc/locks@2/operators\"  # command line",
    ] {
        let has = printed.is(0).stdout.lines().any(|printed| printed == line);
        assert!(has, "{line}: {printed:?}");
    }
    assert!(!printed.stdout.contains("hunter2"), "{printed:?}");
}

#[tokio::test]
async fn a_server_starts_with_the_settings_of_its_file() {
    let db = Postgres::fresh(2).await;
    let (url, operators) = (file(&db.url), file(OPERATOR));
    let listen = format!("127.0.0.1:{}", free_port());
    let settings = file(&format!(
        "listen = \"{listen}\"\ndatabase-url-file = \"{}\"\noperator-secrets-file = \"{}\"\n\
         ttl = \"20s\"\nmax-ttl = \"40s\"\n",
        path(&url),
        path(&operators)
    ));
    let arguments = ["--listen", "127.0.0.1:0", "--config", path(&settings)];
    let server = Served::start_with(&arguments, &[]).await;
    assert_ne!(server.addr().to_string(), listen);
    assert_eq!(server.get("/locks").await.status, 401);
    let server = server.with_secret(OPERATOR);
    let lease = server.post("/locks/sku-1", &json!({})).await.json();
    let ttl_ms = lease["ttl_ms"].as_u64().unwrap();
    assert!((10_000..=20_000).contains(&ttl_ms), "{lease}");
    let long = json!({"ttl_ms": 40_001});
    let refused = server.post("/locks/sku-2", &long).await;
    refused.is_problem(422, "invalid-request");
    // The URL in the environment overrides the file that the settings name.
    let other = Postgres::fresh(2).await;
    let variables = [("TOWER_FENCE_DATABASE_URL", other.url.as_str())];
    let checked = run(&["check", "--config", path(&settings)], &variables).await;
    let (_, name) = other.url.rsplit_once('/').unwrap();
    assert!(checked.is(0).stdout.contains(name), "{checked:?}");
    // DATABASE_URL is used only if nothing else names a database.
    let variables = [("DATABASE_URL", other.url.as_str())];
    let checked = run(&["check", "--config", path(&settings)], &variables).await;
    assert!(!checked.is(0).stdout.contains(name), "{checked:?}");
    let checked = run(&["check"], &variables).await;
    assert!(checked.is(0).stdout.contains(name), "{checked:?}");
}

#[tokio::test]
async fn invalid_file_is_refused_without_showing_secrets() {
    for (text, says) in [
        ("listens = \"hunter2\"", "unknown option --listens"),
        ("config = \"hunter2\"", "unknown option --config"),
        ("ttl = \"hunter2\"", "--ttl: a duration must be a number"),
        ("migrate = \"hunter2\"", "migrate must be true or false"),
        (
            "max-wait = 1.5",
            "max-wait must be a string or a whole number",
        ),
        ("ttl = 1\npassword = hunter2", "line 2"),
        (
            "database-url = \"postgres://me:hunter2@db/shop\"",
            "database-url-file",
        ),
        ("tls-cert-file = \"hunter2\"", "--tls-key-file"),
    ] {
        let settings = file(text);
        let refused = run(&["serve", "--config", path(&settings)], &[]).await;
        refused.is(78).says(says);
        assert!(!refused.stderr.contains("hunter2"), "{refused:?}");
    }
}
