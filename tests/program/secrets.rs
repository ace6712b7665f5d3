//! Secrets appear only in their files.

use std::{
    ffi::OsStr,
    fs,
    os::unix::{
        ffi::OsStrExt,
        fs::{PermissionsExt, symlink},
    },
    process::Command,
};

use reqwest::Url;
use serde_json::json;
use sqlx::Postgres;

use super::program::{HOLDER, OPERATOR, Served, ended, file, name, path, program, run, words};
use crate::support::{database::TestDatabase, eventually, http::Answer, redis::RedisServer};

const REDIS_PASSWORD: &str = "the-password-of-redis";
const SIGNING_SECRET: &str = "5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e";
const WRONG: &str = "a-secret-that-is-none";

#[track_caller]
fn nothing_of(secrets: &[&str], text: &str) {
    for secret in secrets {
        assert!(!text.contains(secret), "{secret} is in {text}");
    }
}

/// Returns the command line of a process, which every user on the machine can read.
fn command_line(pid: u32) -> String {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap();
    String::from_utf8_lossy(&line).into_owned()
}

#[tokio::test]
async fn server_output_contains_no_secret() {
    let db = Postgres::fresh(4).await;
    let mut redis = RedisServer::start(&[]).await;
    let set = ["CONFIG", "SET", "requirepass", REDIS_PASSWORD];
    redis.command(&set).await;
    let redis_url = format!("redis://:{REDIS_PASSWORD}@{}", redis.addr());
    let password = Url::parse(&db.url).unwrap().password().unwrap().to_owned();
    let files = [
        file(HOLDER),
        file(OPERATOR),
        file(&format!("k1:{SIGNING_SECRET}")),
        file(&db.url),
        file(&redis_url),
    ];
    let [holders, operators, key, database, redis_file] = files.each_ref().map(path);
    let options = format!(
        "--holder-secrets-file {holders} --operator-secrets-file {operators} \
         --token-key-file {key} --database-url-file {database} --redis-url-file {redis_file} \
         --log trace"
    );
    let server = Served::start_with(&words(&options), &[]).await;
    let server = server.with_secret(HOLDER);
    let lease = server.post("/locks/sku-1", &json!({})).await;
    assert_eq!(lease.status, 201, "{lease:?}");
    let lease = lease.json();
    let refused = server.client.post(server.url("/locks/sku-1"));
    let mut shown = Answer::to(refused.bearer_auth(WRONG)).await.text;
    redis.kill();
    let down = server.post("/locks/sku-2", &json!({})).await;
    down.is_problem(503, "store-unavailable");
    shown += &down.text;
    eventually("the server is not ready", async || {
        shown += &server.get("/readyz").await.text;
        server.log().contains("not ready")
    })
    .await;
    fs::write(files[0].path(), format!("{WRONG} with a blank")).unwrap();
    server.signal("-HUP");
    server.logs("has a blank").await;
    shown += &server.get("/metrics").await.text;
    shown += &command_line(server.id());
    shown += &server.stdout();
    let log = server.log();
    assert!(log.contains("DEBUG") && log.contains("started"), "{log}");
    assert_contains!(log, &redis.addr().to_string());
    let (id, token) = (lease["lease_id"].as_str(), lease["fencing_token"].as_str());
    let (_, mac) = token.unwrap().split_once("mac=:").unwrap();
    let secrets = [
        HOLDER,
        OPERATOR,
        REDIS_PASSWORD,
        SIGNING_SECRET,
        WRONG,
        &password,
        id.unwrap(),
        mac.split(':').next().unwrap(),
    ];
    nothing_of(&secrets, &shown);
    nothing_of(&secrets, &log);
}

#[tokio::test]
async fn no_password_is_taken_from_the_command_line() {
    #[rustfmt::skip]
    let rows = [
        ("serve --database-url postgres://me:hunter2@db/shop", "TOWER_FENCE_DATABASE_URL"),
        ("migrate --database-url postgres://db/shop?password=hunter2", "TOWER_FENCE_DATABASE_URL"),
        ("leases --url https://me:hunter2@locks", "TOWER_FENCE_SECRET_FILE"),
        (
            "serve --database-url postgres://db/shop --redis-url rediss://:hunter2@r",
            "TOWER_FENCE_REDIS_URL",
        ),
    ];
    for (arguments, variable) in rows {
        let refused = run(&words(arguments), &[]).await;
        refused.is(64).says(variable);
        nothing_of(&["hunter2"], &refused.stderr);
    }
}

#[tokio::test]
async fn errors_and_help_show_no_secret() {
    let database = "postgres://me:hunter2@127.0.0.1:1/shop";
    let variables = [
        ("TOWER_FENCE_DATABASE_URL", database),
        ("TOWER_FENCE_REDIS_URL", "redis://:hunter2@127.0.0.1:1"),
        ("TOWER_FENCE_SECRET", "hunter2-0123456789"),
        ("TOWER_FENCE_HOLDER_SECRETS", "hunter2"),
        ("TOWER_FENCE_TOKEN_KEY", "hunter2"),
        ("TOWER_FENCE_OWNER", "hunter2"),
    ];
    for (arguments, status) in [
        ("--help", 0),
        ("serve --help", 0),
        ("run --help", 0),
        ("leases --help", 0),
        ("reset --help", 0),
        ("serve", 78),
        ("migrate", 69),
        ("leases --url http://127.0.0.1:1", 69),
        ("run --resource a --url http://127.0.0.1:1 true", 69),
        ("run --resource a --direct true", 69),
    ] {
        let ended = run(&words(arguments), &variables).await;
        ended.is(status);
        let shown = ended.stdout + &ended.stderr;
        assert!(shown.len() > 20, "{shown}");
        nothing_of(&["hunter2"], &shown);
    }
}

