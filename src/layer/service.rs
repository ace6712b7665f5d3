//! Tower service of the layer: header → token → admission → handler → COMMIT → response.

use std::{
    mem,
    sync::Arc,
    task::{Context, Poll},
};

use axum::{
    BoxError,
    body::Body,
    extract::MatchedPath,
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use derive_where::derive_where;
use futures_util::future::{BoxFuture, ready};
use http::{
    HeaderMap, HeaderValue, Method, Request,
    header::{CACHE_CONTROL, VARY},
    request::Parts,
};
use http_body_util::{BodyExt, Full};
use tokio::time::{Instant, timeout};
use tower_service::Service;
use tracing::{Instrument, Span, field::Empty};

use super::{
    FenceLayer,
    claims::claims,
    extract::Passed,
    failure,
    idempotency::Idempotency,
    on_begin,
    pending::PendingWrite,
    refusal::Refusal,
    report,
    resource::{ResourceError, ResourceFrom},
    settle::{run_handler, settle},
    stored::replay,
};
use crate::{
    body,
    fence::{Claims, FenceDatabase, FencedTx, KeyedRequest, Once, RecordId, Slot},
    header,
    metrics::{self, Timer},
};

/// Tower service that a [`FenceLayer`](super::FenceLayer) creates.
#[derive_where(Clone, Debug; S)]
pub struct FenceService<S, DB: FenceDatabase, R> {
    inner: S,
    layer: Arc<FenceLayer<DB, R>>,
}

impl<S, DB: FenceDatabase, R> FenceService<S, DB, R> {
    /// Fences a service directly, with the settings of a layer.
    pub fn new(inner: S, layer: FenceLayer<DB, R>) -> Self {
        Self {
            inner,
            layer: Arc::new(layer),
        }
    }

    /// Returns a reference to the inner service.
    pub const fn get_ref(&self) -> &S {
        &self.inner
    }

    /// Returns a mutable reference to the inner service.
    pub const fn get_mut(&mut self) -> &mut S {
        &mut self.inner
    }

    /// Returns the inner service.
    pub fn into_inner(self) -> S {
        self.inner
    }
}

/// Accepts any request body, and passes it to the inner service as axum's `Body`.
impl<S, B, DB, R> Service<Request<B>> for FenceService<S, DB, R>
where
    B: http_body::Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
    S: Service<Request<Body>, Response: IntoResponse, Future: Send, Error: Send>
        + Clone
        + Send
        + 'static,
    DB: FenceDatabase,
    R: ResourceFrom,
{
    type Response = Response;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<Response, S::Error>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let request = request.map(Body::new);
        // Call the service that was polled ready, because its clone may not be ready.
        let clone = self.inner.clone();
        let inner = mem::replace(&mut self.inner, clone);
        let layer = Arc::clone(&self.layer);
        let route = request.extensions().get::<MatchedPath>();
        let route = route.map(MatchedPath::as_str);
        // The level is ERROR, so that log lines in this span have its fields even with the filter
        // `warn`.
        let span = tracing::error_span!("fence", route, resource = Empty, token = Empty);
        // If a filter disables this span, `Span::current` returns a span of the application.
        let fields = span.clone();
        let call = async move {
            let response = layer.respond(inner, request, &fields).await?;
            Ok(layer.render(response))
        };
        Box::pin(call.instrument(span))
    }
}

impl<DB: FenceDatabase, R: ResourceFrom> FenceLayer<DB, R> {
    /// Responds to a request with the handler's response or with a refusal.
    async fn respond<S: Service<Request<Body>, Response: IntoResponse>>(
        &self,
        inner: S,
        request: Request<Body>,
        span: &Span,
    ) -> Result<Response, S::Error> {
        let (mut parts, body) = request.into_parts();
        // Requests with these methods, such as CORS preflights, neither read nor write the
        // resource.
        if matches!(parts.method, Method::OPTIONS | Method::TRACE) {
            parts.extensions.get_or_insert(Passed::PlainRead);
            return unfenced(inner, Request::from_parts(parts, body)).await;
        }
        let claims = match self.identify(&mut parts).await {
            Ok(Some(claims)) => {
                let first = claims.first();
                span.record("resource", first.resource.as_str());
                span.record("token", first.token.get());
                claims
            }
            Ok(None) => {
                parts.extensions.get_or_insert(Passed::PlainRead);
                let mut response = unfenced(inner, Request::from_parts(parts, body)).await?;
                // A cache must not answer a fenced read with this response.
                response
                    .headers_mut()
                    .append(VARY, self.header.clone().into());
                return Ok(response);
            }
            Err(refusal) => {
                self.discard(&parts, body);
                return Ok(refusal.respond(None));
            }
        };
        let resource = claims.first().resource.clone();
        match self.admit(&mut parts, claims, body).await {
            Ok(Entry::Write(slot, body)) => self.fenced(inner, parts, slot, body).await,
            Ok(Entry::Replay(response)) => {
                metrics::count("tower_fence_replayed_total");
                Ok(response)
            }
            Err(refusal) => Ok(refusal.respond(Some(&resource))),
        }
    }

