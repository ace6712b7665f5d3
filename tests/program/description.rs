//! The OpenAPI document of the server, compared with its answers.

use reqwest::Method;
use serde_json::{Value, json};
use sqlx::Postgres;

use super::program::{HOLDER, Served, serving, serving_with_secrets, words};
use crate::support::{database::TestDatabase, eventually, http::Answer};

/// The operations of holders.
const OF_HOLDERS: [(Method, &str); 4] = [
    (Method::POST, "/locks/{resource}"),
    (Method::PUT, "/locks/{resource}"),
    (Method::DELETE, "/locks/{resource}"),
    (Method::GET, "/locks/{resource}"),
];
/// The operations of operators.
const OF_OPERATORS: [(Method, &str); 2] = [
    (Method::GET, "/locks"),
    (Method::POST, "/locks/{resource}/break"),
];

/// Requests an operation with these headers.
async fn asked(
    server: &Served,
    (method, path): &(Method, &str),
    headers: &[(&str, &str)],
) -> Answer {
    let url = server.url(&path.replace("{resource}", "sku-9"));
    let request = server.client.request(method.clone(), url);
    let with = |request: reqwest::RequestBuilder, &(name, value)| request.header(name, value);
    Answer::to(headers.iter().fold(request, with)).await
}

/// The operations of a document.
struct Description(Value);

impl Description {
    async fn of(server: &Served) -> Self {
        let api = server.get("/locks/openapi.json").await.json();
        let paths = api["paths"].as_object().unwrap().values();
        let described: usize = paths.map(|path| path.as_object().unwrap().len()).sum();
        assert_eq!(described, OF_HOLDERS.len() + OF_OPERATORS.len());
        Self(api)
    }

    fn operation(&self, (method, path): &(Method, &str)) -> &Value {
        &self.0["paths"][path][method.as_str().to_lowercase()]
    }

    fn secrets(&self) -> &Value {
        &self.0["components"]["securitySchemes"]
    }

    fn has_status(&self, operation: &(Method, &str), status: &str) -> bool {
        self.operation(operation)["responses"].get(status).is_some()
    }

    /// Follows a reference to another part of the document.
    fn resolve<'a>(&'a self, value: &'a Value) -> &'a Value {
        match value["$ref"].as_str() {
            Some(reference) => self.0.pointer(reference.trim_start_matches('#')).unwrap(),
            None => value,
        }
    }

    /// Checks that the document describes this answer of an operation: the problem type, the
    /// headers, and their values.
    fn has(&self, operation: &(Method, &str), answer: &Answer) {
        let described = &self.operation(operation)["responses"][answer.status.to_string()];
        let described = self.resolve(described);
        let schema = &described["content"]["application/problem+json"]["schema"];
        let alone = [schema.clone()];
        let schemas = schema["oneOf"].as_array().map_or(&alone[..], Vec::as_slice);
        let kind = answer.json()["type"].take();
        let is_it = |schema: &Value| self.resolve(schema)["properties"]["type"]["const"] == kind;
        assert!(schemas.iter().any(is_it), "{operation:?}: {answer:?}");

        let headers = described["headers"].as_object().unwrap();
        let is_described =
            |name: &str| headers.keys().any(|known| known.eq_ignore_ascii_case(name));
        for name in ["www-authenticate", "retry-after", "cache-control"] {
            let is_there = answer.headers.contains_key(name);
            assert!(!is_there || is_described(name), "{operation:?}: {name}");
        }
        for (name, header) in headers {
            let header = self.resolve(header);
            let Some(value) = answer.headers.get(name) else {
                assert_ne!(header["required"], true, "{operation:?}: {name}");
                continue;
            };
            if let Some(values) = header["schema"]["enum"].as_array() {
                let is_listed = values.contains(&value.to_str().unwrap().into());
                assert!(is_listed, "{operation:?}: {name}: {value:?}");
            }
        }
    }
}