#[tokio::test]
async fn variable_that_is_not_utf_8_is_refused() {
    let serve = "serve --listen 127.0.0.1:0";
    let served = format!("{serve} --database-url postgres://127.0.0.1:1/shop");
    let migrated = "migrate --database-url postgres://127.0.0.1:1/shop";
    for (arguments, variable, status) in [
        (&*served, "TOWER_FENCE_HOLDER_SECRETS", 78),
        (&*served, "TOWER_FENCE_OPERATOR_SECRETS", 78),
        (&*served, "TOWER_FENCE_TOKEN_KEY", 78),
        (serve, "TOWER_FENCE_DATABASE_URL", 78),
        (migrated, "PGSSLROOTCERT", 78),
        (migrated, "TOWER_FENCE_LOG", 78),
        ("leases", "TOWER_FENCE_SECRET", 78),
        ("config", "TOWER_FENCE_LISTEN", 64),
        ("config", "TOWER_FENCE_MIGRATE", 64),
        ("run --resource a true", "TOWER_FENCE_OWNER", 64),
    ] {
        let mut command = program();
        let value = OsStr::from_bytes(b"hunter2-0123456789-\xff");
        command.args(words(arguments)).env(variable, value);
        let refused = ended(command).await;
        // Errors with status 64 come from the parser of the arguments, without this prefix.
        let prefix = if status == 78 { "tower-fence: " } else { "" };
        let says = format!("{prefix}{variable} is not UTF-8");
        refused.is(status).says(&says);
        nothing_of(&["hunter2"], &refused.stderr);
    }
}

#[test]
fn files_of_the_service_are_readable_only_by_their_owner() {
    const SETTINGS: &str = include_str!("../../crates/server/packaging/tower-fence.env");
    const FOLDER: &str = "/etc/tower-fence/secrets";
    let (folder, certificates) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    // Like those of certbot, the files are symbolic links.
    for file in ["fullchain.pem", "privkey.pem"] {
        let archived = certificates.path().join(format!("archived-{file}"));
        fs::write(&archived, file).unwrap();
        symlink(archived, certificates.path().join(file)).unwrap();
    }
    let lines = SETTINGS.lines();
    let commands = lines.filter_map(|line| line.strip_prefix("#   "));
    let commands: Vec<_> = commands.filter(|line| line.contains(FOLDER)).collect();
    let script = format!("set -e; umask 022; {}", commands.join("\n"));
    let script = script.replace(FOLDER, name(folder.path()));
    let created = Command::new("sh")
        .args(["-c", &script])
        .env("RENEWED_LINEAGE", certificates.path())
        .status()
        .unwrap();
    assert!(created.success(), "{script}");
    let files: Vec<_> = fs::read_dir(&folder).unwrap().flatten().collect();
    assert_eq!(files.len(), 5, "{script}");
    for file in files {
        // systemd ignores symbolic links. This metadata is that of the link.
        let metadata = file.metadata().unwrap();
        assert!(metadata.is_file(), "{file:?}");
        assert_eq!(metadata.permissions().mode() & 0o777, 0o600, "{file:?}");
    }
}

/// If a password is not percent-encoded, a reserved character in it ends this part of the URL.
#[tokio::test]
async fn malformed_url_shows_no_part_of_its_password() {
    for url in [
        "postgres://admin:12345/6789@127.0.0.1:1/shop",
        "postgres://admin:12345?6789@127.0.0.1:1/shop",
        "postgres://admin:12345#6789@127.0.0.1:1/shop",
        "postgres://admin@127.0.0.1:1/shop?pasword=123456789",
        "postgres://admin:12345 6789@127.0.0.1:1/shop?sslmode=none",
    ] {
        let trace = ("TOWER_FENCE_LOG", "trace");
        let variables = [("TOWER_FENCE_DATABASE_URL", url), trace];
        let refused = run(&["migrate"], &variables).await;
        assert_ne!(refused.status, 0);
        let shown = refused.stdout + &refused.stderr;
        nothing_of(&["12345", "6789"], &shown);
    }
}

#[tokio::test]
async fn malformed_lease_store_url_is_refused_without_being_shown() {
    let database = ("TOWER_FENCE_DATABASE_URL", "postgres://127.0.0.1:1/shop");
    for password in ["#", "?", "/", ","].map(|mark| format!("12345{mark}hunter2")) {
        for (variable, option, scheme) in [
            ("TOWER_FENCE_REDIS_URL", "--redis-url", "redis"),
            ("TOWER_FENCE_ETCD_URL", "--etcd-url", "http"),
        ] {
            let url = format!("{scheme}://me:{password}@127.0.0.1:1");
            let variables = [database, (variable, &*url), ("TOWER_FENCE_LOG", "trace")];
            let of_variable = [
                (&["serve", "--listen", "127.0.0.1:0"][..], 78),
                (&["check"], 78),
                (&["config"], 0),
            ];
            for (arguments, status) in of_variable {
                let ended = run(arguments, &variables).await;
                let shown = ended.is(status).stdout.clone() + &ended.stderr;
                nothing_of(&["12345", "hunter2"], &shown);
            }
            let refused = run(&["serve", option, &url], &[database]).await;
            let status = if scheme == "redis" { 64 } else { 78 };
            refused.is(status).says("contains a password");
            nothing_of(&["12345", "hunter2"], &refused.stderr);
        }
    }
}