    /// Runs the handler with the slot, ends the transaction, and returns the response.
    async fn fenced<S: Service<Request<Body>, Response: IntoResponse>>(
        &self,
        inner: S,
        mut parts: Parts,
        slot: Slot<DB>,
        body: Body,
    ) -> Result<Response, S::Error> {
        let is_read = parts.method.is_safe();
        self.lend(&slot, &mut parts);
        let keys = self.idempotency.as_deref();
        let keys = keys.filter(|_| slot.has_key());
        let request = Request::from_parts(parts, body);
        let handler = run_handler(inner, request, self.commit_if.as_ref(), keys);
        let _hold = Timer {
            name: "tower_fence_hold_seconds",
            since: slot.held_since(),
        };
        let mut response = settle(&self.fence, slot, handler).await?;
        if is_read {
            // A response from a cache would not make older tokens stale.
            let headers = response.headers_mut();
            headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        }
        Ok(response)
    }

    /// Renders a refusal with the application's function, whether the layer or the handler returned
    /// it.
    fn render(&self, mut response: Response) -> Response {
        let Some(map_refusal) = &self.map_refusal else {
            return response;
        };
        let Some(refusal) = response.extensions_mut().remove::<Refusal>() else {
            return response;
        };
        let mut response = map_refusal(&refusal, response);
        let no_store = HeaderValue::from_static("no-store");
        response.headers_mut().insert(CACHE_CONTROL, no_store);
        response.extensions_mut().insert(refusal);
        response
    }

    /// Reads the resources and their tokens. Returns `None` for a safe method without a token.
    async fn identify(&self, parts: &mut Parts) -> Result<Option<Claims>, Refusal> {
        let tokens = header::parse(parts.headers.get_all(&self.header))?;
        if tokens.is_empty() && parts.method.is_safe() {
            return Ok(None);
        }
        if let Some(verification) = &self.verification {
            verification.verify(&tokens)?;
        }
        if let Some(Passed::Fenced { .. }) = parts.extensions.get() {
            return Err(Refusal::TwoLayers);
        }
        let found = self.resource_from.resources_from(parts);
        let found = timeout(self.fence.limits().answer_timeout, found).await;
        let resources = found.unwrap_or(Err(ResourceError::Unavailable))?;
        claims(tokens, resources).map(Some)
    }

    /// Reads the rest of a refused request's body in the background, so that a client that sends
    /// its whole request before it reads also gets the response.
    fn discard(&self, parts: &Parts, body: Body) {
        body::discard(
            &parts.headers,
            body,
            self.body_limit_bytes,
            self.body_timeout,
        );
    }

    /// Runs the checks that do not need the body. If the request has an idempotency key, returns
    /// the id of its record.
    async fn check_head(
        &self,
        parts: &mut Parts,
        claims: &Claims,
    ) -> Result<Option<(&Idempotency, RecordId)>, Refusal> {
        if let Some(keys) = &self.idempotency
            && !parts.method.is_safe()
            && let Some(id) = keys
                .record_of(parts, claims, self.fence.limits().answer_timeout)
                .await?
        {
            // The token is not checked here, because the key may have a stored response even if the
            // token has become stale.
            return Ok(Some((keys, id)));
        }
        self.fence.refuse_stale(claims, self.token_use)?;
        Ok(None)
    }

