//! The service: header → token → admission → handler → COMMIT → response.

use std::{
    any::Any,
    mem,
    panic::{AssertUnwindSafe, resume_unwind},
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use axum::{
    body::Body,
    response::{IntoResponse, Response},
};
use futures_util::{
    FutureExt,
    future::{BoxFuture, ready},
};
use http::{HeaderName, Request, request::Parts};
use http_body_util::{BodyExt, Full};
use tokio::time::{Instant, timeout};
use tower_service::Service;
use tracing::{Instrument, Span, field::Empty};

use super::{
    extract::PlainRead,
    idempotency::Idempotency,
    pending::PendingWrite,
    presented::presented,
    rejection::Rejection,
    resource::ResourceFrom,
    stored::{UnstorableResponse, capture, replay},
};
use crate::{
    body,
    fence::{
        AdmitError, AllAdmitted, Closed, CommitError, Fence, FenceDatabase, Loan, Once,
        StoredResponse, TokenUse,
    },
    header, metrics,
};

/// What the layer and its services share.
pub(super) struct Config<DB: FenceDatabase, R> {
    pub(super) fence: Fence<DB>,
    pub(super) resource_from: R,
    pub(super) header: HeaderName,
    pub(super) token_use: TokenUse,
    pub(super) body_limit_bytes: usize,
    pub(super) body_wait: Duration,
    pub(super) idempotency: Option<Arc<Idempotency>>,
    pub(super) deferred: bool,
}

impl<DB: FenceDatabase, R: Clone> Clone for Config<DB, R> {
    fn clone(&self) -> Self {
        Self {
            fence: self.fence.clone(),
            resource_from: self.resource_from.clone(),
            header: self.header.clone(),
            idempotency: self.idempotency.clone(),
            ..*self
        }
    }
}

/// The service that [`FenceLayer`](super::FenceLayer) makes.
pub struct FenceService<S, DB: FenceDatabase, R> {
    pub(super) inner: S,
    pub(super) config: Arc<Config<DB, R>>,
}

impl<S: Clone, DB: FenceDatabase, R> Clone for FenceService<S, DB, R> {
    fn clone(&self) -> Self {
        Self {
            inner: self.inner.clone(),
            config: Arc::clone(&self.config),
        }
    }
}

impl<S, DB, R> Service<Request<Body>> for FenceService<S, DB, R>
where
    S: Service<Request<Body>> + Clone + Send + 'static,
    S::Response: IntoResponse,
    S::Future: Send,
    S::Error: Send,
    DB: FenceDatabase,
    R: ResourceFrom,
{
    type Response = Response;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<Response, S::Error>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        // The service that was polled ready is the one to call; its clone is not ready yet.
        let clone = self.inner.clone();
        let inner = mem::replace(&mut self.inner, clone);
        let config = Arc::clone(&self.config);
        let span = tracing::info_span!("fence", resource = Empty, token = Empty);
        let call = async move {
            let (mut parts, body) = request.into_parts();
            let presented = match config.identify(&mut parts).await {
                Ok(Some(presented)) => {
                    let first = presented.first();
                    let span = Span::current();
                    span.record("resource", first.resource.as_str());
                    span.record("token", first.token.get());
                    presented
                }
                Ok(None) => {
                    parts.extensions.insert(PlainRead);
                    return unfenced(inner, Request::from_parts(parts, body)).await;
                }
                Err(rejection) => return Ok(rejection.into_response()),
            };
            if parts.method.is_safe() {
                if let Err(error) = config.fence.raise_all(&presented).await {
                    return Ok(Rejection::from(error).into_response());
                }
                metrics::count_by("tower_fence_admitted_total", "kind", "read");
                parts.extensions.insert(presented);
                return unfenced(inner, Request::from_parts(parts, body)).await;
            }
            match config.admit(&mut parts, presented, body).await {
                Ok(Entry::Write(loan, body)) => {
                    config.lend(&loan, &mut parts);
                    let keys = config.idempotency.as_deref();
                    let keys = keys.filter(|_| loan.has_claimed());
                    let handler = run(inner, Request::from_parts(parts, body), keys);
                    let began = Instant::now();
                    let settled = config.settle(loan, handler).await;
                    metrics::took("tower_fence_hold_seconds", began.elapsed());
                    settled
                }
                Ok(Entry::Replay(response)) => {
                    metrics::count("tower_fence_replayed_total");
                    Ok(response)
                }
                Err(rejection) => Ok(rejection.into_response()),
            }
        };
        Box::pin(call.instrument(span))
    }
}

