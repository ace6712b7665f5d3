//! Lease issuer: an axum router over any [`Leases`].
//!
//! `{resource}` is one percent-encoded path segment. The lease id is sent in the `Lease-Id` header,
//! never in a URL. All members of a request body are optional.
//!
//! | call | success | body |
//! |---|---|---|
//! | `POST /{resource}` with `{"ttl_ms", "wait_ms", "lock_delay_ms", "owner", "lease_id"}` | 201 | `{"resource", "lease_id", "token", "fencing_token", "ttl_ms"}`, and the header `Fencing-Token` |
//! | `PUT /{resource}` with `Lease-Id` and `{"ttl_ms", "new_token"}` | 200 | the same members |
//! | `DELETE /{resource}` with `Lease-Id` | 204 | |
//! | `GET /{resource}` | 200 | `{"resource", "held"}`; if held also `token`, `owner`, `granted_at`, `ttl_ms` (the remaining time), `waiters` |
//!
//! The router of [`Issuer::operator_router`] also serves these calls for operators:
//!
//! | call | success | body |
//! |---|---|---|
//! | `GET /?limit=100&cursor=` | 200 | `{"leases": [{"resource", "token", "owner", "granted_at", "ttl_ms", "waiters"}], "cursor"}`; `cursor` is null on the last page |
//! | `POST /{resource}/break` with `{"token"}` | 204 | |
//!
//! `fencing_token` is the value for the `Fencing-Token` header of a write,
//! [signed](Issuer::sign_with) if the issuer has keys. `token` is the bare integer. A renewal
//! returns the lease's current token. If the token differs although no new token was requested, the
//! holder has lost the lease, and a delayed retry of its `POST` has acquired a new lease under the
//! same id. The holder must then discard the data that it has read. With `wait_ms` (default 0), the
//! request waits in the queue. If the store has a queue, waiters are served in the order of
//! arrival.
//!
//! A `POST` or `PUT` with a body needs the header `Content-Type: application/json`, or another type
//! that ends with `+json`. An `Origin` header means that a browser sent the request. Such a `POST`
//! or `PUT` needs this content type even if it has no body. A page of another site therefore cannot
//! acquire a lease without a CORS preflight.
//!
//! Refusals are problem+json:
//!
//! - 409 `lock-held` (with `retry_after_ms` and `Retry-After`), 409 `lease-lost`, and 409
//!   `fence-exhausted` (with `max_token`);
//! - 422 `invalid-request` (with `field`) and 415 `unsupported-media-type`;
//! - 413, 408 and 400 for a body that is too large, too slow or malformed;
//! - 503 `too-many-waiters` and `store-unavailable` (with `Retry-After`);
//! - 503 `server-busy` if [`Issuer::close_on`] ends the wait;
//! - 500 `misconfigured` if a table or a privilege is missing.
//!
//! # Example
//!
//! ```
//! # tokio::runtime::Runtime::new()?.block_on(async {
//! use axum::{Router, body::Body, http::Request};
//! use tower::ServiceExt;
//! use tower_fence::{Fence, issuer, lease::MemoryLeases};
//!
//! # let pool = sqlx::sqlite::SqlitePoolOptions::new()
//! #     .max_connections(1)
//! #     .connect("sqlite::memory:")
//! #     .await?;
//! let fence = Fence::new(pool);
//! fence.migrate().await?;
//! let app: Router = Router::new().nest("/locks", issuer::router(MemoryLeases::new(fence)));
//!
//! let acquire = Request::post("/locks/sku-1").body(Body::empty())?;
//! let response = app.oneshot(acquire).await?;
//! assert_eq!(response.status(), 201);
//! assert_eq!(response.headers()["fencing-token"], r#"1000000001;resource="sku-1""#);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! # })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Deployment
//!
//! The router does not authenticate its clients. Every client that can reach the router can acquire
//! a lease, so put authentication in front of it.
//!
//! If you limit the number of concurrent requests, limit only `POST`. A `POST` that waits in the
//! queue is in progress for up to its `wait_ms`. With one limit for all requests, such as tower's
//! `ConcurrencyLimit` or `Buffer` around the router, renewals would wait for the waiters, and
//! holders would lose their leases. The page on the server describes what [a proxy in
//! front](crate::server#a-proxy-in-front) must do.

