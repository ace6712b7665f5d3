//! OpenAPI 3.1 document of the issuer's routes: the file `openapi.json`, with the limits of this
//! issuer. The file is written by hand, and tests compare it with the responses of the routes.

use std::{mem, sync::Arc, time::Duration};

use axum::{
    Json, Router,
    extract::{OriginalUri, Request},
    middleware::{self, Next},
    response::{IntoResponse, Response},
};
use http::Method;
use serde_json::Value;

use super::{Issuer, LOCK_DELAY_LIMIT};
use crate::{
    lease::{LeaseAdmin, Leases},
    time::whole_ms,
};

const DOCUMENT: &str = include_str!("openapi.json");
/// Path at which a router serves its document.
const PATH: &str = "/openapi.json";
/// Routes for operators, and the schemas that only these routes use.
const OF_OPERATORS: [&str; 6] = [
    "/paths/~1",
    "/paths/~1{resource}~1break",
    "/components/schemas/BreakLease",
    "/components/schemas/HeldLease",
    "/components/schemas/LeasePage",
    "/components/schemas/ListedLease",
];

impl<L: Leases> Issuer<L> {
    /// Returns the OpenAPI 3.1 document of the [`router`](Self::router), with the limits of this
    /// issuer.
    ///
    /// The paths are those of a router that is not nested: `/{resource}`. JSON Schema counts
    /// characters, but resources and owners are limited in bytes. The descriptions of these members
    /// state the limits, and the response to a longer value is 422.
    #[must_use]
    pub fn openapi(&self) -> Value {
        let mut document = self.document();
        for pointer in OF_OPERATORS {
            let (parent, name) = pointer.rsplit_once('/').unwrap_or_default();
            let parent = document.pointer_mut(parent).and_then(Value::as_object_mut);
            if let Some(parent) = parent {
                parent.remove(&name.replace("~1", "/"));
            }
        }
        document
    }

    /// Returns the OpenAPI 3.1 document of the [`operator_router`](Self::operator_router).
    #[must_use]
    pub fn operator_openapi(&self) -> Value
    where
        L: LeaseAdmin,
    {
        self.document()
    }

    /// Serves this document at `GET /openapi.json`, below the path at which the router is nested.
    /// Default: no document is served.
    ///
    /// In the served document, each path of `document` is prefixed with the path at which the
    /// router is nested. A resource named `openapi.json` can be leased like any other. Its state is
    /// at `GET /openapi%2Ejson`.
    ///
    /// ```
    /// use serde_json::json;
    /// use tower_fence::{issuer::Issuer, lease::Leases};
    ///
    /// fn described<L: Leases>(issuer: Issuer<L>) -> Issuer<L> {
    ///     let mut document = issuer.openapi();
    ///     // Add what the application requires in front of the router, such as a secret.
    ///     document["components"]["securitySchemes"]["secret"] =
    ///         json!({ "type": "http", "scheme": "bearer" });
    ///     document["security"] = json!([{ "secret": [] }]);
    ///     issuer.serve_openapi(document)
    /// }
    /// ```
    #[must_use]
    pub fn serve_openapi(mut self, document: Value) -> Self {
        self.document = Some(Arc::new(document));
        self
    }

    fn document(&self) -> Value {
        // A test checks that the file is valid JSON, so parsing does not fail.
        let mut document: Value = serde_json::from_str(DOCUMENT).unwrap_or_default();
        document["info"]["version"] = env!("CARGO_PKG_VERSION").into();
        let mut limit = |schema: &str, member: &str, from: Duration, to: Duration, default| {
            let member = &mut document["components"]["schemas"][schema]["properties"][member];
            member["minimum"] = whole_ms(from).into();
            member["maximum"] = whole_ms(to).into();
            member["default"] = whole_ms(default).into();
        };
        let (shortest, longest) = (*self.ttl_limits.start(), *self.ttl_limits.end());
        let (zero, ttl) = (Duration::ZERO, self.default_ttl());
        limit("AcquireLease", "ttl_ms", shortest, longest, ttl);
        limit("RenewLease", "ttl_ms", shortest, longest, ttl);
        limit("AcquireLease", "wait_ms", zero, self.wait_limit, zero);
        limit(
            "AcquireLease",
            "lock_delay_ms",
            zero,
            LOCK_DELAY_LIMIT,
            zero,
        );
        document
    }
}

