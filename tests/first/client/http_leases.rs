//! `HttpLeases` with different kinds of servers.

use std::{
    error::Error,
    sync::{
        Arc,
        atomic::{AtomicI64, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use axum::{
    Json, Router,
    extract::{Request, State},
    http::{HeaderMap, HeaderName, HeaderValue, StatusCode},
    middleware::{Next, from_fn},
    response::{IntoResponse, Response},
    routing::{any, post},
};
use serde_json::{Value, json};
use sqlx::Sqlite;
use tokio::{
    net::TcpListener,
    time::{Instant, timeout},
};
use tower_fence::{
    client::{AcquireError, Holder, HttpError, HttpLeases, Loss},
    issuer::{self, Issuer},
    lease::{Acquire, LeaseAdmin, LeaseError, Leases, MemoryLeases, Renew},
};

use crate::support::{
    database::TestDatabase,
    eventually,
    fence::resource,
    http::{Answer, Server},
    lease::{LONG, grant, granted, is_held, sku, wait},
};

#[track_caller]
fn cause<T: std::fmt::Debug>(outcome: Result<T, LeaseError>) -> String {
    let Err(LeaseError::Unavailable(cause)) = outcome else {
        panic!("{outcome:?}");
    };
    assert!(cause.downcast_ref::<HttpError>().is_some(), "{cause:?}");
    let source = cause.source().map(|source| format!("{source:?}"));
    format!("{cause} {cause:?} {}", source.unwrap_or_default())
}

/// Checks that the outcome is a refusal with this status, which the client does not retry. Returns
/// the text of the refusal.
#[track_caller]
fn refusal<T: std::fmt::Debug>(outcome: Result<T, LeaseError>, expected: u16) -> String {
    let Err(LeaseError::Misconfigured(cause)) = outcome else {
        panic!("{outcome:?}");
    };
    match cause.downcast_ref() {
        Some(HttpError::Refused { status, .. }) => assert_eq!(*status, expected),
        _ => panic!("{cause:?}"),
    }
    cause.to_string()
}

#[tokio::test]
async fn a_refused_secret_is_final_and_keeps_its_problem() {
    let db = Sqlite::fresh(2).await;
    let guarded = |request: Request, next: Next| async move {
        match request.headers().get("authorization") {
            None => {
                let problem = json!({ "title": "A secret is required", "detail": "send one" });
                (StatusCode::UNAUTHORIZED, Json(problem)).into_response()
            }
            Some(secret) if secret == "Bearer proxy" => {
                StatusCode::PROXY_AUTHENTICATION_REQUIRED.into_response()
            }
            Some(secret) if secret != "Bearer sesame" => StatusCode::FORBIDDEN.into_response(),
            Some(_) if request.headers().get("x-tenant").is_none() => {
                StatusCode::NOT_FOUND.into_response()
            }
            Some(_) => next.run(request).await,
        }
    };
    let issuer = issuer::router(MemoryLeases::new(db.fence())).layer(from_fn(guarded));
    let server = Server::start(issuer).await;
    let leases = HttpLeases::new(&server.url("/")).unwrap();
    let patient = |leases| Holder::new(leases).wait(LONG);
    for (leases, status, text) in [
        (leases.clone(), 401, ": send one"),
        (leases.clone().bearer("open").unwrap(), 403, "403 Forbidden"),
        (leases.clone().bearer("proxy").unwrap(), 407, "Required"),
        (
            leases.clone().bearer("sesame").unwrap(),
            404,
            ": no issuer serves this path, or only without the routes for operators",
        ),
    ] {
        let refused = timeout(Duration::from_secs(5), patient(leases).acquire("sku-1")).await;
        let Err(AcquireError::Lease(error)) = refused.expect("the request is retried") else {
            panic!("the lease was granted");
        };
        let refused = refusal::<()>(Err(error), status);
        assert!(refused.ends_with(text), "{refused}");
    }
    let tenant = HeaderName::from_static("x-tenant");
    let leases = leases.bearer("sesame").unwrap();
    assert!(!format!("{leases:?}").contains("sesame"));
    let leases = leases.header(tenant, HeaderValue::from_static("red"));
    let lease = patient(leases).acquire("sku-1").await.unwrap();
    lease.release().await.unwrap();
    let invalid = HttpLeases::new("http://localhost").unwrap().bearer("a\nb");
    assert_matches!(invalid, Err(HttpError::Header));
}

#[tokio::test]
async fn any_name_survives_the_url() {
    let db = Sqlite::fresh(2).await;
    let issuer = issuer::router(MemoryLeases::new(db.fence()));
    let server = Server::start(Router::new().nest("/a/locks", issuer)).await;
    // The URL may end with a slash.
    for url in ["/a/locks", "/a/locks/"] {
        let leases = HttpLeases::new(&server.url(url)).unwrap();
        for name in "a/b|é ü|?x=1#y|%2e%2e|+|...|break|\u{1F512}".split('|') {
            let resource = resource(name);
            let lease = grant(&leases, &resource, LONG).await;
            assert_eq!(lease.resource, resource);
            let held = leases.inspect(&resource).await.unwrap().unwrap();
            assert_eq!(held.token, lease.token);
            let renewed = leases.renew(&resource, &lease.id, Renew::new(LONG)).await;
            assert_eq!(renewed.unwrap().token, lease.token);
            leases.release(&resource, &lease.id).await.unwrap();
        }
        for name in [".", ".."] {
            let refused = leases.inspect(&resource(name)).await;
            assert_matches!(
                &refused,
                Err(LeaseError::Invalid { field, .. }) if field == "resource"
            );
        }
    }
}

#[tokio::test]
async fn server_that_is_not_an_issuer_is_unavailable() {
    let strange = Json(json!({ "type": 7, "token": "x" }));
    let app = Router::new()
        .route("/html/{r}", any((StatusCode::OK, "<html>")))
        .route("/teapot/{r}", any((StatusCode::IM_A_TEAPOT, "<html>")))
        .route("/json/{r}", any(strange))
        .route("/zero/{r}", any(Json(json!({ "token": 0, "ttl_ms": 1 }))));
    let server = Server::start(app).await;
    for path in ["/html", "/teapot", "/json", "/zero"] {
        let leases = HttpLeases::new(&server.url(path)).unwrap();
        let id = Acquire::new(LONG).id().clone();
        cause(leases.acquire(&sku(), Acquire::new(LONG)).await);
        cause(leases.renew(&sku(), &id, Renew::new(LONG)).await);
        cause(leases.inspect(&sku()).await);
        leases.list(10, None).await.unwrap_err();
    }
}

/// An issuer that grants `sku-1` for any time that a test sets.
struct AnyTtl {
    ttl_ms: AtomicU64,
    token: AtomicI64,
}

impl AnyTtl {
    fn lease(&self, id: &str) -> Json<Value> {
        Json(json!({
            "resource": "sku-1",
            "lease_id": id,
            "token": self.token.load(Relaxed),
            "ttl_ms": self.ttl_ms.load(Relaxed),
        }))
    }

    async fn acquire(State(issuer): State<Arc<Self>>, Json(asked): Json<Value>) -> Response {
        let id = asked["lease_id"].as_str().unwrap();
        (StatusCode::CREATED, issuer.lease(id)).into_response()
    }

    async fn renew(
        State(issuer): State<Arc<Self>>,
        headers: HeaderMap,
        Json(asked): Json<Value>,
    ) -> Response {
        let is_new = asked["new_token"] == true;
        issuer.token.fetch_add(i64::from(is_new), Relaxed);
        let id = headers["lease-id"].to_str().unwrap();
        issuer.lease(id).into_response()
    }
}

#[tokio::test]
async fn lease_with_the_longest_ttl_is_kept_and_renewed() {
    let issuer = Arc::new(AnyTtl {
        ttl_ms: AtomicU64::new(u64::MAX),
        token: AtomicI64::new(1),
    });
    let routes = post(AnyTtl::acquire)
        .put(AnyTtl::renew)
        .delete(StatusCode::NO_CONTENT);
    let app = Router::new().route("/{r}", routes);
    let server = Server::start(app.with_state(Arc::clone(&issuer))).await;
    let leases = HttpLeases::new(&server.url("/")).unwrap();
    let lease = grant(&leases, &sku(), LONG).await;
    assert!(lease.token.get() == 1 && lease.ttl > LONG, "{lease:?}");
    let renewed = leases.renew(&sku(), &lease.id, Renew::new(LONG)).await;
    let renewed = renewed.unwrap();
    assert!(renewed.token.get() == 1 && renewed.ttl > LONG);

    let holder = Holder::new(leases);
    let lease = holder.acquire("sku-1").await.unwrap();
    let renewed = lease.renew_with_new_token().await.unwrap();
    assert_eq!(renewed.token.get(), 2);
    assert!(lease.remaining() > LONG, "{:?}", lease.remaining());
    lease.release().await.unwrap();
    // The guard itself renews the lease after a third of its TTL.
    issuer.ttl_ms.store(3_000, Relaxed);
    let lease = holder.acquire("sku-1").await.unwrap();
    assert!(lease.remaining() < LONG, "{:?}", lease.remaining());
    issuer.ttl_ms.store(u64::MAX, Relaxed);
    eventually!("the guard renews the lease", lease.remaining() > LONG);

    // A lease with a TTL of zero has expired when its answer arrives.
    issuer.ttl_ms.store(0, Relaxed);
    let _ = lease.renew_with_new_token().await;
    let loss = lease.check().unwrap_err();
    assert_matches!(loss, Loss::Expired { .. });
    let refused = holder.acquire("sku-1").await;
    let refused = refused.expect_err("an expired lease was returned");
    assert_matches!(refused, AcquireError::Lease(LeaseError::Unavailable(_)));
}

#[tokio::test]
async fn silent_or_absent_issuer_is_unavailable_within_the_timeout() {
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://user:sesame@{}", silent.local_addr().unwrap());
    let leases = HttpLeases::new(&url).unwrap();
    let leases = leases.answer_timeout(Duration::from_millis(300));
    let asked_at = Instant::now();
    let refused = cause(leases.acquire(&sku(), Acquire::new(LONG)).await);
    let (_, address) = url.split_once('@').unwrap();
    let late = format!("the issuer at {address} did not answer in time ");
    assert!(refused.starts_with(&late), "{refused}");
    assert!(asked_at.elapsed() < Duration::from_secs(3));
    drop(silent);
    let refused = timeout(Duration::from_secs(5), leases.inspect(&sku())).await;
    let refused = cause(refused.unwrap());
    let away = format!("the request to the issuer at {address} failed ");
    assert!(refused.starts_with(&away), "{refused}");
    assert!(!refused.contains("sesame"), "{refused}");
    let shown = format!("{leases:?}");
    assert_contains!(shown, "\"127.0.0.1\"");
    assert!(!shown.contains("sesame"), "{shown}");
}

#[tokio::test]
async fn invalid_cursor_is_distinguished_from_other_refusals() {
    let db = Sqlite::fresh(2).await;
    let issuer = Issuer::new(MemoryLeases::new(db.fence())).operator_router();
    let server = Server::start(Router::new().nest("/locks", issuer)).await;
    let leases = HttpLeases::new(&server.url("/locks")).unwrap();
    let cursor_text = "invalid `cursor`: pass the cursor of the previous page unchanged";
    for (limit, cursor, text) in [
        (1, Some("x"), cursor_text),
        (1, Some(""), cursor_text),
        (0, None, "invalid `limit`: must be from 1 to 1000"),
    ] {
        let refused = leases.list(limit, cursor).await.unwrap_err();
        assert_eq!(refused.to_string(), text);
    }
}

#[tokio::test]
async fn invalid_url_is_refused() {
    for url in [
        "",
        "localhost:3000",
        "ftp://localhost",
        "mailto:a@b",
        "http://",
    ] {
        let refused = HttpLeases::new(url);
        assert!(matches!(refused, Err(HttpError::Url)), "{url}: {refused:?}");
    }
}

/// A redirect would change the request, and send the lease id to another server.
#[tokio::test]
async fn redirects_are_neither_followed_nor_taken_for_a_lease() {
    let db = Sqlite::fresh(2).await;
    let store = MemoryLeases::new(db.fence());
    let real = Server::start(issuer::router(store.clone())).await;
    grant(&store, &sku(), LONG).await;
    for status in [301, 302, 303, 307, 308] {
        let status = StatusCode::from_u16(status).unwrap();
        let to = real.url("/sku-1");
        let redirect = move || async move { (status, [("location", to.clone())]) };
        let server = Server::at("/{r}", any(redirect)).await;
        let leases = HttpLeases::new(&server.url("/")).unwrap();
        let id = Acquire::new(LONG).id().clone();
        let refused = [
            leases.acquire(&sku(), Acquire::new(LONG)).await.map(drop),
            leases.renew(&sku(), &id, Renew::new(LONG)).await.map(drop),
            leases.release(&sku(), &id).await,
        ];
        // The URL does not lead to an issuer, and a retry does not change that.
        for refused in refused {
            let is_final = matches!(refused, Err(LeaseError::Misconfigured(_)));
            assert!(is_final, "{status}: {refused:?}");
        }
        // A client that follows redirects receives the lease of another client.
        let follows = HttpLeases::with_client(&server.url("/"), crate::support::http::client());
        let refused = follows.unwrap().acquire(&sku(), Acquire::new(LONG)).await;
        assert_matches!(
            refused,
            Err(LeaseError::Unavailable(_) | LeaseError::Held { .. })
        );
    }
}

#[tokio::test]
async fn only_the_requested_lease_makes_a_holder() {
    let answer = |resource: &str, id: &str| {
        let lease = json!({ "resource": resource, "lease_id": id, "token": 7, "ttl_ms": 1_000 });
        (StatusCode::CREATED, Json(lease))
    };
    let own = "0123456789abcdef0123456789abcdef";
    let another = "another-lease-id-0123456789";
    let app = Router::new()
        .route("/id/{r}", post(answer("sku-1", another)))
        .route("/resource/{r}", post(answer("sku-2", own)))
        .route("/own/{r}", post(answer("sku-1", own)));
    let server = Server::start(app).await;
    let ask = async |path: &str| {
        let leases = HttpLeases::new(&server.url(path)).unwrap();
        let request = Acquire::new(LONG).lease_id(own.parse().unwrap());
        leases.acquire(&sku(), request).await
    };
    cause(ask("/id").await);
    cause(ask("/resource").await);
    assert_eq!(ask("/own").await.unwrap().token.get(), 7);
}

#[tokio::test]
async fn endless_answer_is_cut_off() {
    let endless = || async {
        let chunk = || Ok::<_, std::convert::Infallible>(vec![b' '; 64 * 1024]);
        let chunks = futures_util::stream::repeat_with(chunk);
        (StatusCode::CREATED, axum::body::Body::from_stream(chunks))
    };
    let server = Server::at("/{r}", any(endless)).await;
    let leases = HttpLeases::new(&server.url("/")).unwrap();
    let leases = leases.answer_timeout(Duration::from_secs(60));
    let sku = sku();
    let asking = leases.acquire(&sku, Acquire::new(LONG));
    let answer = timeout(Duration::from_secs(20), asking).await;
    cause(answer.expect("the client does not stop reading"));
}

#[tokio::test]
async fn the_layer_suits_reqwest() {
    let db = Sqlite::fresh(2).await;
    let holder = Holder::new(MemoryLeases::new(db.fence()));
    let lease = holder.acquire("sku-1").await.unwrap();
    let echo =
        |headers: HeaderMap| async move { headers["fencing-token"].to_str().unwrap().to_owned() };
    let server = Server::at("/", post(echo)).await;
    let client = tower::ServiceBuilder::new().layer(lease.layer());
    let client = client.service(server.client.clone());
    let request = server.post("/").build().unwrap();
    let answer = tower::ServiceExt::oneshot(client, request).await.unwrap();
    let sent = answer.text().await.unwrap();
    assert_eq!(sent, lease.fencing_token().to_string());
}

#[tokio::test]
async fn error_names_the_limits_of_the_issuer() {
    let db = Sqlite::fresh(2).await;
    let issuer = issuer::router(MemoryLeases::new(db.fence()));
    let server = Server::start(issuer).await;
    let leases = HttpLeases::new(&server.url("/")).unwrap();
    let day = Duration::from_secs(24 * 60 * 60);
    let any = Acquire::new(LONG);
    for (request, field, limits) in [
        (Acquire::new(day), "ttl_ms", "100 to 600000"),
        (any.clone().wait(day), "wait_ms", "0 to 60000"),
        (any.lock_delay(day), "lock_delay_ms", "0 to 60000"),
    ] {
        let refused = leases.acquire(&sku(), request).await.unwrap_err();
        let text = format!("invalid `{field}`: must be from {limits} milliseconds");
        assert_eq!(refused.to_string(), text);
    }
    // This server has no routes for operators.
    refusal(leases.break_lease(&sku(), None).await, 404);
    for name in [".", ".."] {
        let refused = leases.break_lease(&resource(name), None).await;
        assert_matches!(refused, Err(LeaseError::Invalid { .. }));
    }
}

#[tokio::test]
async fn too_many_waiters_are_refused_over_http() {
    let db = Sqlite::fresh(2).await;
    let store = MemoryLeases::new(db.fence()).max_waiters(1);
    let server = Server::start(issuer::router(store.clone())).await;
    let leases = HttpLeases::new(&server.url("/")).unwrap();
    let first = grant(&leases, &sku(), LONG).await;
    let waiting = wait(&leases, LONG).await;
    let refused = leases.acquire(&sku(), Acquire::new(LONG).wait(LONG)).await;
    assert_matches!(&refused, Err(LeaseError::TooManyWaiters { resource }) if *resource == sku());
    let request = server.post("/sku-1").json(&json!({ "wait_ms": 1_000 }));
    let answer = Answer::to(request).await;
    let problem = answer.is_problem(503, "too-many-waiters");
    assert_eq!(problem["resource"], "sku-1");
    assert_eq!(answer.headers["retry-after"], "1");
    // A request without a wait is refused because the lease is held, and a free lease is granted.
    is_held(leases.acquire(&sku(), Acquire::new(LONG)).await);
    let request = Acquire::new(LONG).wait(LONG);
    leases.acquire(&resource("sku-2"), request).await.unwrap();
    leases.release(&sku(), &first.id).await.unwrap();
    granted(waiting).await;
}

/// An issuer serves its OpenAPI document at the path of this resource.
#[tokio::test]
async fn lease_with_the_name_of_the_document_is_inspected() {
    let db = Sqlite::fresh(2).await;
    let issuer = Issuer::new(MemoryLeases::new(db.fence()));
    let document = issuer.openapi();
    let server = Server::start(issuer.serve_openapi(document).router()).await;
    let leases = HttpLeases::new(&server.url("/")).unwrap();
    let resource = resource("openapi.json");
    let lease = grant(&leases, &resource, LONG).await;
    let held = leases.inspect(&resource).await.unwrap().unwrap();
    assert_eq!(held.token, lease.token);
    leases.release(&resource, &lease.id).await.unwrap();
}
