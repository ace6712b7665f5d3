//! End of a request: the end of the handler's transaction, and the choice of the response.
//!
//! 1. After a success, the transaction is committed. It is also committed after a fenced read with
//!    a status from 400 to 499, unless the response rejects the client or requests a rollback. The
//!    response is sent only after the COMMIT is confirmed.
//! 2. After every other outcome, the transaction is rolled back. The [`verdict`] decides whether
//!    the fence is raised as well. If the fence is raised, the response is sent afterwards.
//! 3. If a handler takes too long, the response is usually a 503, which promises nothing about
//!    older tokens. The response is sent soon after the timeout, while a task ends the transaction.

use std::{
    any::Any,
    mem,
    panic::{AssertUnwindSafe, resume_unwind},
    sync::Arc,
    time::Duration,
};

use axum::{
    body::Body,
    response::{IntoResponse, Response},
};
use futures_util::FutureExt;
use http::Request;
use tokio::time::timeout;
use tower_service::Service;
use tracing::Instrument;

use super::{
    failure,
    idempotency::Idempotency,
    refusal::Refusal,
    stored::{UnstorableResponse, capture},
    verdict::{CommitIf, Outcome, Verdict, rolls_back, verdict},
};
use crate::{
    chain::Chain,
    fence::{
        AdmitError, Claims, CommitError, Contents, Fence, FenceDatabase, Place, Slot,
        StoredResponse,
    },
};

/// Maximum time that the response to a handler timeout waits for the end of the transaction.
const GRACE: Duration = Duration::from_millis(500);

pub(super) enum HandlerEnd<E> {
    /// The response, the outcome that decides how the transaction ends, and the copy of the
    /// response to be stored.
    Response(Response, Outcome, Option<StoredResponse>),
    /// The handler succeeded, but its response cannot be stored under the idempotency key.
    Unstorable(UnstorableResponse),
    /// The inner service returned an error instead of a response.
    Error(E),
    /// The handler panicked. The value is the payload of the panic.
    Panic(Box<dyn Any + Send>),
}

/// Runs the handler. Catches a panic, which [`settle`] resumes after the transaction has ended. If
/// the request has an idempotency key, reads the body of a successful response to its end.
pub(super) async fn run_handler<S: Service<Request<Body>, Response: IntoResponse>>(
    mut inner: S,
    request: Request<Body>,
    commit_if: Option<&CommitIf>,
    keys: Option<&Idempotency>,
) -> HandlerEnd<S::Error> {
    let is_read = request.method().is_safe();
    let handler = AssertUnwindSafe(async move {
        let response = match inner.call(request).await {
            Ok(response) => response.into_response(),
            Err(error) => return HandlerEnd::Error(error),
        };
        let outcome = Outcome {
            status: Some(response.status()),
            rolls_back: rolls_back(&response, commit_if),
            is_read,
        };
        match keys {
            Some(keys) if outcome.commits() => {
                let limit_bytes = keys.response_limit_bytes;
                match capture(response, limit_bytes, &keys.stored_headers).await {
                    Ok((response, stored)) => HandlerEnd::Response(response, outcome, Some(stored)),
                    Err(error) => HandlerEnd::Unstorable(error),
                }
            }
            _ => HandlerEnd::Response(response, outcome, None),
        }
    });
    let caught = handler.catch_unwind().await;
    caught.unwrap_or_else(HandlerEnd::Panic)
}

/// Waits for the handler, ends its transaction, and then returns the response.
pub(super) async fn settle<DB: FenceDatabase, E>(
    fence: &Fence<DB>,
    slot: Slot<DB>,
    handler: impl Future<Output = HandlerEnd<E>>,
) -> Result<Response, E> {
    // The `on_begin` hook may have used part of the hold timeout.
    let hold_timeout = fence.limits().hold_timeout;
    let within = hold_timeout.saturating_sub(slot.held_since().elapsed());
    // If the client disconnects, this future is dropped, which closes the slot.
    let open = CloseOnDrop { fence, slot };
    let resource = &open.slot.claims().first().resource;
    let Ok(mut handler_end) = timeout(within, handler).await else {
        return Ok(end_after_timeout(fence, &open.slot)
            .await
            .respond(Some(resource)));
    };
    let closed = open.slot.close();
    if let HandlerEnd::Response(response, outcome, _) = &mut handler_end
        && verdict(*outcome, &closed.place) == Verdict::RaiseAndRefuse
    {
        // The body may hold the transaction. The raise would wait for its row lock or connection.
        drop(mem::take(response));
    }
    let (outcome, stored) = match &handler_end {
        HandlerEnd::Response(_, outcome, stored) => (*outcome, stored.as_ref()),
        _ => (Outcome::NONE, None),
    };
    let ended = end_transaction(fence, open.slot.claims(), closed, outcome, stored).await;
    match (handler_end, ended) {
        (HandlerEnd::Response(mut response, ..), Ok(())) => {
            failure::count(&mut response, Some(resource));
            Ok(response)
        }
        (HandlerEnd::Unstorable(error), Ok(())) => Ok(Refusal::from(error).respond(Some(resource))),
        (HandlerEnd::Response(..) | HandlerEnd::Unstorable(_), Err(refusal)) => {
            Ok(refusal.respond(Some(resource)))
        }
        // The fence could not be raised, or the handler has not ended its COMMIT.
        (
            HandlerEnd::Error(_),
            Err(refusal @ (Refusal::Admit(_) | Refusal::Commit(CommitError::OutcomeUnknown(_)))),
        ) => Ok(refusal.respond(Some(resource))),
        (HandlerEnd::Error(error), _) => Err(error),
        (HandlerEnd::Panic(payload), ended) => {
            if let Err(Refusal::Admit(error)) = ended {
                not_raised(&error);
            }
            resume_unwind(payload)
        }
    }
}