impl<DB: FenceDatabase, R: ResourceFrom> Config<DB, R> {
    /// Reads the resources and their tokens; `None` for a safe method without a token.
    async fn identify(&self, parts: &mut Parts) -> Result<Option<AllAdmitted>, Rejection> {
        let tokens = header::parse(parts.headers.get_all(&self.header))?;
        if tokens.is_empty() && parts.method.is_safe() {
            return Ok(None);
        }
        if parts.extensions.get::<Loan<DB>>().is_some() {
            return Err(Rejection::TwoLayers);
        }
        let resources = self.resource_from.resources_from(parts).await?;
        presented(tokens, resources).map(Some)
    }

    /// Reads the body, while nothing is held for it yet; then admits what was presented, unless the
    /// request was answered before.
    async fn admit(
        &self,
        parts: &mut Parts,
        presented: AllAdmitted,
        body: Body,
    ) -> Result<Entry<DB>, Rejection> {
        let record = match &self.idempotency {
            Some(keys) => keys
                .record_of(parts, &presented)
                .await?
                .map(|id| (keys, id)),
            None => None,
        };
        // A key may have been answered before, whatever became of its token.
        if record.is_none() {
            self.fence
                .check_dead(&presented)
                .map_err(AdmitError::from)?;
        }
        let body = body::read(body, self.body_limit_bytes, self.body_wait).await?;
        let began = Instant::now();
        let Some((keys, id)) = record else {
            if self.deferred {
                return Ok(Entry::Write(Loan::pending(presented), Body::new(body)));
            }
            let begun = self.fence.begin_admitted(presented, self.token_use).await;
            metrics::took("tower_fence_admission_seconds", began.elapsed());
            let loan = Loan::new(begun?);
            metrics::count_by("tower_fence_admitted_total", "kind", "write");
            return Ok(Entry::Write(loan, Body::new(body)));
        };
        let trailers = body.trailers().cloned().map(Ok);
        let bytes = body.to_bytes();
        let claim = keys.claim(id, parts, &bytes);
        let body = Body::new(Full::new(bytes).with_trailers(ready(trailers)));
        let begun = self.fence.begin_once(claim, presented, self.token_use);
        let begun = begun.await;
        metrics::took("tower_fence_admission_seconds", began.elapsed());
        Ok(match begun? {
            Once::First(tx) => {
                metrics::count_by("tower_fence_admitted_total", "kind", "write");
                Entry::Write(Loan::new(tx), body)
            }
            Once::Replay(stored) => Entry::Replay(replay(stored)),
        })
    }

    /// Puts what the handler may ask for where its extractors find it.
    fn lend(&self, loan: &Loan<DB>, parts: &mut Parts) {
        if self.deferred {
            let (fence, token_use) = (self.fence.clone(), self.token_use);
            let pending = PendingWrite::new(fence, token_use, loan.clone());
            parts.extensions.insert(pending);
        }
        if !loan.is_pending() {
            parts.extensions.insert(loan.named().clone());
        }
        parts.extensions.insert(loan.clone());
    }

    /// Runs the handler and ends its transaction; only then is there a response.
    async fn settle<E>(
        &self,
        loan: Loan<DB>,
        handler: impl Future<Output = Ended<E>>,
    ) -> Result<Response, E> {
        let hold = self.fence.limits().hold;
        // Where the client goes away, this future is dropped: whatever is still out is called in.
        let loan = CloseOnDrop(loan);
        let ended = timeout(hold, handler).await;
        let outcome = match &ended {
            Ok(Ended::Response(response, stored)) if is_success(response) => {
                Outcome::Success(stored.as_ref())
            }
            _ => Outcome::Failure,
        };
        let settled = self.end_transaction(&loan.0, outcome).await;
        match (ended, settled) {
            (Ok(Ended::Response(response, _)), Ok(_)) => Ok(response),
            (Ok(Ended::Unstorable(error)), Ok(_)) => Ok(Rejection::from(error).into_response()),
            (Ok(Ended::Response(..) | Ended::Unstorable(_)), Err(rejection)) => {
                Ok(rejection.into_response())
            }
            (Err(_), Ok(Written::Nothing | Written::AsAnswered)) => {
                Ok(Rejection::HandlerTimeout(hold).into_response())
            }
            (Err(_), Ok(Written::ByTheHandler)) => {
                let error = unknown("the handler committed, and then took too long");
                Ok(Rejection::from(error).into_response())
            }
            (Err(_), Err(rejection)) => Ok(rejection.into_response()),
            (Ok(Ended::Error(error)), _) => Err(error),
            (Ok(Ended::Panic(payload)), _) => resume_unwind(payload),
        }
    }

