//! The vectors of the header.

use std::collections::{BTreeMap, BTreeSet};

use axum::{
    Json, Router,
    body::Body,
    http::{Request, request::Parts},
    routing::any,
};
use proptest::{
    prelude::*,
    strategy::ValueTree,
    test_runner::{Config, TestRunner},
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
use crate::support::database::{Fresh, TestDatabase};

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
            panic!("{lines:?} was accepted");
        };
        let kind = Refusal::from(error).problem_type();
        assert_eq!(kind.name(), problem, "{lines:?}");
    }
}

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

/// Returns the admitted token, or the SQLSTATE of the refusal.
async fn admit_header(db: &Fresh<Postgres>, field: &str, resource: &str) -> Result<i64, String> {
    let admit = sqlx::query_scalar("SELECT tower_fence.admit_header($1, $2)").bind(field);
    let admitted: sqlx::Result<i64> = admit.bind(resource).fetch_one(&db.pool).await;
    let code = |error: &sqlx::Error| Some(error.as_database_error()?.code()?.into_owned());
    admitted.map_err(|error| code(&error).unwrap())
}

/// The call for a resource uses the token of that resource, and not that of another resource.
#[tokio::test]
async fn admit_header_takes_the_token_of_its_resource() {
    let db = Postgres::fresh(1).await;
    let admit = async |field: &str, resource: &str| admit_header(&db, field, resource).await;
    let both = r#"42;resource="a", 7;resource="b""#;
    assert_eq!(admit(both, "a").await, Ok(42));
    assert_eq!(admit(both, "b").await, Ok(7));
    assert_eq!(admit(both, "b").await, Err("TF412".into()));
    assert_eq!(admit(both, "c").await, Err("TF403".into()));
    assert_eq!(admit("8", "b").await, Ok(8));
    assert_eq!(admit(r#"9;resource="a""#, "b").await, Err("TF403".into()));
    for field in [
        "",
        "9, 10",
        r#"9, 10;resource="a""#,
        r#"9, 10;resource="b""#,
    ] {
        assert_eq!(admit(field, "b").await, Err("TF400".into()), "{field}");
    }
    assert_eq!(admit("9", "").await, Err("TF400".into()));
    let many = |count: usize| {
        let members: Vec<_> = (1..=count)
            .map(|n| format!(r#"{};resource="r{n}""#, 1000 + n))
            .collect();
        members.join(", ")
    };
    assert_eq!(admit(&many(100), "r100").await, Ok(1100));
    assert_eq!(admit(&many(101), "r101").await, Err("TF400".into()));
    let long = format!("7;a=\"{}\"", "x".repeat(65_536));
    assert_eq!(admit(&long, "r1").await, Err("TF400".into()));
}

/// Valid and slightly invalid parts of fields: members, parameters and separators.
#[rustfmt::skip]
const PARTS: &[&str] = &[
    "1", "0", "-5", "0042", "999999999999999", "1000000000000000", "1.5", "(1)", "?1", "@1", " ",
    "  ", "\t", ",", ", ", " ,\t", ";", "; ", " ;", ";\t", "=", "a", "*", "A", "a.b-c_d*",
    "resource", "key", "mac", "123456789012345", "1234567890123456", "-1", "--1", "1.", ".1",
    "1.1234", "1.123", "123456789012.1", "1234567890123.1", "@-7", "@1.5", "@", "?0", "?2",
    "tok/en:x", "to\"k", ":", "::", ":A:", ":AQ:", ":AQI:", ":AQI=:", ":AQ=:", ":AQ==:", ":AQ===:",
    ":AQIDBA:", ":AQIDBA==:", ":A=I=:", ":=:", ":====:", ":AQID====:", ":A-_=:", ":AR==:", "\"\"",
    "\"q\"", "\"a b\"", "\"a\\\"b\\\\\"", "\"a\\b\"", "\"é\"", "\"", "%\"\"", "%\"q\"",
    "%\"%c3%a9\"", "%\"%C3%A9\"", "%\"%ff\"", "%\"%c3\"", "%\"%00\"", "%\"%7f\"", "%\"%c2%85\"",
    "%\"%c0%80\"", "%\"%e0%80%80\"", "%\"%e0%a0%80\"", "%\"%ed%a0%80\"", "%\"%ed%9f%bf\"",
    "%\"%f0%8f%bf%bf\"", "%\"%f0%90%80%80\"", "%\"%f4%8f%bf%bf\"", "%\"%f4%90%80%80\"", "%\"%zz\"",
    "%\"%4\"", "%q", "\"k1\"", "\"k 1\"", "é", "\u{0}1", "\n",
];

/// The fields have each part in each position, or consist of random parts.
#[tokio::test]
async fn sql_and_the_crate_read_odd_fields_alike() {
    let db = Postgres::fresh(1).await;
    let mut fields = BTreeSet::new();
    for part in PARTS {
        for (before, after) in [
            ("", ""),
            ("1", ""),
            ("1;a=", ""),
            ("1;a=", ";b"),
            ("1;a=", ", 2"),
            ("1;", "=1"),
            ("1;", ""),
            ("1;resource=", ""),
            ("1;key=", ""),
            ("1;mac=", ""),
            ("1;resource=", ";resource=\"q\""),
            ("1;resource=\"q\";resource=", ""),
            ("1;resource=\"q\", 2;resource=", ""),
            ("1;key=", ";key=\"k\""),
            ("1", "2"),
            ("1", ";resource=\"q\""),
        ] {
            fields.insert(format!("{before}{part}{after}"));
        }
    }
    let mut runner = TestRunner::new(Config::default());
    let parts = prop::collection::vec(prop::sample::select(PARTS), 1..7);
    let parameters = prop::collection::vec(
        ("(resource|key|mac|a)", prop::sample::select(PARTS))
            .prop_map(|(name, value)| format!(";{name}={value}")),
        0..5,
    );
    for _ in 0..2_000 {
        fields.insert(parts.new_tree(&mut runner).unwrap().current().concat());
        let parameters = parameters.new_tree(&mut runner).unwrap().current();
        fields.insert(format!("7{}", parameters.concat()));
    }
    // Neither a text in Postgres nor a field of HTTP can contain this character.
    fields.retain(|field| !field.contains('\0'));
    db.execute(
        "CREATE FUNCTION read_field(field text) RETURNS jsonb LANGUAGE plpgsql AS $$ BEGIN \
             RETURN (SELECT coalesce(jsonb_agg(jsonb_build_array(h.token, h.resource)), '[]') \
                 FROM tower_fence.header_tokens(field) AS h); \
         EXCEPTION WHEN SQLSTATE 'TF400' THEN RETURN NULL; END $$",
    )
    .await;
    let fields = Vec::from_iter(fields);
    let read: Vec<Option<String>> = sqlx::query_scalar(
        "SELECT read_field(f.field)::text FROM unnest($1) WITH ORDINALITY AS f (field, place) ORDER BY f.place",
    )
    .bind(&fields)
    .fetch_all(&db.pool)
    .await
    .unwrap();
    let mut valid = 0;
    for (field, in_sql) in fields.iter().zip(read) {
        let in_sql: Option<Value> = in_sql.map(|read| serde_json::from_str(&read).unwrap());
        let in_rust = header::parse([field]).ok().map(|tokens| {
            let pair = |token: &FencingToken| {
                let resource = token.resource.as_ref().map(Resource::as_str);
                serde_json::json!([token.token, resource])
            };
            Value::from_iter(tokens.iter().map(pair))
        });
        assert_eq!(in_sql, in_rust, "{field:?}");
        valid += usize::from(in_rust.is_some());
    }
    let all = fields.len();
    assert!(valid > 100 && all > 10 * valid / 9, "{valid} of {all}");
}

/// One call for each resource admits the same tokens as the layer. A call cannot refuse tokens for
/// resources outside the request, because it does not know the other resources of the request.
#[tokio::test]
async fn admit_header_agrees_with_the_layer_on_requests() {
    for vector in vectors::<HeaderVectors>("header.json").requests {
        let db = Postgres::fresh(1).await;
        let named: BTreeSet<_> = vector.resources.iter().collect();
        let field = vector.lines.join(", ");
        let foreign = header::parse(&vector.lines).unwrap().iter().any(|token| {
            let resource = token.resource.as_ref().map(Resource::to_string);
            resource.is_some_and(|resource| !named.contains(&resource))
        });
        let mut codes = vec![];
        let mut tokens = BTreeMap::new();
        for resource in named {
            match admit_header(&db, &field, resource).await {
                Ok(token) => _ = tokens.insert(resource.clone(), token),
                Err(code) => codes.push(code),
            }
        }
        let context = format!("{field:?} for {:?}", vector.resources);
        match vector.problem.as_deref() {
            None => assert_eq!((Some(tokens), codes.len()), (vector.tokens, 0), "{context}"),
            Some(_) if foreign => {}
            Some("token-required") if !vector.lines.concat().is_empty() => {
                assert_eq!(codes, ["TF403"], "{context}")
            }
            Some(_) => assert!(
                !codes.is_empty() && codes.iter().all(|code| code == "TF400"),
                "{context}: {codes:?}"
            ),
        }
    }
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
            _ => panic!("a vector needs either tokens or a problem: {context}"),
        }
    }
}
