//! Where the names of resources come from: path parameters, headers, or a closure.

use std::{collections::HashSet, fmt, marker::PhantomData, str::FromStr};

use axum::{
    RequestPartsExt,
    extract::{MatchedPath, RawPathParams, rejection::RawPathParamsRejection},
};
use http::{HeaderName, request::Parts};

use crate::token::{InvalidResource, Resource};

/// Finds the resources that a request is about: one, or several.
///
/// Implemented by [`PathParam`], by [`HeaderField`], by arrays of those, and by closures from the
/// request's parts to one resource, to an array or to a `Vec`:
///
/// ```
/// use tower_fence::{InvalidResource, PathParam, Resource};
///
/// // One resource.
/// let tenant = |parts: &http::request::Parts| -> Result<Resource, InvalidResource> {
///     Resource::new(parts.uri.host().unwrap_or_default())
/// };
/// // Two, for the route `/inventory/{from}/transfer/{to}`.
/// let both = [PathParam("from"), PathParam("to")];
/// // As many as the request says.
/// let listed = |parts: &http::request::Parts| -> Result<Vec<Resource>, InvalidResource> {
///     parts.uri.query().unwrap_or_default().split(',').map(Resource::new).collect()
/// };
/// # let _ = (tenant, both, listed);
/// ```
pub trait ResourceFrom: Clone + Send + Sync + 'static {
    /// Finds the resources.
    ///
    /// # Errors
    ///
    /// [`ResourceError`], which is answered before anything else happens.
    fn resources_from(
        &self,
        parts: &mut Parts,
    ) -> impl Future<Output = Result<Resources, ResourceError>> + Send;
}

/// The resources of a request, in the order in which it names them. One that is named twice counts
/// once.
///
/// It is made from one [`Resource`], from an array, or from a `Vec`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resources(Vec<Resource>);

impl Resources {
    /// The resources.
    #[must_use]
    pub fn as_slice(&self) -> &[Resource] {
        &self.0
    }
}

impl From<Resource> for Resources {
    fn from(resource: Resource) -> Self {
        Self(vec![resource])
    }
}

impl From<Vec<Resource>> for Resources {
    fn from(mut resources: Vec<Resource>) -> Self {
        let mut seen = HashSet::with_capacity(resources.len());
        resources.retain(|resource| seen.insert(resource.clone()));
        Self(resources)
    }
}

impl<const N: usize> From<[Resource; N]> for Resources {
    fn from(resources: [Resource; N]) -> Self {
        Self::from(Vec::from(resources))
    }
}

/// Writes the names, with a comma between them.
impl fmt::Display for Resources {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (position, resource) in self.0.iter().enumerate() {
            f.write_str(if position > 0 { ", " } else { "" })?;
            resource.fmt(f)?;
        }
        Ok(())
    }
}

/// The resource is a parameter of the path, percent-decoded: `PathParam("sku")` for the route
/// `/inventory/{sku}`.
///
/// The layer must be inside the router (`Router::layer`, `Router::route_layer`,
/// `MethodRouter::layer`): outside of it no path parameter is known yet, and every write is
/// refused.
///
/// Two names are two resources, byte by byte. Where the handler takes the parameter as something
/// else than text, two names may mean one row: with `Path<i64>`, `/items/7`, `/items/07` and
/// `/items/+7` are the same item, and would have three fences. There, say what it is:
/// [`PathParam::parsed`]. The same goes for a handler, or a column, that ignores case.
#[derive(Clone, Debug)]
pub struct PathParam(pub &'static str);

impl PathParam {
    /// The resource is the parameter's value as it is written when it was parsed as a `T`, which has
    /// to be the type that the handler takes: `PathParam("id").parsed::<i64>()` for `Path<i64>`.
    ///
    /// However the value was spelled, its fence is that of the one form: of `7`, for `07` and
    /// `+7`. What is no `T` is refused with 422 `invalid-request`.
    ///
    /// ```
    /// # fn layer(fence: tower_fence::Fence<sqlx::Postgres>) -> impl Clone {
    /// use tower_fence::{FenceLayer, PathParam};
    ///
    /// FenceLayer::new(fence, PathParam("id").parsed::<i64>())
    /// # }
    /// ```
    #[must_use]
    pub const fn parsed<T: FromStr + fmt::Display>(self) -> ParsedPathParam<T> {
        ParsedPathParam {
            name: self.0,
            parsed: PhantomData,
        }
    }
}

impl ResourceFrom for PathParam {
    async fn resources_from(&self, parts: &mut Parts) -> Result<Resources, ResourceError> {
        let name = path_param(parts, self.0, |value| Resource::new(value)).await?;
        Ok(name?.into())
    }
}

/// A parameter of the path in the one form that its value has: [`PathParam::parsed`].
pub struct ParsedPathParam<T> {
    name: &'static str,
    parsed: PhantomData<fn() -> T>,
}

impl<T: FromStr + fmt::Display + 'static> ResourceFrom for ParsedPathParam<T> {
    async fn resources_from(&self, parts: &mut Parts) -> Result<Resources, ResourceError> {
        let canonical = |value: &str| value.parse().map(|value: T| value.to_string()).ok();
        let canonical = path_param(parts, self.name, canonical).await?;
        let canonical = canonical.ok_or(ResourceError::Unparsed(self.name))?;
        Ok(Resource::new(canonical)?.into())
    }
}

