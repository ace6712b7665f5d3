//! Where the resource's name comes from: a path parameter, a header, or a closure.

use axum::{
    RequestPartsExt,
    extract::{MatchedPath, RawPathParams, rejection::RawPathParamsRejection},
};
use http::{HeaderName, request::Parts};

use crate::token::{InvalidResource, Resource};

/// Finds the resource that a request is about.
///
/// Implemented by [`PathParam`], by [`HeaderField`], and by closures from the request's parts:
///
/// ```
/// use tower_fence::{InvalidResource, Resource};
///
/// let tenant = |parts: &http::request::Parts| -> Result<Resource, InvalidResource> {
///     Resource::new(parts.uri.host().unwrap_or_default())
/// };
/// # let _ = tenant;
/// ```
pub trait ResourceFrom: Clone + Send + Sync + 'static {
    /// Finds the resource.
    ///
    /// # Errors
    ///
    /// [`ResourceError`], which is answered before anything else happens.
    fn resource_from(
        &self,
        parts: &mut Parts,
    ) -> impl Future<Output = Result<Resource, ResourceError>> + Send;
}

/// The resource is a parameter of the path, percent-decoded: `PathParam("sku")` for the route
/// `/inventory/{sku}`.
///
/// The layer must be inside the router (`Router::layer`, `Router::route_layer`,
/// `MethodRouter::layer`): outside of it no path parameter is known yet, and every write is
/// refused.
#[derive(Clone, Debug)]
pub struct PathParam(pub &'static str);

impl ResourceFrom for PathParam {
    async fn resource_from(&self, parts: &mut Parts) -> Result<Resource, ResourceError> {
        if parts.extensions.get::<MatchedPath>().is_none() {
            return Err(ResourceError::NoRoute);
        }
        match parts.extract::<RawPathParams>().await {
            Ok(params) => params
                .iter()
                .find(|(name, _)| *name == self.0)
                .ok_or(ResourceError::NoPathParam(self.0))
                .and_then(|(_, value)| Ok(Resource::new(value)?)),
            Err(RawPathParamsRejection::InvalidUtf8InPathParam(_)) => {
                Err(InvalidResource::NotUtf8.into())
            }
            Err(_) => Err(ResourceError::NoPathParam(self.0)),
        }
    }
}

/// The resource is the value of a header.
#[derive(Clone, Debug)]
pub struct HeaderField(pub HeaderName);

impl ResourceFrom for HeaderField {
    async fn resource_from(&self, parts: &mut Parts) -> Result<Resource, ResourceError> {
        let mut values = parts.headers.get_all(&self.0).iter();
        let (Some(value), None) = (values.next(), values.next()) else {
            return Err(ResourceError::NotOneHeader(self.0.clone()));
        };
        let name = std::str::from_utf8(value.as_bytes()).map_err(|_| InvalidResource::NotUtf8)?;
        Ok(Resource::new(name)?)
    }
}

impl<F, E> ResourceFrom for F
where
    F: Fn(&Parts) -> Result<Resource, E> + Clone + Send + Sync + 'static,
    E: Into<ResourceError>,
{
    async fn resource_from(&self, parts: &mut Parts) -> Result<Resource, ResourceError> {
        self(parts).map_err(Into::into)
    }
}

/// Why a request has no resource.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ResourceError {
    /// Its name is not valid.
    #[error(transparent)]
    Invalid(#[from] InvalidResource),
    /// The header that names it is missing, or stands more than once.
    #[error("the header `{0}` must stand exactly once")]
    NotOneHeader(HeaderName),
    /// No route matched before the layer was reached.
    #[error("no route matched before the fence; `FenceLayer` belongs inside the router")]
    NoRoute,
    /// The route has no such path parameter.
    #[error("the route has no path parameter `{0}` for `FenceLayer`")]
    NoPathParam(&'static str),
}
