//! The page for teams whose services are not written in Rust.

use std::process::Command;

use axum::Router;
use http::{StatusCode, Uri};
use serde_json::json;
use sqlx::Postgres;

use super::{
    languages::ADMITS_EVERY_TOKEN,
    program::{Ended, HOLDER, Served, ended, file, path, serving},
};
use crate::support::{database::TestDatabase, process::python};

const PAGE: &str = include_str!("../../src/server.md");
const SCRIPT: &str = include_str!("lease.py");

#[tokio::test]
async fn paused_holder_with_psycopg_and_urllib_is_refused() {
    let db = Postgres::fresh(2).await;
    let holders = file(HOLDER);
    let server = Served::start(&db.url, &["--holder-secrets-file", path(&holders)]).await;
    db.execute("DROP TABLE stock").await;
    let run_script = async || -> Ended {
        let mut command: Command = python("tests/program/lease.py");
        command
            .env("DATABASE_URL", &db.url)
            .env("TOWER_FENCE_URL", &server.url)
            .env("TOWER_FENCE_SECRET", HOLDER);
        ended(command).await
    };
    let output = run_script().await;
    for line in [
        "holder 1 leases sku-1 with token 1000000001, and is paused",
        "holder 2 leases sku-1 with token 1000000002, and writes 96",
        "cannot renew: 409 The lease is not held",
        "writes 100 all the same: TF412 token 1000000001 for sku-1 is not newer than 1000000002",
        "the stock is 96",
    ] {
        assert!(output.is(0).stdout.contains(line), "{line:?}: {output:?}");
    }
    db.execute(ADMITS_EVERY_TOKEN).await;
    let refused = run_script().await;
    refused.is(1).says("holder 1 has written over holder 2");
}

/// With a GET instead of a POST, the script would get the token of the current holder.
#[tokio::test]
async fn python_code_of_the_page_follows_no_redirect() {
    let (db, server) = serving(&[]).await;
    let held = server.post("/locks/sku-1", &json!({})).await;
    assert_eq!(held.status, 201);
    let to = server.url.clone();
    let redirect =
        move |uri: Uri| async move { (StatusCode::FOUND, [("location", format!("{to}{uri}"))]) };
    let moved = Router::new().fallback(redirect);
    let moved = crate::support::http::Server::start(moved).await;
    let mut command: Command = python("tests/program/lease.py");
    command
        .env("DATABASE_URL", &db.url)
        .env("TOWER_FENCE_URL", moved.url(""));
    ended(command).await.is(1).says("HTTP Error 302: Found");
}

#[test]
fn python_code_of_the_page_matches_the_script() {
    let mut shown = 0;
    let page = include_str!("../../src/docs/guide/clients.md");
    for block in page.split("```python\n").skip(1) {
        let (block, _) = block.split_once("```").unwrap();
        for part in block.trim().split("\n\n\n") {
            assert!(SCRIPT.contains(part), "not in the script:\n{part}");
            shown += part.lines().count();
        }
    }
    assert!(shown > 15, "{shown}");
}

/// Each variable and option that the page names must exist in the program.
#[tokio::test]
async fn everything_the_page_names_exists() {
    let mut known = String::new();
    for command in [
        "serve", "run", "leases", "inspect", "break", "reset", "migrate",
    ] {
        known += &super::program::run(&[command, "--help"], &[]).await.stdout;
    }
    let example = include_str!("../../crates/server/packaging/tower-fence.env");
    let readme = include_str!("../../README.md");
    let text = format!("{PAGE} {example} {readme}");
    let words = text.split(|c: char| !(c.is_ascii_uppercase() || c == '_'));
    let variables: Vec<_> = words
        .filter(|word| word.starts_with("TOWER_FENCE_"))
        .collect();
    assert!(variables.len() > 10, "{variables:?}");
    for variable in variables
        .iter()
        .filter(|variable| **variable != "TOWER_FENCE_")
    {
        assert!(
            known.contains(variable),
            "{variable} is not a variable of the program"
        );
    }
}
