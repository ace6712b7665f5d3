//! The end of a request: what its handler made of the transaction, and what the layer answers.
//!
//! 1. A success commits, and is answered only when that is confirmed.
//! 2. Anything else rolls back. Whether the fence is raised as well is the [`verdict`]'s to say; where
//!    it is, no answer leaves before that.
//! 3. But for a handler that took too long: its answer is a 503, which promises nothing about older
//!    tokens. It leaves soon after the limit, while the end of the transaction goes on in a task.

use std::{
    any::Any,
    panic::{AssertUnwindSafe, resume_unwind},
    sync::Arc,
    time::Duration,
};

use axum::{
    body::Body,
    response::{IntoResponse, Response},
};
use futures_util::FutureExt;
use http::{Request, StatusCode};
use tokio::time::timeout;
use tower_service::Service;
use tracing::Instrument;

use super::{
    idempotency::Idempotency,
    rejection::Rejection,
    stored::{UnstorableResponse, capture},
    verdict::{Verdict, verdict},
};
use crate::fence::{Closed, CommitError, Fence, FenceDatabase, Loan, StoredResponse, Turn};

/// How long a handler's answer that came too late waits for the end of its transaction.
const GRACE: Duration = Duration::from_millis(500);

/// How a handler ended.
pub(super) enum Ended<E> {
    /// With what must be stored of it, where something must.
    Response(Response, Option<StoredResponse>),
    Unstorable(UnstorableResponse),
    Error(E),
    Panic(Box<dyn Any + Send>),
}

/// Runs the handler. A panic is held back until its transaction is ended. Under a key the response
/// of a success is read to its end.
pub(super) async fn run<S>(
    mut inner: S,
    request: Request<Body>,
    keys: Option<&Idempotency>,
) -> Ended<S::Error>
where
    S: Service<Request<Body>>,
    S::Response: IntoResponse,
{
    let handler = AssertUnwindSafe(async move {
        let response = match inner.call(request).await {
            Ok(response) => response.into_response(),
            Err(error) => return Ended::Error(error),
        };
        let commits = verdict(Some(response.status()), true) == Verdict::Commit;
        match keys {
            Some(keys) if commits => match capture(response, keys).await {
                Ok((response, stored)) => Ended::Response(response, Some(stored)),
                Err(error) => Ended::Unstorable(error),
            },
            _ => Ended::Response(response, None),
        }
    });
    handler.catch_unwind().await.unwrap_or_else(Ended::Panic)
}

/// Waits for the handler and ends its transaction; only then is there a response.
pub(super) async fn settle<DB: FenceDatabase, E>(
    fence: &Fence<DB>,
    loan: Loan<DB>,
    handler: impl Future<Output = Ended<E>>,
) -> Result<Response, E> {
    let hold = fence.limits().hold;
    // Where the client goes away, this future is dropped: whatever is still out is called in.
    let loan = CloseOnDrop(loan);
    let Ok(ended) = timeout(hold, handler).await else {
        return Ok(too_late(fence, &loan.0).await.into_response());
    };
    let (status, stored) = match &ended {
        Ended::Response(response, stored) => (Some(response.status()), stored.as_ref()),
        _ => (None, None),
    };
    let ending = Ending::of(&loan.0);
    let settled = ending.end(fence, status, stored).await;
    match (ended, settled) {
        (Ended::Response(response, _), Ok(())) => Ok(response),
        (Ended::Unstorable(error), Ok(())) => Ok(Rejection::from(error).into_response()),
        (Ended::Response(..) | Ended::Unstorable(_), Err(rejection)) => {
            Ok(rejection.into_response())
        }
        (Ended::Error(error), _) => Err(error),
        (Ended::Panic(payload), _) => resume_unwind(payload),
    }
}

