//! [`Refusal`]: the reasons for refusing a request, and the responses.

use std::{sync::Arc, time::Duration};

use axum::response::{IntoResponse, Response};

use super::{
    report,
    resource::{ResourceError, Resources},
    stored::UnstorableResponse,
};
pub use crate::body::BodyError;
use crate::{
    chain::Chain,
    events,
    fence::{AdmitError, Claim, CommitError, Fault, StaleToken},
    header::MalformedToken,
    idempotency::InvalidKey,
    metrics,
    pattern::FillError,
    problem::{Problem, ProblemType},
    token::Resource,
    token_keys::Forged,
};

/// Reason for refusing a request.
///
/// The response is problem+json. The refusal is also in the extensions of the response, so that an
/// outer layer can count it or render it differently:
///
/// ```
/// use axum::response::Response;
/// use tower_fence::layer::Refusal;
///
/// fn is_stale(response: &Response) -> bool {
///     let refusal = response.extensions().get::<Refusal>();
///     refusal.is_some_and(|refusal| refusal.stale().is_some())
/// }
/// ```
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The write has no token.
    #[error("an unsafe method needs a fencing token")]
    TokenRequired,
    /// The token header is malformed.
    #[error(transparent)]
    Malformed(#[from] MalformedToken),
    /// The write names several resources and has no token for one of them.
    #[error("the request also needs a fencing token for {0}")]
    TokenMissing(Resource),
    /// The token is for a resource that is not a resource of the request.
    #[error("the token is for {token_resource}, but the request is for {resources}")]
    WrongResource {
        /// The resources of the request.
        resources: Resources,
        /// The resource of the token.
        token_resource: Resource,
    },
    /// The resource of the request cannot be determined.
    #[error(transparent)]
    Resource(#[from] ResourceError),
    /// The issuer has not signed the token; see
    /// [`FenceLayer::verify_with`](super::FenceLayer::verify_with). The response does not contain
    /// the details.
    #[error("the fencing token was not signed by the issuer")]
    Forged(#[source] Forged),
    /// This database has never assigned the token's epoch; see
    /// [`FenceLayer::issued_by_this_database`](super::FenceLayer::issued_by_this_database).
    #[error("this database never assigned the epoch of token {} for {}", .0.token, .0.resource)]
    UnknownEpoch(Claim),
    /// Another `FenceLayer` has already admitted this request. A second admission would wait for
    /// the row lock that the first admission holds.
    #[error("two `FenceLayer`s wrap this handler; remove one of them")]
    TwoLayers,
    /// The write has no idempotency key, and the layer requires one.
    #[error("this write needs an idempotency key")]
    KeyRequired,
    /// The idempotency key is malformed.
    #[error(transparent)]
    MalformedKey(#[from] InvalidKey),
    /// The principal that owns the idempotency key of the request is unknown; see
    /// [`Idempotency::principal`](super::Idempotency::principal).
    #[error(
        "the principal of a request with an idempotency key is unknown: unless the service identifies its principals \
         otherwise, a request with cookies needs an `Authorization` field"
    )]
    PrincipalRequired,
    /// The idempotency key was used for another request.
    #[error("the idempotency key was used for another method, path, query, resource or body")]
    KeyMismatch,
    /// A request with this idempotency key is in progress.
    #[error("a request with this idempotency key is in progress")]
    KeyInFlight,
    /// The write of the first request with this key was committed without its response, by an SQL
    /// statement.
    #[error("the write under this idempotency key was committed, but its response was not stored")]
    Unanswered,
    /// The response could not be stored, so the write was rolled back.
    #[error(transparent)]
    Unstorable(#[from] UnstorableResponse),
    /// The body could not be read.
    #[error(transparent)]
    Body(#[from] BodyError),
    /// The token was not admitted, or the fence could not be raised after the handler had failed.
    #[error(transparent)]
    Admit(#[from] AdmitError),
    /// The `on_begin` hook failed; see [`FenceLayer::on_begin`](super::FenceLayer::on_begin).
    #[error("the `on_begin` hook failed")]
    OnBegin(#[source] Arc<sqlx::Error>),
    /// The `on_begin` hook did not end before the fence's hold timeout expired.
    #[error("the `on_begin` hook did not end before the hold timeout of {0:?} expired")]
    OnBeginTimeout(Duration),
    /// The handler did not respond before the fence's hold timeout expired.
    #[error("the handler did not respond before the hold timeout of {0:?} expired")]
    HandlerTimeout(Duration),
    /// The layer is deferred, and the handler returned a success without writing.
    #[error("the handler responded with a success without using its `PendingWrite`")]
    NotWritten,
    /// The transaction was not committed, or its outcome is unknown.
    #[error(transparent)]
    Commit(#[from] CommitError),
}

impl Refusal {
    /// Returns the stale token, if the request was refused because its token is stale.
    #[must_use]
    pub const fn stale(&self) -> Option<&StaleToken> {
        match self {
            Self::Admit(AdmitError::Stale(stale)) => Some(stale),
            _ => None,
        }
    }

    /// Returns the problem type of the response.
    #[must_use]
    pub fn problem_type(&self) -> ProblemType {
        match self {
            Self::TokenRequired | Self::TokenMissing(_) => ProblemType::TokenRequired,
            Self::Malformed(_) => ProblemType::MalformedToken,
            Self::WrongResource { .. } => ProblemType::WrongResource,
            Self::Resource(error) => match error {
                ResourceError::Invalid(_)
                | ResourceError::Unparsed(_)
                | ResourceError::Pattern(FillError::Separator { .. })
                | ResourceError::Nothing => ProblemType::InvalidRequest,
                ResourceError::NoRoute => ProblemType::UnknownRoute,
                ResourceError::NoPathParam { .. }
                | ResourceError::PathParamTwice { .. }
                | ResourceError::Pattern(_) => ProblemType::Misconfigured,
                ResourceError::Unavailable => ProblemType::StoreUnavailable,
            },
            Self::Forged(_) => ProblemType::ForgedToken,
            Self::UnknownEpoch(_) => ProblemType::UnknownEpoch,
            Self::OnBegin(error) => problem_of_statement(error),
            Self::OnBeginTimeout(_) => ProblemType::HandlerTimeout,
            Self::TwoLayers | Self::NotWritten => ProblemType::Misconfigured,
            Self::KeyRequired => ProblemType::IdempotencyKeyRequired,
            Self::MalformedKey(_) => ProblemType::MalformedIdempotencyKey,
            Self::PrincipalRequired => ProblemType::IdempotencyPrincipalRequired,
            Self::KeyMismatch => ProblemType::IdempotencyMismatch,
            Self::KeyInFlight => ProblemType::IdempotencyInFlight,
            Self::Unanswered => ProblemType::ResponseMissing,
            Self::Unstorable(_) => ProblemType::ResponseNotStored,
            Self::Body(error) => error.problem_type(),
            Self::Admit(error) => error.problem_type(),
            Self::HandlerTimeout(_) => ProblemType::HandlerTimeout,
            Self::Commit(error) => match error {
                CommitError::Aborted(_) | CommitError::Unfinished | CommitError::Unrecorded => {
                    ProblemType::TransactionAborted
                }
                CommitError::Unfenced(_) => ProblemType::UnfencedWrite,
                CommitError::Unavailable(_) => ProblemType::StoreUnavailable,
                CommitError::Busy(_) => ProblemType::FenceBusy,
                CommitError::Escaped => ProblemType::TransactionEscaped,
                CommitError::OutcomeUnknown(_) => ProblemType::OutcomeUnknown,
            },
        }
    }

    /// Reports the layer's refusal of a request for this resource, and returns the response.
    pub(super) fn respond(self, resource: Option<&Resource>) -> Response {
        self.count(resource);
        self.render()
    }

    /// Counts the refusal of a request for this resource.
    pub(super) fn count(&self, resource: Option<&Resource>) {
        let problem = self.problem_type().name();
        metrics::refused(problem, self.stale().map(stale_reason));
        match self {
            Self::Admit(AdmitError::Stale(stale)) => events::stale(stale),
            // `Verification` has already reported the forged token.
            Self::Forged(_) => {}
            Self::TokenMissing(resource) => events::refused(problem, Some(resource)),
            Self::UnknownEpoch(claim) => events::refused(problem, Some(&claim.resource)),
            _ => events::refused(problem, resource),
        }
        if matches!(self, Self::Commit(_)) {
            metrics::count_by("tower_fence_commit_failures_total", "problem", problem);
        }
    }

    /// Logs the refusal, and returns the response.
    pub(super) fn render(self) -> Response {
        self.log();
        let mut response = Problem::from(&self).into_response();
        response.extensions_mut().insert(self);
        response
    }

    /// Logs the refusal in one line. The sources of an error appear in the log, never in the
    /// response.
    fn log(&self) {
        let problem = self.problem_type().name();
        match self {
            Self::Admit(AdmitError::Stale(stale)) => report::stale(stale),
            // `Verification` has already logged the forged token, at most once per second for each
            // reason.
            Self::Forged(_) => {}
            Self::PrincipalRequired => report::no_principal(),
            _ if self.problem_type() == ProblemType::FenceBusy => {
                report::busy(problem, self, "refused a write");
            }
            _ if self.problem_type().status().is_server_error() => {
                tracing::error!(problem, error = Chain(self).to_string(), "refused a write");
            }
            _ => report::refused(problem, self),
        }
    }
}

/// Returns the metrics label for the reason why a token is stale.
const fn stale_reason(stale: &StaleToken) -> &'static str {
    if stale.by_floor {
        "floor"
    } else if stale.used {
        "used"
    } else {
        "superseded"
    }
}

pub(super) fn problem_of_statement(error: &sqlx::Error) -> ProblemType {
    match Fault::of(error) {
        Fault::Contention | Fault::Collision => ProblemType::FenceBusy,
        Fault::Lost | Fault::Silent => ProblemType::StoreUnavailable,
        Fault::Unfenced => ProblemType::UnfencedWrite,
        // A bug or a violated constraint, which the handler must handle.
        Fault::Unsupported
        | Fault::Missing
        | Fault::Misconfigured
        | Fault::Refused
        | Fault::Ended => ProblemType::TransactionAborted,
    }
}

impl From<&Refusal> for Problem {
    fn from(refusal: &Refusal) -> Self {
        let problem = Self::new(refusal.problem_type()).detail(refusal.to_string());
        match refusal {
            Refusal::Admit(AdmitError::Stale(stale)) => {
                let problem = problem
                    .member("resource", stale.resource.as_str())
                    .member("presented_token", stale.presented_token.get())
                    .member("max_token", stale.max_token);
                if stale.by_floor {
                    problem.member("by_floor", true)
                } else if stale.used {
                    let detail = format!(
                        "{stale}; renew the lease with a new token, or have the service admit reusable tokens"
                    );
                    problem.member("used", true).detail(detail)
                } else {
                    problem
                }
            }
            Refusal::TokenMissing(resource) => problem.member("resource", resource.as_str()),
            Refusal::Resource(ResourceError::Invalid(_) | ResourceError::Nothing) => {
                problem.member("field", "resource")
            }
            Refusal::Resource(
                ResourceError::Unparsed(name)
                | ResourceError::Pattern(FillError::Separator {
                    parameter: name, ..
                }),
            ) => problem.member("field", name.as_str()),
            Refusal::UnknownEpoch(claim) => problem
                .member("resource", claim.resource.as_str())
                .member("presented_token", claim.token.get()),
            Refusal::Body(error) => Self::from(error),
            Refusal::KeyInFlight => problem.retry_after(Duration::from_secs(1)),
            _ if problem.status_code().as_u16() == 503 => {
                problem.retry_after(Duration::from_secs(1))
            }
            _ => problem,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::token::{Resource, Token};

    fn members(refusal: &Refusal) -> Value {
        serde_json::to_value(Problem::from(refusal)).unwrap()
    }

    fn stale(by_floor: bool, used: bool) -> StaleToken {
        StaleToken {
            resource: Resource::new("a").unwrap(),
            presented_token: Token::MIN,
            max_token: 4,
            by_floor,
            used,
        }
    }

    #[test]
    fn used_superseded_and_below_minimum_tokens_are_distinguished() {
        let refused = |by_floor, used| {
            let stale = stale(by_floor, used);
            (
                stale_reason(&stale),
                members(&Refusal::from(AdmitError::Stale(stale))),
            )
        };
        let (reason, used) = refused(false, true);
        assert_eq!((reason, &used["used"]), ("used", &json!(true)));
        let detail = used["detail"].as_str().unwrap();
        assert!(detail.contains("was used already; renew"), "{detail}");
        for (by_floor, expected) in [(false, "superseded"), (true, "floor")] {
            let (reason, other) = refused(by_floor, false);
            assert_eq!((reason, other.get("used")), (expected, None));
        }
    }

    #[test]
    fn a_used_token_has_a_log_line_of_its_own() {
        // No line is suppressed, because no other unit test refuses a used token.
        let used = stale(false, true);
        let log = report::captured(|| drop(Refusal::from(AdmitError::Stale(used)).into_response()));
        let line = "refused a token that was used already";
        assert!(log.contains("WARN") && log.contains(line), "{log}");
        assert!(!log.contains("stale writer"), "{log}");
    }

    #[tokio::test(start_paused = true)]
    async fn text_of_a_client_cannot_imitate_fields_of_the_log() {
        let text = r#"sku-1 ERROR resource="sku-2" max_token=7"#;
        let named = |name| Resource::new(name).unwrap();
        for refusal in [
            Refusal::WrongResource {
                resources: named("sku-1").into(),
                token_resource: named(text),
            },
            Refusal::OnBegin(Arc::new(sqlx::Error::Protocol(text.into()))),
        ] {
            let mut log = String::new();
            // Another test may have logged a refusal within the last second.
            while log.is_empty() {
                tokio::time::advance(Duration::from_secs(1)).await;
                log = report::captured(|| drop(refusal.clone().into_response()));
            }
            let (_, error) = log
                .split_once(" error=\"")
                .unwrap_or_else(|| panic!("{log}"));
            let quoted = r#"sku-1 ERROR resource=\"sku-2\" max_token=7"#;
            assert!(error.contains(quoted), "{log}");
        }
    }
}
