//! The example of the paused holder in other languages and with other client libraries. The issuer
//! of the inventory service, which uses the same database, grants the tokens over HTTP.

use std::{fs, process::Command};

use serde_json::{Value, json};
use sqlx::Postgres;

use super::{
    drivers::TABLE,
    program::{ended, file, path},
};
use crate::support::{
    database::TestDatabase,
    process::{Inventory, Process, built, psql},
    repository,
};

/// A statement that makes the fence admit every token.
pub const ADMITS_EVERY_TOKEN: &str = "CREATE OR REPLACE FUNCTION tower_fence.admit(resource text, token bigint, reusable boolean DEFAULT false) \
     RETURNS bigint LANGUAGE sql AS 'SELECT admit.token'";

/// Runs the program that `command` creates from the URLs of a database and an issuer. Its exit
/// status reports whether the paused holder was refused.
async fn refuses_the_paused_holder(command: impl Fn(&str, &str) -> Command) {
    let db = Postgres::fresh(2).await;
    let service = Inventory::start(&[("DATABASE_URL", &db.url)]).await;
    let issuer = service.url("/locks");
    let run = async || {
        let mut process = Process::run(command(&db.url, &issuer));
        let status = process.exit().await;
        (status.success(), process.stdout(), process.log())
    };
    // The program runs twice, and its tokens continue to increase.
    for round in [0, 2] {
        let (success, stdout, log) = run().await;
        assert!(success, "{stdout}{log}");
        let [first, second] = [1, 2].map(|n| 1_000_000_000 + round + n);
        for line in [
            &format!("holder 1 leases sku-1 with token {first}, counts 100, and is paused"),
            &format!("holder 2 leases sku-1 with token {second}, counts 96, and writes that"),
            "refused: TF412",
            "the stock is 96",
        ] {
            assert!(stdout.contains(line), "{line:?} is not in {stdout}{log}");
        }
        let mut lines = stdout.lines().chain(log.lines());
        let problem: Value = lines
            .find_map(|line| serde_json::from_str(line.trim_start_matches("DETAIL: ")).ok())
            .unwrap_or_else(|| panic!("not a problem document: {stdout}{log}"));
        let members = ["resource", "presented_token", "max_token"].map(|name| &problem[name]);
        assert_eq!(members, [&json!("sku-1"), &json!(first), &json!(second)]);
        assert_eq!(db.number("SELECT stock FROM inventory").await, 96);
    }

    db.execute(ADMITS_EVERY_TOKEN).await;
    let (success, stdout, log) = run().await;
    assert!(!success, "{stdout}{log}");
    assert_contains!(log, "holder 1 has written over holder 2");
}

/// Runs an example that reads the URLs from variables.
async fn example_refuses_the_paused_holder(example: &str) {
    refuses_the_paused_holder(|database, issuer| {
        let mut command = Command::new(built(example));
        command.envs([("DATABASE_URL", database), ("ISSUER_URL", issuer)]);
        command
    })
    .await;
}

#[tokio::test]
async fn psql_reports_the_paused_holder() {
    refuses_the_paused_holder(|database, issuer| {
        let mut command = psql(database);
        command.args(["-v", &format!("issuer={issuer}")]);
        command.args(["-f", "examples/fence.sql"]);
        command
    })
    .await;
}

/// A scheduler repeats a script that fails.
#[tokio::test]
async fn psql_script_of_the_guide_fails_only_if_nothing_was_written() {
    let guide = include_str!("../../src/docs/guide/leases-in-sql.md");
    let (_, script) = guide.split_once("```text\n").unwrap();
    let (script, _) = script.split_once("```").unwrap();
    let db = Postgres::fresh(2).await;
    db.execute(TABLE).await;
    let ends_with = async |status: i32, edits: [(&str, &str); 2], refusal: &str| {
        let edit = |script: String, (part, edited): (&str, &str)| {
            assert!(script.contains(part), "{part}");
            script.replace(part, edited)
        };
        let script = file(&edits.into_iter().fold(script.to_owned(), edit));
        let mut command = psql(&db.url);
        command.args(["-f", path(&script)]);
        ended(command).await.is(status).says(refusal);
        let stock = "SELECT stock FROM inventory WHERE sku = 'sku-1'";
        db.number(stock).await
    };
    let sleeps = ("COMMIT;", "SELECT pg_sleep(1.2);\nCOMMIT;");
    let expires = [("30 s", "1 s"), sleeps];
    assert_eq!(ends_with(0, expires, "is not held").await, 9);

    // Another transaction locks the row of the resource.
    let mut other = db.pool.begin().await.unwrap();
    let lock = "SELECT FROM tower_fence.resources FOR UPDATE";
    Postgres::run(&mut other, lock).await;
    let is_locked = [("5s", "100ms"), ("nightly", "other")];
    assert_eq!(ends_with(3, is_locked, "lock timeout").await, 9);
}

