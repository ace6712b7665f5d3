//! [`DatabaseError`]: the response of a handler whose statement or call to the fence has failed.

use std::sync::Arc;

use axum::response::{IntoResponse, Response};

use super::{Refusal, refusal::problem_of_statement, report};
use crate::{
    chain::Chain,
    events,
    fence::{AdmitError, CommitError, WriteError},
    metrics,
    problem::{Problem, ProblemType},
    token::Resource,
};

/// Error response for a handler whose statement, or whose call to the fence, has failed.
///
/// The operator `?` converts sqlx's errors and the errors of the fence into this type. A
/// [`WriteError`] is rendered as if the handler had returned it. Any other error of the fence is
/// rendered like a refusal by the layer. The following rules apply to sqlx's errors.
///
/// If another transaction caused the failure (a deadlock, a serialization failure or a lock
/// timeout), the response is 503 `fence-busy`. If the database is unreachable, the response is 503
/// `store-unavailable`. Both have `Retry-After`, as after a failure of the fence itself. If the
/// handler wrote to a [protected table](crate::guide::protected_tables) under a resource that was
/// not admitted, the response is 500 `unfenced-write`. Any other failure is a bug or a violated
/// constraint. The response is then 500, and only the log contains the cause. A handler that
/// handles such an error itself must not convert the error into this type. In every case, the layer
/// rolls the transaction back.
///
/// ```
/// use tower_fence::{PgFencedTx, layer::DatabaseError};
///
/// async fn handler(mut tx: PgFencedTx) -> Result<(), DatabaseError> {
///     sqlx::query("UPDATE inventory SET stock = stock - 1").execute(&mut *tx).await?;
///     Ok(())
/// }
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DatabaseError {
    /// A statement failed.
    #[error("a statement failed")]
    Statement(#[from] sqlx::Error),
    /// The token was not admitted, or the transaction was not committed.
    #[error(transparent)]
    Refusal(#[from] Refusal),
    /// A [single-statement write](super::PendingWrite::write) failed.
    #[error(transparent)]
    Write(#[from] WriteError),
}

impl From<AdmitError> for DatabaseError {
    fn from(error: AdmitError) -> Self {
        Refusal::from(error).into()
    }
}

impl From<CommitError> for DatabaseError {
    fn from(error: CommitError) -> Self {
        Refusal::from(error).into()
    }
}

impl IntoResponse for DatabaseError {
    fn into_response(self) -> Response {
        match self {
            Self::Statement(error) => failed(&Arc::new(error)),
            Self::Refusal(refusal) => refusal.into_response(),
            Self::Write(error) => error.into_response(),
        }
    }
}

/// Renders the error of a [`PendingWrite`](super::PendingWrite). If the token was not admitted or
/// the write was not committed, the response is the same as for a refusal by the layer. A failed
/// statement is rendered like a [`DatabaseError`]. If the rows were written but do not have the
/// type that the handler requested, the response is 500 `rows-unreadable`.
impl IntoResponse for WriteError {
    fn into_response(self) -> Response {
        match self {
            Self::Admit(error) => Refusal::from(error).into_response(),
            Self::Commit(error) => Refusal::from(error).into_response(),
            Self::Statement(error) => failed(&error),
            Self::Rows(_) => {
                tracing::error!(
                    error = Chain(&self).to_string(),
                    "cannot decode the rows of a handler's write"
                );
                let kind = ProblemType::RowsUnreadable;
                marked(kind, Problem::new(kind))
            }
            Self::Independent | Self::Unsupported(_) => {
                tracing::error!(
                    error = Chain(&self).to_string(),
                    "a handler's statement cannot be fenced"
                );
                let kind = ProblemType::Misconfigured;
                marked(kind, Problem::new(kind))
            }
        }
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        marked(self.problem_type(), self.render())
    }
}

/// Marks the response of a handler that has failed. The layer counts this response like a refusal
/// if it sends it, but not if it answers with a refusal of its own.
#[derive(Clone, Copy)]
struct FailedHandler(ProblemType);

/// Returns the response of a handler that has failed, for the layer to count.
pub(super) fn marked(kind: ProblemType, response: impl IntoResponse) -> Response {
    let mut response = response.into_response();
    response.extensions_mut().insert(FailedHandler(kind));
    response
}

/// Counts the response of a handler that has failed. Removes the mark, so that an outer layer does
/// not count the response again.
pub(super) fn count(response: &mut Response, resource: Option<&Resource>) {
    if let Some(FailedHandler(kind)) = response.extensions_mut().remove() {
        if let Some(refusal) = response.extensions().get::<Refusal>() {
            return refusal.count(resource);
        }
        metrics::refused(kind.name(), None);
        events::refused(kind.name(), resource);
    }
}

/// Logs a failed statement, and returns the response.
fn failed(error: &Arc<sqlx::Error>) -> Response {
    let kind = problem_of_statement(error);
    let refusal = match kind {
        ProblemType::FenceBusy => Some(Refusal::from(AdmitError::Busy(error.clone()))),
        ProblemType::StoreUnavailable => {
            Some(Refusal::from(AdmitError::Unavailable(error.clone())))
        }
        _ => None,
    };
    let problem = refusal
        .as_ref()
        .map_or_else(|| Problem::new(kind), Problem::from);
    let message = "a handler's statement failed";
    if kind == ProblemType::FenceBusy {
        report::busy(kind.name(), error, message);
    } else {
        tracing::error!(
            problem = kind.name(),
            error = Chain(error).to_string(),
            "{message}"
        );
    }
    let mut response = marked(kind, problem);
    if let Some(refusal) = refusal {
        response.extensions_mut().insert(refusal);
    }
    response
}

#[cfg(all(test, feature = "metrics"))]
mod tests {
    use std::io;

    use metrics_exporter_prometheus::PrometheusBuilder;

    use super::*;
    use crate::layer::{NoTransaction, report::captured};

    #[tokio::test(start_paused = true)]
    async fn failed_statements_are_counted_and_contention_is_no_error() {
        let recorder = PrometheusBuilder::new().build_recorder();
        let respond = |error: fn() -> sqlx::Error| {
            let log = captured(|| {
                ::metrics::with_local_recorder(&recorder, || {
                    for _ in 0..2 {
                        count(&mut DatabaseError::from(error()).into_response(), None);
                        let failed = WriteError::Statement(error().into());
                        count(&mut failed.into_response(), None);
                    }
                });
            });
            assert!(log.contains("a handler's statement failed"), "{log}");
            log
        };
        let busy = || sqlx::Error::PoolTimedOut;
        let log = respond(busy);
        assert_eq!(
            (log.lines().count(), log.contains("WARN")),
            (1, true),
            "{log}"
        );
        // The layer's own refusals for this reason share the limit of the log lines.
        let again = captured(|| {
            let refusal = Refusal::from(AdmitError::Busy(busy().into()));
            drop(refusal.into_response());
        });
        assert_eq!(again, "");
        let log = respond(|| sqlx::Error::Io(io::ErrorKind::BrokenPipe.into()));
        assert_eq!(log.matches("ERROR").count(), 4, "{log}");
        let log = respond(|| sqlx::Error::RowNotFound);
        assert_eq!(log.matches("ERROR").count(), 4, "{log}");
        ::metrics::with_local_recorder(&recorder, || {
            for mut response in [
                WriteError::Rows(busy().into()).into_response(),
                WriteError::Independent.into_response(),
                WriteError::Unsupported(busy().into()).into_response(),
                NoTransaction::InUse.into_response(),
            ] {
                count(&mut response, None);
            }
        });
        let counted = recorder.handle().render();
        for (problem, count) in [
            ("fence-busy", 4),
            ("store-unavailable", 4),
            ("transaction-aborted", 4),
            ("rows-unreadable", 1),
            ("misconfigured", 3),
        ] {
            let series = format!(r#"tower_fence_refused_total{{problem="{problem}"}} {count}"#);
            assert!(counted.contains(&series), "{counted}");
        }
    }
}
