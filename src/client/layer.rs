//! A tower layer for outgoing requests, which adds the token of a lease.

use std::{
    fmt,
    sync::Arc,
    task::{Context, Poll},
};

use tower_layer::Layer;
use tower_service::Service;

use super::renewal::Known;

/// Adds the header `Fencing-Token` to each request, with the token that the lease has then, in place
/// of any other. From [`LeaseGuard::layer`](super::LeaseGuard::layer).
///
/// It goes on after the lease is lost: the resource tells whether the token still counts.
#[derive(Clone)]
pub struct TokenLayer {
    known: Arc<Known>,
}

impl TokenLayer {
    pub(super) const fn new(known: Arc<Known>) -> Self {
        Self { known }
    }
}

impl<S> Layer<S> for TokenLayer {
    type Service = AddToken<S>;

    fn layer(&self, inner: S) -> AddToken<S> {
        AddToken {
            inner,
            known: Arc::clone(&self.known),
        }
    }
}

/// The service of [`TokenLayer`].
#[derive(Clone)]
pub struct AddToken<S> {
    inner: S,
    known: Arc<Known>,
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
        self.known.add_to(request.headers_mut());
        self.inner.call(request)
    }
}

/// For `reqwest::Client` as a tower service.
#[cfg(feature = "client")]
impl<S: Service<reqwest::Request>> Service<reqwest::Request> for AddToken<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut request: reqwest::Request) -> Self::Future {
        self.known.add_to(request.headers_mut());
        self.inner.call(request)
    }
}

impl fmt::Debug for TokenLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokenLayer")
            .field("resource", &self.known.resource)
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