/// Ends the transaction of a handler that took too long, and says what became of it.
async fn too_late<DB: FenceDatabase>(fence: &Fence<DB>, loan: &Loan<DB>) -> Rejection {
    let ending = Ending::of(loan);
    let answer = match &ending.closed {
        Closed::Settled(Ok(())) => unknown("the handler committed, and then took too long").into(),
        Closed::EscapedCommitting => unknown("the handler took too long to commit").into(),
        Closed::Escaped(_) => CommitError::Escaped.into(),
        _ => Rejection::HandlerTimeout(fence.limits().hold),
    };
    let fence = fence.clone();
    let ending = async move {
        let ended = ending.end(&fence, None, None).await;
        ended.inspect_err(|error| {
            tracing::warn!(%error, "a handler took too long, and its transaction ended badly");
        })
    };
    // In a task: a statement that is still under way, or a pool that is empty, can keep it for longer
    // than anybody should wait for an answer.
    let task = tokio::spawn(ending.in_current_span());
    match timeout(GRACE, task).await {
        Ok(Ok(Err(rejection))) => rejection,
        _ => answer,
    }
}

/// A transaction that nobody can use any more, and that is to be ended.
struct Ending<DB: FenceDatabase> {
    loan: Loan<DB>,
    closed: Closed<DB>,
    /// Others of this process go on when it has ended.
    _turns: Vec<Turn>,
}

impl<DB: FenceDatabase> Ending<DB> {
    fn of(loan: &Loan<DB>) -> Self {
        let (closed, turns) = loan.close();
        Self {
            loan: loan.clone(),
            closed,
            _turns: turns,
        }
    }

    /// Ends it by what the handler answered, if it did, and with the response where that must be
    /// stored. An error is to be answered instead.
    async fn end(
        self,
        fence: &Fence<DB>,
        status: Option<StatusCode>,
        stored: Option<&StoredResponse>,
    ) -> Result<(), Rejection> {
        let used = match &self.closed {
            Closed::Home(tx) => tx.is_used(),
            _ => true,
        };
        let verdict = verdict(status, used);
        let error = match (self.closed, verdict) {
            (Closed::Unused, Verdict::Commit) => return Err(Rejection::NotWritten),
            (Closed::Refused(error), Verdict::Commit) => return Err(error.into()),
            (Closed::Unused | Closed::Refused(_), _) => return Ok(()),
            (Closed::Home(tx), Verdict::Commit) => {
                let committed = match stored {
                    Some(stored) => tx.commit_with(stored).await,
                    None => tx.commit().await,
                };
                match committed {
                    Ok(()) => return Ok(()),
                    Err(error) => error,
                }
            }
            // There is nothing to commit, and the handler knows.
            (Closed::Empty(tx), Verdict::Commit)
            | (Closed::Home(tx) | Closed::Empty(tx), Verdict::Raise) => {
                return Ok(fence.fail(tx).await?);
            }
            // Dropped, it is rolled back.
            (Closed::Home(_) | Closed::Empty(_), Verdict::Leave) => return Ok(()),
            // What the handler has committed is there, whatever it answers.
            (Closed::Settled(Ok(())), _) => return Ok(()),
            // The handler knows that its own COMMIT failed, and answers for it.
            (Closed::Settled(Err(_)), Verdict::Raise) => {
                return Ok(fence.fail_lost(self.loan.named()).await?);
            }
            (Closed::Settled(Err(_)), Verdict::Leave) => return Ok(()),
            (Closed::Settled(Err(error)), Verdict::Commit) => error,
            (Closed::Escaped(lock), _) => {
                fence.terminate(lock).await;
                CommitError::Escaped
            }
            (Closed::EscapedCommitting, _) => {
                unknown("the handler answered while it was committing")
            }
        };
        if let Err(raise) = fence.fail_lost(self.loan.named()).await {
            tracing::error!(error = %raise, "the fence could not be raised");
        }
        Err(error.into())
    }
}

fn unknown(why: &str) -> CommitError {
    CommitError::OutcomeUnknown(Arc::new(sqlx::Error::Protocol(why.into())))
}

/// Nothing that is still out can commit once this is gone.
struct CloseOnDrop<DB: FenceDatabase>(Loan<DB>);

impl<DB: FenceDatabase> Drop for CloseOnDrop<DB> {
    fn drop(&mut self) {
        drop(self.0.close());
    }
}
