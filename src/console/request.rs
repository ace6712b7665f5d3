//! Reading a request of the page, and refusing those of other pages.

use std::time::Duration;

use axum::{
    body::Body,
    extract::{FromRequest, FromRequestParts, Query, Request},
    middleware::Next,
    response::{IntoResponse, Response},
};
use http::request::Parts;
use serde::de::DeserializeOwned;

use super::rejection::Rejection;
use crate::{body, issuer::is_json};

/// The greatest length of a body.
const BODY_LIMIT_BYTES: usize = 4 * 1024;
/// How long to wait for it.
const BODY_WAIT: Duration = Duration::from_secs(10);

/// Refuses what a page of another origin has a browser send, whatever CORS the application allows. Browsers say so in
/// `Sec-Fetch-Site`; other clients do not send it.
pub(super) async fn refuse_other_sites(request: Request, next: Next) -> Response {
    let mut sites = request.headers().get_all("sec-fetch-site").iter();
    if sites.all(|site| site == "same-origin" || site == "none") {
        return next.run(request).await;
    }
    Rejection::OtherSite.into_response()
}

/// A body of JSON, marked as such: no page of another site can have a browser send that without asking here first.
pub(super) struct Json<T>(pub(super) T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for Json<T> {
    type Rejection = Rejection;

    async fn from_request(request: Request, _: &S) -> Result<Self, Rejection> {
        let (parts, mut body): (_, Body) = request.into_parts();
        if !is_json(&parts.headers) {
            return Err(Rejection::NoJson);
        }
        let body = body::read(&mut body, BODY_LIMIT_BYTES, BODY_WAIT).await?;
        let read = serde_json::from_slice(&body.to_bytes());
        read.map(Self)
            .map_err(|error| Rejection::invalid("body", error))
    }
}

/// The query of a URL.
pub(super) struct Asked<T>(pub(super) T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequestParts<S> for Asked<T> {
    type Rejection = Rejection;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Rejection> {
        match Query::from_request_parts(parts, state).await {
            Ok(Query(asked)) => Ok(Self(asked)),
            Err(rejection) => Err(Rejection::invalid("query", rejection.body_text())),
        }
    }
}

/// How many rows a page has: from 1 to 250, 50 when nothing is said.
pub(super) fn rows(limit: Option<u16>) -> Result<u16, Rejection> {
    let limit = limit.unwrap_or(50);
    if (1..=250).contains(&limit) {
        return Ok(limit);
    }
    Err(Rejection::invalid("limit", "`limit` is from 1 to 250"))
}