    /// Commits after a success. Otherwise rolls back and raises the fence: once the token was
    /// admitted, everyone older is dead before any response leaves.
    async fn end_transaction(
        &self,
        loan: &Loan<DB>,
        outcome: Outcome<'_>,
    ) -> Result<Written, Rejection> {
        let (closed, _turns) = loan.close();
        let error = match (closed, outcome) {
            (Closed::Unused | Closed::Refused(_), Outcome::Failure) => return Ok(Written::Nothing),
            (Closed::Unused, Outcome::Success(_)) => return Err(Rejection::NotWritten),
            (Closed::Refused(error), Outcome::Success(_)) => return Err(error.into()),
            (Closed::Home(tx), Outcome::Success(stored)) => {
                let committed = match stored {
                    Some(stored) => tx.commit_with(stored).await,
                    None => tx.commit().await,
                };
                match committed {
                    Ok(()) => return Ok(Written::AsAnswered),
                    Err(error) => error,
                }
            }
            (Closed::Home(tx), Outcome::Failure) => {
                self.fence.fail(tx).await?;
                return Ok(Written::Nothing);
            }
            (Closed::Settled(Ok(())), _) => return Ok(Written::ByTheHandler),
            // The handler knows that its own COMMIT failed, and answers for it.
            (Closed::Settled(Err(_)), Outcome::Failure) => {
                self.fence.fail_lost(loan.named()).await?;
                return Ok(Written::Nothing);
            }
            (Closed::Settled(Err(error)), Outcome::Success(_)) => error,
            (Closed::Escaped(server_process), _) => {
                self.fence.terminate(server_process).await;
                CommitError::Escaped
            }
            (Closed::EscapedCommitting, _) => {
                unknown("the handler answered while it was committing")
            }
        };
        if let Err(raise) = self.fence.fail_lost(loan.named()).await {
            tracing::error!(error = %raise, "the fence could not be raised");
        }
        Err(error.into())
    }
}

/// How a request goes on.
enum Entry<DB: FenceDatabase> {
    /// To its handler, with a transaction that has begun, or may begin.
    Write(Loan<DB>, Body),
    /// It was answered before.
    Replay(Response),
}

/// What the handler wants.
enum Outcome<'a> {
    /// COMMIT, together with the response where that must be stored.
    Success(Option<&'a StoredResponse>),
    Failure,
}

fn is_success(response: &Response) -> bool {
    response.status().as_u16() < 400
}

/// What a request has written in the end.
enum Written {
    /// What the handler's success claims.
    AsAnswered,
    /// What the handler has committed by itself.
    ByTheHandler,
    Nothing,
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

/// How a handler ended.
enum Ended<E> {
    /// With what must be stored of it, where something must.
    Response(Response, Option<StoredResponse>),
    Unstorable(UnstorableResponse),
    Error(E),
    Panic(Box<dyn Any + Send>),
}

/// Runs the handler. A panic is held back until its transaction is ended. Under a key the response
/// of a success is read to its end.
async fn run<S>(mut inner: S, request: Request<Body>, keys: Option<&Idempotency>) -> Ended<S::Error>
where
    S: Service<Request<Body>>,
    S::Response: IntoResponse,
{
    let handler = AssertUnwindSafe(async move {
        let response = match inner.call(request).await {
            Ok(response) => response.into_response(),
            Err(error) => return Ended::Error(error),
        };
        match keys {
            Some(keys) if is_success(&response) => match capture(response, keys).await {
                Ok((response, stored)) => Ended::Response(response, Some(stored)),
                Err(error) => Ended::Unstorable(error),
            },
            _ => Ended::Response(response, None),
        }
    });
    handler.catch_unwind().await.unwrap_or_else(Ended::Panic)
}

/// Runs the handler without a transaction.
async fn unfenced<S>(mut inner: S, request: Request<Body>) -> Result<Response, S::Error>
where
    S: Service<Request<Body>>,
    S::Response: IntoResponse,
{
    Ok(inner.call(request).await?.into_response())
}
