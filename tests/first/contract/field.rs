//! The vectors of the header.

use std::collections::BTreeMap;

use axum::{
    Json, Router,
    body::Body,
    http::{Request, request::Parts},
    routing::any,
};
use serde::Deserialize;
use serde_json::{Map, Value};
use sqlx::Sqlite;
use tower::ServiceExt;
use tower_fence::{
    AllAdmitted, FenceLayer, InvalidResource, Resource,
    header::{self, FencingToken},
    layer::Rejection,
    token_keys::KeyId,
};

use super::{json, problem, resource, vectors};
use crate::support::database::TestDatabase;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct HeaderVectors {
    #[serde(rename = "description")]
    _description: String,
    valid: Vec<ValidHeader>,
    invalid: Vec<InvalidHeader>,
    requests: Vec<RequestHeader>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ValidHeader {
    lines: Vec<String>,
    tokens: Vec<Member>,
}

#[derive(Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Member {
    token: i64,
    resource: Option<String>,
    key: Option<String>,
    mac: Option<String>,
}

impl From<&FencingToken> for Member {
    fn from(token: &FencingToken) -> Self {
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        Self {
            token: token.token.get(),
            resource: token.resource.as_ref().map(Resource::to_string),
            key: token.key.as_ref().map(KeyId::to_string),
            mac: token.mac.as_deref().map(hex),
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct InvalidHeader {
    lines: Vec<String>,
    problem: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RequestHeader {
    #[serde(rename = "comment")]
    _comment: Option<String>,
    resources: Vec<String>,
    lines: Vec<String>,
    tokens: Option<BTreeMap<String, i64>>,
    problem: Option<String>,
    #[serde(default)]
    members: Map<String, Value>,
}

#[test]
fn the_field_is_parsed() {
    let HeaderVectors { valid, invalid, .. } = vectors("header.json");
    for ValidHeader { lines, tokens } in &valid {
        let parsed = header::parse(lines).unwrap_or_else(|error| panic!("{lines:?}: {error}"));
        let members: Vec<_> = parsed.iter().map(Member::from).collect();
        assert_eq!(members, *tokens, "{lines:?}");
        let again = header::parse([header::format(&parsed)]).unwrap();
        assert_eq!(again, parsed, "{lines:?}");
    }
    for InvalidHeader { lines, problem } in &invalid {
        let Err(error) = header::parse(lines) else {
            panic!("{lines:?} was taken");
        };
        let kind = Rejection::from(error).problem_type();
        assert_eq!(kind.name(), problem, "{lines:?}");
    }
}

#[tokio::test]
async fn each_resource_of_a_request_finds_its_token() {
    for vector in vectors::<HeaderVectors>("header.json").requests {
        let db = Sqlite::fresh(1).await;
        let named: Vec<_> = vector.resources.iter().map(|name| resource(name)).collect();
        let names = move |_: &Parts| Ok::<_, InvalidResource>(named.clone());
        let admitted = |all: AllAdmitted| async move {
            let tokens = all
                .iter()
                .map(|one| (one.resource.to_string(), one.token.get()));
            Json(tokens.collect::<BTreeMap<_, _>>())
        };
        let app: Router = Router::new()
            .route("/", any(admitted))
            .route_layer(FenceLayer::new(db.fence(), names));
        let mut request = Request::post("/");
        for line in &vector.lines {
            request = request.header("Fencing-Token", line);
        }
        let request = request.body(Body::empty()).unwrap();
        let response = app.oneshot(request).await.unwrap();
        let context = format!("{:?} for {:?}", vector.lines, vector.resources);
        match (vector.tokens, vector.problem) {
            (Some(tokens), None) => {
                assert_eq!(response.status(), 200, "{context}");
                assert_eq!(json(response).await, serde_json::json!(tokens), "{context}");
            }
            (None, Some(name)) => {
                let problem = problem(response, &name, &context).await;
                for (member, value) in vector.members {
                    assert_eq!(problem[&member], value, "{context}");
                }
            }
            _ => panic!("either tokens or a problem: {context}"),
        }
    }
}
