//! Decision about a request's transaction, and about the fence, after the handler has ended. The
//! decision has no side effects.

use std::sync::Arc;

use axum::response::Response;
use http::StatusCode;

use crate::fence::Place;

/// Response extension that requests a rollback, for protocols that report errors with status 200.
///
/// A response with this extension counts as a failure, as if the function of
/// [`FenceLayer::commit_if`](super::FenceLayer::commit_if) had returned `false`. If the request has
/// no idempotency key, a write by [`PendingWrite::write`](super::PendingWrite::write) that has
/// returned rows is already committed, and is not rolled back.
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rollback;

/// The function of [`FenceLayer::commit_if`](super::FenceLayer::commit_if).
pub(super) type CommitIf = Arc<dyn Fn(&Response) -> bool + Send + Sync>;

/// Returns whether a response requests a rollback regardless of its status.
pub(super) fn rolls_back(response: &Response, commit_if: Option<&CommitIf>) -> bool {
    response.extensions().get::<Rollback>().is_some()
        || commit_if.is_some_and(|commits| !commits(response))
}

/// The parts of a handler's outcome on which the end of the transaction depends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Outcome {
    /// The status of the response, or `None` if the handler panicked, failed or took too long.
    pub(super) status: Option<StatusCode>,
    /// Whether the response requests a rollback regardless of its status, with
    /// [`Rollback`](super::Rollback) or through [`commit_if`](super::FenceLayer::commit_if).
    pub(super) rolls_back: bool,
    pub(super) is_read: bool,
}

impl Outcome {
    /// The outcome of a handler that returned no response.
    pub(super) const NONE: Self = Self {
        status: None,
        rolls_back: false,
        is_read: false,
    };

    pub(super) fn commits(self) -> bool {
        served(self, true) == Served::Success
    }

    /// Returns whether the response is a fenced read's answer with a status from 400 to 499 that
    /// does not request a rollback. For example, a 404 reports that nothing was found.
    fn is_finding(self) -> bool {
        let is_client_error = self.status.is_some_and(|status| status.is_client_error());
        self.is_read && is_client_error && !self.rolls_back
    }
}

/// Decision about the transaction, the fence and the response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Commit. If the COMMIT is confirmed, return the handler's response. Otherwise raise the fence
    /// and return the error.
    Commit,
    /// Roll back and raise the fence, so that older tokens are stale and the token stays usable.
    /// Return the handler's response.
    Raise,
    /// Leave the fence unchanged, and roll back if the transaction is open. Return the handler's
    /// response.
    Answer,
    /// Leave the transaction and the fence unchanged. Return an error, because the handler reports
    /// a success although nothing was written.
    Refuse,
    /// Raise the fence in a separate transaction, because the handler's transaction is not
    /// accessible. Return an error.
    RaiseAndRefuse,
}

/// Returns the decision for the handler's outcome and the state of its transaction.
pub(super) fn verdict<T>(outcome: Outcome, place: &Place<T>) -> Verdict {
    let used = !matches!(place, Place::WithLayer { used: false, .. });
    match (place, served(outcome, used)) {
        (Place::Pending | Place::Beginning | Place::Refused(_), Served::Success) => Verdict::Refuse,
        (Place::Pending | Place::Beginning | Place::Refused(_), _) => Verdict::Answer,
        (Place::WithLayer { .. }, Served::Success) => Verdict::Commit,
        (Place::WithLayer { .. } | Place::Empty(_), Served::Rejected) => Verdict::Answer,
        // A rollback would release the row lock before the raise, so an older write could follow
        // the read.
        (Place::WithLayer { .. }, Served::Failure) if outcome.is_finding() => Verdict::Commit,
        (Place::WithLayer { .. }, Served::Failure) => Verdict::Raise,
        // The handler's write returned no rows, and the handler knows this. Nothing is left to
        // commit.
        (Place::Empty(_), Served::Success | Served::Failure) => Verdict::Raise,
        // The handler's COMMIT is final, whatever response the handler returns.
        (Place::Settled(Ok(())), _) => Verdict::Answer,
        // The handler has received the error of its COMMIT, so its response accounts for the
        // failure.
        (Place::Settled(Err(_)), Served::Failure) => Verdict::Raise,
        (Place::Settled(Err(_)), Served::Rejected) => Verdict::Answer,
        (Place::Settled(Err(_)), Served::Success) => Verdict::RaiseAndRefuse,
        // The handler, or a task that it started, still has the transaction, and can no longer
        // commit it.
        (Place::Lent | Place::Closed, Served::Rejected) => Verdict::Answer,
        // The handler, or a task that it started, still has the transaction or is committing it.
        (Place::Lent | Place::Committing | Place::Closed, _) => Verdict::RaiseAndRefuse,
    }
}

