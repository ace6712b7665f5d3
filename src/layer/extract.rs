//! What a handler can ask for: the transaction, and what was admitted.

use axum::{
    extract::FromRequestParts,
    response::{IntoResponse, Response},
};
use http::request::Parts;

use crate::{
    fence::{Admitted, FenceDatabase, FencedTx, Loan},
    problem::{Problem, ProblemType},
};

/// Lends the request's transaction to the handler. See [`FencedTx`].
impl<DB: FenceDatabase, S: Sync> FromRequestParts<S> for FencedTx<DB> {
    type Rejection = NoTransaction;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Self::Rejection> {
        let Some(loan) = parts.extensions.get::<Loan<DB>>() else {
            return Err(if parts.method.is_safe() {
                NoTransaction::SafeMethod
            } else {
                NoTransaction::NoLayer
            });
        };
        loan.take().ok_or(NoTransaction::Taken)
    }
}

/// The resource and the token of this request: of a write, or of a fenced read.
impl<S: Sync> FromRequestParts<S> for Admitted {
    type Rejection = NoTransaction;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Self::Rejection> {
        let admitted = parts.extensions.get::<Self>().cloned();
        admitted.ok_or(NoTransaction::NoLayer)
    }
}

/// Why a handler cannot have the transaction: an error of the service, answered with 500.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NoTransaction {
    /// No `FenceLayer` for this database is around the handler.
    #[error("no fence: add `.route_layer(FenceLayer::new(fence, …))` to this route")]
    NoLayer,
    /// The handler serves a safe method, which has no transaction.
    #[error("a safe method has no fenced transaction: take the pool from the state instead")]
    SafeMethod,
    /// The transaction was extracted before and is not back, or was committed already.
    #[error("the fenced transaction was already taken by another extractor")]
    Taken,
}

impl IntoResponse for NoTransaction {
    fn into_response(self) -> Response {
        tracing::error!(error = %self, "a handler got no fenced transaction");
        Problem::new(ProblemType::Misconfigured)
            .detail(self.to_string())
            .into_response()
    }
}
