//! Reading of requests to the issuer. A rejection names the invalid part of the request.

use std::time::Duration;

use axum::{
    body::Body,
    extract::{FromRequestParts, RawPathParams},
};
use bytes::Bytes;
use http::{
    HeaderMap,
    header::{CONTENT_TYPE, ORIGIN},
    request::Parts,
};

use super::response::Rejection;
use crate::{
    body,
    lease::{LeaseError, LeaseId},
    token::{InvalidResource, Resource},
    wire::{LEASE_ID, read_nothing},
};

/// Maximum size of a request's body, in bytes.
pub(super) const BODY_LIMIT_BYTES: usize = 16 * 1024;
/// Timeout for receiving the body.
pub(super) const BODY_TIMEOUT: Duration = Duration::from_secs(10);

/// Returns a rejection for an invalid part of the request.
pub(super) fn invalid(field: &str, why: impl ToString) -> Rejection {
    LeaseError::invalid(field, why.to_string()).into()
}

/// Resource in the path, as one percent-encoded segment. The names `.` and `..` are refused,
/// because URL libraries remove such segments.
pub(super) struct ResourcePath(pub(super) Resource);

impl<S: Send + Sync> FromRequestParts<S> for ResourcePath {
    type Rejection = Rejection;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Rejection> {
        // The issuer's routes have this parameter, so extraction fails only for invalid UTF-8.
        let params = RawPathParams::from_request_parts(parts, state)
            .await
            .map_err(|_| invalid("resource", InvalidResource::NotUtf8))?;
        // The path before the issuer's routes may contain parameters of the application, even with
        // the same name.
        let named = params.iter().filter(|(name, _)| *name == "resource");
        let resource = named.last().map_or("", |(_, value)| value);
        let resource = Resource::new(resource).map_err(|error| invalid("resource", error))?;
        if matches!(resource.as_str(), "." | "..") {
            let why =
                "a resource name must not be . or .., which most clients cannot send in a URL";
            return Err(invalid("resource", why));
        }
        Ok(Self(resource))
    }
}

/// Returns the lease id of the `Lease-Id` header.
pub(super) fn lease_id(headers: &HeaderMap) -> Result<LeaseId, Rejection> {
    let mut values = headers.get_all(LEASE_ID).iter();
    let (Some(value), None) = (values.next(), values.next()) else {
        return Err(invalid(
            LEASE_ID.as_str(),
            "the header must occur exactly once",
        ));
    };
    let id = String::from_utf8_lossy(value.as_bytes());
    LeaseId::new(id).map_err(|error| invalid(LEASE_ID.as_str(), error))
}

/// Returns whether the content type is JSON: `application/json`, or a type that ends with `+json`.
fn is_json(headers: &HeaderMap) -> bool {
    let content_type = headers
        .get(CONTENT_TYPE)
        .and_then(|value| value.to_str().ok());
    let essence = content_type.and_then(|value| value.split(';').next());
    let essence = essence.unwrap_or_default().trim().to_ascii_lowercase();
    match essence.strip_prefix("application/") {
        Some(subtype) => subtype == "json" || subtype.ends_with("+json"),
        None => false,
    }
}

/// Refuses a request that a page of another site can make a browser send without a CORS preflight.
/// Such a request has an `Origin` header, and its content type is not JSON.
fn refuse_foreign_pages(headers: &HeaderMap) -> Result<(), Rejection> {
    if headers.contains_key(ORIGIN) && !is_json(headers) {
        return Err(Rejection::UnsupportedMediaType);
    }
    Ok(())
}

/// Reads the body of a request that takes no members. Refuses any member, because a client could
/// otherwise assume that the member has an effect.
pub(super) async fn no_members(headers: &HeaderMap, body: Body) -> Result<(), Rejection> {
    let read = body::read(headers, body, BODY_LIMIT_BYTES, BODY_TIMEOUT).await?;
    Ok(read_nothing(&read.to_bytes())?)
}

/// Reads the body, and checks that its content type is JSON.
pub(super) async fn body_bytes(headers: &HeaderMap, body: Body) -> Result<Bytes, Rejection> {
    let read = body::read(headers, body, BODY_LIMIT_BYTES, BODY_TIMEOUT).await?;
    let bytes = read.to_bytes();
    refuse_foreign_pages(headers)?;
    if !bytes.trim_ascii().is_empty() && !is_json(headers) {
        return Err(Rejection::UnsupportedMediaType);
    }
    Ok(bytes)
}
