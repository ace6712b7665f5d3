//! The settings of an application for etcd, and their errors.

use std::time::Duration;

use axum::{
    Router,
    body::{Body, to_bytes},
    extract::Request,
    http::StatusCode,
    response::IntoResponse,
};
use sqlx::Sqlite;
use tower_fence::lease::{LeaseError, Leases};
use tower_fence_etcd::EtcdLeasesBuilder;

use crate::support::{
    database::TestDatabase,
    etcd,
    http::Server,
    lease::{LONG, grant, granted, sku, wait},
    redis::fresh_prefix,
};

fn invalid<T: std::fmt::Debug>(built: Result<T, LeaseError>) -> (String, String) {
    match built {
        Err(LeaseError::Invalid { field, detail }) => (field, detail),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn invalid_endpoint_is_named_by_index_without_its_text() {
    let db = Sqlite::fresh(1).await;
    let build = || EtcdLeasesBuilder::new(db.fence());
    for (url, reason) in [
        ("", "not a valid URL"),
        ("127.0.0.1:2379", "not a valid URL"),
        ("http://:2379/s3cret", "not a valid URL"),
        ("ftp://s3cret", "https://"),
        ("s3cret:2379", "https://"),
        ("http://me:s3cret@a:2379", "user"),
        ("http://s3cret@a:2379", "user"),
        ("http://:s3cret@a:2379", "user"),
        ("http://a:2379?token=s3cret", "query"),
        ("http://a:2379/?", "query"),
        ("http://a:2379/#s3cret", "fragment"),
    ] {
        let (field, detail) = invalid(build().connect_lazy(&["http://b:2379", url, "http://c"]));
        assert_eq!(field, "endpoints");
        assert_contains!(detail, "endpoint 2 of 3");
        assert!(detail.contains(reason), "{url}: {detail}");
        assert!(!detail.contains("s3cret"), "{detail}");
    }
    assert_eq!(invalid(build().connect_lazy::<&str>(&[])).0, "endpoints");
    for prefix in ["", "a:b", "a\nb", "a\u{200b}", "é"] {
        let built = build().key_prefix(prefix).connect_lazy(&["http://a:2379"]);
        assert_eq!(invalid(built).0, "key_prefix");
    }
}

/// A reverse proxy may serve etcd only below a path.
#[tokio::test]
async fn path_prefix_precedes_the_paths_of_etcd() {
    let db = Sqlite::fresh(2).await;
    let client = crate::support::http::client();
    let pass_on = async move |request: Request| {
        let path = request.uri().path().to_owned();
        let Some(path) = path.strip_prefix("/shared/etcd/") else {
            return StatusCode::NOT_FOUND.into_response();
        };
        let body = to_bytes(request.into_body(), 1 << 20).await.unwrap();
        let url = format!("{}/{path}", etcd::shared_url());
        let answer = client.post(url).body(body).send().await.unwrap();
        let status = answer.status();
        (status, Body::from_stream(answer.bytes_stream())).into_response()
    };
    let proxy = Server::start(Router::new().fallback(pass_on)).await;
    for path in ["/shared/etcd", "/shared/etcd/"] {
        let builder = EtcdLeasesBuilder::new(db.fence()).key_prefix(fresh_prefix());
        let leases = builder.connect(&[proxy.url(path)]).await.unwrap();
        let first = grant(&leases, &sku(), LONG).await;
        let waiting = wait(&leases, LONG).await;
        leases.release(&sku(), &first.id).await.unwrap();
        granted(waiting).await;
    }
    let elsewhere = EtcdLeasesBuilder::new(db.fence()).call_timeout(Duration::from_millis(300));
    let url = proxy.url("/elsewhere");
    elsewhere.connect(&[url]).await.unwrap_err();
}
