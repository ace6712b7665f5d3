//! Resources of a request.

use std::{collections::HashSet, fmt};

use http::request::Parts;

use crate::{
    pattern::FillError,
    token::{InvalidResource, Resource},
};

/// Source of the resources of a request.
///
/// Its implementers are [`ResourcePattern`](crate::ResourcePattern),
/// [`PathParam`](super::PathParam) and [`FromPath`](super::FromPath), arrays of these, and closures
/// that take the request's parts and return one resource, an array or a `Vec`:
///
/// ```
/// use tower_fence::{PathParam, Resource, layer::{FromPath, PathParams, ResourceError}};
///
/// // One resource, from a header.
/// let tenant = |parts: &http::request::Parts| -> Result<Resource, ResourceError> {
///     let tenant = parts.headers.get("x-tenant").ok_or(ResourceError::Nothing)?;
///     Ok(Resource::new(tenant.to_str().map_err(|_| ResourceError::Nothing)?)?)
/// };
/// // Two resources, for the route `/inventory/{from}/transfer/{to}`.
/// let both = [PathParam("from"), PathParam("to")];
/// // One resource for each name in the path, for the route `/inventory/{skus}`.
/// let listed = FromPath(|path: &PathParams| -> Result<Vec<Resource>, ResourceError> {
///     let skus = path.get("skus")?.split(',').map(Resource::new);
///     Ok(skus.collect::<Result<Vec<_>, _>>()?)
/// });
/// # let _ = (tenant, both, listed);
/// ```
///
/// A closure sees the path and the query before they are percent-decoded. In this form,
/// `/documents/7` and `/documents/%37` differ, but a handler that decodes the path treats them as
/// one document. Take names from `PathParam`, [`FromPath`](super::FromPath) or
/// [`PathParams`](super::PathParams), which decode the path, or decode them in the closure.
///
/// The trait's method is asynchronous, so a type of the application may also query a database. The
/// handler must [check the result](crate::guide::resources#a-name-that-has-to-be-looked-up) again:
///
/// ```
/// use http::request::Parts;
/// use tower_fence::layer::{PathParams, ResourceError, ResourceFrom, Resources};
/// use tower_fence::Resource;
///
/// /// Protects all orders of a customer as one resource.
/// #[derive(Clone)]
/// struct CustomerOf(sqlx::PgPool);
///
/// impl ResourceFrom for CustomerOf {
///     async fn resources_from(&self, parts: &mut Parts) -> Result<Resources, ResourceError> {
///         let path = PathParams::of(parts).await?;
///         let query = sqlx::query_scalar("SELECT customer FROM orders WHERE id = $1");
///         let customer: Option<String> = query
///             .bind(path.get("order")?)
///             .fetch_optional(&self.0)
///             .await
///             .map_err(|_| ResourceError::Unavailable)?;
///         Ok(Resource::new(customer.ok_or(ResourceError::Nothing)?)?.into())
///     }
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not name a resource",
    note = "use `PathParam(\"name\")`, a `ResourcePattern`, or a closure `|parts: &Parts| …`"
)]
pub trait ResourceFrom: Clone + Send + Sync + 'static {
    /// Returns the resources of a request, within the fence's
    /// [`answer_timeout`](crate::FenceBuilder::answer_timeout).
    ///
    /// # Errors
    ///
    /// Returns a [`ResourceError`]. The layer then refuses the request, before it reads the body or
    /// uses the database.
    fn resources_from(
        &self,
        parts: &mut Parts,
    ) -> impl Future<Output = Result<Resources, ResourceError>> + Send;
}

/// Resources of a request, in the order in which the request names them.
///
/// A resource that is named twice counts once. A [`Resource`], an array and a `Vec` can be
/// converted into this type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resources(Vec<Resource>);

impl Resources {
    /// Returns the resources as a slice.
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

/// Writes the names, separated by commas.
impl fmt::Display for Resources {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (position, resource) in self.0.iter().enumerate() {
            f.write_str(if position > 0 { ", " } else { "" })?;
            resource.fmt(f)?;
        }
        Ok(())
    }
}

/// Combines the resources of all elements, in order.
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

/// Error for a request whose resource cannot be determined.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ResourceError {
    /// The name of the resource is invalid.
    #[error(transparent)]
    Invalid(#[from] InvalidResource),
    /// The request names no resource.
    #[error("the request names no resource")]
    Nothing,
    /// The resource cannot be determined at the moment, because the database or service that
    /// provides its name is unreachable.
    #[error("the resource of the request cannot be determined at the moment")]
    Unavailable,
    /// The request reached the layer before a route matched.
    #[error(
        "no route matched before the fence (a `nest_service` does not count as a route): add `FenceLayer` inside the \
         router, or use `nest`"
    )]
    NoRoute,
    /// The value of a path parameter cannot be parsed as the type that the resource's name needs.
    #[error("invalid value of the path parameter `{0}`")]
    Unparsed(String),
    /// The values do not match the pattern of the resource's name.
    #[error(transparent)]
    Pattern(FillError),
    /// The route has two path parameters with this name.
    #[error("the route `{route}` has two path parameters named `{name}`; rename one of them")]
    PathParamTwice {
        /// The parameter.
        name: String,
        /// The route.
        route: String,
    },
    /// The route has no path parameter with this name.
    #[error(
        "the route `{route}` has no path parameter `{name}`; give each route a `FenceLayer` of its own: \
         `post(handler).layer(FenceLayer::new(fence, ResourcePattern::new(\"order/{{order}}\")?))`, or distinguish the \
         routes with `FromPath`"
    )]
    NoPathParam {
        /// The parameter.
        name: String,
        /// The route.
        route: String,
    },
}

impl From<FillError> for ResourceError {
    fn from(error: FillError) -> Self {
        match error {
            FillError::Resource(error) => Self::Invalid(error),
            other => Self::Pattern(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resources_are_written_with_commas_between_them() {
        let [a, b] = ["a", "b"].map(|name| Resource::new(name).unwrap());
        assert_eq!(Resources::from(a.clone()).to_string(), "a");
        assert_eq!(Resources::from([a, b]).to_string(), "a, b");
    }

    #[test]
    fn missing_parameter_is_reported_with_a_layer_that_has_a_pattern() {
        let error = ResourceError::NoPathParam {
            name: "sku".into(),
            route: "/orders/{order}".into(),
        };
        let line = r#".layer(FenceLayer::new(fence, ResourcePattern::new("order/{order}")?))"#;
        assert!(error.to_string().contains(line), "{error}");
    }
}
