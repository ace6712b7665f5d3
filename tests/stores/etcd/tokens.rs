//! Auth tokens that etcd refuses: whether the client fetches another one, and how often.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use axum::{
    Json, Router,
    http::{HeaderMap, StatusCode},
    response::{IntoResponse, Response},
    routing::{MethodRouter, post},
};
use futures_util::future::join_all;
use serde_json::json;
use sqlx::Sqlite;
use tokio::sync::Barrier;
use tower_fence::lease::{LeaseError, Leases};
use tower_fence_etcd::EtcdLeasesBuilder;

use crate::support::{
    database::TestDatabase,
    http::Server,
    lease::{messages_of, sku},
};

/// The status, the code and the message of an error of etcd.
type Refusal = (StatusCode, i64, &'static str);

/// The error of etcd for an unknown auth token.
const UNKNOWN: Refusal = (
    StatusCode::UNAUTHORIZED,
    16,
    "etcdserver: invalid auth token",
);
/// The error of etcd for an auth token that was issued before a change of users.
const OLD: Refusal = (
    StatusCode::BAD_REQUEST,
    3,
    "etcdserver: revision of auth store is old",
);
/// The error of etcd for a missing right.
const DENIED: Refusal = (StatusCode::FORBIDDEN, 7, "etcdserver: permission denied");

fn refused((status, code, message): Refusal) -> Response {
    (status, Json(json!({ "code": code, "message": message }))).into_response()
}

fn answered() -> Response {
    let header = json!({ "cluster_id": "7", "member_id": "1", "revision": "1" });
    Json(json!({ "header": header })).into_response()
}

/// Grants tokens, and counts them.
fn counting() -> (Arc<AtomicUsize>, MethodRouter) {
    let fetched = Arc::<AtomicUsize>::default();
    let counted = Arc::clone(&fetched);
    let authenticate = async move || {
        let n = counted.fetch_add(1, SeqCst);
        Json(json!({ "token": format!("token-{n}") }))
    };
    (fetched, post(authenticate))
}

/// Returns a server that refuses this number of calls, and counts the requests for an auth token.
async fn refusing(refusal: Refusal, times: usize) -> (Server, Arc<AtomicUsize>) {
    let (fetched, authenticate) = counting();
    let left = Arc::new(Mutex::new(times));
    let txn = async move || -> Response {
        let mut left = left.lock().unwrap();
        if *left == 0 {
            return answered();
        }
        *left -= 1;
        refused(refusal)
    };
    (serve(authenticate, post(txn)).await, fetched)
}

async fn serve(authenticate: MethodRouter, txn: MethodRouter) -> Server {
    let router = Router::new()
        .route("/v3/auth/authenticate", authenticate)
        .route("/v3/kv/txn", txn);
    Server::start(router).await
}

async fn builder() -> EtcdLeasesBuilder {
    let db = Sqlite::fresh(1).await;
    EtcdLeasesBuilder::new(db.fence())
        .user("locks", "p4ssw0rd")
        .call_timeout(Duration::from_secs(3))
}

#[tokio::test]
async fn a_token_that_is_refused_is_fetched_again() {
    for refusal in [UNKNOWN, OLD] {
        let (server, fetched) = refusing(refusal, 1).await;
        builder().await.connect(&[server.url("")]).await.unwrap();
        assert_eq!(fetched.load(SeqCst), 2, "{refusal:?}");
    }
}

#[tokio::test]
async fn second_refused_auth_token_is_an_error() {
    for (refusal, expected) in [(UNKNOWN, 2), (OLD, 2), (DENIED, 1)] {
        let (server, fetched) = refusing(refusal, usize::MAX).await;
        let connected = builder().await.connect(&[server.url("")]).await;
        let refused = connected.unwrap_err();
        let messages = messages_of(&refused);
        // An auth token may be accepted later, whereas rights do not change by themselves.
        let is_permanent = matches!(refused, LeaseError::Misconfigured(_));
        assert_eq!(is_permanent, refusal == DENIED, "{messages}");
        assert_contains!(messages, refusal.2);
        assert_eq!(fetched.load(SeqCst), expected, "{refusal:?}");
    }
}

/// etcd hashes the password slowly, and handles one authentication after the other.
#[tokio::test]
async fn concurrently_refused_calls_authenticate_once() {
    const CALLS: usize = 20;
    let all_sent = Arc::new(Barrier::new(CALLS));
    let txn = async move |headers: HeaderMap| -> Response {
        if headers["authorization"] == "token-0" {
            all_sent.wait().await;
            return refused(UNKNOWN);
        }
        answered()
    };
    let (fetched, authenticate) = counting();
    let server = serve(authenticate, post(txn)).await;
    let leases = builder().await.connect_lazy(&[server.url("")]).unwrap();
    let resource = sku();
    for inspected in join_all((0..CALLS).map(|_| leases.inspect(&resource))).await {
        assert_eq!(inspected.unwrap(), None);
    }
    assert_eq!(fetched.load(SeqCst), 2);
}
