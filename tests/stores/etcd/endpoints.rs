//! Endpoints that are not etcd servers, and an endpoint that echoes requests.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use axum::{Json, Router, http::StatusCode, routing::any};
use serde_json::json;
use sqlx::Sqlite;
use tower_fence::lease::{Acquire, LeaseError, Leases};
use tower_fence_etcd::EtcdLeasesBuilder;

use crate::support::{
    database::TestDatabase,
    etcd::{self, EtcdCluster},
    http::Server,
    lease::{LONG, grant, grant_and_release, is_unavailable, messages_of, sku},
    proxy::{Passage, Proxy},
    redis::fresh_prefix,
};

/// Returns servers whose answers are not those of etcd.
async fn strangers() -> Vec<Server> {
    let answers = [
        any(async || "<html></html>"),
        any(async || "{\"header\":"),
        any(async || (StatusCode::NOT_FOUND, "no such page")),
        any(async || (StatusCode::INTERNAL_SERVER_ERROR, "{}")),
        any(async || Json(json!({ "hello": "world" }))),
    ];
    let mut servers = vec![];
    for answer in answers {
        servers.push(Server::start(Router::new().fallback_service(answer)).await);
    }
    servers
}

#[tokio::test]
async fn next_endpoint_is_tried_if_one_is_unreachable() {
    let db = Sqlite::fresh(2).await;
    for stranger in &strangers().await[..4] {
        let builder = EtcdLeasesBuilder::new(db.fence()).key_prefix(fresh_prefix());
        let endpoints = [stranger.url(""), etcd::shared_url()];
        let leases = builder.connect(&endpoints).await.unwrap();
        grant_and_release(&leases).await;
    }
}

/// The first status call to the member that has executed a transaction fails, so the call goes to
/// another member.
#[tokio::test]
async fn status_is_read_from_the_member_that_answered() {
    let (cluster, db) = (EtcdCluster::start(2).await, Sqlite::fresh(2).await);
    let cut = Arc::<AtomicUsize>::default();
    let proxy = Proxy::judging(cluster.addr(), {
        let cut = Arc::clone(&cut);
        move |_, message| {
            let is_status = message.starts_with(b"POST /v3/maintenance/status");
            Passage::CutAfter(0).when(is_status && cut.fetch_add(1, Relaxed) == 0)
        }
    })
    .await;
    let endpoints = [format!("http://{}", proxy.addr), cluster.urls()[1].clone()];
    let builder = EtcdLeasesBuilder::new(db.fence());
    let leases = builder.connect(&endpoints).await.unwrap();
    grant(&leases, &sku(), LONG).await;
    assert!(cut.load(Relaxed) > 1);
}

/// etcd 3.4 disables its HTTP gateway if it reads a configuration file.
#[tokio::test]
async fn missing_gateway_of_all_endpoints_is_misconfigured() {
    let db = Sqlite::fresh(2).await;
    let builder = || EtcdLeasesBuilder::new(db.fence()).call_timeout(LONG);
    let servers = strangers().await;
    let (missing, failing) = (servers[2].url(""), servers[3].url(""));
    let began_at = Instant::now();
    for endpoints in [vec![missing.clone()], vec![missing.clone(); 3]] {
        let refused = builder().connect(&endpoints).await.unwrap_err();
        let text = messages_of(&refused);
        assert_contains!(text, "enable-grpc-gateway");
        assert!(matches!(refused, LeaseError::Misconfigured(_)), "{text}");
    }
    assert!(began_at.elapsed() < LONG / 2, "a call was repeated");
    // The other endpoint may recover.
    let builder = builder().call_timeout(Duration::from_millis(300));
    is_unavailable(builder.connect(&[missing, failing]).await);
}

/// An ingress whose route is missing for a moment answers 404.
#[tokio::test]
async fn missing_route_of_a_known_etcd_is_unavailable() {
    let (cluster, db) = (EtcdCluster::start(1).await, Sqlite::fresh(2).await);
    let proxy = Proxy::to(cluster.addr()).await;
    let builder = EtcdLeasesBuilder::new(db.fence()).call_timeout(Duration::from_secs(5));
    let url = proxy.url(&cluster.urls()[0]);
    let leases = builder.connect_lazy(&[url]).unwrap();
    grant_and_release(&leases).await;
    let ingress = strangers().await.remove(2);
    proxy.switch_to(ingress.addr);
    is_unavailable(leases.acquire(&sku(), Acquire::new(LONG)).await);
    // A call is repeated until the route exists.
    let resource = sku();
    let (granted, ()) = tokio::join!(leases.acquire(&resource, Acquire::new(LONG)), async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        proxy.switch_to(cluster.addr());
    });
    granted.unwrap();
}

#[tokio::test]
async fn server_that_is_not_etcd_grants_and_loses_nothing() {
    let db = Sqlite::fresh(2).await;
    let mut strangers = strangers().await;
    // Another test is about the error for this server.
    strangers.remove(2);
    for stranger in strangers {
        let hasty = Duration::from_millis(300);
        let builder = || EtcdLeasesBuilder::new(db.fence()).call_timeout(hasty);
        builder().connect(&[stranger.url("")]).await.unwrap_err();
        let leases = builder().connect_lazy(&[stranger.url("")]).unwrap();
        is_unavailable(leases.acquire(&sku(), Acquire::new(LONG)).await);
        is_unavailable(leases.inspect(&sku()).await);
        let id = tower_fence::lease::LeaseId::random();
        is_unavailable(leases.release(&sku(), &id).await);
    }
}

#[tokio::test]
async fn errors_do_not_contain_an_echoed_password() {
    let db = Sqlite::fresh(2).await;
    let parrot = any(async |body: String| {
        let error = json!({ "code": 3, "message": format!("cannot read {body}") });
        (StatusCode::BAD_REQUEST, Json(error))
    });
    let parrot = Server::start(Router::new().fallback_service(parrot)).await;
    let builder = EtcdLeasesBuilder::new(db.fence()).user("shop", "s3cret");
    let refused = builder.connect(&[parrot.url("")]).await.unwrap_err();
    let texts = messages_of(&refused);
    assert!(matches!(refused, LeaseError::Misconfigured(_)));
    assert_contains!(texts, "400");
    assert!(!texts.contains("s3cret"), "{texts}");
}

#[tokio::test]
async fn endless_answer_is_not_read_to_its_end() {
    let db = Sqlite::fresh(2).await;
    let header = json!({ "header": { "cluster_id": "7", "member_id": "1", "revision": "1" } });
    for (spaces, is_read) in [(1 << 20, true), (9 << 20, false)] {
        let answer = format!("{}{header}", " ".repeat(spaces));
        let long = any(async move || answer.clone());
        let server = Server::start(Router::new().fallback_service(long)).await;
        let connected = etcd::connect(&[server.url("")], db.fence()).await;
        assert_eq!(connected.is_ok(), is_read, "{connected:?}");
    }
}
