//! Conversion of the errors of a lease store into problem documents, and back.

#[cfg(feature = "client")]
use std::sync::Arc;
#[cfg(feature = "issuer")]
use std::time::Duration;

#[cfg(feature = "client")]
use serde::Deserialize;

#[cfg(feature = "client")]
use crate::{
    chain::is_deceptive,
    time::of_ms,
    token::{Resource, Token},
};
use crate::{lease::LeaseError, problem::ProblemType};
#[cfg(feature = "issuer")]
use crate::{problem::Problem, time::whole_ms};

/// Returns the problem type of the response to an error of the store.
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

/// Value of `Retry-After` for temporary refusals.
#[cfg(feature = "issuer")]
pub(crate) const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Adds the members and the `Retry-After` header for an error of the store to a problem document.
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
        LeaseError::Invalid { field, .. } => problem.member("field", field.as_str()),
        LeaseError::Unavailable(_) => problem.retry_after(RETRY_AFTER),
        LeaseError::Misconfigured(_) => problem,
    }
}

/// Members of an issuer's problem documents.
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

/// Reads the problem document of a refused request. `resource` is the resource of the request, if
/// the request has one.
///
/// Returns `None` if the body is not a problem document of an issuer, or if its type, such as
/// `store-unavailable`, has no [`LeaseError`] of its own.
#[cfg(feature = "client")]
pub(crate) fn read(body: &[u8], resource: Option<&Resource>) -> Option<LeaseError> {
    let problem: ProblemBody = serde_json::from_slice(body).ok()?;
    let kind = ProblemType::ALL
        .iter()
        .find(|kind| kind.uri() == problem.kind)?;
    let detail = limited(&problem.detail.unwrap_or_default());
    Some(match kind {
        ProblemType::InvalidRequest => {
            LeaseError::invalid(limited(&problem.field.unwrap_or_default()), detail)
        }
        ProblemType::Misconfigured => LeaseError::Misconfigured(Arc::from(Box::from(detail))),
        ProblemType::LockHeld => {
            LeaseError::held(resource?, of_ms(problem.retry_after_ms.unwrap_or(0)))
        }
        ProblemType::LeaseLost => LeaseError::lost(resource?),
        ProblemType::TooManyWaiters => LeaseError::TooManyWaiters {
            resource: resource?.clone(),
        },
        ProblemType::FenceExhausted => {
            LeaseError::exhausted(resource?, problem.max_token.unwrap_or(Token::MAX.get()))
        }
        _ => return None,
    })
}

/// Maximum number of characters of a peer's text in an error message.
#[cfg(feature = "client")]
const LONGEST_TEXT: usize = 300;

/// Returns the beginning of a peer's text, without deceptive characters, for an error message.
#[cfg(feature = "client")]
pub(crate) fn limited(text: &str) -> String {
    let honest = text.chars().filter(|c| !is_deceptive(*c));
    honest.take(LONGEST_TEXT).collect()
}

#[cfg(all(test, feature = "issuer", feature = "client"))]
mod tests {
    use super::*;

    #[test]
    fn text_of_a_peer_is_limited() {
        for kind in [ProblemType::InvalidRequest, ProblemType::Misconfigured] {
            let detail = "é\n\u{202e}".repeat(100_000);
            let problem = Problem::new(kind).detail(&detail);
            let problem = problem.member("field", detail.as_str());
            let body = serde_json::to_vec(&problem).unwrap();
            let error = read(&body, None).unwrap();
            let text = crate::chain::Chain(&error).to_string();
            assert!(
                text.contains("éé") && text.len() < 1_500 && !text.contains("u{202e}"),
                "{text}"
            );
        }
    }

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
