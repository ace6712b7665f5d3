//! All checks of schemathesis against the server program, with secrets and without.

use serde_json::{Value, json};
use sqlx::Postgres;

use super::schemathesis::{FIRST_PHASES, Spoiled, finds, run};
use crate::{
    program::{OPERATOR, Served, file, path},
    support::database::{Fresh, TestDatabase},
};

/// Starts the server, with a short limit for waits.
async fn server(db: &Fresh<Postgres>, arguments: &[&str]) -> Served {
    let limits = ["--max-wait", "50ms", "--log", "error"];
    Served::start(&db.url, &[&limits, arguments].concat()).await
}

/// Returns the header of an operator.
fn bearer() -> String {
    format!("Authorization: Bearer {OPERATOR}")
}

async fn finds_nothing(server: &Served, options: &[&str]) {
    let document = server.url("/locks/openapi.json");
    let (clean, said) = run(&server.url, &document, options).await;
    assert!(clean, "{said}{}", server.log());
    println!("{said}");
}

#[tokio::test]
async fn schemathesis_finds_no_fault_with_an_operator_secret() {
    let (db, operators) = (Postgres::fresh(2).await, file(OPERATOR));
    let server = server(&db, &["--operator-secrets-file", path(&operators)]).await;
    finds_nothing(&server, &["--header", &bearer()]).await;
}

#[tokio::test]
async fn schemathesis_finds_no_fault_without_secrets() {
    let db = Postgres::fresh(2).await;
    finds_nothing(&server(&db, &[]).await, &FIRST_PHASES).await;
}

#[tokio::test]
async fn schemathesis_finds_false_statements_about_secrets() {
    let (db, operators) = (Postgres::fresh(2).await, file(OPERATOR));
    let open = server(&db, &[]).await;
    let closed = server(&db, &["--operator-secrets-file", path(&operators)]).await;
    let closed = closed.with_secret(OPERATOR);
    let cases: [(&Served, Spoiled); 2] = [
        (
            &open,
            ("API accepts requests without authentication", |api| {
                api["components"]["securitySchemes"] =
                    json!({"secret": {"type": "http", "scheme": "bearer"}});
                api["security"] = json!([{"secret": []}]);
            }),
        ),
        (
            &closed,
            ("Undocumented status code", |api| {
                let responses = &mut api["paths"]["/locks/{resource}"]["get"]["responses"];
                responses.as_object_mut().unwrap().remove("401");
            }),
        ),
    ];
    let bearer = bearer();
    for (server, (finding, spoil)) in cases {
        let mut api: Value = server.get("/locks/openapi.json").await.json();
        spoil(&mut api);
        let options = [&FIRST_PHASES[..], &["--header", &bearer]].concat();
        finds(finding, &api, &server.url, &options).await;
    }
}
