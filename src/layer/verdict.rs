//! What becomes of a request's transaction, and of the fence, once its handler has ended: one decision,
//! without a side effect.

use std::sync::Arc;

use axum::response::Response;
use http::StatusCode;

use crate::fence::Place;

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

/// What a handler answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Outcome {
    /// The status of the response; `None` if the handler panicked, failed or took too long.
    pub(super) status: Option<StatusCode>,
    /// Whether the response demands a rollback whatever its status: by
    /// [`Rollback`](super::Rollback), or by [`commit_if`](super::FenceLayer::commit_if).
    pub(super) rolls_back: bool,
}

impl Outcome {
    /// The handler returned no response.
    pub(super) const NONE: Self = Self {
        status: None,
        rolls_back: false,
    };

    /// Whether the handler's writes are to be committed.
    pub(super) fn commits(self) -> bool {
        served(self, true) == Served::Success
    }
}

/// What becomes of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// COMMIT. When that is confirmed, the handler's answer leaves; otherwise the fence is raised, and
    /// the error is answered.
    Commit,
    /// It is rolled back, and the fence raised: everyone older is dead, the token stays usable. The
    /// handler's answer leaves.
    Raise,
    /// It is rolled back, and the fence stays where it was, since the sender was turned away without
    /// being served. The handler's answer leaves.
    Leave,
    /// There is nothing to do: the handler's answer leaves.
    Answer,
    /// There is nothing to do, but the handler claims a success that there is not: an error is answered.
    Refuse,
    /// The fence is raised beside a transaction that is out of reach, and an error is answered.
    RaiseAndRefuse,
}

/// Decides by what the handler answered, and by where its transaction is.
pub(super) fn verdict<T>(outcome: Outcome, place: &Place<T>) -> Verdict {
    let used = !matches!(place, Place::Home { used: false, .. });
    match (place, served(outcome, used)) {
        (Place::Pending | Place::Beginning | Place::Refused(_), Served::Success) => Verdict::Refuse,
        (Place::Pending | Place::Beginning | Place::Refused(_), _) => Verdict::Answer,
        (Place::Home { .. }, Served::Success) => Verdict::Commit,
        (Place::Home { .. } | Place::Empty(_), Served::TurnedAway) => Verdict::Leave,
        (Place::Home { .. }, Served::Failure) => Verdict::Raise,
        // There is nothing to commit, and the handler knows.
        (Place::Empty(_), Served::Success | Served::Failure) => Verdict::Raise,
        // What the handler has committed is there, whatever it answers.
        (Place::Settled(Ok(())), _) => Verdict::Answer,
        // The handler knows that its COMMIT failed, and answers for it.
        (Place::Settled(Err(_)), Served::Failure) => Verdict::Raise,
        (Place::Settled(Err(_)), Served::TurnedAway) => Verdict::Answer,
        (Place::Settled(Err(_)), Served::Success) => Verdict::RaiseAndRefuse,
        // Something still has it, or is committing it.
        (Place::Lent | Place::Committing | Place::Closed, _) => Verdict::RaiseAndRefuse,
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Served {
    Success,
    Failure,
    TurnedAway,
}

/// What an answer says about its request.
///
/// 401, 403 and 405 turn away a client that has no business here: a token that such a request brings may be
/// any number. So may that of a request which no handler could read (400, 413, 415, 422); but a
/// handler may give these answers as well, of what it has seen. It has seen something where it has
/// used the transaction.
///
/// A status below 400 that demands a rollback is a failure: the body or a header reports an error, as in GraphQL,
/// JSON-RPC and gRPC.
fn served(outcome: Outcome, used: bool) -> Served {
    match outcome.status.map(|status| status.as_u16()) {
        Some(..400) if outcome.rolls_back => Served::Failure,
        Some(..400) => Served::Success,
        Some(401 | 403 | 405) => Served::TurnedAway,
        Some(400 | 413 | 415 | 422) if !used => Served::TurnedAway,
        // What broke off in the middle may have been seen, as well.
        Some(_) | None => Served::Failure,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fence::{AdmitError, CommitError};

    /// Each answer with each place of the transaction.
    #[test]
    fn every_combination() {
        use Verdict::{
            Answer as Ans, Commit as Com, Leave as Lea, Raise as Rai, RaiseAndRefuse as Bad,
            Refuse as Ref,
        };
        let home = |used| Place::Home {
            transaction: (),
            used,
        };
        let columns = [
            Place::Pending,
            Place::Beginning,
            Place::Refused(AdmitError::NoResource),
            home(false),
            home(true),
            Place::Empty(()),
            Place::Settled(Ok(())),
            Place::Settled(Err(CommitError::Unfinished)),
            Place::Lent,
            Place::Committing,
            Place::Closed,
        ];
        let success = [Ref, Ref, Ref, Com, Com, Rai, Ans, Bad, Bad, Bad, Bad];
        let failure = [Ans, Ans, Ans, Rai, Rai, Rai, Ans, Rai, Bad, Bad, Bad];
        let turned_away = [Ans, Ans, Ans, Lea, Lea, Lea, Ans, Ans, Bad, Bad, Bad];
        // A failure, but where the transaction was not used.
        let unread = [Ans, Ans, Ans, Lea, Rai, Rai, Ans, Rai, Bad, Bad, Bad];
        // The status, its row, and its row if the response demands a rollback.
        let table = [
            (Some(200), success, failure),
            (Some(204), success, failure),
            (Some(303), success, failure),
            (Some(399), success, failure),
            (Some(400), unread, unread),
            (Some(401), turned_away, turned_away),
            (Some(403), turned_away, turned_away),
            (Some(404), failure, failure),
            (Some(405), turned_away, turned_away),
            (Some(409), failure, failure),
            (Some(412), failure, failure),
            (Some(413), unread, unread),
            (Some(415), unread, unread),
            (Some(422), unread, unread),
            (Some(429), failure, failure),
            (Some(500), failure, failure),
            (Some(503), failure, failure),
            (Some(999), failure, failure),
            (None, failure, failure),
        ];
        for (status, row, rolled_back) in table {
            let status = status.map(|status| StatusCode::from_u16(status).unwrap());
            for (rolls_back, row) in [(false, row), (true, rolled_back)] {
                let outcome = Outcome { status, rolls_back };
                assert_eq!(outcome.commits(), row == success, "{outcome:?}");
                for (column, (place, expected)) in columns.iter().zip(row).enumerate() {
                    let decided = verdict(outcome, place);
                    assert_eq!(decided, expected, "{outcome:?}, column {column}");
                }
            }
        }
    }
}
