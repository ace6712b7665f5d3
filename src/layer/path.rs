//! Resources that the path of a request names.

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

/// Resource named by a percent-decoded path parameter.
///
/// For the route `/inventory/{sku}`, use `PathParam("sku")`. The layer must be inside the router
/// (`Router::layer`, `Router::route_layer`, `MethodRouter::layer`). Outside of the router, the path
/// parameters are not yet known, and the layer refuses every write. The layer also refuses every
/// write if it wraps a service that is mounted with `nest_service`, for which axum sets no
/// `MatchedPath`.
///
/// All routes of a fence share one set of names: a SKU `7` and an order `7` are one resource. If a
/// service has several kinds of resources, use a [`ResourcePattern`] for each of them.
///
/// Names are compared byte by byte, and different names denote different resources. If the handler
/// parses the parameter, several names may denote one row. In that case use [`FromPath`] with a
/// function that parses the parameter as the handler does. Do the same if the handler or the column
/// ignores case.
#[derive(Clone, Debug)]
pub struct PathParam(pub &'static str);

impl ResourceFrom for PathParam {
    async fn resources_from(&self, parts: &mut Parts) -> Result<Resources, ResourceError> {
        let path = PathParams::of(parts).await?;
        Ok(Resource::new(path.get(self.0)?)?.into())
    }
}

/// Fills the pattern with the percent-decoded path parameters that it names.
impl ResourceFrom for ResourcePattern {
    async fn resources_from(&self, parts: &mut Parts) -> Result<Resources, ResourceError> {
        let path = PathParams::of(parts).await?;
        Ok(path.fill(self)?.into())
    }
}

/// Resources returned by a function of the path parameters.
///
/// If the handler parses a parameter, the function must [parse it
/// too](crate::guide::resources#a-name-that-is-parsed). With `Path<i64>`, for example, `/items/7`,
/// `/items/07` and `/items/+7` denote the same item.
///
/// One layer can serve routes whose parameters have different names:
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

/// Percent-decoded path parameters of a request.
#[derive(Debug)]
pub struct PathParams {
    route: MatchedPath,
    params: Option<RawPathParams>,
}

impl PathParams {
    /// Reads the parameters of a request that a route has matched.
    ///
    /// # Errors
    ///
    /// Returns [`ResourceError::NoRoute`] if no route has matched, and [`ResourceError::Invalid`]
    /// if a parameter is not UTF-8.
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

    /// Returns the route that matched, such as `/orders/{order}`, including the prefix of a nested
    /// router.
    #[must_use]
    pub fn route(&self) -> &str {
        self.route.as_str()
    }

    /// Fills a pattern with the path parameters that it names.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`get`](Self::get) and of [`ResourcePattern::fill`].
    pub fn fill(&self, pattern: &ResourcePattern) -> Result<Resource, ResourceError> {
        let values = pattern.parameters().map(|name| Ok((name, self.get(name)?)));
        let values = values.collect::<Result<Vec<_>, ResourceError>>()?;
        Ok(pattern.fill(values)?)
    }

    /// Parses the path parameter with this name as a `T`.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`get`](Self::get), and [`ResourceError::Unparsed`] if the value is
    /// not a valid `T`.
    pub fn parse<T: FromStr>(&self, name: &str) -> Result<T, ResourceError> {
        let unparsed = |_| ResourceError::Unparsed(name.to_owned());
        self.get(name)?.parse().map_err(unparsed)
    }

    /// Returns the path parameter with this name.
    ///
    /// # Errors
    ///
    /// Returns [`ResourceError::NoPathParam`] if the route has no such parameter. Returns
    /// [`ResourceError::PathParamTwice`] if nested routers both have a parameter with this name,
    /// because the layer cannot determine which of the two values the handler uses.
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
