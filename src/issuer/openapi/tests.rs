use axum::{
    body::{Body, to_bytes},
    extract::Request,
};
use serde_json::Value;
use tower::ServiceExt;

use super::{served::DOCUMENT, *};
use crate::{
    fence::Fence,
    issuer::{
        Rejection,
        request::{BODY_LIMIT_BYTES, BODY_WAIT},
    },
    lease::{LeaseError, MemoryLeases},
    problem::Problem,
    token::Resource,
    token_keys::TokenKeys,
};

async fn issuer() -> Issuer<MemoryLeases> {
    let pool = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1);
    let fence = Fence::new(pool.connect("sqlite::memory:").await.unwrap());
    fence.migrate().await.unwrap();
    Issuer::new(MemoryLeases::new(fence))
}

async fn call(app: &Router, method: &str, path: &str) -> (u16, Value) {
    let request = Request::builder().method(method).uri(path);
    let request = request.body(Body::empty()).unwrap();
    let answer = app.clone().oneshot(request).await.unwrap();
    let status = answer.status().as_u16();
    let body = to_bytes(answer.into_body(), usize::MAX).await.unwrap();
    (status, serde_json::from_slice(&body).unwrap_or_default())
}

#[tokio::test]
async fn limits_are_those_of_the_issuer() {
    let seconds = Duration::from_secs;
    let issuer = issuer().await;
    let issuer = issuer
        .ttl_limits(seconds(1)..=seconds(5))
        .wait_limit(seconds(2));
    let api = serde_json::to_value(issuer.openapi()).unwrap();
    let schemas = &api["components"]["schemas"];
    for body in ["AcquireLease", "RenewLease"] {
        let ttl = &schemas[body]["properties"]["ttl_ms"];
        assert_eq!(
            [&ttl["minimum"], &ttl["maximum"], &ttl["default"]],
            [1_000, 5_000, 5_000]
        );
        assert_eq!(schemas[body]["additionalProperties"], false);
    }
    let wait = &schemas["AcquireLease"]["properties"]["wait_ms"];
    assert_eq!([&wait["minimum"], &wait["maximum"]], [0, 2_000]);
    let token = &schemas["Lease"]["properties"]["fencing_token"];
    assert!(token["pattern"].is_string());
}

#[tokio::test]
async fn the_document_has_the_paths_of_where_it_is_served() {
    let issuer = issuer().await.serve_openapi();
    let api = serde_json::to_value(issuer.operator_openapi()).unwrap();
    let paths = |api: &Value| {
        let paths = api["paths"].as_object().unwrap();
        paths.keys().cloned().collect::<Vec<_>>()
    };
    assert_eq!(paths(&api), ["/", "/{resource}", "/{resource}/break"]);
    let app = Router::new()
        .nest("/a/locks", issuer.clone().operator_router())
        .nest("/b", issuer.router());
    let (status, served) = call(&app, "GET", "/a/locks/openapi.json").await;
    assert_eq!(status, 200);
    assert_eq!(
        paths(&served),
        [
            "/a/locks",
            "/a/locks/{resource}",
            "/a/locks/{resource}/break"
        ]
    );
    assert_eq!(served["components"], api["components"]);
    let (_, served) = call(&app, "GET", "/b/openapi.json").await;
    assert_eq!(paths(&served), ["/b/{resource}"]);
}

#[tokio::test]
async fn each_document_has_the_amendments_in_their_order() {
    let title = |api: &mut OpenApi| api.info.title += " of a shop";
    let issuer = issuer().await.serve_openapi();
    let issuer = issuer
        .amend_openapi(|api| api.info.title = "The leases".into())
        .amend_openapi(title);
    let expected = "The leases of a shop";
    assert_eq!(issuer.openapi().info.title, expected);
    assert_eq!(issuer.operator_openapi().info.title, expected);
    let keys: TokenKeys = format!("k1:{}", "5".repeat(64)).parse().unwrap();
    let signed = issuer.clone().sign_with(keys).operator_router();
    let nested = issuer.clone().openapi_router::<()>();
    assert_eq!(nested.get_openapi().info.title, expected);
    for app in [issuer.clone().router(), issuer.operator_router(), signed] {
        let (_, served) = call(&app, "GET", DOCUMENT).await;
        assert_eq!(served["info"]["title"], expected);
    }
}

#[tokio::test]
async fn a_resource_named_as_the_document_is_leased_and_seen_as_any_other() {
    let issuer = issuer().await;
    let app: Router = issuer.clone().serve_openapi().router();
    assert_eq!(call(&app, "POST", DOCUMENT).await.0, 201);
    let (_, state) = call(&app, "GET", "/openapi%2Ejson").await;
    assert_eq!(state["resource"], "openapi.json");
    assert_eq!(state["held"], true);
    // Without `serve_openapi`, the router serves no document.
    let (_, state) = call(&issuer.router(), "GET", DOCUMENT).await;
    assert_eq!(state["held"], true);
}

#[tokio::test]
async fn each_operation_has_its_route_and_there_are_no_others() {
    let issuer = issuer().await;
    let api = serde_json::to_value(issuer.operator_openapi()).unwrap();
    let app: Router = issuer.operator_router();
    for (path, item) in api["paths"].as_object().unwrap() {
        for method in ["get", "put", "post", "delete", "patch", "trace", "query"] {
            let path = path.replace("{resource}", "a");
            let (status, _) = call(&app, &method.to_uppercase(), &path).await;
            let documented = item.get(method);
            assert_eq!(status == 405, documented.is_none(), "{method} {path}");
            if let Some(operation) = documented {
                let answers = &operation["responses"];
                assert!(answers.get(status.to_string()).is_some(), "{method} {path}");
            }
        }
    }
}

#[test]
fn each_refusal_has_the_members_of_its_schema() {
    let resource = Resource::new("a").unwrap();
    let limit_bytes = BODY_LIMIT_BYTES;
    let errors = [
        LeaseError::Held {
            resource: resource.clone(),
            retry_after: BODY_WAIT,
        },
        LeaseError::Lost {
            resource: resource.clone(),
        },
        LeaseError::TooManyWaiters {
            resource: resource.clone(),
        },
        LeaseError::Exhausted {
            resource,
            max_token: 7,
        },
        LeaseError::Invalid {
            field: "ttl_ms".into(),
            detail: String::new(),
        },
        LeaseError::unavailable(std::io::Error::other("down")),
    ];
    let others = [
        Rejection::InvalidRequest {
            field: "a".into(),
            why: String::new(),
        },
        Rejection::UnsupportedMediaType,
        Rejection::Body(crate::body::BodyError::TooLarge { limit_bytes }),
        Rejection::Body(crate::body::BodyError::TimedOut { within: BODY_WAIT }),
        Rejection::Body(crate::body::BodyError::Malformed),
    ];
    let refused = errors.map(Rejection::Lease).into_iter().chain(others);
    for rejection in refused {
        let problem = Problem::from(&rejection);
        assert!(crate::openapi::fits(&problem), "{problem:?}");
    }
}
