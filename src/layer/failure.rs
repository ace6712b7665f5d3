//! [`DatabaseError`]: what a handler answers when one of its statements failed.

use std::sync::Arc;

use axum::response::{IntoResponse, Response};

use super::Rejection;
use crate::{
    fence::{AdmitError, Fault, fault_of},
    problem::{Problem, ProblemType},
};

/// The failure of a statement, as the answer of a handler: `?` on sqlx's errors makes it.
///
/// Where another transaction was in the way (a deadlock, a serialization failure, a lock), or where
/// the database is out of reach, the answer is that of the fence itself: 503 `fence-busy` or
/// `store-unavailable`, with `Retry-After`. Anything else is a bug or a violated constraint, which
/// the handler knows better: 500, without a word of the cause but in the log. The transaction is
/// rolled back in any case.
///
/// ```
/// use tower_fence::{FencedTx, layer::DatabaseError};
///
/// async fn handler(mut tx: FencedTx) -> Result<(), DatabaseError> {
///     sqlx::query("UPDATE inventory SET stock = stock - 1").execute(&mut *tx).await?;
///     Ok(())
/// }
/// ```
#[derive(Debug, thiserror::Error)]
#[error("a statement failed")]
pub struct DatabaseError(#[from] sqlx::Error);

impl IntoResponse for DatabaseError {
    fn into_response(self) -> Response {
        let Self(error) = self;
        let error = Arc::new(error);
        let problem = match fault_of(&error) {
            Fault::Contention => Problem::from(&Rejection::from(AdmitError::Busy(error.clone()))),
            Fault::Lost => Problem::from(&Rejection::from(AdmitError::Unavailable(error.clone()))),
            Fault::Refused => Problem::new(ProblemType::TransactionAborted),
        };
        tracing::error!(%error, "a statement of a handler failed");
        problem.into_response()
    }
}
