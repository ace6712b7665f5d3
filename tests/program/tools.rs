//! The tools for operators: the tables, the leases, and the reset of a fence.

use reqwest::Method;
use serde_json::json;
use sqlx::{Connection, PgConnection, Postgres};
use tower_fence::lease::{MemoryLeases, conformance::CountedEpochs};

use super::check::ISSUER;
use super::program::{
    HOLDER, OPERATOR, Served, ended, file, path, program, run, run_on, secret_options, serving,
    words,
};
use crate::support::{
    database::TestDatabase,
    eventually,
    functions::{self, Refused, is_refused},
    http::{Answer, Server},
    postgres::PostgresServer,
    process::psql,
    proxy::{Passage, Proxy, Sender, contains},
};

/// Admits a token, as any program would.
async fn admit(url: &str, token: i64) -> Result<i64, Refused> {
    let mut conn = PgConnection::connect(url).await.unwrap();
    functions::admit(&mut conn, "sku-1", token).await
}

#[tokio::test]
async fn migrate_creates_the_tables_and_then_reports_them_current() {
    let postgres = PostgresServer::start(&[]).await;
    let url = postgres.url("postgres");
    for end in [" were created or updated\n", " are up to date\n"] {
        let migrated = run_on(&url, &["migrate"]).await;
        let said = &migrated.is(0).stdout;
        let begin = "the tables, functions and privileges in postgres on 127.0.0.1:";
        assert!(said.starts_with(begin) && said.ends_with(end), "{said}");
    }
    admit(&url, 7).await.unwrap();
    is_refused(admit(&url, 6).await, "TF412");
    // The tables are created in a separate schema. The URL is in a file, and then in the variable
    // `DATABASE_URL`, which many clients read.
    let mut conn = PgConnection::connect(&url).await.unwrap();
    Postgres::run(&mut conn, "CREATE SCHEMA fence").await;
    let database = file(&url);
    let file = ["--database-url-file", path(&database)];
    let arguments = [&["migrate", "--database-schema", "fence"], &file[..]].concat();
    run(&arguments, &[]).await.is(0);
    run(&arguments[..3], &[("DATABASE_URL", &url)]).await.is(0);
    Postgres::run(&mut conn, "SELECT fence.admit('sku-1', 1)").await;
}

#[tokio::test]
async fn printed_schema_creates_a_working_fence() {
    let db = Postgres::fresh(1).await;
    db.execute("DROP SCHEMA tower_fence CASCADE").await;
    let url = db.url.clone();
    let printed = run(&["schema"], &[]).await;
    let sql = file(&printed.is(0).stdout);
    let create = async || {
        let mut command = psql(&url);
        command.args(["-v", "ON_ERROR_STOP=1", "-f", path(&sql)]);
        ended(command).await
    };
    create().await.is(0);
    admit(&url, 7).await.unwrap();
    is_refused(admit(&url, 6).await, "TF412");
    // A server starts on this schema, and `migrate` has nothing to do.
    run_on(&url, &["migrate"]).await.is(0);
    let server = Served::start(&url, &[]).await;
    let lease = server.post("/locks/sku-1", &json!({})).await.json();
    admit(&url, lease["token"].as_i64().unwrap()).await.unwrap();
    // On a database that already has the schema, nothing changes.
    create().await.is(3);
}

