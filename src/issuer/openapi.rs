//! The issuer's routes as an OpenAPI document: the handlers say what they are, and here their limits, headers, refusals
//! and links are added.

use std::{mem, sync::Arc, time::Duration};

use axum::{
    Json, Router,
    extract::{OriginalUri, Request},
    middleware::{self, Next},
    response::{IntoResponse, Response},
};
use http::{Method, header::CACHE_CONTROL};
use utoipa::{
    OpenApi as _, PartialSchema,
    openapi::{
        Info, Object, OpenApi, RefOr, Required, Schema,
        link::Link,
        path::{Operation, Parameter, ParameterBuilder, ParameterIn},
    },
};
use utoipa_axum::router::OpenApiRouter;

use super::{
    Issuer, LOCK_DELAY_LIMIT, operators,
    request::{BODY_LIMIT_BYTES, BODY_WAIT},
};
use crate::{
    header::FENCING_TOKEN,
    lease::{LeaseId, Leases, Operate, time::whole_ms},
    openapi::{
        add_schemas, answer_header, answer_problems, cache_control, fencing_token, operations,
        required, take_header, text,
    },
    problem::ProblemType,
    token::Resource,
    wire::LEASE_ID,
};

/// Where the router serves its document.
const DOCUMENT: &str = "/openapi.json";

#[derive(utoipa::OpenApi)]
#[openapi(paths(super::acquire, super::renew, super::release, super::inspect))]
struct OfHolders;

#[derive(utoipa::OpenApi)]
#[openapi(paths(operators::list, operators::break_lease))]
struct OfOperators;

impl<L: Leases> Issuer<L> {
    /// The document of the [`router`](Self::router), with these limits. Its paths are those of a router that is not nested:
    /// `OpenApi::nest` adds a prefix.
    #[must_use]
    pub fn openapi(&self) -> OpenApi {
        self.complete(OfHolders::openapi())
    }

    /// The document of the [`operator_router`](Self::operator_router).
    #[must_use]
    pub fn operator_openapi(&self) -> OpenApi
    where
        L: Operate,
    {
        self.complete(OfHolders::openapi().merge_from(OfOperators::openapi()))
    }

    /// The [`router`](Self::router) and its document, to be nested in an application's own.
    pub fn openapi_router<S: Clone + Send + Sync + 'static>(self) -> OpenApiRouter<S> {
        let api = self.openapi();
        with_document(self.router(), api)
    }

    /// The [`operator_router`](Self::operator_router) and its document.
    pub fn operator_openapi_router<S: Clone + Send + Sync + 'static>(self) -> OpenApiRouter<S>
    where
        L: Operate,
    {
        let api = self.operator_openapi();
        with_document(self.operator_router(), api)
    }

    /// Lets the router answer `GET /openapi.json` with its document, whose paths begin with that at which the router is
    /// nested. Default: no.
    ///
    /// A resource named `openapi.json` can be leased as any other; `GET` has its state at `/openapi%2Ejson`.
    #[must_use]
    pub const fn serve_openapi(mut self) -> Self {
        self.serves_openapi = true;
        self
    }

    /// Adds what the handlers do not say themselves.
    fn complete(&self, mut api: OpenApi) -> OpenApi {
        api.info = Info::new("Leases", env!("CARGO_PKG_VERSION"));
        api.info.description = Some("Leases, each with a fencing token.".into());
        let mut all = Vec::new();
        for (_, operation) in operations(&mut api) {
            let id = operation.operation_id.clone().unwrap_or_default();
            take_parameters(operation, &id);
            answer_header(operation, &CACHE_CONTROL, &cache_control());
            add_links(operation, &id);
            let problems = problems(&id);
            answer_problems(operation, problems);
            all.extend_from_slice(problems);
            if let Some(RefOr::T(body)) = &mut operation.request_body {
                let seconds = BODY_WAIT.as_secs();
                body.required = Some(Required::False);
                body.description = Some(format!(
                    "At most {BODY_LIMIT_BYTES} bytes, which arrive within {seconds} s, of `application/json` or another \
                     type that ends with `+json`."
                ));
            }
        }
        add_schemas(&mut api, &all);
        self.set_limits(&mut api);
        api
    }

    fn set_limits(&self, api: &mut OpenApi) {
        let (shortest, longest) = (*self.ttl_limits.start(), *self.ttl_limits.end());
        for body in ["AcquireLease", "RenewLease"] {
            limit_ms(api, body, "ttl_ms", shortest, longest, self.default_ttl());
        }
        let zero = Duration::ZERO;
        limit_ms(api, "AcquireLease", "wait_ms", zero, self.wait_limit, zero);
        limit_ms(
            api,
            "AcquireLease",
            "lock_delay_ms",
            zero,
            LOCK_DELAY_LIMIT,
            zero,
        );
        if let Some(value) = property(api, "Lease", "fencing_token") {
            *value = fencing_token();
        }
    }
}

