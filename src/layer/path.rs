//! Resources that are named in the path.

use std::{fmt, marker::PhantomData, str::FromStr};

use axum::{
    RequestPartsExt,
    extract::{MatchedPath, RawPathParams, rejection::RawPathParamsRejection},
};
use http::request::Parts;

use super::resource::{Prefixed, ResourceError, ResourceFrom, Resources};
use crate::token::{InvalidResource, Resource};

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

    /// The resource is the parameter behind a prefix: `PathParam("id").prefix("order/")`, so that an
    /// order and an account with the same number are two resources.
    #[must_use]
    pub const fn prefix(self, prefix: &'static str) -> Prefixed<Self> {
        Prefixed::new(prefix, self)
    }
}

impl ResourceFrom for PathParam {
    async fn resources_from(&self, parts: &mut Parts) -> Result<Resources, ResourceError> {
        let path = PathParams::of(parts).await?;
        Ok(Resource::new(path.get(self.0)?)?.into())
    }

    fn at_most(&self) -> Option<usize> {
        Some(1)
    }
}

/// A parameter of the path in the one form that its value has: [`PathParam::parsed`].
pub struct ParsedPathParam<T> {
    name: &'static str,
    parsed: PhantomData<fn() -> T>,
}

impl<T: FromStr + fmt::Display + 'static> ResourceFrom for ParsedPathParam<T> {
    async fn resources_from(&self, parts: &mut Parts) -> Result<Resources, ResourceError> {
        let path = PathParams::of(parts).await?;
        let value: Result<T, _> = path.get(self.name)?.parse();
        let value = value.map_err(|_| ResourceError::Unparsed(self.name))?;
        Ok(Resource::new(value.to_string())?.into())
    }

    fn at_most(&self) -> Option<usize> {
        Some(1)
    }
}

impl<T> ParsedPathParam<T> {
    /// The same behind a prefix; see [`PathParam::prefix`].
    #[must_use]
    pub const fn prefix(self, prefix: &'static str) -> Prefixed<Self> {
        Prefixed::new(prefix, self)
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

/// The resources are what a function makes of the parameters of the path:
///
/// ```
/// use tower_fence::{Resource, layer::{FromPath, PathParams, ResourceError}};
///
/// // For the route `/{tenant}/inventory/{sku}`, where no tenant has a slash in its name: otherwise two
/// // pairs could be one name.
/// let tenants_sku = FromPath(|path: &PathParams| -> Result<Resource, ResourceError> {
///     Ok(Resource::new(format!("{}/{}", path.get("tenant")?, path.get("sku")?))?)
/// });
/// # let _ = tenants_sku;
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
