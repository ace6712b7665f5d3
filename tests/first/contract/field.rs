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
use sqlx::{Postgres, Sqlite};
use tower::ServiceExt;
use tower_fence::{
    Admitted, FenceLayer, InvalidResource, Resource,
    header::{self, FencingToken},
    layer::Refusal,
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
        let kind = Refusal::from(error).problem_type();
        assert_eq!(kind.name(), problem, "{lines:?}");
    }
}

/// The functions of SQL read the field as the crate does.
#[tokio::test]
async fn the_field_is_parsed_in_sql() {
    let db = Postgres::fresh(1).await;
    let read = async |lines: &[String]| {
        sqlx::query_as("SELECT token, resource FROM tower_fence.header_tokens($1)")
            .bind(lines.join(", "))
            .fetch_all(&db.pool)
            .await
    };
    let HeaderVectors { valid, invalid, .. } = vectors("header.json");
    for ValidHeader { lines, tokens } in &valid {
        let members: Vec<(i64, Option<String>)> = read(lines)
            .await
            .unwrap_or_else(|error| panic!("{lines:?}: {error}"));
        let expected: Vec<_> = tokens
            .iter()
            .map(|member| (member.token, member.resource.clone()))
            .collect();
        assert_eq!(members, expected, "{lines:?}");
    }
    for InvalidHeader { lines, .. } in &invalid {
        let refused = read(lines).await.map(drop).unwrap_err();
        let code = refused.as_database_error().and_then(|error| error.code());
        assert_eq!(code.as_deref(), Some("TF400"), "{lines:?}");
    }
}

/// Each resource gets its own token, and no other one's.
#[tokio::test]
async fn admit_header_takes_the_token_of_its_resource() {
    let db = Postgres::fresh(1).await;
    let admit = async |field: &str, resource: &str| {
        let admitted: sqlx::Result<i64> =
            sqlx::query_scalar("SELECT tower_fence.admit_header($1, $2)")
                .bind(field)
                .bind(resource)
                .fetch_one(&db.pool)
                .await;
        admitted.map_err(|error| match error.as_database_error() {
            Some(error) => error.code().unwrap().into_owned(),
            None => panic!("{error}"),
        })
    };
    let both = r#"42;resource="a", 7;resource="b""#;
    assert_eq!(admit(both, "a").await, Ok(42));
    assert_eq!(admit(both, "b").await, Ok(7));
    assert_eq!(admit(both, "b").await, Err("TF412".into()));
    assert_eq!(admit(both, "c").await, Err("TF403".into()));
    assert_eq!(admit("8", "b").await, Ok(8));
    assert_eq!(admit(r#"9;resource="a""#, "b").await, Err("TF403".into()));
    // It is not known which of the two the token without a name is for.
    assert_eq!(
        admit(r#"9, 10;resource="a""#, "b").await,
        Err("TF403".into())
    );
    assert_eq!(admit("", "b").await, Err("TF400".into()));
    assert_eq!(admit("9", "").await, Err("TF400".into()));
    let many = |count: usize| {
        let members: Vec<_> = (1..=count)
            .map(|n| format!(r#"{};resource="r{n}""#, 1000 + n))
            .collect();
        members.join(", ")
    };
    assert_eq!(admit(&many(100), "r100").await, Ok(1100));
    assert_eq!(admit(&many(101), "r101").await, Err("TF400".into()));
}

#[tokio::test]
async fn each_resource_of_a_request_finds_its_token() {
    for vector in vectors::<HeaderVectors>("header.json").requests {
        let db = Sqlite::fresh(1).await;
        let named: Vec<_> = vector.resources.iter().map(|name| resource(name)).collect();
        let names = move |_: &Parts| Ok::<_, InvalidResource>(named.clone());
        let admitted = |all: Admitted| async move {
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