/// Adds the document's path to a router. The path takes precedence over `GET /{resource}`.
pub(super) fn serve<S: Clone + Send + Sync + 'static>(
    router: Router<S>,
    document: Option<Arc<Value>>,
) -> Router<S> {
    let Some(document) = document else {
        return router;
    };
    router.route_layer(middleware::from_fn(move |request: Request, next: Next| {
        let document = Arc::clone(&document);
        async move {
            let reads = matches!(*request.method(), Method::GET | Method::HEAD);
            if !reads || request.uri().path() != PATH {
                return next.run(request).await;
            }
            let path = match request.extensions().get() {
                Some(OriginalUri(uri)) => uri.path(),
                None => PATH,
            };
            nested(&document, path.strip_suffix(PATH).unwrap_or_default())
        }
    }))
}

/// Returns a response that contains the document, with all paths below `prefix`.
fn nested(document: &Value, prefix: &str) -> Response {
    let mut document = document.clone();
    if let Some(paths) = document["paths"].as_object_mut() {
        let before = mem::take(paths).into_iter();
        let nested = before.map(|(path, item)| match path.as_str() {
            "/" if !prefix.is_empty() => (prefix.to_owned(), item),
            path => (format!("{prefix}{path}"), item),
        });
        paths.extend(nested);
    }
    Json(document).into_response()
}

#[cfg(all(test, feature = "memory", feature = "sqlite"))]
mod tests {
    use axum::body::{Body, to_bytes};
    use tower::ServiceExt;

