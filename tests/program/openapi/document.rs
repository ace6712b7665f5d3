//! The documents that are served, and the findings of a validator.

use std::fs;

use serde_json::Value;

use super::{finish, python_module};
use crate::support::{
    http::{Answer, client},
    process::Inventory,
};

async fn served(service: &Inventory, path: &str) -> Value {
    let answer = Answer::to(client().get(service.url(path))).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    assert_eq!(answer.headers["content-type"], "application/json");
    answer.json()
}

#[tokio::test]
async fn lock_routes_have_their_own_matching_document() {
    let service = Inventory::start(&[]).await;
    let whole = served(&service, "/openapi.json").await;
    let locks = served(&service, "/locks/openapi.json").await;
    assert_eq!(locks["openapi"], "3.1.0");
    let paths = locks["paths"].as_object().unwrap();
    assert_eq!(
        paths.keys().collect::<Vec<_>>(),
        ["/locks", "/locks/{resource}", "/locks/{resource}/break"]
    );
    for (path, operations) in paths {
        for (method, operation) in operations.as_object().unwrap() {
            let answers = &whole["paths"][path][method]["responses"];
            for status in operation["responses"].as_object().unwrap().keys() {
                let [one, other] =
                    [&operation["responses"], answers].map(|all| &all[status]["content"]);
                assert_eq!(one, other, "{method} {path} {status}");
            }
        }
    }
    let schemas = locks["components"]["schemas"].as_object().unwrap();
    for (name, schema) in schemas {
        assert_eq!(schema, &whole["components"]["schemas"][name], "{name}");
    }
}

/// This test is in the module of the tests with schemathesis, because it uses what `tests/run`
/// installs for them.
#[tokio::test]
async fn independent_validator_accepts_the_document() {
    let service = Inventory::start(&[]).await;
    for path in ["/openapi.json", "/locks/openapi.json"] {
        let file = tempfile::Builder::new().suffix(".json").tempfile().unwrap();
        let mut api = served(&service, path).await;
        fs::write(&file, api.to_string()).unwrap();
        let validate = async || {
            let mut command = python_module("openapi_spec_validator");
            command.args(["--schema", "3.1"]).arg(file.path());
            finish(command).await
        };
        let (valid, said) = validate().await;
        assert!(valid, "{said}");
        // The validator finds an error in a wrong document.
        api["paths"]["/locks"]["get"]["responses"] = Value::Null;
        fs::write(&file, api.to_string()).unwrap();
        let (valid, said) = validate().await;
        assert!(!valid, "{said}");
    }
}
