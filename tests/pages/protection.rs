//! The restrictions of the page in a browser, and the refusal of requests from other sites.

use axum::{Router, routing::get};
use serde_json::json;
use sqlx::Sqlite;
use tower_fence::lease::MemoryLeases;

use super::service::{OnSqlite, events};
use crate::support::{
    database::TestDatabase,
    http::{Answer, Server},
};

#[tokio::test]
async fn console_can_be_nested_with_and_without_a_slash() {
    let db = Sqlite::fresh(4).await;
    let console =
        || tower_fence_console::router(db.fence(), MemoryLeases::new(db.fence()), events());
    let app = Router::new()
        .route("/", get(async || "the application"))
        .nest_service("/ops/console", console())
        .nest("/plain", console())
        .nest_service("/tenants/{tenant}/console", console());
    let server = Server::start(app).await;
    for page in
        "/ops/console /ops/console/ /plain /tenants/a/console /tenants/a/console/?x=1".split(' ')
    {
        let answer = Answer::to(server.get(page)).await;
        assert_eq!(answer.status, 200, "{page}");
        assert_eq!(answer.headers["content-type"], "text/html; charset=utf-8");
        let (_, rest) = answer
            .text
            .split_once("script type=\"module\" src=\"")
            .unwrap();
        let (script, _) = rest.split_once('"').unwrap();
        let url = reqwest::Url::parse(&server.url(page))
            .unwrap()
            .join(script)
            .unwrap();
        let script = Answer::to(server.client.get(url.clone())).await;
        assert_eq!(
            script.headers["content-type"],
            "text/javascript; charset=utf-8"
        );
        let leases = Answer::to(server.client.get(url.join("api/leases").unwrap())).await;
        assert_eq!(leases.json()["leases"], json!([]));
    }
}

#[tokio::test]
async fn headers_forbid_external_content_framing_sniffing_and_caching() {
    let service = OnSqlite::start().await;
    for path in [
        "",
        "console.js",
        "console.css",
        "api/leases",
        "api/fence",
        "api/nothing",
        "nothing",
    ] {
        let answer = service.get(path).await;
        let policy = answer.headers["content-security-policy"].to_str().unwrap();
        let mut parts: Vec<_> = policy.split(';').map(str::trim).collect();
        parts.sort_unstable();
        let expected = [
            "base-uri 'none'",
            "connect-src 'self'",
            "default-src 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "img-src 'self' data:",
            "script-src 'self'",
            "style-src 'self'",
        ];
        assert_eq!(parts, expected, "{path}");
        assert_eq!(answer.headers["x-content-type-options"], "nosniff");
        assert_eq!(answer.headers["referrer-policy"], "no-referrer");
        assert_eq!(
            answer.headers["cross-origin-resource-policy"],
            "same-origin"
        );
    }
    let page = service.get("").await;
    assert_eq!(page.headers["cache-control"], "no-store");
}

#[tokio::test]
async fn cross_site_page_changes_and_reads_nothing() {
    let service = OnSqlite::start().await;
    let body = r#"{"resource":"a","token":1000000001}"#;
    let resource = tower_fence::Resource::new("a").unwrap();
    let held = tower_fence::lease::Acquire::new(std::time::Duration::from_secs(60));
    let leases = &service.leases;
    tower_fence::lease::Leases::acquire(leases, &resource, held)
        .await
        .unwrap();
    let post = |path: &str| {
        service
            .server
            .post(&format!("/ops/console/api/{path}"))
            .body(body)
    };
    for call in ["break", "reset"] {
        // Requests without a preflight: forms, and scripts without CORS.
        for content_type in [
            "text/plain",
            "application/x-www-form-urlencoded",
            "multipart/form-data; boundary=a",
        ] {
            let request = post(call).header("Content-Type", content_type);
            Answer::to(request)
                .await
                .is_problem(415, "unsupported-media-type");
        }
        Answer::to(post(call))
            .await
            .is_problem(415, "unsupported-media-type");
        // Requests with this header are refused even if the application allows all origins.
        for site in ["cross-site", "same-site"] {
            let request = post(call).header("Content-Type", "application/json");
            let request = request.header("Sec-Fetch-Site", site);
            assert_eq!(Answer::to(request).await.status, 403);
        }
        let get = service.get(&format!("api/{call}")).await;
        assert_eq!(get.status, 405);
    }
    for read in ["leases", "fences", "events", "fence?resource=a"] {
        let request = service.server.get(&format!("/ops/console/api/{read}"));
        let request = request.header("Sec-Fetch-Site", "cross-site");
        assert_eq!(Answer::to(request).await.status, 403);
    }
    assert!(
        tower_fence::lease::Leases::inspect(leases, &resource)
            .await
            .unwrap()
            .is_some()
    );
    let own = post("break").header("Content-Type", "application/json");
    let own = own.header("Sec-Fetch-Site", "same-origin");
    assert_eq!(Answer::to(own).await.status, 204);
}
