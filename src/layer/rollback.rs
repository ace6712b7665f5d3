//! Which answers of a handler are not committed although their status is that of a success.

use std::sync::Arc;

use axum::response::Response;

/// Demands a rollback: an extension of a handler's response.
///
/// GraphQL, JSON-RPC and gRPC report errors with status 200, which a [`FenceLayer`](super::FenceLayer) otherwise commits. A
/// response with this extension counts as a failure: the handler's writes are rolled back, older tokens become stale, the
/// token stays usable, and under an idempotency key the response is not stored. The client gets the response as it is. Rows
/// that [`PendingWrite::write`](super::PendingWrite::write) has returned are committed by then, and stay.
///
/// ```
/// use axum::{Extension, Json, response::{IntoResponse, Response}};
/// use serde_json::{Value, json};
/// use tower_fence::layer::Rollback;
///
/// fn answer(result: Result<Value, String>) -> Response {
///     match result {
///         Ok(data) => Json(json!({ "data": data })).into_response(),
///         Err(message) => {
///             let errors = json!({ "data": null, "errors": [{ "message": message }] });
///             (Extension(Rollback), Json(errors)).into_response()
///         }
///     }
/// }
/// ```
///
/// [`FenceLayer::commit_if`](super::FenceLayer::commit_if) decides the same from what a response has already, such as the header
/// `grpc-status`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rollback;

/// The function of [`FenceLayer::commit_if`](super::FenceLayer::commit_if).
pub(super) type CommitIf = Arc<dyn Fn(&Response) -> bool + Send + Sync>;

/// Whether a response demands a rollback, whatever its status.
pub(super) fn rolls_back(response: &Response, commit_if: Option<&CommitIf>) -> bool {
    response.extensions().get::<Rollback>().is_some()
        || commit_if.is_some_and(|commits| !commits(response))
}