/// Class of a handler's outcome.
#[derive(Clone, Copy, PartialEq)]
enum Served {
    /// The handler's writes must be committed.
    Success,
    /// The handler failed, or its response may be based on data that it has seen.
    Failure,
    /// The response rejects the client or its request, without serving it.
    Rejected,
}

/// Classifies an outcome. `used` is whether the handler has used its transaction.
///
/// The statuses 401, 403 and 405 reject a client without permissions, whose token may be any
/// number. The other statuses up to 431 in this function reject an invalid request, for example
/// because an extractor could not read it. However, a handler may also respond with one of them
/// because of data that it has seen. The handler may have seen data if it has used the transaction.
///
/// A response with a status below 400 that requests a rollback is a failure. In GraphQL, JSON-RPC
/// and gRPC, such a response reports an error in its body or in a header.
fn served(outcome: Outcome, used: bool) -> Served {
    match outcome.status.map(|status| status.as_u16()) {
        Some(..400) if outcome.rolls_back => Served::Failure,
        Some(..400) => Served::Success,
        Some(401 | 403 | 405) => Served::Rejected,
        Some(400 | 406 | 411 | 413..=415 | 417 | 422 | 426 | 431) if !used => Served::Rejected,
        // A handler that was interrupted may also have seen data.
        Some(_) | None => Served::Failure,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fence::{AdmitError, CommitError};

    /// Tests each response with each state of the transaction.
    #[test]
    fn every_combination() {
        use Verdict::{
            Answer as Ans, Commit as Com, Raise as Rai, RaiseAndRefuse as Bad, Refuse as Ref,
        };
        let with_layer = |used| Place::WithLayer {
            transaction: (),
            used,
        };
        let columns = [
            Place::Pending,
            Place::Beginning,
            Place::Refused(AdmitError::NoResource),
            with_layer(false),
            with_layer(true),
            Place::Empty(()),
            Place::Settled(Ok(())),
            Place::Settled(Err(CommitError::Unfinished)),
            Place::Lent,
            Place::Committing,
            Place::Closed,
        ];
        let success = [Ref, Ref, Ref, Com, Com, Rai, Ans, Bad, Bad, Bad, Bad];
        let failure = [Ans, Ans, Ans, Rai, Rai, Rai, Ans, Rai, Bad, Bad, Bad];
        let refused = [Ans, Ans, Ans, Ans, Ans, Ans, Ans, Ans, Ans, Bad, Ans];
        // The response is a failure only if the handler used the transaction.
        let unread = [Ans, Ans, Ans, Ans, Rai, Rai, Ans, Rai, Bad, Bad, Bad];
        // The status, the expected verdicts, and the expected verdicts if the response requests a
        // rollback.
        let table = [
            (Some(200), success, failure),
            (Some(204), success, failure),
            (Some(303), success, failure),
            (Some(399), success, failure),
            (Some(400), unread, unread),
            (Some(401), refused, refused),
            (Some(403), refused, refused),
            (Some(404), failure, failure),
            (Some(405), refused, refused),
            (Some(406), unread, unread),
            (Some(409), failure, failure),
            (Some(411), unread, unread),
            (Some(412), failure, failure),
            (Some(413), unread, unread),
            (Some(414), unread, unread),
            (Some(415), unread, unread),
            (Some(416), failure, failure),
            (Some(417), unread, unread),
            (Some(422), unread, unread),
            (Some(426), unread, unread),
            (Some(429), failure, failure),
            (Some(431), unread, unread),
            (Some(500), failure, failure),
            (Some(503), failure, failure),
            (Some(999), failure, failure),
            (None, failure, failure),
        ];
        let cases = table.into_iter().flat_map(|(status, row, rolled_back)| {
            let rows = [(false, row), (true, rolled_back)];
            rows.into_iter().flat_map(move |(rolls_back, row)| {
                [false, true].map(|is_read| (status, rolls_back, is_read, row))
            })
        });
        for (status, rolls_back, is_read, row) in cases {
            let outcome = Outcome {
                status: status.map(|status| StatusCode::from_u16(status).unwrap()),
                rolls_back,
                is_read,
            };
            assert_eq!(outcome.commits(), row == success, "{outcome:?}");
            for (column, (place, expected)) in columns.iter().zip(row).enumerate() {
                let is_finding = is_read && !rolls_back && matches!(status, Some(400..500));
                let expected = match (place, expected) {
                    (Place::WithLayer { .. }, Rai) if is_finding => Com,
                    (_, expected) => expected,
                };
                let decided = verdict(outcome, place);
                assert_eq!(decided, expected, "{outcome:?}, column {column}");
            }
        }
    }
}
