//! Routes for operators.

use std::{ops::RangeInclusive, sync::Arc};

use axum::{
    body::Body,
    extract::{Query, State, rejection::QueryRejection},
    response::Response,
};
use http::HeaderMap;
use serde::Deserialize;
use tracing::Instrument;

use super::{
    request::{ResourcePath, body_bytes, invalid},
    response::{self, Rejection},
};
use crate::{
    lease::{LeaseAdmin, LeaseError},
    token::Token,
    wire::BreakBody,
};

/// Range of `limit`, the maximum number of leases in a page.
pub(super) const LIMITS: RangeInclusive<usize> = 1..=1_000;
/// Default value of `limit`.
pub(super) const LIMIT: usize = 100;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Paging {
    limit: Option<usize>,
    cursor: Option<String>,
}

/// Lists the held leases, page by page.
pub(super) async fn list<L: LeaseAdmin>(
    State(leases): State<Arc<L>>,
    paging: Result<Query<Paging>, QueryRejection>,
) -> Result<Response, Rejection> {
    let Query(paging) = paging.map_err(|_| {
        invalid(
            "query",
            "may contain only `limit`, a number, and `cursor`, each at most once",
        )
    })?;
    let limit = paging.limit.unwrap_or(LIMIT);
    if !LIMITS.contains(&limit) {
        let (from, to) = (LIMITS.start(), LIMITS.end());
        return Err(invalid("limit", format!("must be from {from} to {to}")));
    }
    let cursor = paging.cursor.filter(|cursor| !cursor.is_empty());
    let listed = leases.list(limit, cursor.as_deref()).await;
    let page = listed.map_err(|error| response::failed(error, None))?;
    Ok(response::page(&page))
}

/// Breaks a lease and removes its lock delay. If a token is given, breaks the lease only if it has
/// this token.
pub(super) async fn break_lease<L: LeaseAdmin>(
    State(leases): State<Arc<L>>,
    ResourcePath(resource): ResourcePath,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Rejection> {
    let body = BreakBody::read(&body_bytes(&headers, body).await?)?;
    let subject = resource.clone();
    let breaking = async move {
        let broken = leases.break_lease(&subject, body.token).await;
        let (resource, token) = (subject.as_str(), body.token.map(Token::get));
        match &broken {
            Ok(true) => tracing::warn!(resource, token, "broke a lease"),
            Err(LeaseError::Unavailable(_)) => tracing::warn!(
                resource,
                token,
                "a lease may have been broken: the store has not confirmed it"
            ),
            _ => {}
        }
        broken
    };
    // The lease may be broken even if the client disconnects. The task logs it nevertheless.
    let task = tokio::spawn(breaking.in_current_span()).await;
    let broken = task.unwrap_or_else(|stopped| Err(LeaseError::unavailable(stopped)));
    match broken.map_err(|error| response::failed(error, Some(&resource)))? {
        true => Ok(response::released()),
        false => Err(response::not_held(&resource)),
    }
}