/// Ends the transaction of a handler that took too long. Returns the refusal that describes the
/// outcome.
async fn end_after_timeout<DB: FenceDatabase>(fence: &Fence<DB>, slot: &Slot<DB>) -> Refusal {
    let closed = slot.close();
    let answer = match &closed.place {
        Place::Settled(Ok(())) => unknown("the handler committed, and then took too long").into(),
        Place::Committing => unknown("the handler took too long to commit").into(),
        Place::Settled(Err(error @ CommitError::OutcomeUnknown(_))) => error.clone().into(),
        Place::Lent => CommitError::Escaped.into(),
        _ => Refusal::HandlerTimeout(fence.limits().hold_timeout),
    };
    let (fence, claims) = (fence.clone(), slot.claims().clone());
    let ending = async move {
        let ended = end_transaction(&fence, &claims, closed, Outcome::NONE, None).await;
        ended.inspect_err(|error| {
            tracing::warn!(
                error = Chain(error).to_string(),
                "a handler took too long and its transaction failed to end"
            );
        })
    };
    // The transaction is ended in a task, because a statement that is still running, or an
    // exhausted pool, can delay the end longer than the client should wait.
    let task = tokio::spawn(ending.in_current_span());
    match timeout(GRACE, task).await {
        Ok(Ok(Err(refusal))) => refusal,
        _ => answer,
    }
}

/// Ends the transaction of a closed slot according to the handler's outcome, and stores the
/// response with the COMMIT if `stored` is given. A returned error replaces the handler's response.
/// Waiting writes of this process continue only after the transaction has ended.
async fn end_transaction<DB: FenceDatabase>(
    fence: &Fence<DB>,
    claims: &Claims,
    closed: Contents<DB>,
    outcome: Outcome,
    stored: Option<&StoredResponse>,
) -> Result<(), Refusal> {
    let Contents {
        place,
        id,
        permits: _permits,
    } = closed;
    if matches!(place, Place::Lent | Place::Closed)
        && let Some(terminating) = fence.terminate(id)
    {
        let _ = terminating.await;
    }
    let error = match (verdict(outcome, &place), place) {
        // Dropping a transaction that is still open rolls it back.
        (Verdict::Answer, _) => return Ok(()),
        (Verdict::Raise, Place::WithLayer { transaction, .. } | Place::Empty(transaction)) => {
            return Ok(fence.roll_back_and_raise(transaction, claims).await?);
        }
        (Verdict::Raise, Place::Settled(Err(error @ CommitError::OutcomeUnknown(_)))) => {
            return fence.raise_after_loss(claims).await.map_err(|raise| {
                // The error of the raise would promise that nothing was written.
                not_raised(&raise);
                error.into()
            });
        }
        (Verdict::Raise, _) => return Ok(fence.raise_after_loss(claims).await?),
        (Verdict::Commit, Place::WithLayer { transaction, .. }) => {
            let committed = match stored {
                Some(stored) => transaction.commit_with(stored).await,
                None => transaction.commit().await,
            };
            match committed {
                Ok(()) => return Ok(()),
                Err(error) => error,
            }
        }
        (Verdict::Refuse, Place::Refused(error)) => return Err(error.into()),
        (Verdict::Refuse | Verdict::Commit, _) => return Err(Refusal::NotWritten),
        (Verdict::RaiseAndRefuse, Place::Settled(Err(error))) => error,
        (Verdict::RaiseAndRefuse, Place::Committing) => {
            unknown("the handler answered while it was committing")
        }
        (Verdict::RaiseAndRefuse, _) => CommitError::Escaped,
    };
    if let Err(raise) = fence.raise_after_loss(claims).await {
        // A COMMIT in progress may still take effect, so its outcome stays unknown.
        if outcome.status.is_none() && !matches!(error, CommitError::OutcomeUnknown(_)) {
            return Err(raise.into());
        }
        not_raised(&raise);
    }
    Err(error.into())
}