fn with_document<S: Clone + Send + Sync + 'static>(
    router: Router<S>,
    api: OpenApi,
) -> OpenApiRouter<S> {
    let mut router = OpenApiRouter::from(router);
    *router.get_openapi_mut() = api;
    router
}

/// What an operation may be refused with.
fn problems(id: &str) -> &'static [ProblemType] {
    match id {
        "acquire_lease" => &[
            ProblemType::MalformedBody,
            ProblemType::BodyTimeout,
            ProblemType::LockHeld,
            ProblemType::FenceExhausted,
            ProblemType::BodyTooLarge,
            ProblemType::UnsupportedMediaType,
            ProblemType::InvalidRequest,
            ProblemType::TooManyWaiters,
            ProblemType::StoreUnavailable,
        ],
        "renew_lease" => &[
            ProblemType::MalformedBody,
            ProblemType::BodyTimeout,
            ProblemType::LeaseLost,
            ProblemType::FenceExhausted,
            ProblemType::BodyTooLarge,
            ProblemType::UnsupportedMediaType,
            ProblemType::InvalidRequest,
            ProblemType::StoreUnavailable,
        ],
        "release_lease" => &[
            ProblemType::LeaseLost,
            ProblemType::InvalidRequest,
            ProblemType::StoreUnavailable,
        ],
        "break_lease" => &[
            ProblemType::LeaseLost,
            ProblemType::UnsupportedMediaType,
            ProblemType::InvalidRequest,
            ProblemType::StoreUnavailable,
        ],
        _ => &[ProblemType::InvalidRequest, ProblemType::StoreUnavailable],
    }
}

fn take_parameters(operation: &mut Operation, id: &str) {
    let parameters = operation.parameters.get_or_insert_default();
    if id == "list_leases" {
        let limit = utoipa::openapi::ObjectBuilder::new()
            .schema_type(utoipa::openapi::Type::Integer)
            .minimum(Some(*operators::LIMITS.start()))
            .maximum(Some(*operators::LIMITS.end()))
            .default(Some(operators::LIMIT.into()))
            .description(Some("How many leases the page has at most."));
        let cursor = text("The `cursor` of the page before. Nothing else is one.");
        for (name, schema) in [("limit", limit.build()), ("cursor", cursor.build())] {
            parameters.push(parameter(name, ParameterIn::Query, Required::False, schema).into());
        }
        return;
    }
    let resource = object_of::<Resource>();
    parameters.push(parameter("resource", ParameterIn::Path, Required::True, resource).into());
    if matches!(id, "renew_lease" | "release_lease") {
        take_header(operation, &LEASE_ID, true, object_of::<LeaseId>());
    }
}

fn parameter(name: &str, place: ParameterIn, required: Required, schema: Object) -> Parameter {
    ParameterBuilder::new()
        .name(name)
        .parameter_in(place)
        .required(required)
        .description(schema.description.clone())
        .schema(Some(schema))
        .build()
}

