//! Responses of the issuer: leases, and refusals as problem+json.

use std::error::Error;
#[cfg(feature = "_fence")]
use std::iter;

use axum::{
    Json,
    response::{IntoResponse, Response},
};
use http::{HeaderValue, StatusCode, header::CACHE_CONTROL};

#[cfg(feature = "_fence")]
use crate::fence::AdmitError;
use crate::{
    body::BodyError,
    chain::Chain,
    events,
    header::FENCING_TOKEN,
    lease::{Held, Lease, LeaseError, Page},
    metrics,
    problem::{Problem, ProblemType},
    sampler::Sampler,
    token::Resource,
    wire::{LeaseBody, PageBody, StateBody, refusal},
};

/// Header that prohibits caches from storing a response, because lease ids are secrets.
const NO_STORE: (http::HeaderName, HeaderValue) =
    (CACHE_CONTROL, HeaderValue::from_static("no-store"));

/// Returns a response with a lease, for its holder.
pub(super) fn lease(status: StatusCode, lease: &Lease) -> Response {
    let body = LeaseBody::from(lease);
    // The conversion does not fail, because the field is an RFC 9651 List, which is ASCII.
    let fencing_token = HeaderValue::try_from(&body.fencing_token);
    let mut response = (status, [NO_STORE], Json(body)).into_response();
    if let Ok(mut value) = fencing_token {
        // The value may be signed, and the signature is confidential.
        value.set_sensitive(true);
        response.headers_mut().insert(FENCING_TOKEN, value);
    }
    response
}

/// Returns a response with the state of a lock. It contains no secrets.
pub(super) fn state(resource: &Resource, held: Option<&Held>) -> Response {
    ([NO_STORE], Json(StateBody::new(resource, held))).into_response()
}

/// Returns a response with a page of leases, for operators.
pub(super) fn page(page: &Page) -> Response {
    ([NO_STORE], Json(PageBody::from(page))).into_response()
}

/// Returns the empty response to a successful release or break.
pub(super) fn released() -> Response {
    (StatusCode::NO_CONTENT, [NO_STORE]).into_response()
}

