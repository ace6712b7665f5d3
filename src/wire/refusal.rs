//! An error of the lease store as a problem document, and back.

#[cfg(feature = "client")]
use std::sync::Arc;
#[cfg(feature = "issuer")]
use std::time::Duration;

#[cfg(feature = "client")]
use serde::Deserialize;

use crate::{lease::LeaseError, problem::ProblemType};
#[cfg(feature = "client")]
use crate::{
    lease::time::of_ms,
    token::{Resource, Token},
};
#[cfg(feature = "issuer")]
use crate::{lease::time::whole_ms, problem::Problem};

/// The type of problem that an error of the store is answered with.
#[cfg(feature = "issuer")]
pub(crate) const fn problem_type(error: &LeaseError) -> ProblemType {
    match error {
        LeaseError::Held { .. } => ProblemType::LockHeld,
        LeaseError::Lost { .. } => ProblemType::LeaseLost,
        LeaseError::TooManyWaiters { .. } => ProblemType::TooManyWaiters,
        LeaseError::Exhausted { .. } => ProblemType::FenceExhausted,
        LeaseError::Invalid { .. } => ProblemType::InvalidRequest,
        LeaseError::Unavailable(_) => ProblemType::StoreUnavailable,
        LeaseError::Misconfigured(_) => ProblemType::Misconfigured,
    }
}

/// When a client may ask again that was refused for a moment.
#[cfg(feature = "issuer")]
pub(crate) const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Adds what an error of the store says beside its type and its text.
#[cfg(feature = "issuer")]
pub(crate) fn describe(problem: Problem, error: &LeaseError) -> Problem {
    match error {
        LeaseError::Held {
            resource,
            retry_after,
        } => problem
            .member("resource", resource.as_str())
            .member("retry_after_ms", whole_ms(*retry_after))
            .retry_after(*retry_after),
        LeaseError::Lost { resource } => problem.member("resource", resource.as_str()),
        LeaseError::Exhausted {
            resource,
            max_token,
        } => problem
            .member("resource", resource.as_str())
            .member("max_token", *max_token),
        LeaseError::TooManyWaiters { resource } => problem
            .member("resource", resource.as_str())
            .retry_after(RETRY_AFTER),
        LeaseError::Invalid { field, .. } => invalid(problem, field),
        LeaseError::Unavailable(_) => problem.retry_after(RETRY_AFTER),
        LeaseError::Misconfigured(_) => problem,
    }
}

/// Names the part of a request that has no valid value.
#[cfg(feature = "issuer")]
pub(crate) fn invalid(problem: Problem, field: &str) -> Problem {
    problem.member("field", field)
}

/// The members of the problems that an issuer answers.
#[cfg(feature = "client")]
#[derive(Deserialize)]
struct ProblemBody {
    #[serde(rename = "type")]
    kind: String,
    detail: Option<String>,
    field: Option<String>,
    retry_after_ms: Option<u64>,
    max_token: Option<i64>,
}

/// Reads a refusal of a request for this resource, or for none. `None` where it is no problem of an
/// issuer's, or one that says nothing but that the store is unavailable.
#[cfg(feature = "client")]
pub(crate) fn read(body: &[u8], resource: Option<&Resource>) -> Option<LeaseError> {
    let problem: ProblemBody = serde_json::from_slice(body).ok()?;
    let is = |kind: ProblemType| problem.kind == kind.uri();
    if is(ProblemType::InvalidRequest) {
        return Some(LeaseError::Invalid {
            field: problem.field.unwrap_or_default(),
            detail: problem.detail.unwrap_or_default(),
        });
    }
    if is(ProblemType::Misconfigured) {
        let detail = problem.detail.unwrap_or_default();
        return Some(LeaseError::Misconfigured(Arc::from(Box::from(detail))));
    }
    let resource = resource?.clone();
    if is(ProblemType::LockHeld) {
        let retry_after = of_ms(problem.retry_after_ms.unwrap_or(0));
        return Some(LeaseError::Held {
            resource,
            retry_after,
        });
    }
    if is(ProblemType::LeaseLost) {
        return Some(LeaseError::Lost { resource });
    }
    if is(ProblemType::TooManyWaiters) {
        return Some(LeaseError::TooManyWaiters { resource });
    }
    is(ProblemType::FenceExhausted).then(|| LeaseError::Exhausted {
        resource,
        max_token: problem.max_token.unwrap_or(Token::MAX.get()),
    })
}

#[cfg(all(test, feature = "issuer", feature = "client"))]
mod tests {
    use super::*;

    #[test]
    fn a_client_reads_each_error_that_an_issuer_writes() {
        let resource = Resource::new("sku-1").unwrap();
        let errors = [
            LeaseError::Held {
                resource: resource.clone(),
                retry_after: Duration::from_millis(1_500),
            },
            LeaseError::Lost {
                resource: resource.clone(),
            },
            LeaseError::TooManyWaiters {
                resource: resource.clone(),
            },
            LeaseError::Exhausted {
                resource: resource.clone(),
                max_token: 7,
            },
            LeaseError::Invalid {
                field: "ttl_ms".into(),
                detail: "too long".into(),
            },
            LeaseError::Misconfigured(Arc::from(Box::from("a table is missing"))),
        ];
        for error in errors {
            let mut problem = Problem::new(problem_type(&error));
            if let LeaseError::Invalid { detail, .. } = &error {
                problem = problem.detail(detail);
            }
            if let LeaseError::Misconfigured(cause) = &error {
                problem = problem.detail(cause.to_string());
            }
            let body = serde_json::to_vec(&describe(problem, &error)).unwrap();
            let read = read(&body, Some(&resource)).unwrap();
            assert_eq!(format!("{read:?}"), format!("{error:?}"));
        }
        let unavailable = LeaseError::unavailable(std::io::Error::other("down"));
        let problem = Problem::new(problem_type(&unavailable));
        let body = serde_json::to_vec(&describe(problem, &unavailable)).unwrap();
        assert!(read(&body, Some(&resource)).is_none());
    }
}