/// Adds the headers and links of a success: which calls a lease leads to.
fn add_links(operation: &mut Operation, id: &str) {
    let leads_to: &[(&str, &str)] = match id {
        "acquire_lease" => {
            answer_header(operation, &FENCING_TOKEN, &required(fencing_token()));
            &[("Renew", "renew_lease"), ("Release", "release_lease")]
        }
        "renew_lease" => {
            answer_header(operation, &FENCING_TOKEN, &required(fencing_token()));
            &[("Renew", "renew_lease"), ("Release", "release_lease")]
        }
        _ => &[],
    };
    for answer in operation.responses.responses.values_mut() {
        let RefOr::T(answer) = answer else { continue };
        for &(name, operation_id) in leads_to {
            let link = Link::builder()
                .operation_id(operation_id)
                .parameter("resource", "$response.body#/resource")
                .parameter("Lease-Id", "$response.body#/lease_id");
            answer.links.insert(name.into(), link.build().into());
        }
        if id == "list_leases" {
            let link = Link::builder()
                .operation_id("list_leases")
                .parameter("cursor", "$response.body#/cursor");
            answer.links.insert("Next".into(), link.build().into());
        }
    }
}

/// The schema of a value.
fn object_of<T: PartialSchema>() -> Object {
    match T::schema() {
        RefOr::T(Schema::Object(object)) => object,
        _ => Object::default(),
    }
}

/// A property of a schema of the document.
fn property<'a>(api: &'a mut OpenApi, schema: &str, name: &str) -> Option<&'a mut Object> {
    let schemas = &mut api.components.as_mut()?.schemas;
    let RefOr::T(Schema::Object(schema)) = schemas.get_mut(schema)? else {
        return None;
    };
    match schema.properties.get_mut(name)? {
        RefOr::T(Schema::Object(property)) => Some(property),
        _ => None,
    }
}

/// Bounds a member that is a number of milliseconds.
fn limit_ms(
    api: &mut OpenApi,
    schema: &str,
    name: &str,
    from: Duration,
    to: Duration,
    default: Duration,
) {
    if let Some(member) = property(api, schema, name) {
        member.minimum = Some(whole_ms(from).into());
        member.maximum = Some(whole_ms(to).into());
        member.default = Some(whole_ms(default).into());
    }
}

/// Serves the document ahead of the state of the resource that is named as it is.
pub(super) fn serve<S: Clone + Send + Sync + 'static>(
    router: Router<S>,
    document: Option<OpenApi>,
) -> Router<S> {
    let Some(document) = document.map(Arc::new) else {
        return router;
    };
    router.route_layer(middleware::from_fn(move |request: Request, next: Next| {
        let document = Arc::clone(&document);
        async move {
            let reads = matches!(*request.method(), Method::GET | Method::HEAD);
            if !reads || request.uri().path() != DOCUMENT {
                return next.run(request).await;
            }
            answer(&document, request.extensions().get())
        }
    }))
}

/// The document, with the paths of where the router is nested.
fn answer(document: &OpenApi, uri: Option<&OriginalUri>) -> Response {
    let path = uri.map_or(DOCUMENT, |OriginalUri(uri)| uri.path());
    let prefix = path.strip_suffix(DOCUMENT).unwrap_or_default();
    let mut api = document.clone();
    let paths = mem::take(&mut api.paths.paths).into_iter();
    let nested = paths.map(|(path, item)| match path.as_str() {
        "/" if !prefix.is_empty() => (prefix.to_owned(), item),
        path => (format!("{prefix}{path}"), item),
    });
    api.paths.paths = nested.collect();
    Json(api).into_response()
}

#[cfg(all(test, feature = "embedded", feature = "sqlite"))]
mod tests {
    use axum::body::{Body, to_bytes};
    use serde_json::Value;
    use tower::ServiceExt;

    use super::*;
    use crate::{
        fence::Fence,
        issuer::Rejection,
        lease::{EmbeddedLeases, LeaseError},
        problem::Problem,
    };

    async fn issuer() -> Issuer<EmbeddedLeases> {
        let pool = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1);
        let fence = Fence::new(pool.connect("sqlite::memory:").await.unwrap());
        fence.migrate().await.unwrap();
        Issuer::new(EmbeddedLeases::new(fence))
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
    async fn a_resource_named_as_the_document_is_leased_and_seen_as_any_other() {
        let issuer = issuer().await;
        let app: Router = issuer.clone().serve_openapi().router();
        assert_eq!(call(&app, "POST", DOCUMENT).await.0, 201);
        let (_, state) = call(&app, "GET", "/openapi%2Ejson").await;
        assert_eq!(state["resource"], "openapi.json");
        assert_eq!(state["held"], true);
        // And where nobody has asked for a document, there is none.
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
}
