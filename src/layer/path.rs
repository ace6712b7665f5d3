//! Resources that the path names.

use std::{fmt, str::FromStr};

use axum::{
    RequestPartsExt,
    extract::{MatchedPath, RawPathParams, rejection::RawPathParamsRejection},
};
use http::request::Parts;

use super::resource::{ResourceError, ResourceFrom, Resources};
use crate::{
    pattern::ResourcePattern,
    token::{InvalidResource, Resource},
};

/// The resource is a parameter of the path, percent-decoded: `PathParam("sku")` for the route
/// `/inventory/{sku}`.
///
/// The layer must be inside the router (`Router::layer`, `Router::route_layer`,
/// `MethodRouter::layer`): outside of it no path parameter is known yet, and every write is
/// refused.
///
/// Two names are two resources, byte by byte. Where the handler takes the parameter as something
/// else than text, two names may mean one row: with `Path<i64>`, `/items/7`, `/items/07` and
/// `/items/+7` are the same item, and would have three fences. There, [`FromPath`] parses it as the
/// handler does. The same goes for a handler, or a column, that ignores case.
#[derive(Clone, Debug)]
pub struct PathParam(pub &'static str);

impl ResourceFrom for PathParam {
    async fn resources_from(&self, parts: &mut Parts) -> Result<Resources, ResourceError> {
        let path = PathParams::of(parts).await?;
        Ok(Resource::new(path.get(self.0)?)?.into())
    }
}

/// The resource is the pattern, filled from the parameters of the path that have its parameters' names: percent-decoded, as
/// [`PathParam`] reads them.
impl ResourceFrom for ResourcePattern {
    async fn resources_from(&self, parts: &mut Parts) -> Result<Resources, ResourceError> {
        let path = PathParams::of(parts).await?;
        Ok(path.fill(self)?.into())
    }
}

/// The resources are what a function makes of the parameters of the path.
///
/// If the handler parses a parameter, so does the function: with `Path<i64>`, `/items/7` and `/items/07` are one item.
///
/// ```
/// use tower_fence::{Resource, ResourcePattern, layer::{FromPath, PathParams, ResourceError}};
///
/// # fn example() -> Result<(), tower_fence::InvalidPattern> {
/// let item = ResourcePattern::new("item/{id}")?;
/// let item = FromPath(move |path: &PathParams| -> Result<Resource, ResourceError> {
///     Ok(item.fill([("id", path.parse::<i64>("id")?)])?)
/// });
/// # let _ = item;
/// # Ok(())
/// # }
/// ```
///
/// One layer serves routes whose parameters have different names:
///
/// ```
/// use tower_fence::{Resource, ResourcePattern, layer::{FromPath, PathParams, ResourceError}};
///
/// # fn example() -> Result<(), tower_fence::InvalidPattern> {
/// let order = ResourcePattern::new("order/{order}")?;
/// let customer = ResourcePattern::new("customer/{customer}")?;
/// let either = FromPath(move |path: &PathParams| -> Result<Resource, ResourceError> {
///     match path.route() {
///         "/orders/{order}" => path.fill(&order),
///         _ => path.fill(&customer),
///     }
/// });
/// # let _ = either;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct FromPath<F>(pub F);

impl<F, T, E> ResourceFrom for FromPath<F>
where
    F: Fn(&PathParams) -> Result<T, E> + Clone + Send + Sync + 'static,
    T: Into<Resources>,
    E: Into<ResourceError>,
{
    async fn resources_from(&self, parts: &mut Parts) -> Result<Resources, ResourceError> {
        let path = PathParams::of(parts).await?;
        self.0(&path).map(Into::into).map_err(Into::into)
    }
}

impl<F> fmt::Debug for FromPath<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FromPath(…)")
    }
}

/// The parameters of a request's path, percent-decoded.
#[derive(Debug)]
pub struct PathParams {
    route: MatchedPath,
    params: Option<RawPathParams>,
}

impl PathParams {
    /// Reads them from a request that a route has matched.
    ///
    /// # Errors
    ///
    /// [`ResourceError::NoRoute`] where none has; [`ResourceError::Invalid`] where a parameter is not
    /// UTF-8.
    pub async fn of(parts: &mut Parts) -> Result<Self, ResourceError> {
        let route = parts.extensions.get::<MatchedPath>();
        let route = route.ok_or(ResourceError::NoRoute)?.clone();
        let params = match parts.extract::<RawPathParams>().await {
            Ok(params) => Some(params),
            Err(RawPathParamsRejection::InvalidUtf8InPathParam(_)) => {
                return Err(InvalidResource::NotUtf8.into());
            }
            Err(_) => None,
        };
        Ok(Self { route, params })
    }

    /// The route that matched, such as `/orders/{order}`, with what it is nested below.
    #[must_use]
    pub fn route(&self) -> &str {
        self.route.as_str()
    }

    /// Fills a pattern from the parameters that have the names of its parameters.
    ///
    /// # Errors
    ///
    /// As [`get`](Self::get), and those of [`ResourcePattern::fill`].
    pub fn fill(&self, pattern: &ResourcePattern) -> Result<Resource, ResourceError> {
        let values = pattern.parameters().map(|name| Ok((name, self.get(name)?)));
        let values = values.collect::<Result<Vec<_>, ResourceError>>()?;
        Ok(pattern.fill(values)?)
    }

    /// The only parameter of this name, as a `T`.
    ///
    /// # Errors
    ///
    /// As [`get`](Self::get), and [`ResourceError::Unparsed`] if it is not a `T`.
    pub fn parse<T: FromStr>(&self, name: &str) -> Result<T, ResourceError> {
        let unparsed = |_| ResourceError::Unparsed(name.to_owned());
        self.get(name)?.parse().map_err(unparsed)
    }

    /// The only parameter of this name.
    ///
    /// # Errors
    ///
    /// [`ResourceError::NoPathParam`] where there is none. [`ResourceError::PathParamTwice`] where a
    /// router that is nested in another one has a second one: nobody can know which one the handler
    /// means.
    pub fn get(&self, name: &str) -> Result<&str, ResourceError> {
        let params = self.params.iter().flatten();
        let mut found = params.filter(|(other, _)| *other == name);
        match (found.next(), found.next()) {
            (Some((_, value)), None) => Ok(value),
            (None, _) => Err(ResourceError::NoPathParam {
                name: name.to_owned(),
                route: self.route.as_str().to_owned(),
            }),
            (Some(_), Some(_)) => Err(ResourceError::PathParamTwice {
                name: name.to_owned(),
                route: self.route.as_str().to_owned(),
            }),
        }
    }
}
