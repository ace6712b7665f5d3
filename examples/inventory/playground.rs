//! The playground at `/`: a web page with two workers that write the stock of one SKU through this
//! service.

use std::time::Duration;

use axum::{
    Json, Router,
    extract::{Path, State},
    http::{
        HeaderValue, StatusCode,
        header::{
            CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, REFERRER_POLICY,
            X_CONTENT_TYPE_OPTIONS,
        },
    },
    middleware::map_response,
    response::{IntoResponse, Response},
    routing::{get, put},
};
use serde::Deserialize;
use sqlx::Pool;
use tokio::time::timeout;

use crate::stock::Stock;

const FILES: [(&str, &str, &str); 6] = [
    (
        "playground.css",
        "text/css; charset=utf-8",
        include_str!("playground/playground.css"),
    ),
    (
        "playground.js",
        SCRIPT,
        include_str!("playground/playground.js"),
    ),
    ("service.js", SCRIPT, include_str!("playground/service.js")),
    ("story.js", SCRIPT, include_str!("playground/story.js")),
    (
        "timeline.js",
        SCRIPT,
        include_str!("playground/timeline.js"),
    ),
    ("worker.js", SCRIPT, include_str!("playground/worker.js")),
];
const SCRIPT: &str = "text/javascript; charset=utf-8";

/// Serves the page and its files. One route writes without the fence, so that the page can show the
/// lost update that the fence prevents.
pub fn router<DB: Stock>(pool: Pool<DB>) -> Router {
    Router::new()
        .route("/", get(index))
        .route("/playground/{file}", get(file))
        .route("/playground/unfenced/{sku}", put(set_unfenced::<DB>))
        .with_state(pool)
        .layer(map_response(protect))
}

async fn index() -> Response {
    serve(
        "text/html; charset=utf-8",
        include_str!("playground/index.html"),
    )
}

async fn file(Path(name): Path<String>) -> Response {
    match FILES.iter().find(|(file, ..)| *file == name) {
        Some((_, content_type, text)) => serve(content_type, text),
        None => StatusCode::NOT_FOUND.into_response(),
    }
}

fn serve(content_type: &'static str, text: &'static str) -> Response {
    let headers = [(CONTENT_TYPE, content_type), (CACHE_CONTROL, "no-cache")];
    (headers, text).into_response()
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NewStock {
    stock: u32,
}

/// The timeout of a write without a fence.
const WRITE_LIMIT: Duration = Duration::from_secs(5);

/// Writes without checking a token, like a service without a fence. Only SKUs whose names begin
/// with `playground-` can be written.
async fn set_unfenced<DB: Stock>(
    State(pool): State<Pool<DB>>,
    Path(sku): Path<String>,
    Json(NewStock { stock }): Json<NewStock>,
) -> Result<StatusCode, StatusCode> {
    if !sku.starts_with("playground-") {
        return Err(StatusCode::NOT_FOUND);
    }
    let writing = async { DB::set(&mut *pool.acquire().await?, &sku, stock.into()).await };
    match timeout(WRITE_LIMIT, writing).await {
        Ok(Ok(())) => Ok(StatusCode::NO_CONTENT),
        Ok(Err(_)) | Err(_) => Err(StatusCode::SERVICE_UNAVAILABLE),
    }
}

/// Forbids inline code and content from other origins.
async fn protect(mut response: Response) -> Response {
    const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
         img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
    for (name, value) in [
        (CONTENT_SECURITY_POLICY, POLICY),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (REFERRER_POLICY, "no-referrer"),
    ] {
        response
            .headers_mut()
            .insert(name, HeaderValue::from_static(value));
    }
    response
}
