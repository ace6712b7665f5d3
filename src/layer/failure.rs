//! [`DatabaseError`]: what a handler answers when one of its statements failed.

use std::sync::Arc;

use axum::response::{IntoResponse, Response};

use super::{Refusal, refusal::of_statement};
use crate::{
    chain::Chain,
    fence::{AdmitError, WriteError},
    problem::{Problem, ProblemType},
};

/// The failure of a statement, as the answer of a handler: `?` on sqlx's errors makes it.
///
/// Where another transaction was in the way (a deadlock, a serialization failure, a lock), or where
/// the database is out of reach, the answer is that of the fence itself: 503 `fence-busy` or
/// `store-unavailable`, with `Retry-After`. A write to a [protected table](crate::guide::protected_tables)
/// of what was not admitted is 500 `unfenced-write`. Anything else is a bug or a violated constraint, which
/// the handler knows better: 500, without a word of the cause but in the log. The transaction is
/// rolled back in any case.
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
#[error("a statement failed")]
pub struct DatabaseError(#[from] sqlx::Error);

impl IntoResponse for DatabaseError {
    fn into_response(self) -> Response {
        failed(&Arc::new(self.0))
    }
}

/// A [`PendingWrite`](super::PendingWrite) that failed: what was not admitted, or not committed, is
/// answered as by the layer itself, and a failed statement as a [`DatabaseError`]. Rows of another type than the handler
/// asked for are 500 `rows-unreadable`: they were written.
impl IntoResponse for WriteError {
    fn into_response(self) -> Response {
        match self {
            Self::Admit(error) => Refusal::from(error).into_response(),
            Self::Commit(error) => Refusal::from(error).into_response(),
            Self::Statement(error) => failed(&error),
            Self::Rows(_) => {
                tracing::error!(error = %Chain(&self), "the rows of a handler's write could not be read");
                Problem::new(ProblemType::RowsUnreadable).into_response()
            }
            Self::Independent | Self::Unsupported(_) => {
                tracing::error!(error = %Chain(&self), "a handler's statement cannot be fenced");
                Problem::new(ProblemType::Misconfigured).into_response()
            }
        }
    }
}

fn failed(error: &Arc<sqlx::Error>) -> Response {
    let problem = match of_statement(error) {
        ProblemType::FenceBusy => Problem::from(&Refusal::from(AdmitError::Busy(error.clone()))),
        ProblemType::StoreUnavailable => {
            Problem::from(&Refusal::from(AdmitError::Unavailable(error.clone())))
        }
        kind => Problem::new(kind),
    };
    tracing::error!(error = %Chain(error), "a statement of a handler failed");
    problem.into_response()
}