/// Logs a failed raise that the response does not report.
fn not_raised(error: &AdmitError) {
    tracing::error!(
        error = Chain(error).to_string(),
        "the fence could not be raised"
    );
}

/// Returns the error for a COMMIT of the handler whose outcome is unknown.
fn unknown(why: &str) -> CommitError {
    CommitError::OutcomeUnknown(Arc::new(sqlx::Error::Protocol(why.into())))
}

/// Closes the slot on drop, so that a leaked `FencedTx` cannot commit, and terminates its
/// transaction.
struct CloseOnDrop<'a, DB: FenceDatabase> {
    fence: &'a Fence<DB>,
    slot: Slot<DB>,
}

impl<DB: FenceDatabase> Drop for CloseOnDrop<'_, DB> {
    fn drop(&mut self) {
        let closed = self.slot.close();
        if let Place::Lent = closed.place {
            let _ = self.fence.terminate(closed.id);
        }
    }
}

#[cfg(all(test, feature = "sqlite", feature = "metrics"))]
mod tests {
    use axum::{Router, routing::post};
    use http::Method;
    use metrics_exporter_prometheus::PrometheusBuilder;
    use sqlx::sqlite::SqlitePoolOptions;
    use tokio::runtime::Builder;
    use tower::ServiceExt;

    use super::*;
    use crate::{FenceLayer, PathParam, SqliteFencedTx, header, layer::report::captured_at};

    #[tokio::test]
    async fn hold_time_of_a_panicking_handler_is_recorded() {
        let pool = SqlitePoolOptions::new().max_connections(1);
        let fence = Fence::new(pool.connect("sqlite::memory:").await.unwrap());
        fence.migrate().await.unwrap();
        let handler = async || -> Body { panic!("this panic is part of the test") };
        let app = Router::new()
            .route("/{sku}", post(handler))
            .route_layer(FenceLayer::new(fence, PathParam("sku")));
        let recorder = PrometheusBuilder::new().build_recorder();
        let _recording = ::metrics::set_default_local_recorder(&recorder);
        let request = Request::post("/sku-1").header(header::FENCING_TOKEN, "1");
        let answer = app.oneshot(request.body(Body::empty()).unwrap());
        AssertUnwindSafe(answer).catch_unwind().await.unwrap_err();
        let recorded = recorder.handle().render();
        for name in ["hold", "admission"] {
            let count = format!("tower_fence_{name}_seconds_count 1");
            assert!(recorded.contains(&count), "{recorded}");
        }
    }

    /// The layer replaces the second response, because its handler has kept the transaction.
    #[test]
    fn a_refusal_by_a_handler_is_counted_if_it_is_sent() {
        let busy = || Refusal::from(AdmitError::Busy(Arc::new(sqlx::Error::PoolTimedOut)));
        let leak = move |tx: SqliteFencedTx| async move {
            mem::forget(tx);
            busy()
        };
        let recorder = PrometheusBuilder::new().build_recorder();
        let respond = async || {
            let brief = Duration::from_millis(20);
            let fence = Fence::builder().lock_timeout(brief).pool_timeout(brief);
            let pool = SqlitePoolOptions::new().max_connections(1);
            let fence = fence.build(pool.connect("sqlite::memory:").await.unwrap());
            fence.migrate().await.unwrap();
            let app: Router = Router::new()
                .route("/{sku}", post(leak).put(async move || busy()))
                .route_layer(FenceLayer::new(fence, PathParam("sku")));
            for (method, status) in [(Method::PUT, 503), (Method::POST, 500)] {
                let request = Request::builder().method(method).uri("/sku-1");
                let request = request.header(header::FENCING_TOKEN, "1");
                let answer = app.clone().oneshot(request.body(Body::empty()).unwrap());
                assert_eq!(answer.await.unwrap().status(), status);
            }
        };
        let log = captured_at(tracing::Level::TRACE, || {
            let _recording = ::metrics::set_default_local_recorder(&recorder);
            let runtime = Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(respond());
        });
        let counted = recorder.handle().render();
        for problem in ["fence-busy", "transaction-escaped"] {
            let series = format!(r#"tower_fence_refused_total{{problem="{problem}"}} 1"#);
            assert!(counted.contains(&series), "{counted}");
            let event = format!(r#"event="refused" problem="{problem}" resource="sku-1""#);
            assert_eq!(log.matches(&event).count(), 1, "{log}");
        }
    }
}