mod openapi;
mod operators;
mod request;
mod response;

use std::{
    ops::RangeInclusive,
    sync::Arc,
    time::{Duration, Instant},
};

use axum::{
    Router,
    body::Body,
    extract::State,
    response::Response,
    routing::{get, post},
};
use futures_util::{
    FutureExt,
    future::{BoxFuture, Shared, pending},
};
use http::{HeaderMap, StatusCode};
use serde_json::Value;
use tracing::Instrument;

use self::request::{ResourcePath, body_bytes, invalid, lease_id, no_members};
pub use self::response::Rejection;
use crate::{
    events,
    lease::{Acquire, Lease, LeaseAdmin, LeaseError, Leases, Owner, Renew},
    metrics,
    token_keys::TokenKeys,
    wire::{AcquireBody, RenewBody},
};

/// Returns a router with the default limits. Use [`Issuer`] to change them.
pub fn router<L: Leases, S: Clone + Send + Sync + 'static>(leases: L) -> Router<S> {
    Issuer::new(leases).router()
}

/// Builder of an issuer's router.
#[derive(Clone, Debug)]
pub struct Issuer<L> {
    leases: Arc<L>,
    ttl: Duration,
    ttl_limits: RangeInclusive<Duration>,
    wait_limit: Duration,
    closed: Shared<BoxFuture<'static, ()>>,
    document: Option<Arc<Value>>,
    keys: Option<TokenKeys>,
}

/// Maximum time for which a resource may stay blocked after a lease has expired.
const LOCK_DELAY_LIMIT: Duration = Duration::from_secs(60);
/// Minimum duration of a request that counts as having waited in the queue.
const WAITED: Duration = Duration::from_millis(20);

impl<L: Leases> Issuer<L> {
    /// Creates an issuer with the default limits.
    pub fn new(leases: L) -> Self {
        Self {
            leases: Arc::new(leases),
            ttl: Duration::from_secs(30),
            ttl_limits: Duration::from_millis(100)..=Duration::from_secs(10 * 60),
            wait_limit: Duration::from_secs(60),
            closed: pending().boxed().shared(),
            document: None,
            keys: None,
        }
    }

