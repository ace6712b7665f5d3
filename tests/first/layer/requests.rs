//! The parts of a request that the layer reads: its token, its body, and its resource.

use std::{convert::Infallible, time::Duration};

use axum::{
    Router,
    body::Bytes,
    http::request::Parts,
    routing::{get, post},
};
use futures_util::StreamExt;
use reqwest::header::HeaderValue;
use tower_fence::{
    Admitted, FenceLayer, InvalidResource, PathParam, Resource, layer::ResourceError,
};

use super::handlers::{max_token, start};
use crate::support::{
    database::{TestDatabase, on_both_databases},
    http::{Answer, Server},
};

on_both_databases!(
    each_wrong_token_has_its_answer,
    each_wrong_body_has_its_answer,
    a_slow_body_holds_nothing,
    resources_come_from_the_path_a_header_or_a_closure,
    read_that_requires_a_token_is_refused_without_one,
);

async fn each_wrong_token_has_its_answer<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let server = start(&db).await;
    for method in ["POST", "PUT", "PATCH", "DELETE", "ODD"] {
        let request = server
            .client
            .request(method.parse().unwrap(), server.url("/a/plain"));
        Answer::to(request).await.is_problem(428, "token-required");
    }
    server.refuses("/a/plain", "", 428, "token-required").await;
    // The vectors of the header have each malformed field.
    server
        .refuses("/a/plain", "x", 400, "malformed-token")
        .await;
    for wrong in [&b"1\xff"[..], b"\xc3\xa9"] {
        let value = HeaderValue::from_bytes(wrong).unwrap();
        let request = server.post("/a/plain").header("Fencing-Token", value);
        Answer::to(request).await.is_problem(400, "malformed-token");
    }
    // A safe method need not carry a token, but a token that it carries must be valid.
    let read = server.get("/a/plain").header("Fencing-Token", "x");
    Answer::to(read).await.is_problem(400, "malformed-token");
    let other = server.write("/a/plain", "1;resource=\"b\"").await;
    other.is_problem(403, "wrong-resource");
    // None of these requests has raised the fence.
    assert_eq!(max_token(&db).await, None);
    let with_more = "1;resource=\"a\";mac=:AQI=:;x";
    assert_eq!(server.write("/a/plain", with_more).await.status, 200);
    let cafe = "1;resource=%\"caf%c3%a9\"";
    assert_eq!(server.write("/caf%C3%A9/plain", cafe).await.status, 200);
}

async fn each_wrong_body_has_its_answer<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let layer = FenceLayer::new(db.fence(), PathParam("sku"))
        .body_limit_bytes(100)
        .body_timeout(Duration::from_secs(1));
    let echo = post(|body: Bytes| async { body });
    let app = Router::new().route("/{sku}/echo", echo).route_layer(layer);
    let server = Server::start(app).await;
    let send = |body: reqwest::Body| {
        let request = server.post("/a/echo").header("Fencing-Token", "1");
        Answer::to(request.body(body))
    };
    let stream = |chunks: usize, pause: Duration| {
        let chunks = futures_util::stream::iter(0..chunks).then(move |_| async move {
            tokio::time::sleep(pause).await;
            Ok::<_, Infallible>("0123456789")
        });
        reqwest::Body::wrap_stream(chunks)
    };
    let large = send(vec![b'x'; 101].into()).await;
    let problem = large.is_problem(413, "body-too-large");
    assert_eq!(problem["limit_bytes"], 100);
    let large = send(stream(11, Duration::ZERO)).await;
    large.is_problem(413, "body-too-large");
    let slow = send(stream(9, Duration::from_millis(200))).await;
    slow.is_problem(408, "body-timeout");
    assert_eq!(max_token(&db).await, None);
    assert_eq!(send(vec![b'x'; 100].into()).await.text, "x".repeat(100));
}

async fn a_slow_body_holds_nothing<DB: TestDatabase>() {
    let db = DB::fresh(1).await;
    let server = start(&db).await;
    let (go_on, gate) = tokio::sync::oneshot::channel::<()>();
    let body = futures_util::stream::once(async {
        gate.await.unwrap();
        Ok::<_, Infallible>("late")
    });
    let slow = server.post("/a/echo").header("Fencing-Token", "9");
    let slow = tokio::spawn(Answer::to(slow.body(reqwest::Body::wrap_stream(body))));
    // The pool has one connection. If the slow request held it, these writes would hang.
    for token in 1..=3 {
        assert_eq!(server.write("/a/add", token).await.status, 200);
    }
    go_on.send(()).unwrap();
    assert_eq!(slow.await.unwrap().text, "late");
}

async fn resources_come_from_the_path_a_header_or_a_closure<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let resource = |admitted: Admitted| async move { admitted.resource().to_string() };
    let tenant = |parts: &Parts| -> Result<Resource, ResourceError> {
        let mut values = parts.headers.get_all("x-tenant").iter();
        let (Some(tenant), None) = (values.next(), values.next()) else {
            return Err(ResourceError::Nothing);
        };
        Ok(Resource::new(tenant.to_str().unwrap())?)
    };
    let query = |parts: &Parts| -> Result<Resource, InvalidResource> {
        Resource::new(parts.uri.query().unwrap_or_default())
    };
    let app = Router::new()
        .route("/path/{id}", post(resource))
        .route_layer(FenceLayer::new(db.fence(), PathParam("id")))
        .merge(
            Router::new()
                .route("/header", post(resource))
                .route_layer(FenceLayer::new(db.fence(), tenant)),
        )
        .merge(
            Router::new()
                .route("/query", post(resource))
                // `layer` can be used instead of `route_layer`.
                .layer(FenceLayer::new(db.fence(), query)),
        );
    let server = Server::start(app).await;

    assert_eq!(server.write("/path/a%2Fb%20c", 1).await.text, "a/b c");
    for id in ["%00", "%FF", &"x".repeat(256)] {
        let answer = server.write(&format!("/path/{id}"), 1).await;
        let problem = answer.is_problem(422, "invalid-request");
        assert_eq!(problem["field"], "resource");
    }
    let header = || server.post("/header").header("Fencing-Token", "1");
    let named = Answer::to(header().header("X-Tenant", "acme")).await;
    assert_eq!(named.text, "acme");
    let twice = header()
        .header("X-Tenant", "acme")
        .header("X-Tenant", "other");
    for request in [header(), twice] {
        let problem = Answer::to(request).await.is_problem(422, "invalid-request");
        assert_eq!(problem["field"], "resource");
    }
    assert_eq!(server.write("/query?x=1", 1).await.text, "x=1");
    server.refuses("/query", 1, 422, "invalid-request").await;
}

async fn read_that_requires_a_token_is_refused_without_one<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let strict = |admitted: Admitted| async move { admitted.token().to_string() };
    let lenient = |admitted: Option<Admitted>| async move { format!("{:?}", admitted.is_some()) };
    let app = Router::new()
        .route("/{sku}/strict", get(strict))
        .route("/{sku}/lenient", get(lenient))
        .route_layer(FenceLayer::new(db.fence(), PathParam("sku")));
    let server = Server::start(app).await;
    let bare = Answer::to(server.get("/a/strict")).await;
    bare.is_problem(428, "token-required");
    assert_eq!(Answer::to(server.get("/a/lenient")).await.text, "false");
    for (path, text) in [("/a/strict", "5"), ("/a/lenient", "true")] {
        let read = server.get(path).header("Fencing-Token", "5");
        assert_eq!(Answer::to(read).await.text, text);
    }
}
