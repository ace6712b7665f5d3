//! All checks of schemathesis against the example: valid requests from its document, invalid ones,
//! and sequences that follow its links.

use std::{env, fs};

use serde_json::Value;
use sqlx::Postgres;

use super::{file, finish, python_module};
use crate::support::{database::TestDatabase, http::Answer, process::Inventory};

/// A string that schemathesis prints, and the error in the document that causes it.
pub(super) type Spoiled = (&'static str, fn(&mut Value));

/// The default number of examples for each operation in one run.
const EXAMPLES: &str = "25";

/// The options for a run that needs only some of the phases.
pub(super) const FIRST_PHASES: [&str; 2] = ["--phases", "examples,coverage"];

/// Starts the service, with a short limit for waits.
async fn service(variables: &[(&str, &str)]) -> Inventory {
    let limits = [("WAIT_LIMIT_MS", "50"), ("RUST_LOG", "error")];
    Inventory::start(&[&limits, variables].concat()).await
}

/// Runs schemathesis against a service, with a document and further options. Returns whether it
/// found no fault, and its output.
pub(super) async fn run(url: &str, document: &str, options: &[&str]) -> (bool, String) {
    let seed = env::var("SCHEMATHESIS_SEED").unwrap_or_else(|_| "1".into());
    let mut command = python_module("schemathesis.cli");
    command
        .args(["--config-file", &file("schemathesis.toml"), "run", document])
        .args(["--url", url, "--checks", "all", "--seed", &seed])
        .args(["--no-color", "--request-timeout", "10"])
        .args(["--generation-database", "none"])
        .args(options)
        .env("SCHEMATHESIS_HOOKS", file("hooks.py"));
    match env::var("SCHEMATHESIS_SECONDS") {
        Ok(seconds) => command.args(["--max-time", &seconds]),
        Err(_) => command.args(["--max-examples", EXAMPLES]),
    };
    finish(command).await
}

/// Checks that schemathesis finds this fault with this document.
pub(super) async fn finds(fault: &str, api: &Value, url: &str, options: &[&str]) {
    let file = tempfile::Builder::new().suffix(".json").tempfile().unwrap();
    fs::write(&file, api.to_string()).unwrap();
    let document = file.path().to_str().unwrap();
    let (clean, said) = run(url, document, options).await;
    assert!(!clean && said.contains(fault), "{fault}: {said}");
}

async fn finds_nothing(service: &Inventory) {
    let (clean, said) = run(&service.url, &service.url("/openapi.json"), &[]).await;
    assert!(clean, "{said}{}", service.log());
    println!("{said}");
}

#[tokio::test]
async fn schemathesis_finds_no_fault_on_sqlite() {
    finds_nothing(&service(&[]).await).await;
}

#[tokio::test]
async fn schemathesis_finds_no_fault_on_postgres_with_signed_tokens() {
    let db = Postgres::fresh(2).await;
    let key = format!("k1:{}", "5".repeat(64));
    finds_nothing(&service(&[("DATABASE_URL", &db.url), ("TOKEN_KEY", &key)]).await).await;
}

#[tokio::test]
async fn schemathesis_finds_omissions_in_a_document() {
    let service = service(&[]).await;
    let document = crate::support::http::client().get(service.url("/locks/openapi.json"));
    let api = Answer::to(document).await.json();
    let lock = "/locks/{resource}";
    let broken: [Spoiled; 3] = [
        ("Undocumented status code", |lock| {
            let responses = &mut lock["put"]["responses"];
            responses.as_object_mut().unwrap().remove("409");
        }),
        ("Response violates schema", |lock| {
            let content = &mut lock["get"]["responses"]["200"]["content"];
            let schema = &mut content["application/json"]["schema"];
            *schema = serde_json::json!({ "type": "object", "required": ["secret"] });
        }),
        ("Schema-violating request accepted", |lock| {
            lock["get"]["parameters"][0] = serde_json::json!({
                "name": "resource",
                "in": "path",
                "required": true,
                "schema": { "type": "string", "maxLength": 3 },
            });
        }),
    ];
    for (finding, spoil) in broken {
        let mut api = api.clone();
        spoil(&mut api["paths"][lock]);
        finds(finding, &api, &service.url, &FIRST_PHASES).await;
    }
}
