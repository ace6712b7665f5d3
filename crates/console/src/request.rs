//! Parsing of requests, and the refusal of requests from pages of other sites.

use std::time::Duration;

use axum::{
    extract::{self, FromRequest, FromRequestParts, Request, rejection::JsonRejection},
    middleware::Next,
    response::{IntoResponse, Response},
};
use http::{StatusCode, request::Parts};
use serde::de::DeserializeOwned;
use tokio::time::timeout;

use crate::rejection::Rejection;

/// The timeout for a request body.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);

/// Refuses requests that a page of another origin sends, even if the CORS settings of the
/// application allow them. Browsers send the header `Sec-Fetch-Site`; other clients do not.
pub(super) async fn refuse_other_sites(request: Request, next: Next) -> Response {
    let mut sites = request.headers().get_all("sec-fetch-site").iter();
    if sites.all(|site| site == "same-origin" || site == "none") {
        return next.run(request).await;
    }
    Rejection::OtherSite.into_response()
}

/// A JSON body with the `Content-Type` for JSON. For a page of another site, a browser sends such a
/// request only after a preflight request.
pub(super) struct Json<T>(pub(super) T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for Json<T> {
    type Rejection = Rejection;

    async fn from_request(request: Request, state: &S) -> Result<Self, Rejection> {
        let body = timeout(BODY_TIMEOUT, axum::Json::from_request(request, state));
        match body.await {
            Ok(Ok(axum::Json(body))) => Ok(Self(body)),
            Ok(Err(JsonRejection::MissingJsonContentType(_))) => Err(Rejection::NoJson),
            Ok(Err(rejection)) if rejection.status() == StatusCode::PAYLOAD_TOO_LARGE => {
                Err(Rejection::TooLong)
            }
            Ok(Err(rejection)) => Err(Rejection::invalid("body", rejection.body_text())),
            Err(_) => Err(Rejection::TooSlow),
        }
    }
}

/// The query of a URL.
pub(super) struct Query<T>(pub(super) T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequestParts<S> for Query<T> {
    type Rejection = Rejection;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Rejection> {
        match extract::Query::from_request_parts(parts, state).await {
            Ok(extract::Query(query)) => Ok(Self(query)),
            Err(rejection) => Err(Rejection::invalid("query", rejection.body_text())),
        }
    }
}

/// Checks the number of rows of a page: 1 to 250, by default 50.
pub(super) fn rows(limit: Option<u16>) -> Result<u16, Rejection> {
    let limit = limit.unwrap_or(50);
    if (1..=250).contains(&limit) {
        return Ok(limit);
    }
    Err(Rejection::invalid("limit", "`limit` must be 1 to 250"))
}
