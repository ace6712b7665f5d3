//! [`TokenLayer`]: a tower layer that adds a lease's token to outgoing requests.

use std::{
    fmt,
    sync::Arc,
    task::{Context, Poll},
};

use tower_layer::Layer;
use tower_service::Service;

use super::held_lease::HeldLease;

/// Tower layer that adds the lease's newest token to each request, created by
/// [`LeaseGuard::layer`](super::LeaseGuard::layer).
///
/// The layer sets the header `Fencing-Token`, or the header that
/// [`Holder::header`](super::Holder::header) names, and replaces any other value. The layer still
/// adds the token after the lease is lost, because the fence decides whether the token is stale.
///
/// A GET with the token is a [fenced read](crate::layer#fenced-reads). The client should [not
/// follow redirects](crate::guide::holders#redirects).
///
/// Put layers that retry or hedge requests inside of this layer, as in
/// `ServiceBuilder::new().layer(lease.layer()).layer(retry)`. All attempts of a write then carry
/// the same token. If such a layer is outside, an attempt after
/// [`renew_with_new_token`](super::LeaseGuard::renew_with_new_token) carries another token, and the
/// write may be applied twice.
///
/// # Example
///
/// ```
/// # tokio::runtime::Runtime::new()?.block_on(async {
/// use http::{Request, Response};
/// use tower::{ServiceBuilder, ServiceExt, service_fn};
/// use tower_fence::{Fence, client::Holder, lease::MemoryLeases};
///
/// # let pool = sqlx::sqlite::SqlitePoolOptions::new()
/// #     .max_connections(1)
/// #     .connect("sqlite::memory:")
/// #     .await?;
/// # let fence = Fence::new(pool);
/// # fence.migrate().await?;
/// let lease = Holder::new(MemoryLeases::new(fence)).acquire("sku-1").await?;
///
/// // Any HTTP client that is a tower service: hyper's, reqwest's, or this one, which returns the
/// // token that it received.
/// let client = ServiceBuilder::new().layer(lease.layer()).service(service_fn(
///     async |request: Request<()>| {
///         let token = request.headers()["fencing-token"].clone();
///         Ok::<_, std::convert::Infallible>(Response::new(token))
///     },
/// ));
/// let sent = client.oneshot(Request::new(())).await?.into_body();
/// assert_eq!(sent, lease.headers()["fencing-token"]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// # })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct TokenLayer {
    held: Arc<HeldLease>,
}

impl TokenLayer {
    pub(super) const fn new(held: Arc<HeldLease>) -> Self {
        Self { held }
    }
}

impl<S> Layer<S> for TokenLayer {
    type Service = AddToken<S>;

    fn layer(&self, inner: S) -> AddToken<S> {
        AddToken {
            inner,
            held: Arc::clone(&self.held),
        }
    }
}

/// Tower service created by [`TokenLayer`].
#[derive(Clone)]
pub struct AddToken<S> {
    inner: S,
    held: Arc<HeldLease>,
}

impl<S, B> Service<http::Request<B>> for AddToken<S>
where
    S: Service<http::Request<B>>,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut request: http::Request<B>) -> Self::Future {
        self.held.add_to(request.headers_mut());
        self.inner.call(request)
    }
}

/// Adds the token to the requests of a `reqwest::Client` that is used as a tower service.
impl<S: Service<reqwest::Request>> Service<reqwest::Request> for AddToken<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut request: reqwest::Request) -> Self::Future {
        self.held.add_to(request.headers_mut());
        self.inner.call(request)
    }
}

impl fmt::Debug for TokenLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokenLayer")
            .field("resource", &self.held.resource)
            .finish_non_exhaustive()
    }
}

impl<S: fmt::Debug> fmt::Debug for AddToken<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AddToken")
            .field("inner", &self.inner)
            .finish_non_exhaustive()
    }
}