    /// Sets the TTL of leases for requests without a TTL. Default: 30 s. A value outside of the
    /// [limits](Self::ttl_limits) is replaced with the nearest limit.
    #[must_use]
    pub const fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = ttl;
        self
    }

    /// Sets the range of TTLs that a request may choose. Default: 100 ms to 10 min.
    #[must_use]
    pub fn ttl_limits(mut self, limits: RangeInclusive<Duration>) -> Self {
        self.ttl_limits = limits;
        self
    }

    /// Sets the maximum time for which a request may wait in the queue. Default: 60 s.
    #[must_use]
    pub const fn wait_limit(mut self, limit: Duration) -> Self {
        self.wait_limit = limit;
        self
    }

    /// Refuses waiting requests once `closed` completes, so that the application can shut down
    /// quickly. Default: never.
    ///
    /// A request in the queue gets 503 `server-busy`. A later request with a wait gets the same
    /// response if the lease is held. All other requests are served as before.
    ///
    /// The future is polled only while a request waits. Pass a future that is not missed if it is
    /// polled later, such as a `oneshot` channel, and not a signal handler or a `Notify`.
    ///
    /// ```
    /// # fn router<L: tower_fence::lease::Leases>(leases: L) -> axum::Router {
    /// use tower_fence::issuer::Issuer;
    ///
    /// let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    /// let issuer = Issuer::new(leases).close_on(async {
    ///     let _ = stopped.await;
    /// });
    /// # drop(stop);
    /// issuer.router()
    /// # }
    /// ```
    #[must_use]
    pub fn close_on(mut self, closed: impl Future<Output = ()> + Send + 'static) -> Self {
        self.closed = closed.boxed().shared();
        self
    }

    /// Signs each returned token, so that
    /// [`FenceLayer::verify_with`](crate::FenceLayer::verify_with) can refuse forged tokens.
    /// Default: tokens are plain numbers. See [`token_keys`](crate::token_keys).
    ///
    /// Every client that can acquire a lease gets a signed token for it, so authentication in front
    /// of the issuer is still required.
    #[must_use]
    pub fn sign_with(mut self, keys: TokenKeys) -> Self {
        self.keys = Some(keys);
        self
    }

    /// Builds the router, which can be nested at any path.
    pub fn router<S: Clone + Send + Sync + 'static>(self) -> Router<S> {
        let document = self.document.clone();
        openapi::serve(self.routes(), document)
    }

    fn routes<S: Clone + Send + Sync + 'static>(self) -> Router<S> {
        Router::new()
            .route(
                "/{resource}",
                post(acquire::<L>)
                    .put(renew::<L>)
                    .delete(release::<L>)
                    .get(inspect::<L>),
            )
            .with_state(Arc::new(self))
    }

    /// Builds the router with the additional routes for operators. `GET /` lists the held leases,
    /// and `POST /{resource}/break` breaks a lease. If the router is nested at `/locks`, the list
    /// is at `/locks`, without a slash at the end. Every client that can reach the router can call
    /// these routes.
    pub fn operator_router<S: Clone + Send + Sync + 'static>(self) -> Router<S>
    where
        L: LeaseAdmin,
    {
        let document = self.document.clone();
        let operators = Router::new()
            .route("/", get(operators::list::<L>))
            .route("/{resource}/break", post(operators::break_lease::<L>))
            .with_state(Arc::clone(&self.leases));
        openapi::serve(self.routes().merge(operators), document)
    }

    /// Returns the response with a lease, whose token is signed if the issuer has keys.
    fn answer(&self, status: StatusCode, lease: Lease) -> Response {
        let lease = match &self.keys {
            Some(keys) => lease.sign(keys),
            None => lease,
        };
        response::lease(status, &lease)
    }

    /// Returns the TTL for a request without a TTL, within the limits.
    fn default_ttl(&self) -> Duration {
        let (shortest, longest) = (*self.ttl_limits.start(), *self.ttl_limits.end());
        self.ttl.min(longest).max(shortest)
    }

    /// Returns the TTL of a lease. Refuses a value outside of the limits.
    fn check_ttl(&self, ttl_ms: Option<u64>) -> Result<Duration, Rejection> {
        let ttl = ttl_ms.map_or_else(|| self.default_ttl(), Duration::from_millis);
        if self.ttl_limits.contains(&ttl) {
            return Ok(ttl);
        }
        let (shortest, longest) = (*self.ttl_limits.start(), *self.ttl_limits.end());
        let (from, to) = (shortest.as_millis(), longest.as_millis());
        Err(invalid(
            "ttl_ms",
            format!("must be from {from} to {to} milliseconds"),
        ))
    }
}

/// Returns a duration of `ms` milliseconds (default 0). Refuses a value above `limit`.
fn check_ms(field: &'static str, ms: Option<u64>, limit: Duration) -> Result<Duration, Rejection> {
    let time = Duration::from_millis(ms.unwrap_or(0));
    if time > limit {
        let limit = limit.as_millis();
        return Err(invalid(
            field,
            format!("must be from 0 to {limit} milliseconds"),
        ));
    }
    Ok(time)
}

