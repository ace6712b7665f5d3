//! Refused requests, as problem details (`application/problem+json`).

use axum::response::{IntoResponse, Response};
use http::StatusCode;

use tower_fence::{
    AdmitError,
    chain::Chain,
    fence::ResetError,
    issuer,
    lease::LeaseError,
    problem::{Problem, ProblemType},
};

use crate::readers::STREAM_LIMIT;

/// The maximum length of a request body.
pub(super) const BODY_LIMIT_BYTES: usize = 4 * 1024;

pub(super) enum Rejection {
    /// A part of the request is invalid.
    Invalid {
        field: &'static str,
        why: String,
    },
    /// The `Content-Type` is not JSON.
    NoJson,
    /// A page of another site has sent the request.
    OtherSite,
    /// The maximum number of pages already follows the feed.
    TooManyReaders,
    TooLong,
    TooSlow,
    Lease(LeaseError),
    Fence(AdmitError),
    Reset(ResetError),
}

impl Rejection {
    pub(super) fn invalid(field: &'static str, why: impl ToString) -> Self {
        Self::Invalid {
            field,
            why: why.to_string(),
        }
    }
}

impl From<LeaseError> for Rejection {
    fn from(error: LeaseError) -> Self {
        Self::Lease(error)
    }
}

impl From<AdmitError> for Rejection {
    fn from(error: AdmitError) -> Self {
        Self::Fence(error)
    }
}

impl From<ResetError> for Rejection {
    fn from(error: ResetError) -> Self {
        match error {
            ResetError::Fence(error) => error.into(),
            refused => Self::Reset(refused),
        }
    }
}

impl From<Rejection> for Problem {
    fn from(rejection: Rejection) -> Self {
        match rejection {
            Rejection::Invalid { field, why } => {
                let problem = Self::new(ProblemType::InvalidRequest).member("field", field);
                problem.detail(why)
            }
            Rejection::NoJson => Self::new(ProblemType::UnsupportedMediaType),
            Rejection::OtherSite => Self::custom(
                "about:blank",
                StatusCode::FORBIDDEN,
                "The request comes from a page of another site",
            ),
            Rejection::TooManyReaders => Self::new(ProblemType::TooManyWaiters)
                .detail("too many pages follow the events of this process")
                .retry_after(STREAM_LIMIT),
            Rejection::TooLong => {
                Self::new(ProblemType::BodyTooLarge).member("limit_bytes", BODY_LIMIT_BYTES)
            }
            Rejection::TooSlow => Self::new(ProblemType::BodyTimeout),
            Rejection::Lease(error) => Self::from(&issuer::Rejection::Lease(error)),
            Rejection::Fence(error) => {
                let problem = Self::new(error.problem_type()).detail(error.to_string());
                if problem.status_code() == StatusCode::SERVICE_UNAVAILABLE {
                    problem.retry_after(std::time::Duration::from_secs(1))
                } else {
                    problem
                }
            }
            Rejection::Reset(error) => Self::custom(
                "about:blank",
                StatusCode::CONFLICT,
                "The fence was not reset",
            )
            .detail(error.to_string()),
        }
    }
}

impl IntoResponse for Rejection {
    fn into_response(self) -> Response {
        match &self {
            Self::Lease(error @ (LeaseError::Unavailable(_) | LeaseError::Misconfigured(_))) => {
                tracing::error!(
                    error = Chain(error).to_string(),
                    "the console cannot reach the lease store"
                );
            }
            Self::Fence(error) => {
                tracing::error!(
                    error = Chain(error).to_string(),
                    "the console cannot use the fence"
                );
            }
            _ => {}
        }
        Problem::from(self).into_response()
    }
}