#[tokio::test]
async fn operators_list_inspect_and_break_leases() {
    let db = Postgres::fresh(2).await;
    let (holders, operators) = (file(HOLDER), file(OPERATOR));
    let arguments = secret_options(&holders, &operators);
    let server = Served::start(&db.url, &arguments).await.with_secret(HOLDER);
    let url = ("TOWER_FENCE_URL", server.url.as_str());
    let with = |secret| [url, ("TOWER_FENCE_SECRET_FILE", secret)];
    let operator = with(path(&operators));
    let none = run(&["leases"], &operator).await;
    let title = "RESOURCE  TOKEN  OWNER  SINCE  LEFT  WAITERS\n";
    assert_eq!(none.is(0).stdout, title);
    let none = run(&["leases", "--json"], &operator).await;
    assert_eq!(none.json(), json!([]));

    // The names contain a character that changes the direction of text.
    let body = json!({"owner": "worker\u{202e}7", "ttl_ms": 600_000});
    assert_eq!(server.post("/locks/sku-1", &body).await.status, 201);
    let strange = "/locks/caf%C3%A9%20%2F%E2%80%AE";
    assert_eq!(server.post(strange, &json!({})).await.status, 201);
    let table = run(&["leases"], &operator).await;
    let lines: Vec<_> = table.is(0).stdout.lines().collect();
    let [_, strange, ordinary] = lines[..] else {
        panic!("{lines:?}");
    };
    assert!(strange.starts_with(r"café /\u{202e}  "), "{strange}");
    assert_contains!(strange, "  -  ");
    assert_contains!(ordinary, r"worker\u{202e}7");
    let listed = run(&["leases", "--json"], &operator).await.json();
    let mut listed = listed.as_array().unwrap().iter();
    let lease = listed.find(|lease| lease["resource"] == "sku-1").unwrap();
    assert_eq!(lease["owner"], "worker\u{202e}7");
    assert_eq!(lease["waiters"], 0);

    let inspect = ["inspect", "sku-1", "--json"];
    let inspected = run(&inspect, &with(path(&holders))).await.json();
    assert_eq!(inspected["token"], lease["token"]);
    let inspected = run(&inspect[..2], &operator).await;
    let text = r"sku-1 is held by worker\u{202e}7 since 20";
    assert!(inspected.is(0).stdout.starts_with(text), "{inspected:?}");
    let free = run(&["inspect", "sku-9"], &operator).await;
    assert_eq!(free.is(0).stdout, "sku-9 is free\n");

    for command in [vec!["leases"], vec!["break", "sku-1"]] {
        let refused = run(&command, &with(path(&holders))).await;
        refused.is(77).says("operator");
        let refused = run(&command, &[operator[0]]).await;
        refused.is(77).says("TOWER_FENCE_SECRET_FILE");
    }
    // The operator has seen an earlier lease.
    let token = lease["token"].as_i64().unwrap();
    let seen = (token - 1).to_string();
    let refused = run(&["break", "sku-1", "--token", &seen], &operator).await;
    refused.is(1);
    let broken = run(&["break", "sku-1"], &operator).await;
    assert_eq!(broken.is(0).stdout, "the lease on sku-1 was broken\n");
    let held = run(&["run", "--resource", "café /\u{202e}", "true"], &operator);
    let is_held = r"the lease on café /\u{202e} is held";
    held.await.is(75).says(is_held);
    let broken = run(&["break", "café /\u{202e}"], &operator).await;
    let expected = "the lease on café /\\u{202e} was broken\n";
    assert_eq!(broken.is(0).stdout, expected);
    let refused = run(&["break", "sku-1"], &operator).await;
    refused.is(1).says("sku-1 is not held");

    // A lock delay is not shown, and is ended with the token of the expired lease.
    let body = json!({"ttl_ms": 100, "lock_delay_ms": 60_000});
    let lease = server.post("/locks/sku-2", &body).await.json();
    eventually("the lease has expired", async || {
        let free = run(&["inspect", "sku-2"], &operator).await;
        free.is(0).stdout == "sku-2 is free\n"
    })
    .await;
    let held = server.post("/locks/sku-2", &json!({})).await;
    held.is_problem(409, "lock-held");
    let refused = run(&["break", "sku-2"], &operator).await;
    refused.is(1).says("an expired lease with a lock delay");
    let token = lease["token"].to_string();
    let ran = run(&["break", "sku-2", "--token", &token], &operator).await;
    ran.is(0);
    assert_eq!(server.post("/locks/sku-2", &json!({})).await.status, 201);
}

/// The pages of a list are printed as one list.
#[tokio::test]
async fn long_list_of_leases_is_complete() {
    let db = Postgres::fresh(2).await;
    let acquire =
        "SELECT tower_fence.acquire('r' || i, '5 min') FROM generate_series(1, 2100) AS i";
    db.execute(acquire).await;
    let server = Served::start(&db.url, &[]).await;
    let list = ["leases", "--json", "--url", &server.url];
    let listed = run(&list, &[]).await.json();
    assert_eq!(listed.as_array().unwrap().len(), 2_100);
}