impl<T> Clone for ParsedPathParam<T> {
    fn clone(&self) -> Self {
        Self { ..*self }
    }
}

impl<T> fmt::Debug for ParsedPathParam<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ParsedPathParam").field(&self.name).finish()
    }
}

/// Reads the only parameter of this name. Of two (in a router that is nested in another one) nobody
/// can know which one the handler means.
async fn path_param<V>(
    parts: &mut Parts,
    name: &'static str,
    read: impl FnOnce(&str) -> V,
) -> Result<V, ResourceError> {
    if parts.extensions.get::<MatchedPath>().is_none() {
        return Err(ResourceError::NoRoute);
    }
    match parts.extract::<RawPathParams>().await {
        Ok(params) => {
            let mut found = params.iter().filter(|(other, _)| *other == name);
            match (found.next(), found.next()) {
                (Some((_, value)), None) => Ok(read(value)),
                (None, _) => Err(ResourceError::NoPathParam(name)),
                (Some(_), Some(_)) => Err(ResourceError::PathParamTwice(name)),
            }
        }
        Err(RawPathParamsRejection::InvalidUtf8InPathParam(_)) => {
            Err(InvalidResource::NotUtf8.into())
        }
        Err(_) => Err(ResourceError::NoPathParam(name)),
    }
}

/// The resource is the value of a header.
#[derive(Clone, Debug)]
pub struct HeaderField(pub HeaderName);

impl ResourceFrom for HeaderField {
    async fn resources_from(&self, parts: &mut Parts) -> Result<Resources, ResourceError> {
        let mut values = parts.headers.get_all(&self.0).iter();
        let (Some(value), None) = (values.next(), values.next()) else {
            return Err(ResourceError::NotOneHeader(self.0.clone()));
        };
        let name = std::str::from_utf8(value.as_bytes()).map_err(|_| InvalidResource::NotUtf8)?;
        Ok(Resource::new(name)?.into())
    }
}

/// What each of them finds, in this order.
impl<R: ResourceFrom, const N: usize> ResourceFrom for [R; N] {
    async fn resources_from(&self, parts: &mut Parts) -> Result<Resources, ResourceError> {
        let mut all = Vec::with_capacity(N);
        for one in self {
            all.extend(one.resources_from(parts).await?.0);
        }
        Ok(all.into())
    }
}

impl<F, T, E> ResourceFrom for F
where
    F: Fn(&Parts) -> Result<T, E> + Clone + Send + Sync + 'static,
    T: Into<Resources>,
    E: Into<ResourceError>,
{
    async fn resources_from(&self, parts: &mut Parts) -> Result<Resources, ResourceError> {
        self(parts).map(Into::into).map_err(Into::into)
    }
}

/// Why a request has no resource.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ResourceError {
    /// Its name is not valid.
    #[error(transparent)]
    Invalid(#[from] InvalidResource),
    /// It names none.
    #[error("the request names no resource")]
    Nothing,
    /// The header that names it is missing, or stands more than once.
    #[error("the header `{0}` must stand exactly once")]
    NotOneHeader(HeaderName),
    /// No route matched before the layer was reached.
    #[error("no route matched before the fence; `FenceLayer` belongs inside the router")]
    NoRoute,
    /// The path parameter is not of the type that it has to be.
    #[error("the path parameter `{0}` is not what it has to be")]
    Unparsed(&'static str),
    /// The route has two path parameters of this name.
    #[error("the route has the path parameter `{0}` twice; which one is the resource?")]
    PathParamTwice(&'static str),
    /// The route has no such path parameter.
    #[error("the route has no path parameter `{0}` for `FenceLayer`")]
    NoPathParam(&'static str),
}