    use super::*;
    use crate::{
        body::BodyError,
        fence::Fence,
        issuer::{
            Rejection, operators,
            request::{BODY_LIMIT_BYTES, BODY_TIMEOUT},
        },
        lease::{LeaseError, MemoryLeases},
        problem::Problem,
        token::Resource,
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

    fn paths(document: &Value) -> Vec<&str> {
        let paths = document["paths"].as_object().unwrap();
        paths.keys().map(String::as_str).collect()
    }

    #[tokio::test]
    async fn document_has_the_limits_of_its_issuer() {
        let seconds = Duration::from_secs;
        let issuer = issuer().await;
        let whole: Value = serde_json::from_str(DOCUMENT).unwrap();
        assert_eq!(
            issuer.operator_openapi(),
            whole,
            "the defaults are in the file"
        );
        let issuer = issuer
            .ttl_limits(seconds(1)..=seconds(5))
            .wait_limit(seconds(2));
        let schemas = &issuer.openapi()["components"]["schemas"];
        for body in ["AcquireLease", "RenewLease"] {
            let ttl = &schemas[body]["properties"]["ttl_ms"];
            let limits = [&ttl["minimum"], &ttl["maximum"], &ttl["default"]];
            assert_eq!(limits, [1_000, 5_000, 5_000]);
        }
        let wait = &schemas["AcquireLease"]["properties"]["wait_ms"];
        assert_eq!([&wait["minimum"], &wait["maximum"]], [0, 2_000]);
        let limit = &whole["paths"]["/"]["get"]["parameters"][0]["schema"];
        let limits = [&limit["minimum"], &limit["maximum"], &limit["default"]];
        let (from, to) = (operators::LIMITS.start(), operators::LIMITS.end());
        assert_eq!(limits, [*from, *to, operators::LIMIT]);
        let body = &whole["paths"]["/{resource}"]["post"]["requestBody"]["description"];
        let timeout_s = BODY_TIMEOUT.as_secs();
        let limits = format!("At most {BODY_LIMIT_BYTES} bytes, which arrive within {timeout_s} s");
        assert!(body.as_str().unwrap().starts_with(&limits));
    }

    #[tokio::test]
    async fn document_has_the_paths_of_its_mount_point() {
        let issuer = issuer().await;
        let document = issuer.operator_openapi();
        let operators = issuer.clone().serve_openapi(document.clone());
        let holders = issuer.openapi();
        assert_eq!(paths(&holders), ["/{resource}"]);
        let text = holders.to_string();
        for schema in ["BreakLease", "HeldLease", "LeasePage", "ListedLease"] {
            assert!(!text.contains(schema), "{schema}");
        }
        let app = Router::new()
            .nest("/a/locks", operators.operator_router())
            .nest("/b", issuer.serve_openapi(holders).router());
        let (status, served) = call(&app, "GET", "/a/locks/openapi.json").await;
        assert_eq!(status, 200);
        let of_operators = [
            "/a/locks",
            "/a/locks/{resource}",
            "/a/locks/{resource}/break",
        ];
        assert_eq!(paths(&served), of_operators);
        assert_eq!(served["components"], document["components"]);
        let (_, served) = call(&app, "GET", "/b/openapi.json").await;
        assert_eq!(paths(&served), ["/b/{resource}"]);
    }

    #[tokio::test]
    async fn resource_named_like_the_document_is_leased_like_any_other() {
        let issuer = issuer().await;
        let document = issuer.openapi();
        let app: Router = issuer.clone().serve_openapi(document).router();
        assert_eq!(call(&app, "POST", PATH).await.0, 201);
        let (_, state) = call(&app, "GET", "/openapi%2Ejson").await;
        assert_eq!(
            (&state["resource"], &state["held"]),
            (&"openapi.json".into(), &true.into())
        );
        let (_, state) = call(&issuer.router(), "GET", PATH).await;
        assert_eq!(state["held"], true, "no document is served by default");
    }

    #[tokio::test]
    async fn document_has_each_operation_and_no_other() {
        let issuer = issuer().await;
        let document = issuer.operator_openapi();
        let app: Router = issuer.operator_router();
        for (path, item) in document["paths"].as_object().unwrap() {
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
        let document: Value = serde_json::from_str(DOCUMENT).unwrap();
        let schemas = document["components"]["schemas"].as_object().unwrap();
        let resource = Resource::new("a").unwrap();
        let errors = [
            LeaseError::Held {
                resource: resource.clone(),
                retry_after: BODY_TIMEOUT,
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
            LeaseError::misconfigured(std::io::Error::other("no table")),
        ];
        let limit_bytes = BODY_LIMIT_BYTES;
        let others = [
            Rejection::UnsupportedMediaType,
            Rejection::Body(BodyError::TooLarge { limit_bytes }),
            Rejection::Body(BodyError::OuterLimit),
            Rejection::Body(BodyError::TimedOut {
                within: BODY_TIMEOUT,
            }),
            Rejection::Body(BodyError::Malformed),
        ];
        for rejection in errors.map(Rejection::Lease).into_iter().chain(others) {
            let problem = serde_json::to_value(Problem::from(&rejection)).unwrap();
            let problem = problem.as_object().unwrap();
            let mut all = schemas.values();
            let schema = all.find(|one| one["properties"]["type"]["const"] == problem["type"]);
            let schema = schema.unwrap_or_else(|| panic!("no schema: {problem:?}"));
            let known = schema["properties"].as_object().unwrap();
            assert!(
                problem.keys().all(|name| known.contains_key(name)),
                "{problem:?}"
            );
            let mut required = schema["required"].as_array().unwrap().iter();
            let has = |name: &Value| problem.contains_key(name.as_str().unwrap());
            assert!(required.all(has), "{problem:?}");
            assert_eq!(problem["status"], known["status"]["const"]);
            assert_eq!(problem["title"], known["title"]["examples"][0]);
        }
    }
}
