//! Reading a request to the issuer. Each part that has no valid value is named in the answer.

use std::time::Duration;

use axum::{
    body::Body,
    extract::{FromRequestParts, Path},
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
    lease::LeaseId,
    token::{InvalidResource, Resource},
    wire::{LEASE_ID, read_nothing},
};

/// The greatest length of a request's body.
pub(super) const BODY_LIMIT_BYTES: usize = 16 * 1024;
/// How long to wait for it.
pub(super) const BODY_WAIT: Duration = Duration::from_secs(10);

/// A part of the request without a valid value.
pub(super) fn invalid(field: &str, why: impl ToString) -> Rejection {
    Rejection::InvalidRequest {
        field: field.into(),
        why: why.to_string(),
    }
}

/// The resource that the path names, in one percent-encoded segment.
pub(super) struct ResourcePath(pub(super) Resource);

impl<S: Send + Sync> FromRequestParts<S> for ResourcePath {
    type Rejection = Rejection;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Rejection> {
        // The router's own routes have this one parameter; what fails is its UTF-8.
        let Path(name) = Path::<String>::from_request_parts(parts, state)
            .await
            .map_err(|_| invalid("resource", InvalidResource::NotUtf8))?;
        let resource = Resource::new(name).map_err(|error| invalid("resource", error))?;
        Ok(Self(resource))
    }
}

/// The lease id of the header.
pub(super) fn lease_id(headers: &HeaderMap) -> Result<LeaseId, Rejection> {
    let mut values = headers.get_all(LEASE_ID).iter();
    let (Some(value), None) = (values.next(), values.next()) else {
        return Err(invalid(
            LEASE_ID.as_str(),
            "the header `Lease-Id` must stand exactly once",
        ));
    };
    let id = String::from_utf8_lossy(value.as_bytes());
    LeaseId::new(id).map_err(|error| invalid(LEASE_ID.as_str(), error))
}

/// Whether a body is marked as JSON: `application/json`, or a type on top of it.
pub(crate) fn is_json(headers: &HeaderMap) -> bool {
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

/// Refuses what a page of another site could have a browser send without asking here first. Such a
/// request has an `Origin`, and is never marked as JSON.
fn refuse_foreign_pages(headers: &HeaderMap) -> Result<(), Rejection> {
    if headers.contains_key(ORIGIN) && !is_json(headers) {
        return Err(Rejection::UnsupportedMediaType);
    }
    Ok(())
}

/// Reads the body of a request that has none: a member that nobody reads must not pass for one that counts.
pub(super) async fn no_members(mut body: Body) -> Result<(), Rejection> {
    let body = body::read(&mut body, BODY_LIMIT_BYTES, BODY_WAIT).await?;
    Ok(read_nothing(&body.to_bytes())?)
}

/// Reads the body, which must be marked as JSON.
pub(super) async fn body_bytes(headers: &HeaderMap, mut body: Body) -> Result<Bytes, Rejection> {
    refuse_foreign_pages(headers)?;
    let bytes = body::read(&mut body, BODY_LIMIT_BYTES, BODY_WAIT)
        .await?
        .to_bytes();
    if !bytes.trim_ascii().is_empty() && !is_json(headers) {
        return Err(Rejection::UnsupportedMediaType);
    }
    Ok(bytes)
}
