//! What the issuer answers: leases, and refusals as problem+json.

use std::{error::Error, time::Duration};

use axum::{
    Json,
    response::{IntoResponse, Response},
};
use http::{HeaderValue, StatusCode, header::CACHE_CONTROL};
use serde_json::{Value, json};

use crate::{
    body::BodyError,
    header::FENCING_TOKEN,
    lease::{Held, Lease, LeaseError, Owner, Page},
    metrics,
    problem::{Problem, ProblemType},
    token::Resource,
};

/// Lease ids are secrets; no cache may keep an answer.
const NO_STORE: (http::HeaderName, HeaderValue) =
    (CACHE_CONTROL, HeaderValue::from_static("no-store"));

/// A lease, to its holder.
pub(super) fn lease(status: StatusCode, lease: &Lease) -> Response {
    let fencing_token = lease.fencing_token().to_string();
    let body = Json(json!({
        "resource": lease.resource,
        "lease_id": lease.id.expose(),
        "token": lease.token,
        "fencing_token": fencing_token,
        "ttl_ms": whole_ms(lease.ttl),
    }));
    let mut response = (status, [NO_STORE], body).into_response();
    // The List grammar is ASCII; a Display String escapes the rest.
    if let Ok(value) = HeaderValue::try_from(fencing_token) {
        response.headers_mut().insert(FENCING_TOKEN, value);
    }
    response
}

/// A lease, or the lack of one, to everybody.
pub(super) fn state(resource: &Resource, held: Option<&Held>) -> Response {
    let body = match held {
        None => json!({ "resource": resource, "held": false }),
        Some(held) => {
            let mut body = holder(resource, held);
            body["held"] = true.into();
            body
        }
    };
    ([NO_STORE], Json(body)).into_response()
}

/// A page of leases, to operators.
pub(super) fn page(page: &Page) -> Response {
    let leases = page.leases.iter();
    let leases: Vec<_> = leases
        .map(|(resource, held)| holder(resource, held))
        .collect();
    (
        [NO_STORE],
        Json(json!({ "leases": leases, "cursor": page.cursor })),
    )
        .into_response()
}

fn holder(resource: &Resource, held: &Held) -> Value {
    json!({
        "resource": resource,
        "token": held.token,
        "owner": held.owner.as_ref().map(Owner::as_str),
        "ttl_ms": whole_ms(held.ttl),
        "waiters": held.waiters,
    })
}

/// A release.
pub(super) fn released() -> Response {
    (StatusCode::NO_CONTENT, [NO_STORE]).into_response()
}

fn whole_ms(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Why the issuer refused a request. It is also in the extensions of the response.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// A part of the request has no valid value.
    #[error("`{field}`: {why}")]
    InvalidRequest {
        /// The part: a member of the body, `body`, `resource`, or `lease-id`.
        field: String,
        /// What is wrong with it.
        why: String,
    },
    /// The body, or a browser's request without one, is not marked as JSON: without that mark, any
    /// page of another site could send it.
    #[error("the request needs `Content-Type: application/json`")]
    UnsupportedMediaType,
    /// The body could not be read.
    #[error(transparent)]
    Body(#[from] BodyError),
    /// The store said no.
    #[error(transparent)]
    Lease(#[from] LeaseError),
}

impl Refusal {
    /// The type of problem it is answered with.
    #[must_use]
    pub const fn problem_type(&self) -> ProblemType {
        match self {
            Self::InvalidRequest { .. } => ProblemType::InvalidRequest,
            Self::UnsupportedMediaType => ProblemType::UnsupportedMediaType,
            Self::Body(error) => error.problem_type(),
            Self::Lease(error) => match error {
                LeaseError::Held { .. } => ProblemType::LockHeld,
                LeaseError::Lost { .. } => ProblemType::LeaseLost,
                LeaseError::TooManyWaiters { .. } => ProblemType::TooManyWaiters,
                LeaseError::Exhausted { .. } => ProblemType::FenceExhausted,
                LeaseError::Invalid { .. } => ProblemType::InvalidRequest,
                LeaseError::Unavailable(_) => ProblemType::StoreUnavailable,
            },
        }
    }
}

impl From<&Refusal> for Problem {
    fn from(refusal: &Refusal) -> Self {
        let problem = Self::new(refusal.problem_type()).detail(refusal.to_string());
        match refusal {
            Refusal::InvalidRequest { field, .. }
            | Refusal::Lease(LeaseError::Invalid { field, .. }) => {
                problem.member("field", field.as_str())
            }
            Refusal::UnsupportedMediaType => problem,
            Refusal::Body(error) => Self::from(error),
            Refusal::Lease(LeaseError::Held {
                resource,
                retry_after,
            }) => problem
                .member("resource", resource.as_str())
                .member("retry_after_ms", whole_ms(*retry_after))
                .retry_after(*retry_after),
            Refusal::Lease(LeaseError::Lost { resource }) => {
                problem.member("resource", resource.as_str())
            }
            Refusal::Lease(LeaseError::Exhausted {
                resource,
                max_token,
            }) => problem
                .member("resource", resource.as_str())
                .member("max_token", *max_token),
            Refusal::Lease(LeaseError::TooManyWaiters { resource }) => problem
                .member("resource", resource.as_str())
                .retry_after(Duration::from_secs(1)),
            Refusal::Lease(LeaseError::Unavailable(_)) => {
                problem.retry_after(Duration::from_secs(1))
            }
        }
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        if let Self::Lease(LeaseError::Unavailable(cause)) = &self {
            let source = cause.source().map(tracing::field::display);
            tracing::error!(error = %cause, source, "the lease store is unavailable");
        }
        let problem = self.problem_type().name();
        metrics::count_by("tower_fence_lease_refused_total", "problem", problem);
        let mut response = Problem::from(&self).into_response();
        response.extensions_mut().insert(self);
        response
    }
}