#[tokio::test]
async fn description_with_secrets_names_roles_and_refusals() {
    let (_db, server) = serving_with_secrets().await;
    let server = server.with_secret(HOLDER);
    let description = Description::of(&server).await;
    let schemes = description.secrets().as_object().unwrap();
    let schemes: Vec<_> = schemes
        .values()
        .map(|one| (&one["type"], &one["scheme"]))
        .collect();
    assert_eq!(schemes, [(&json!("http"), &json!("bearer"))]);

    let known = format!("Bearer {HOLDER}");
    let unknown = "Bearer another-secret-of-holders";
    for operation in OF_HOLDERS.iter().chain(&OF_OPERATORS) {
        for headers in [&[][..], &[("Authorization", unknown)]] {
            let refused = asked(&server, operation, headers).await;
            refused.is_problem(401, "unauthorized");
            description.has(operation, &refused);
        }
    }
    for operation in &OF_OPERATORS {
        let security = &description.operation(operation)["security"];
        assert_eq!(security, &json!([{"secret": ["operator"]}]));
        let refused = asked(&server, operation, &[("Authorization", &known)]).await;
        refused.is_problem(403, "operators-only");
        description.has(operation, &refused);
    }
    for operation in &OF_HOLDERS {
        let security = &description.operation(operation)["security"];
        assert_eq!(security, &json!([{"secret": []}]));
        assert!(!description.has_status(operation, "403"), "{operation:?}");
        let host = [("Authorization", known.as_str()), ("Host", "locks.example")];
        let answer = asked(&server, operation, &host).await;
        assert!(![401, 403].contains(&answer.status), "{answer:?}");
    }
}

#[tokio::test]
async fn description_without_secrets_documents_refused_host_names() {
    let db = Postgres::fresh(2).await;
    let everybody = Served::start(&db.url, &["--allow-anyone"]).await;
    let this_machine = Served::start(&db.url, &[]).await;
    for (server, refuses) in [(this_machine, true), (everybody, false)] {
        let description = Description::of(&server).await;
        assert!(description.secrets().is_null(), "{}", description.secrets());
        for operation in OF_HOLDERS.iter().chain(&OF_OPERATORS) {
            assert!(description.operation(operation)["security"].is_null());
            assert!(!description.has_status(operation, "401"), "{operation:?}");
            let documents = description.has_status(operation, "403");
            assert_eq!(documents, refuses, "{operation:?}");
            let answer = asked(&server, operation, &[("Host", "locks.example")]).await;
            assert_eq!(answer.status == 403, refuses, "{answer:?}");
            if refuses {
                answer.is_problem(403, "operators-only");
                description.has(operation, &answer);
            }
        }
    }
}

#[tokio::test]
async fn description_documents_the_busy_answer() {
    let limits = "--max-requests 1 --max-waiting 1 --max-waiting-per-caller 1";
    let (db, server) = serving(&words(limits)).await;
    let description = Description::of(&server).await;
    let lease = server.post("/locks/sku-1", &json!({})).await.json();
    let request = server.request(Method::POST, "/locks/sku-1");
    let waiter = tokio::spawn(Answer::to(request.json(&json!({"wait_ms": 40_000}))));
    eventually!(
        "the request waits",
        db.number("SELECT count(*) FROM tower_fence.waiters").await == 1
    );
    // A renewal that waits for the rows of its resource is in progress, too.
    let mut conn = db.pool.acquire().await.unwrap();
    let lock = "BEGIN; SELECT FROM tower_fence.leases FOR UPDATE";
    Postgres::run(&mut conn, lock).await;
    let renewal = server.of_holder(Method::PUT, &lease);
    let renewal = tokio::spawn(Answer::to(renewal.json(&json!({}))));
    db.waits_for_lock().await;
    for operation in OF_HOLDERS.iter().chain(&OF_OPERATORS) {
        let refused = asked(&server, operation, &[]).await;
        refused.is_problem(503, "server-busy");
        description.has(operation, &refused);
    }
    waiter.abort();
    renewal.abort();
}
