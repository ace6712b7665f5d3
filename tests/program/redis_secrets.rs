//! Redis with passwords, users and databases, behind sentinels.

use serde_json::json;
use sqlx::Postgres;

use super::program::{Served, file, name, path, run, words};
use crate::support::{
    certificates::Certificates,
    database::{Fresh, TestDatabase},
    eventually,
    ports::free_port,
    redis::{RedisServer, Sentinel, open},
};

pub const MASTER: &str = "the-password-of-the-master";
pub const SENTINEL: &str = "the-password-of-the-sentinel";
const WRONG: &str = "a-password-that-is-none";

/// Starts a server that stores leases in the Redis master found through the sentinel at `url`, with
/// the further arguments `more`.
pub async fn serve(db: &Fresh<Postgres>, url: &str, password: &str, more: &[&str]) -> Served {
    let mut arguments = vec!["--redis-mode", "sentinel", "--redis-master", "the-master"];
    arguments.extend(["--log", "trace"]);
    arguments.extend(more);
    let mut variables = vec![
        ("TOWER_FENCE_DATABASE_URL", db.url.as_str()),
        ("TOWER_FENCE_REDIS_URL", url),
    ];
    if !password.is_empty() {
        variables.push(("TOWER_FENCE_REDIS_MASTER_PASSWORD", password));
    }
    Served::start_with(&arguments, &variables).await
}

pub async fn grants(server: &Served) {
    eventually!(
        "the sentinel knows the master",
        server.get("/readyz").await.status == 200
    );
    let granted = server.post("/locks/sku-1", &json!({})).await;
    assert_eq!(granted.status, 201, "{granted:?}");
    shows_no_secret(server);
}

/// Checks that no lease is granted, and that the log has this reason.
pub async fn refuses(server: &Served, reason: &str) {
    refuses_with(server, (503, "store-unavailable"), reason).await;
}

/// Checks that requests for leases get this answer, and that the log has this reason.
async fn refuses_with(server: &Served, (status, problem): (u16, &str), reason: &str) {
    // The first call may come before the sentinel has discovered its master.
    eventually("the master refuses requests", async || {
        let refused = server.post("/locks/sku-1", &json!({})).await;
        if refused.status == 503 && status != 503 {
            return false;
        }
        refused.is_problem(status, problem);
        server.log().contains(reason)
    })
    .await;
    assert_eq!(server.get("/readyz").await.status, 503);
    shows_no_secret(server);
}

#[track_caller]
fn shows_no_secret(server: &Served) {
    let log = server.log();
    for secret in [MASTER, SENTINEL, WRONG, "PRIVATE KEY"] {
        assert!(!log.contains(secret), "{secret}: {log}");
    }
}

/// Returns the names of the keys in a database of a Redis.
async fn keys(redis: &RedisServer, user: &str, database: u8) -> Vec<String> {
    let url = format!("redis://{user}:{MASTER}@{}/{database}", redis.addr());
    let mut connection = open(&url).await.unwrap();
    let mut keys = redis::cmd("KEYS");
    keys.arg("*").query_async(&mut connection).await.unwrap()
}

#[tokio::test]
async fn the_master_of_sentinels_may_have_secrets() {
    let user = format!("--user locks on >{MASTER} ~* &* +@all");
    let user = words(&user);
    let as_user = ["--redis-master-username", "locks"];
    let for_master = format!("sentinel auth-pass the-master {MASTER}");
    let for_user = "sentinel auth-user the-master locks";
    let own = format!("requirepass {SENTINEL}");
    let third = ["--redis-master-database", "3"];
    #[rustfmt::skip]
    let rows = [
        // A password for the master only, and one for both the master and the sentinel.
        (&["--requirepass", MASTER][..], vec![&*for_master], false, vec![], 0),
        (&["--requirepass", MASTER], vec![&for_master, &own], true, vec![], 0),
        (&user, vec![&for_master, for_user], false, as_user.to_vec(), 0),
        (&["--requirepass", MASTER], vec![&for_master, &own], true, third.to_vec(), 3),
    ];
    for (redis, lines, has_own, more, database) in rows {
        let (db, redis) = (Postgres::fresh(4).await, RedisServer::start(redis).await);
        let port = free_port();
        let listens = format!("port {port}");
        let lines = [&lines[..], &[&listens]].concat();
        let _sentinel = Sentinel::start_with(port, redis.addr(), &lines);
        let url = match has_own {
            true => format!("redis://:{SENTINEL}@127.0.0.1:{port}"),
            false => format!("redis://127.0.0.1:{port}"),
        };
        let server = serve(&db, &url, MASTER, &more).await;
        grants(&server).await;
        let place = format!(", database {database}, prefix tower-fence ");
        assert_contains!(server.log(), &place);
        let user = if more.contains(&"locks") { "locks" } else { "" };
        assert!(!keys(&redis, user, database).await.is_empty());
        if database > 0 {
            assert_eq!(keys(&redis, user, 0).await, [""; 0]);
        }
        let server = serve(&db, &url, WRONG, &more).await;
        refuses(&server, "Password authentication failed").await;
        if user.is_empty() {
            let (server, answer) = (serve(&db, &url, "", &more).await, (500, "misconfigured"));
            refuses_with(&server, answer, "Authentication required").await;
        }
    }
}

#[tokio::test]
async fn settings_of_redis_without_effect_are_refused() {
    let certificates = Certificates::make();
    let [authority, cert, key] =
        ["authority.pem", "server.pem", "authority.key"].map(|file| certificates.path(file));
    let (password, empty) = (file(MASTER), file(""));
    let url = ("TOWER_FENCE_REDIS_URL", "redis://:hunter2@127.0.0.1:1");
    let database = ("TOWER_FENCE_DATABASE_URL", "postgres://127.0.0.1:1/shop");
    #[rustfmt::skip]
    let rows = [
        (vec!["--redis-master-password-file", path(&password)], "for sentinel mode"),
        (vec!["--redis-master-database", "3"], "for sentinel mode"),
        (vec!["--redis-master-tls"], "for sentinel mode"),
        (vec!["--redis-ca-file", name(&authority)], "rediss://"),
        (vec!["--redis-mode", "sentinel", "--redis-ca-file", name(&authority)], "rediss://"),
        (vec!["--redis-mode", "cluster", "--redis-ca-file", name(&authority)], "rediss://"),
        (vec!["--redis-mode", "quorum", "--redis-ca-file", name(&authority)], "without TLS"),
        (vec!["--redis-ca-file", path(&empty)], "it contains no certificate"),
        (vec!["--redis-ca-file", "/none"], "cannot read /none"),
        (
            vec!["--redis-mode", "sentinel", "--redis-master-username", "locks"],
            "requires a password",
        ),
        (
            vec!["--redis-cert-file", name(&cert), "--redis-key-file", name(&cert)],
            "it contains no private key",
        ),
        (vec!["--redis-cert-file", name(&cert), "--redis-key-file", name(&key)], "with its key"),
    ];
    for (arguments, says) in rows {
        let arguments = [&["serve", "--listen", "127.0.0.1:0"][..], &arguments].concat();
        let refused = run(&arguments, &[url, database]).await;
        refused.is(78).says(says);
        assert!(!refused.stderr.contains("hunter2"), "{refused:?}");
        assert!(!refused.stderr.contains(MASTER), "{refused:?}");
    }
}
