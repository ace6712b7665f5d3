//! The issuer's routes as an OpenAPI document. The handlers' attributes describe the operations;
//! this module adds their limits, headers, refusals and links.

mod operations;
mod served;
#[cfg(all(test, feature = "memory", feature = "sqlite"))]
mod tests;

use std::{fmt, sync::Arc, time::Duration};

use axum::Router;
use utoipa::{
    OpenApi as _,
    openapi::{Info, Object, OpenApi, RefOr, Schema},
};
use utoipa_axum::router::OpenApiRouter;

pub(super) use self::served::serve;
use super::{Issuer, LOCK_DELAY_LIMIT, operators};
use crate::{
    lease::{LeaseAdmin, Leases, time::whole_ms},
    openapi::fencing_token,
};

/// Settings of an issuer's documents.
#[derive(Clone, Debug, Default)]
pub(super) struct Documents {
    /// Whether the router serves its own document.
    pub(super) served: bool,
    amendments: Vec<Amendment>,
}

#[derive(Clone)]
struct Amendment(Arc<dyn Fn(&mut OpenApi) + Send + Sync>);

impl fmt::Debug for Amendment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Amendment(…)")
    }
}

#[derive(utoipa::OpenApi)]
#[openapi(paths(super::acquire, super::renew, super::release, super::inspect))]
struct OfHolders;

#[derive(utoipa::OpenApi)]
#[openapi(paths(operators::list, operators::break_lease))]
struct OfOperators;

impl<L: Leases> Issuer<L> {
    /// Returns the document of the [`router`](Self::router), with the limits of this issuer. The
    /// paths are those of a router that is not nested; `OpenApi::nest` adds a prefix.
    #[must_use]
    pub fn openapi(&self) -> OpenApi {
        self.complete(OfHolders::openapi())
    }

    /// Returns the document of the [`operator_router`](Self::operator_router).
    #[must_use]
    pub fn operator_openapi(&self) -> OpenApi
    where
        L: LeaseAdmin,
    {
        self.complete(OfHolders::openapi().merge_from(OfOperators::openapi()))
    }

    /// Returns the [`router`](Self::router) with its document, to nest in the application's own.
    pub fn openapi_router<S: Clone + Send + Sync + 'static>(self) -> OpenApiRouter<S> {
        let api = self.openapi();
        with_document(self.router(), api)
    }

    /// Returns the [`operator_router`](Self::operator_router) with its document.
    pub fn operator_openapi_router<S: Clone + Send + Sync + 'static>(self) -> OpenApiRouter<S>
    where
        L: LeaseAdmin,
    {
        let api = self.operator_openapi();
        with_document(self.operator_router(), api)
    }

    /// Serves the document at `GET /openapi.json`. Its paths start with the path at which the
    /// router is nested. Default: not served.
    ///
    /// A resource named `openapi.json` can still be leased; its state is at `GET /openapi%2Ejson`.
    #[must_use]
    pub const fn serve_openapi(mut self) -> Self {
        self.documents.served = true;
        self
    }

    /// Amends the documents with what the issuer does not know, such as authentication in front of
    /// the router. This applies to [`openapi`](Self::openapi),
    /// [`operator_openapi`](Self::operator_openapi), and the [served
    /// document](Self::serve_openapi). `amend` sees the paths of a router that is not nested.
    /// Several amendments are applied in the order of the calls. Default: none.
    ///
    /// If the [router and its document](Self::openapi_router) are nested in an application, a
    /// `security` of the whole document, as in this example, becomes part of the application's
    /// document. Each operation can have its own `security` instead.
    ///
    /// ```
    /// use tower_fence::{issuer::Issuer, lease::Leases};
    /// use utoipa::openapi::security::{Http, HttpAuthScheme, SecurityRequirement, SecurityScheme};
    ///
    /// fn described<L: Leases>(issuer: Issuer<L>) -> Issuer<L> {
    ///     issuer.serve_openapi().amend_openapi(|api| {
    ///         let bearer = SecurityScheme::Http(Http::new(HttpAuthScheme::Bearer));
    ///         let components = api.components.get_or_insert_default();
    ///         components.add_security_scheme("secret", bearer);
    ///         api.security = Some(vec![SecurityRequirement::new::<_, _, &str>("secret", [])]);
    ///     })
    /// }
    /// ```
    #[must_use]
    pub fn amend_openapi(mut self, amend: impl Fn(&mut OpenApi) + Send + Sync + 'static) -> Self {
        self.documents.amendments.push(Amendment(Arc::new(amend)));
        self
    }

    /// Adds what the handlers' attributes do not contain, then applies the application's
    /// amendments.
    fn complete(&self, mut api: OpenApi) -> OpenApi {
        api.info = Info::new("Leases", env!("CARGO_PKG_VERSION"));
        api.info.description = Some("Leases, each with a fencing token.".into());
        operations::complete(&mut api);
        self.set_limits(&mut api);
        for Amendment(amend) in &self.documents.amendments {
            amend(&mut api);
        }
        api
    }

    fn set_limits(&self, api: &mut OpenApi) {
        let (shortest, longest) = (*self.ttl_limits.start(), *self.ttl_limits.end());
        for body in ["AcquireLease", "RenewLease"] {
            limit_ms(api, body, "ttl_ms", shortest, longest, self.default_ttl());
        }
        let zero = Duration::ZERO;
        limit_ms(api, "AcquireLease", "wait_ms", zero, self.wait_limit, zero);
        limit_ms(
            api,
            "AcquireLease",
            "lock_delay_ms",
            zero,
            LOCK_DELAY_LIMIT,
            zero,
        );
        if let Some(value) = property(api, "Lease", "fencing_token") {
            *value = fencing_token();
        }
    }
}

fn with_document<S: Clone + Send + Sync + 'static>(
    router: Router<S>,
    api: OpenApi,
) -> OpenApiRouter<S> {
    let mut router = OpenApiRouter::from(router);
    *router.get_openapi_mut() = api;
    router
}

/// Returns a property of a schema in the document.
fn property<'a>(api: &'a mut OpenApi, schema: &str, name: &str) -> Option<&'a mut Object> {
    let schemas = &mut api.components.as_mut()?.schemas;
    let RefOr::T(Schema::Object(schema)) = schemas.get_mut(schema)? else {
        return None;
    };
    match schema.properties.get_mut(name)? {
        RefOr::T(Schema::Object(property)) => Some(property),
        _ => None,
    }
}

/// Adds the limits of a member that is a number of milliseconds.
fn limit_ms(
    api: &mut OpenApi,
    schema: &str,
    name: &str,
    from: Duration,
    to: Duration,
    default: Duration,
) {
    if let Some(member) = property(api, schema, name) {
        member.minimum = Some(whole_ms(from).into());
        member.maximum = Some(whole_ms(to).into());
        member.default = Some(whole_ms(default).into());
    }
}
