//! Responses of the issuer: leases, and refusals as problem+json.

use axum::{
    Json,
    response::{IntoResponse, Response},
};
use http::{HeaderValue, StatusCode, header::CACHE_CONTROL};

use crate::{
    body::BodyError,
    chain::Chain,
    events,
    header::FENCING_TOKEN,
    lease::{Held, Lease, LeaseError, Page},
    metrics,
    problem::{Problem, ProblemType},
    token::Resource,
    wire::{InvalidMember, LeaseBody, PageBody, StateBody, refusal},
};

/// Header that prohibits caches from storing a response, because lease ids are secrets.
const NO_STORE: (http::HeaderName, HeaderValue) =
    (CACHE_CONTROL, HeaderValue::from_static("no-store"));

/// Returns a response with a lease, for its holder.
pub(super) fn lease(status: StatusCode, lease: &Lease) -> Response {
    let body = LeaseBody::from(lease);
    // The conversion does not fail, because the field is an RFC 9651 List, which is ASCII.
    let fencing_token = HeaderValue::try_from(&body.fencing_token);
    let mut response = (status, [NO_STORE], Json(body)).into_response();
    if let Ok(mut value) = fencing_token {
        // The value may be signed, and the signature is confidential.
        value.set_sensitive(true);
        response.headers_mut().insert(FENCING_TOKEN, value);
    }
    response
}

/// Returns a response with the state of a lock. It contains no secrets.
pub(super) fn state(resource: &Resource, held: Option<&Held>) -> Response {
    ([NO_STORE], Json(StateBody::new(resource, held))).into_response()
}

/// Returns a response with a page of leases, for operators.
pub(super) fn page(page: &Page) -> Response {
    ([NO_STORE], Json(PageBody::from(page))).into_response()
}

/// Returns the empty response to a successful release or break.
pub(super) fn released() -> Response {
    (StatusCode::NO_CONTENT, [NO_STORE]).into_response()
}

/// Reason for refusing a request to the issuer.
///
/// The rejection is also in the extensions of the response.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Rejection {
    /// A part of the request has an invalid value.
    #[error("`{field}`: {why}")]
    InvalidRequest {
        /// The invalid part: a member of the body, `body`, `query`, `limit`, `cursor`, `resource`,
        /// or `lease-id`.
        field: String,
        /// The reason.
        why: String,
    },
    /// The content type is not JSON, although the request has a body or was sent by a browser. The
    /// issuer refuses such a request, because a page of another site may have caused it.
    #[error("the request needs `Content-Type: application/json`")]
    UnsupportedMediaType,
    /// The body could not be read.
    #[error(transparent)]
    Body(#[from] BodyError),
    /// The application is shutting down, and the request was waiting or would have had to wait.
    #[error("the service is shutting down, and requests no longer wait")]
    Closing,
    /// The store refused the request, or failed.
    #[error(transparent)]
    Lease(#[from] LeaseError),
}

impl Rejection {
    /// Returns the problem type of the response.
    #[must_use]
    pub const fn problem_type(&self) -> ProblemType {
        match self {
            Self::InvalidRequest { .. } => ProblemType::InvalidRequest,
            Self::UnsupportedMediaType => ProblemType::UnsupportedMediaType,
            Self::Closing => ProblemType::ServerBusy,
            Self::Body(error) => error.problem_type(),
            Self::Lease(error) => refusal::problem_type(error),
        }
    }
}

impl From<InvalidMember> for Rejection {
    fn from(invalid: InvalidMember) -> Self {
        Self::InvalidRequest {
            field: invalid.field,
            why: invalid.why,
        }
    }
}

/// Returns the rejection of a request to end a lease that is not held.
pub(super) fn not_held(resource: &Resource) -> Rejection {
    events::refused(ProblemType::LeaseLost.name(), Some(resource));
    LeaseError::lost(resource).into()
}

impl From<&Rejection> for Problem {
    fn from(refused: &Rejection) -> Self {
        let problem = Self::new(refused.problem_type()).detail(refused.to_string());
        match refused {
            Rejection::InvalidRequest { field, .. } => refusal::invalid(problem, field),
            Rejection::UnsupportedMediaType => problem,
            Rejection::Closing => problem.retry_after(refusal::RETRY_AFTER),
            Rejection::Body(error) => Self::from(error),
            Rejection::Lease(error) => refusal::describe(problem, error),
        }
    }
}

impl IntoResponse for Rejection {
    fn into_response(self) -> Response {
        match &self {
            Self::Lease(LeaseError::Unavailable(cause)) => {
                tracing::error!(error = %Chain(&**cause), "the lease store is unavailable");
            }
            Self::Lease(LeaseError::Misconfigured(cause)) => {
                tracing::error!(error = %Chain(&**cause), "the lease store is misconfigured");
            }
            _ => {}
        }
        let problem = self.problem_type().name();
        metrics::count_by("tower_fence_lease_refused_total", "problem", problem);
        match &self {
            // The handlers of the requests report this event.
            Self::Lease(LeaseError::Lost { .. }) => {}
            Self::Lease(
                LeaseError::Held { resource, .. } | LeaseError::TooManyWaiters { resource },
            ) => events::refused(problem, Some(resource)),
            _ => events::refused(problem, None),
        }
        let mut response = Problem::from(&self).into_response();
        response.extensions_mut().insert(self);
        response
    }
}