#[tokio::test]
async fn tokio_postgres_reports_the_paused_holder() {
    example_refuses_the_paused_holder("example-tokio-postgres").await;
}

#[tokio::test]
async fn sea_orm_reports_the_paused_holder() {
    example_refuses_the_paused_holder("example-sea-orm").await;
}

/// Runs an example that is a service of another protocol and its clients. Returns the printed
/// lines.
async fn lines_of(example: &str) -> Vec<String> {
    let mut process = Process::run(Command::new(built(example)));
    let success = process.exit().await.success();
    let (stdout, log) = (process.stdout(), process.log());
    assert!(success, "{stdout}{log}");
    stdout.lines().map(str::to_owned).collect()
}

/// A read with a token uses the connection of its transaction. The pool has only this connection.
#[tokio::test]
async fn failed_graphql_mutation_is_rolled_back_and_get_writes_nothing() {
    let expected = [
        r#"holder 2 takes 2: {"data":{"take":7}}"#,
        r#"holder 1 wakes up, and takes 1: {"data":null,"errors":[{"extensions":{"code":"stale-token"},"message":"token 1 for sku-1 is not newer than 2"}]}"#,
        r#"holder 3 takes 100: {"data":null,"errors":[{"locations":[{"column":12,"line":1}],"message":"not enough in stock","path":["take"]}]}"#,
        r#"holder 3 takes 1 and 100: {"data":null,"errors":[{"locations":[{"column":47,"line":1}],"message":"not enough in stock","path":["b"]}]}"#,
        r#"holder 3 takes -5: {"data":null,"errors":[{"locations":[{"column":12,"line":1}],"message":"quantity must be at least 1","path":["take"]}]}"#,
        r#"holder 3 takes 3: {"data":{"take":4}}"#,
        r#"the holder of sku-2 takes 1: {"data":null,"errors":[{"locations":[{"column":12,"line":1}],"message":"the token is for sku-2, not for sku-1","path":["take"]}]}"#,
        "holder 4 takes 1 with GET: 405 Method Not Allowed a mutation must be sent with POST",
        r#"holder 4 reads: 200 OK {"data":{"stock":4}}"#,
        r#"holder 4 reads sku-2: 200 OK {"data":null,"errors":[{"message":"the token is for sku-1, not for sku-2","locations":[{"line":1,"column":3}],"path":["stock"]}]}"#,
        r#"the stock: 200 OK {"data":{"stock":4}}"#,
    ];
    assert_eq!(lines_of("example-graphql").await, expected);
}

#[tokio::test]
async fn failed_grpc_call_is_rolled_back_and_get_writes_nothing() {
    let expected = [
        "holder 2 takes 2: 7 left",
        "holder 1 wakes up, and takes 1: FailedPrecondition token 1 for sku-1 is not newer than 2 (stale-token)",
        "holder 3 takes 100: FailedPrecondition not enough in stock (not refused by the fence)",
        "holder 3 takes -5: InvalidArgument quantity must be at least 1 (not refused by the fence)",
        "holder 3 takes 3: 4 left",
        "the holder of sku-2 takes 1: InvalidArgument the token is for sku-2, not for sku-1 (not refused by the fence)",
        "holder 4 takes 1 with GET: 405 Method Not Allowed",
        "the stock: 4",
    ];
    assert_eq!(lines_of("example-grpc").await, expected);
}

/// The tokens that Python's `hmac` module signs equal those of this crate.
#[test]
fn python_implementation_produces_the_same_vectors() {
    let mut python = Command::new("python3");
    let script = python.arg("tests/vectors/signed_tokens.py");
    let made = script.current_dir(repository()).output().unwrap();
    let kept = fs::read(repository().join("tests/vectors/signed_tokens.json"));
    assert!(
        made.status.success() && made.stdout == kept.unwrap(),
        "{made:?}"
    );
}