/// Reason for refusing a request to the issuer.
///
/// The rejection is also in the extensions of the response.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Rejection {
    /// The content type is not JSON, although the request has a body or was sent by a browser. The
    /// issuer refuses such a request, because a page of another site may have caused it.
    #[error("the request needs `Content-Type: application/json`")]
    UnsupportedMediaType,
    /// The body could not be read.
    #[error(transparent)]
    Body(#[from] BodyError),
    /// The application is shutting down, and the request was waiting or would have had to wait.
    #[error("the service is shutting down, and requests no longer wait")]
    Closing,
    /// A part of the request has an invalid value ([`LeaseError::Invalid`]), or the store refused
    /// the request, or failed.
    #[error(transparent)]
    Lease(#[from] LeaseError),
}

impl Rejection {
    /// Returns the problem type of the response.
    #[must_use]
    pub const fn problem_type(&self) -> ProblemType {
        match self {
            Self::UnsupportedMediaType => ProblemType::UnsupportedMediaType,
            Self::Closing => ProblemType::ServerBusy,
            Self::Body(error) => error.problem_type(),
            Self::Lease(error) => refusal::problem_type(error),
        }
    }
}

/// Returns the rejection of a request to end a lease that is not held. The request does not show
/// that a holder has lost its lease.
pub(super) fn not_held(resource: &Resource) -> Rejection {
    let problem = ProblemType::LeaseLost.name();
    metrics::lease_refused(problem, Some("end"));
    events::refused(problem, Some(resource));
    LeaseError::lost(resource).into()
}

/// Returns the rejection of a renewal whose lease is not held.
pub(super) fn lost(resource: &Resource) -> Rejection {
    metrics::lease_refused(ProblemType::LeaseLost.name(), Some("renewal"));
    events::lost(resource);
    LeaseError::lost(resource).into()
}

impl From<&Rejection> for Problem {
    fn from(refused: &Rejection) -> Self {
        let problem = Self::new(refused.problem_type());
        let problem = match refused {
            // The member `field` names the part.
            Rejection::Lease(LeaseError::Invalid { detail, .. }) => problem.detail(detail),
            _ => problem.detail(refused.to_string()),
        };
        match refused {
            Rejection::UnsupportedMediaType => problem,
            Rejection::Closing => problem.retry_after(refusal::RETRY_AFTER),
            Rejection::Body(error) => Self::from(error),
            Rejection::Lease(error) => refusal::describe(problem, error),
        }
    }
}

// All issuers share these samplers, because they write to the same log.
static BUSY: Sampler = Sampler::new();
static UNAVAILABLE: Sampler = Sampler::new();
static EXHAUSTED: Sampler = Sampler::new();
static WAITERS: Sampler = Sampler::new();

/// Returns the rejection for an error of the store, and logs a failure of the store. For failures
/// that clients can repeat, logs at most one line per second.
pub(super) fn failed(error: LeaseError, resource: Option<&Resource>) -> Rejection {
    if let LeaseError::Lost { resource } = &error {
        return not_held(resource);
    }
    let resource = resource.map(Resource::as_str);
    match &error {
        LeaseError::Unavailable(cause) if is_busy(&**cause) => {
            if let Some(suppressed) = BUSY.next() {
                let error = Chain(&**cause).to_string();
                tracing::warn!(
                    resource,
                    error,
                    suppressed,
                    "the resource or the pool is busy"
                );
            }
        }
        LeaseError::Unavailable(cause) => {
            if let Some(suppressed) = UNAVAILABLE.next() {
                let error = Chain(&**cause).to_string();
                tracing::error!(
                    resource,
                    error,
                    suppressed,
                    "the lease store is unavailable"
                );
            }
        }
        LeaseError::Misconfigured(cause) => {
            let error = Chain(&**cause).to_string();
            tracing::error!(resource, error, "the lease store is misconfigured");
        }
        &LeaseError::Exhausted { max_token, .. } => {
            if let Some(suppressed) = EXHAUSTED.next() {
                tracing::error!(
                    resource,
                    max_token,
                    suppressed,
                    "no higher token is left: reset the fence of the resource"
                );
            }
        }
        LeaseError::TooManyWaiters { .. } => {
            if let Some(suppressed) = WAITERS.next() {
                tracing::warn!(resource, suppressed, "too many requests wait for leases");
            }
        }
        _ => {}
    }
    error.into()
}

/// Returns whether the fence of the resource, or its pool, was busy. Clients can cause this failure
/// by collisions, so it is logged as a warning.
#[cfg(feature = "_fence")]
fn is_busy(error: &(dyn Error + 'static)) -> bool {
    iter::successors(Some(error), |&error| error.source())
        .any(|cause| matches!(cause.downcast_ref(), Some(AdmitError::Busy(_))))
}

#[cfg(not(feature = "_fence"))]
const fn is_busy(_: &(dyn Error + 'static)) -> bool {
    false
}

impl IntoResponse for Rejection {
    fn into_response(self) -> Response {
        let problem = self.problem_type().name();
        let resource = match &self {
            Self::Lease(
                LeaseError::Held { resource, .. }
                | LeaseError::TooManyWaiters { resource }
                | LeaseError::Exhausted { resource, .. },
            ) => Some(resource),
            _ => None,
        };
        // For a lease that is not held, `not_held` or `lost` has already counted the refusal, with
        // its reason.
        if !matches!(self, Self::Lease(LeaseError::Lost { .. })) {
            metrics::lease_refused(problem, None);
            events::refused(problem, resource);
        }
        let mut response = Problem::from(&self).into_response();
        response.extensions_mut().insert(self);
        response
    }
}

#[cfg(all(test, feature = "layer", feature = "metrics"))]
mod tests {
    use std::{io, sync::Arc};

    use axum::{Router, body::Body};
    use http::Request;
    use metrics_exporter_prometheus::PrometheusBuilder;
    use tokio::runtime::{self, Runtime};
    use tower::ServiceExt;

    use super::*;
    use crate::{
        announce::AnnounceError,
        issuer::Issuer,
        layer::captured,
        lease::{Acquire, LeaseAdmin, LeaseId, Leases, Renew},
        token::Token,
    };

    /// Store whose calls return this error.
    struct Failing(LeaseError);

    impl Leases for Failing {
        async fn acquire(&self, _: &Resource, _: Acquire) -> Result<Lease, LeaseError> {
            Err(self.0.clone())
        }

        async fn renew(&self, _: &Resource, _: &LeaseId, _: Renew) -> Result<Lease, LeaseError> {
            Err(self.0.clone())
        }

        async fn release(&self, _: &Resource, _: &LeaseId) -> Result<(), LeaseError> {
            Err(self.0.clone())
        }

        async fn inspect(&self, _: &Resource) -> Result<Option<Held>, LeaseError> {
            Err(self.0.clone())
        }
    }

    impl LeaseAdmin for Failing {
        async fn list(&self, _: usize, _: Option<&str>) -> Result<Page, LeaseError> {
            Err(self.0.clone())
        }

        async fn break_lease(&self, _: &Resource, _: Option<Token>) -> Result<bool, LeaseError> {
            match &self.0 {
                LeaseError::Lost { .. } => Ok(false),
                error => Err(error.clone()),
            }
        }
    }

    /// A runtime on the thread of the test, which is where spawned tasks log and count. Its time
    /// advances only while all tasks wait.
    fn paused() -> Runtime {
        let mut builder = runtime::Builder::new_current_thread();
        builder.enable_all().start_paused(true).build().unwrap()
    }

    /// Sends a request to an issuer whose store returns this error, and returns the status.
    fn status(runtime: &Runtime, error: &LeaseError, method: &str, path: &str) -> u16 {
        let app: Router = Issuer::new(Failing(error.clone())).operator_router();
        let request = Request::builder().method(method).uri(path);
        let request = request.header("Lease-Id", "a".repeat(22));
        let answer = app.oneshot(request.body(Body::empty()).unwrap());
        runtime.block_on(answer).unwrap().status().as_u16()
    }

    #[test]
    fn lost_renewals_are_counted_apart_from_late_releases() {
        let runtime = paused();
        let lost = LeaseError::lost(&Resource::new("a").unwrap());
        let recorder = PrometheusBuilder::new().build_recorder();
        ::metrics::with_local_recorder(&recorder, || {
            for (method, path) in [
                ("PUT", "/a"),
                ("DELETE", "/a"),
                ("POST", "/a"),
                ("POST", "/a/break"),
            ] {
                assert_eq!(
                    status(&runtime, &lost, method, path),
                    409,
                    "{method} {path}"
                );
            }
        });
        let counted = recorder.handle().render();
        for (reason, count) in [("renewal", 1), ("end", 3)] {
            let series = format!(
                r#"tower_fence_lease_refused_total{{problem="lease-lost",reason="{reason}"}} {count}"#
            );
            assert!(counted.contains(&series), "{counted}");
        }
        assert_eq!(counted.matches("lease-lost").count(), 2, "{counted}");
    }

    #[test]
    fn names_that_urls_cannot_contain_are_refused() {
        let runtime = paused();
        let lost = LeaseError::lost(&Resource::new("a").unwrap());
        for (path, expected) in [("/.", 422), ("/..", 422), ("/...", 409), ("/%2E%2e", 422)] {
            for method in ["POST", "PUT", "DELETE", "GET"] {
                assert_eq!(
                    status(&runtime, &lost, method, path),
                    expected,
                    "{method} {path}"
                );
            }
            let path = format!("{path}/break");
            assert_eq!(status(&runtime, &lost, "POST", &path), expected, "{path}");
        }
    }

    #[test]
    fn failures_of_the_store_are_logged_with_the_resource() {
        let runtime = paused();
        let busy = AnnounceError::Unreachable(Box::new(AdmitError::Busy(Arc::new(
            sqlx::Error::PoolTimedOut,
        ))));
        for (error, count, line) in [
            (
                LeaseError::unavailable(io::Error::other("refused")),
                2,
                r#"ERROR the lease store is unavailable resource="sku-1" error="refused""#,
            ),
            (
                LeaseError::misconfigured(io::Error::other("no table")),
                6,
                r#"ERROR the lease store is misconfigured resource="sku-1" error="no table""#,
            ),
            (busy.into(), 2, "WARN the resource or the pool is busy"),
            (
                LeaseError::Exhausted {
                    resource: Resource::new("sku-1").unwrap(),
                    max_token: Token::MAX.get(),
                },
                1,
                "ERROR no higher token is left: reset the fence of the resource",
            ),
            (
                LeaseError::TooManyWaiters {
                    resource: Resource::new("sku-1").unwrap(),
                },
                1,
                "WARN too many requests wait for leases",
            ),
        ] {
            let is_conflict = matches!(error, LeaseError::Exhausted { .. });
            let least = if is_conflict { 409 } else { 500 };
            // No line is suppressed at the beginning, because no other unit test logs one.
            let log = captured(|| {
                for (method, path) in [
                    ("POST", "/sku-1"),
                    ("PUT", "/sku-1"),
                    ("DELETE", "/sku-1"),
                    ("GET", "/sku-1"),
                    ("POST", "/sku-1/break"),
                    ("GET", "/"),
                ] {
                    assert!(
                        status(&runtime, &error, method, path) >= least,
                        "{method} {path}"
                    );
                }
            });
            let lines: Vec<_> = log.lines().collect();
            assert_eq!(lines.len(), count, "{log}");
            let unconfirmed = log.contains("WARN") && log.contains("a lease may have been broken");
            assert_eq!(unconfirmed, count == 2, "{log}");
            let (level, message) = line.split_once(' ').unwrap();
            for part in [level, message, r#"resource="sku-1""#] {
                assert!(lines[0].contains(part), "{part}: {log}");
            }
        }
    }
}