#[tokio::test]
async fn unreachable_or_invalid_server_is_named() {
    let (_db, server) = serving(&[]).await;
    let refused = run(&["leases", "--url", "http://127.0.0.1:1"], &[]).await;
    refused.is(69).says("127.0.0.1:1");
    let secret = [("TOWER_FENCE_SECRET", OPERATOR)];
    let refused = run(&["leases", "--url", "http://no-such-host.invalid"], &secret).await;
    refused.is(69).says("the secret is sent unencrypted");
    let refused = run(&["leases", "--url", "nowhere"], &[]).await;
    refused.is(64).says("must begin with http://");
    let refused = run(&["leases", "--url", &server.url("/lock")], &[]).await;
    refused.is(78).says("is not an issuer");
    // An application's issuer may have no routes for operators.
    let issuer = Server::issuer(MemoryLeases::new(CountedEpochs::default())).await;
    let url = [("TOWER_FENCE_URL", &*issuer.url("/locks"))];
    run(&["inspect", "sku-1"], &url).await.is(0);
    for command in [&["leases"][..], &["break", "sku-1", "--token", "1"]] {
        let refused = run(command, &url).await;
        refused.is(78).says("lacks the routes for operators");
    }
    let refused = run(&["inspect", "a\nb"], &[]).await;
    refused.is(64).says("invalid resource");
    run(&["reset", "sku-1"], &[]).await.is(64).says("--to");
}

#[tokio::test]
async fn fence_with_a_forged_token_is_reset() {
    let (db, server) = serving(&[]).await;
    let lease = server.post("/locks/sku-1", &json!({})).await.json();
    let granted = lease["token"].as_i64().unwrap();
    let release = server.of_holder(Method::DELETE, &lease);
    assert_eq!(Answer::to(release).await.status, 204);
    admit(&db.url, 999_999_999_999_999).await.unwrap();
    is_refused(admit(&db.url, granted).await, "TF412");
    let to = granted.to_string();
    let max_token = async || db.number("SELECT tower_fence.max_token('sku-1')").await;

    // There is no terminal for the question, so nothing changes.
    let asked = run_on(&db.url, &["reset", "sku-1", "--to", &to]).await;
    asked.is(64).says("Condition: ").says("--yes");
    asked.says("is 999999999999999. After the reset");
    assert_eq!(max_token().await, 999_999_999_999_999);
    // A reset below a grant is refused.
    let lower = run_on(&db.url, &["reset", "sku-1", "--to", "1", "--yes"]).await;
    lower.is(1).says("nothing was changed");
    assert_eq!(max_token().await, 999_999_999_999_999);

    let reset = run_on(&db.url, &["reset", "sku-1", "--to", &to, "--yes"]).await;
    let text = format!("the fence of sku-1 was reset: all tokens above {to} are admitted\n");
    assert_eq!(reset.is(0).stdout, text);
    assert_eq!(max_token().await, granted);
    let next = server.post("/locks/sku-1", &json!({})).await.json();
    let next = next["token"].as_i64().unwrap();
    admit(&db.url, next).await.unwrap();
}

#[tokio::test]
async fn reset_that_may_be_committed_is_not_reported_as_unchanged() {
    let db = Postgres::fresh(2).await;
    let mut is_reset = false;
    let mut is_committed = false;
    let proxy = Proxy::judging(db.addr(), move |sender, message| {
        if sender == Sender::Client {
            is_reset |= contains(message, "tower_fence.reset(");
            is_committed |= is_reset && contains(message, "COMMIT");
        } else if is_committed {
            return Passage::CutAfter(0);
        }
        Passage::Whole
    })
    .await;
    let through = proxy.url(&db.url);
    admit(&db.url, 9).await.unwrap();
    let reset = ["reset", "sku-1", "--to", "5", "--yes"];
    let unknown = run_on(&through, &reset).await;
    let text = "the reset may have been executed: run the command again";
    unknown.is(69).says(text);
    unknown.says("the fence may have been reset: the database has not confirmed it");
    assert_eq!(db.number("SELECT tower_fence.max_token('sku-1')").await, 5);
    run_on(&db.url, &reset).await.is(0);
    let read_only = format!("{}?options=-c%20default_transaction_read_only%3Don", db.url);
    let refused = run_on(&read_only, &reset).await;
    refused.is(69).says("nothing was changed: ");
    assert!(!refused.stderr.contains("may have been"), "{refused:?}");
}

#[tokio::test]
async fn failure_contains_the_hint_of_postgres() {
    let db = Postgres::fresh(2).await;
    db.execute("TRUNCATE tower_fence.floors").await;
    let reset = ["reset", "sku-1", "--to", "5", "--yes"];
    let emptied = run_on(&db.url, &reset).await;
    emptied
        .is(78)
        .says("were emptied, or restored in part. Restore the whole database from a backup");
    db.execute("TRUNCATE tower_fence.migrations").await;
    let refused = run_on(&db.url, &["migrate"]).await;
    refused
        .is(78)
        .says("no migration history. If the tables are empty because");
}