    /// Reads the body before the request takes a connection. Then admits the claims or returns the
    /// stored response. If the layer is deferred and the request has no idempotency key, leaves the
    /// admission to the handler.
    async fn admit(
        &self,
        parts: &mut Parts,
        claims: Claims,
        body: Body,
    ) -> Result<Entry<DB>, Refusal> {
        let record = match self.check_head(parts, &claims).await {
            Ok(record) => record,
            Err(refusal) => {
                self.discard(parts, body);
                return Err(refusal);
            }
        };
        let (limit_bytes, within) = (self.body_limit_bytes, self.body_timeout);
        let body = body::read(&parts.headers, body, limit_bytes, within).await?;
        let trailers = body.trailers().cloned();
        let bytes = body.to_bytes();
        let body = whole(bytes.clone(), trailers);
        let is_read = parts.method.is_safe();
        if self.deferred && !is_read && record.is_none() {
            self.check_epochs(&claims).await?;
            return Ok(Entry::Write(Slot::pending(claims), body));
        }
        let admission = Timer {
            name: "tower_fence_admission_seconds",
            since: Instant::now(),
        };
        let begun = match record {
            Some((keys, id)) => {
                let request = keys.keyed(id, parts, &claims, &bytes);
                self.begin_once(request, claims).await
            }
            None => self.begin(claims, is_read).await.map(Once::First),
        };
        drop(admission);
        match begun? {
            Once::First(tx) => Ok(Entry::Write(self.fill_slot(parts, tx).await?, body)),
            Once::Replay(stored) => Ok(Entry::Replay(replay(stored))),
            Once::Mismatch => Err(Refusal::KeyMismatch),
            Once::InFlight => Err(Refusal::KeyInFlight),
            Once::Unanswered => Err(Refusal::Unanswered),
        }
    }

    async fn begin(&self, claims: Claims, is_read: bool) -> Result<FencedTx<DB>, Refusal> {
        self.check_epochs(&claims).await?;
        let begun = self.fence.begin_admitted(claims, self.token_use, is_read);
        Ok(begun.await?)
    }

    /// Begins the transaction of a request with an idempotency key, or returns the stored response,
    /// even if the epoch of the token is unknown.
    async fn begin_once(&self, request: KeyedRequest, claims: Claims) -> Result<Once<DB>, Refusal> {
        match self.check_epochs(&claims).await {
            Ok(()) => {}
            Err(refusal @ Refusal::UnknownEpoch(_)) => {
                return self.fence.find_once(&request).await?.ok_or(refusal);
            }
            Err(refusal) => return Err(refusal),
        }
        let begun = self.fence.begin_once(request, claims, self.token_use);
        Ok(begun.await?)
    }

    /// If the layer checks the epochs, refuses a token with an epoch that this database has never
    /// assigned.
    async fn check_epochs(&self, claims: &Claims) -> Result<(), Refusal> {
        if self.known_epochs
            && let Some(claim) = self.fence.unknown_epoch(claims).await?
        {
            return Err(Refusal::UnknownEpoch(claim.clone()));
        }
        Ok(())
    }

    /// Runs the hook in a transaction in which the claims were admitted, moves the transaction into
    /// a slot, and reports the admission.
    async fn fill_slot(&self, parts: &Parts, mut tx: FencedTx<DB>) -> Result<Slot<DB>, Refusal> {
        if let Some(hook) = &self.on_begin {
            tx = on_begin::run(hook, parts, tx, self.fence.limits().hold_timeout).await?;
        }
        let slot = tx.into_slot();
        report::admitted(slot.claims(), parts.method.is_safe());
        Ok(slot)
    }

    /// Adds the request extensions that the handler's extractors read.
    fn lend(&self, slot: &Slot<DB>, parts: &mut Parts) {
        let deferred = self.deferred && !parts.method.is_safe();
        if deferred {
            let (fence, token_use) = (self.fence.clone(), self.token_use);
            let on_begin = self.on_begin.as_ref();
            let on_begin = on_begin.map(|hook| (Arc::clone(hook), Arc::new(parts.clone())));
            let pending = PendingWrite::new(fence, token_use, slot.clone(), on_begin);
            parts.extensions.insert(pending);
        }
        if !slot.is_pending() {
            parts.extensions.insert(slot.admitted());
        }
        parts.extensions.insert(Passed::Fenced {
            database: DB::NAME,
            deferred,
        });
        parts.extensions.insert(slot.clone());
    }
}

/// Next step of a request that was not refused.
enum Entry<DB: FenceDatabase> {
    /// Run the handler, with a transaction that has begun or that the handler can begin.
    Write(Slot<DB>, Body),
    /// Return the stored response of an earlier request.
    Replay(Response),
}

async fn unfenced<S: Service<Request<Body>, Response: IntoResponse>>(
    mut inner: S,
    request: Request<Body>,
) -> Result<Response, S::Error> {
    let mut response = inner.call(request).await?.into_response();
    failure::count(&mut response, None);
    Ok(response)
}

/// Returns a body that was read completely. Unlike `Collected`, its length and its end are known.
fn whole(bytes: Bytes, trailers: Option<HeaderMap>) -> Body {
    match trailers {
        Some(trailers) => Body::new(Full::new(bytes).with_trailers(ready(Some(Ok(trailers))))),
        None => Body::from(bytes),
    }
}
