//! Limits concurrent requests for leases, and terminates them when the server stops.
//!
//! 1. A request to acquire a lease may wait for a long time. Renewals, releases, reads and the
//!    requests of operators therefore have separate limits.
//! 2. Each kind has a total limit and a limit for each caller.
//! 3. A request counts towards its limit only after its body has arrived.
//! 4. When the server closes, the issuer answers a request that waits in the queue with 503 within
//!    a second. Any other request may take the time of `--drain`.

use std::{
    iter,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use axum::{
    body::Body,
    extract::{MatchedPath, Request, State},
    middleware::Next,
    response::{IntoResponse, Response},
};
use futures_util::{StreamExt, stream};
use http::Method;
use http_body::Body as _;
use tokio::{
    runtime::Handle,
    time::{error::Elapsed, sleep, timeout},
};
use tower_fence::{issuer::Rejection, lease::LeaseError, problem::ProblemType};

use super::{args::LimitArgs, limits::Limit, metrics, recent_grants::RecentGrants, stop::Stop};

/// How long the number of background tasks must stay the same before `settle` returns.
const CALM: Duration = Duration::from_millis(500);

/// The maximum length of a body. The issuer has the same limit.
const BODY_LIMIT_BYTES: usize = 16 * 1024;

/// The time to send the body. The issuer has the same timeout.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);

/// The limits of concurrent requests, and the signal to stop.
#[derive(Clone)]
pub struct UnderWay {
    acquisitions: Limit,
    others: Limit,
    grants: Arc<RecentGrants>,
    stop: Stop,
    drain: Duration,
    has_ended_requests: Arc<AtomicBool>,
}

impl UnderWay {
    pub fn new(
        limits: &LimitArgs,
        connections: u32,
        stop: Stop,
        grants: Arc<RecentGrants>,
    ) -> Self {
        // A waiting request occupies a connection, so waiters leave half of them to other requests.
        let most = limits.max_waiting.min((connections / 2).max(1));
        if most < limits.max_waiting {
            tracing::info!(
                max_waiting = limits.max_waiting,
                most,
                "fewer requests may wait than --max-waiting allows, because of the limit on connections"
            );
        }
        Self {
            acquisitions: Limit::new(
                "requests that wait for leases",
                most,
                limits.max_waiting_per_caller,
            ),
            others: Limit::new("concurrent requests", limits.max_requests, None),
            grants,
            stop,
            drain: limits.drain,
            has_ended_requests: Arc::default(),
        }
    }

    /// Waits until the terminated requests have left the queue, and until leases that were granted
    /// to them in the meantime are released. Background tasks do this work, so the method waits
    /// until the number of tasks has not changed for [`CALM`]. Leases that are not released by then
    /// expire.
    pub async fn settle(&self) {
        if !self.has_ended_requests.load(Relaxed) {
            return;
        }
        let tasks = Handle::current().metrics();
        let (mut last, mut since) = (tasks.num_alive_tasks(), Instant::now());
        let began = since;
        while since.elapsed() < CALM && began.elapsed() < 6 * CALM {
            sleep(CALM / 25).await;
            let now = tasks.num_alive_tasks();
            if now != last {
                (last, since) = (now, Instant::now());
            }
        }
    }

    /// Records the outcome of a grant in the store, and the time that the grant took.
    fn record(&self, response: &Response, took: Duration) {
        match response.extensions().get() {
            // A misconfiguration also counts as a failure. It does not pass by itself, and a check
            // that only reads may not detect it.
            Some(Rejection::Lease(
                LeaseError::Unavailable(cause) | LeaseError::Misconfigured(cause),
            )) => self.grants.failed(&**cause, took),
            Some(Rejection::Lease(LeaseError::Held { .. })) => self.grants.answered(),
            None if response.status().is_success() => self.grants.answered(),
            _ => {}
        }
    }

    /// Waits until all requests must end because the server closes.
    async fn over(&self) {
        self.stop.closing().await;
        sleep(self.drain).await;
    }
}

/// Middleware that answers 503 if a limit is reached, or when a request must end.
pub async fn limit(State(under_way): State<UnderWay>, request: Request, next: Next) -> Response {
    let method = request.method().clone();
    let route = request.extensions().get::<MatchedPath>().cloned();
    let may_wait = method == Method::POST
        && route
            .as_ref()
            .is_some_and(|route| !route.as_str().ends_with("/break"));
    let began = Instant::now();
    let answer = async {
        let Ok(request) = in_memory(request).await else {
            return body_timeout();
        };
        let limit = match may_wait {
            true => &under_way.acquisitions,
            false => &under_way.others,
        };
        let _permit = match limit.permit(&request) {
            Ok(permit) => permit,
            Err(detail) => return busy(&detail),
        };
        let asked_at = Instant::now();
        let response = next.run(request).await;
        if may_wait {
            under_way.record(&response, asked_at.elapsed());
        }
        response
    };
    let response = tokio::select! {
        response = answer => {
            if matches!(response.extensions().get(), Some(Rejection::Closing)) {
                under_way.has_ended_requests.store(true, Relaxed);
            }
            response
        }
        // If a lease was granted to the dropped request, it is released.
        () = under_way.over() => {
            under_way.has_ended_requests.store(true, Relaxed);
            busy("the server is stopping")
        }
    };
    let route = route.as_ref().map_or("", MatchedPath::as_str);
    let (status, ms) = (
        response.status().as_u16(),
        began.elapsed().as_millis() as u64,
    );
    tracing::debug!(%method, route, status, ms, "answered");
    response
}

/// Reads the body of a request into memory.
///
/// A body is read before its request takes a permit. Otherwise, one holder with slow bodies could
/// hold all permits, and block the renewals of all other holders. A limit for each caller would not
/// prevent this, because the holders may share one secret. A body in memory has little more than
/// [`BODY_LIMIT_BYTES`], and each connection has at most one, so `--max-connections` limits them.
async fn in_memory(request: Request) -> Result<Request, Elapsed> {
    let (parts, body) = request.into_parts();
    let is_unused = matches!(parts.method, Method::GET | Method::HEAD);
    // The issuer refuses a body with such a length before it reads any byte.
    if is_unused || body.size_hint().lower() > BODY_LIMIT_BYTES as u64 {
        return Ok(Request::from_parts(parts, body));
    }
    let mut rest = body.into_data_stream();
    let mut read: Vec<u8> = vec![];
    let reading = async {
        while read.len() <= BODY_LIMIT_BYTES
            && let Some(data) = rest.next().await
        {
            read.extend_from_slice(&data?);
        }
        Ok::<_, axum::Error>(())
    };
    let failure = timeout(BODY_TIMEOUT, reading).await?.err();
    let body = if failure.is_none() && read.len() <= BODY_LIMIT_BYTES {
        Body::from(read)
    } else {
        // The issuer refuses this body.
        let beginning = iter::once(Ok(read.into())).chain(failure.map(Err));
        Body::from_stream(stream::iter(beginning).chain(rest))
    };
    Ok(Request::from_parts(parts, body))
}

fn body_timeout() -> Response {
    metrics::refused(ProblemType::BodyTimeout)
        .detail(format!("the body did not arrive within {BODY_TIMEOUT:?}"))
        .into_response()
}

fn busy(detail: &str) -> Response {
    metrics::refused(ProblemType::ServerBusy)
        .detail(detail)
        .retry_after(Duration::from_secs(1))
        .into_response()
}