#[tokio::test]
async fn commands_that_a_retry_cannot_help_exit_with_78() {
    let db = Postgres::fresh(2).await;
    // On a worker of Citus, which has this table.
    db.execute(
        "SET allow_system_table_mods = on; CREATE TABLE pg_catalog.pg_dist_local_group AS SELECT 1 AS groupid",
    )
    .await;
    let reason = "this server is a worker of a Citus cluster: migrate on the coordinator";
    for arguments in ["migrate", "serve --migrate --listen 127.0.0.1:0"] {
        let refused = run_on(&db.url, &words(arguments)).await;
        refused.is(78).says(reason);
        assert_eq!(refused.stderr.matches(reason).count(), 1, "{refused:?}");
    }
    db.execute("DELETE FROM pg_catalog.pg_dist_local_group")
        .await;
    run_on(&db.url, &["migrate"]).await.is(0);

    let shop = db.role(ISSUER).await;
    let revoke = "REVOKE EXECUTE ON FUNCTION tower_fence.reset FROM";
    db.execute(&format!("{revoke} {}", shop.name)).await;
    let reset = words("reset sku-1 --to 5 --yes");
    let refused = run_on(&shop.url, &reset).await;
    refused.is(78).says("permission denied for function reset");
    run_on(&db.url, &reset).await.is(0);
}

#[tokio::test]
async fn without_a_command_the_program_prints_its_commands() {
    let ended = ended(program()).await;
    let help = ended.is(64).stderr.clone() + &ended.stdout;
    for command in words("serve run leases inspect break reset migrate check config schema") {
        assert_contains!(help, &format!("\n  {command} "));
        let help = run(&[command, "--help"], &[]).await;
        assert!(help.is(0).stdout.len() > 150, "{help:?}");
    }
}

/// A request to this machine does not go through a proxy.
#[tokio::test]
async fn secret_for_the_local_server_reaches_no_proxy() {
    let db = Postgres::fresh(2).await;
    let operators = file(OPERATOR);
    let options = ["--operator-secrets-file", path(&operators)];
    let server = Served::start(&db.url, &options).await;
    let proxy = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", proxy.local_addr().unwrap());
    let mut command = program();
    command
        .arg("leases")
        .env("TOWER_FENCE_URL", &server.url)
        .env("TOWER_FENCE_SECRET", OPERATOR)
        .env_remove("no_proxy")
        .env_remove("NO_PROXY")
        .envs([("http_proxy", &address), ("HTTP_PROXY", &address)]);
    ended(command).await.is(0);
}

/// The target of a redirect would receive the lease id of a request.
#[tokio::test]
async fn commands_follow_no_redirect() {
    let (_db, server) = serving(&[]).await;
    let proxy = Proxy::redirecting(server.addr(), &server.url).await;
    let url = proxy.url(&server.url);
    let refused = run(&["leases", "--url", &url], &[]).await;
    refused
        .is(78)
        .says("the server redirects the request: set --url");
}

/// The file has the format of the server's secrets.
#[tokio::test]
async fn the_first_secret_of_a_file_is_shown() {
    let db = Postgres::fresh(2).await;
    let operators = file(&format!("# since May\n\n{OPERATOR}\nanother-{HOLDER}\n"));
    let options = ["--operator-secrets-file", path(&operators)];
    let server = Served::start(&db.url, &options).await;
    let variables = [
        ("TOWER_FENCE_URL", server.url.as_str()),
        ("TOWER_FENCE_SECRET_FILE", path(&operators)),
    ];
    run(&["leases"], &variables).await.is(0);
}

/// The tests on Citus are in the tier `scale`.
#[tokio::test]
async fn a_fence_is_distributed_only_on_citus() {
    let db = Postgres::fresh(2).await;
    for arguments in [&["distribute"][..], &["distribute", "pg_class"]] {
        let refused = run_on(&db.url, arguments).await;
        refused.is(78).says("does not have the extension citus");
    }
    // A lock can be released.
    let mut locked = db.pool.begin().await.unwrap();
    Postgres::run(&mut locked, "LOCK TABLE pg_extension").await;
    let impatient = format!("{}?options=-c%20lock_timeout%3D100ms", db.url);
    let waited = run_on(&impatient, &["distribute"]).await;
    waited.is(69).says("lock timeout");
    locked.rollback().await.unwrap();
    admit(&db.url, 7).await.unwrap();
}