/// Acquires a lease, and waits in the queue if the request asks for it.
async fn acquire<L: Leases>(
    State(issuer): State<Arc<Issuer<L>>>,
    ResourcePath(resource): ResourcePath,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Rejection> {
    let body = AcquireBody::read(&body_bytes(&headers, body).await?)?;
    let mut request = Acquire::new(issuer.check_ttl(body.ttl_ms)?);
    request.wait = check_ms("wait_ms", body.wait_ms, issuer.wait_limit)?;
    request.lock_delay = check_ms("lock_delay_ms", body.lock_delay_ms, LOCK_DELAY_LIMIT)?;
    if let Some(owner) = body.owner {
        request = request.owner(owner);
    }
    if let Some(id) = body.lease_id {
        request = request.lease_id(id);
    }
    let asked_at = Instant::now();
    let (owner, may_wait) = (request.owner.clone(), !request.wait.is_zero());
    let is_closed = may_wait && issuer.closed.clone().now_or_never().is_some();
    // A closed issuer still grants a free lease, but no request waits.
    if is_closed {
        request.wait = Duration::ZERO;
    }
    let owner = owner.as_ref().map(Owner::as_str);
    let span = tracing::error_span!("acquire_lease", resource = resource.as_str());
    let acquiring = issuer.leases.acquire(&resource, request).instrument(span);
    // If the issuer closes first, the acquisition is dropped, and the request leaves the queue.
    let lease = tokio::select! {
        biased;
        outcome = acquiring => match outcome {
            Err(LeaseError::Held { .. }) if is_closed => Err(Rejection::Closing),
            outcome => outcome.map_err(|error| response::failed(error, Some(&resource))),
        },
        () = issuer.closed.clone(), if may_wait && !is_closed => Err(Rejection::Closing),
    }?;
    let took = asked_at.elapsed();
    metrics::took("tower_fence_lease_wait_seconds", took);
    metrics::count("tower_fence_leases_granted_total");
    let waited = (may_wait && took >= WAITED).then_some(took);
    events::granted(&resource, lease.token, owner, waited);
    tracing::debug!(
        resource = resource.as_str(),
        token = lease.token.get(),
        "granted a lease"
    );
    Ok(issuer.answer(StatusCode::CREATED, lease))
}

/// Renews a lease, and replaces its token if the request asks for it.
async fn renew<L: Leases>(
    State(issuer): State<Arc<Issuer<L>>>,
    ResourcePath(resource): ResourcePath,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Rejection> {
    let body = body_bytes(&headers, body).await?;
    let id = lease_id(&headers)?;
    let body = RenewBody::read(&body)?;
    let mut request = Renew::new(issuer.check_ttl(body.ttl_ms)?);
    request.new_token = body.new_token.unwrap_or(false);
    let span = tracing::error_span!("renew_lease", resource = resource.as_str());
    let renewing = issuer.leases.renew(&resource, &id, request);
    let lease = match renewing.instrument(span).await {
        Err(LeaseError::Lost { .. }) => return Err(response::lost(&resource)),
        renewed => renewed.map_err(|error| response::failed(error, Some(&resource)))?,
    };
    metrics::count("tower_fence_leases_renewed_total");
    Ok(issuer.answer(StatusCode::OK, lease))
}

async fn release<L: Leases>(
    State(issuer): State<Arc<Issuer<L>>>,
    ResourcePath(resource): ResourcePath,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Rejection> {
    no_members(&headers, body).await?;
    let id = lease_id(&headers)?;
    let span = tracing::error_span!("release_lease", resource = resource.as_str());
    let releasing = issuer.leases.release(&resource, &id);
    let released = releasing.instrument(span).await;
    released.map_err(|error| response::failed(error, Some(&resource)))?;
    metrics::count("tower_fence_leases_released_total");
    events::released(&resource);
    Ok(response::released())
}

/// Returns the state of a lock, including its holder.
async fn inspect<L: Leases>(
    State(issuer): State<Arc<Issuer<L>>>,
    ResourcePath(resource): ResourcePath,
) -> Result<Response, Rejection> {
    let inspected = issuer.leases.inspect(&resource).await;
    let held = inspected.map_err(|error| response::failed(error, Some(&resource)))?;
    Ok(response::state(&resource, held.as_ref()))
}
