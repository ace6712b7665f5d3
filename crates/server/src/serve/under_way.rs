//! Requests for leases that are under way: how many there may be, and how they end when the server stops.
//!
//! 1. A request to take a lease may wait for long. Such requests have a limit in all, and a limit for each caller; they
//!    take no place of another request.
//! 2. Renewals, releases, reads and what operators do have a limit of their own.
//! 3. When the server closes, a request that waits in the queue is answered 503 within a second. Any other request has
//!    the time of `--drain`.

use std::{
    collections::HashMap,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    pin::Pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    task::{Context, Poll, ready},
    time::{Duration, Instant},
};

use axum::{
    body::{Body, Bytes},
    extract::{MatchedPath, Request, State},
    middleware::Next,
    response::{IntoResponse, Response},
};
use http::Method;
use http_body::{Frame, SizeHint};
use tokio::{
    runtime::Handle,
    sync::{OwnedSemaphorePermit, Semaphore},
    time::sleep,
};
use tower_fence::{
    issuer::Rejection,
    lease::LeaseError,
    problem::{Problem, ProblemType},
};

use super::{access::Caller, args::LimitArgs, probe::Recent, stop::Stop};

/// How long a request may wait in the queue once the server closes.
const QUEUE_GRACE: Duration = Duration::from_secs(1);

/// How long nothing has to happen in the background.
const CALM: Duration = Duration::from_millis(500);

/// As much of a body as the issuer reads.
const BODY_LIMIT_BYTES: usize = 16 * 1024;

/// The limits of requests, and the signal to stop.
#[derive(Clone)]
pub struct UnderWay {
    free: Arc<Semaphore>,
    free_waits: Arc<Semaphore>,
    callers: Arc<Callers>,
    grants: Arc<Recent>,
    stop: Stop,
    drain: Duration,
    sent_away: Arc<AtomicBool>,
}

/// How many requests each caller has that may wait.
struct Callers {
    each: usize,
    waits: Mutex<HashMap<Source, usize>>,
}

/// Where a request comes from: a secret, or an address if the server has no secrets.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Source {
    Secret(Caller),
    Address(IpAddr),
    Unknown,
}

/// The place of a request.
enum Place {
    Request {
        _permit: OwnedSemaphorePermit,
    },
    Wait {
        _permit: OwnedSemaphorePermit,
        _caller: CallersPlace,
    },
}

struct CallersPlace {
    callers: Arc<Callers>,
    source: Source,
}

impl Source {
    fn of(request: &Request) -> Self {
        if let Some(caller) = request.extensions().get::<Caller>() {
            return Self::Secret(*caller);
        }
        match request.extensions().get::<SocketAddr>().map(SocketAddr::ip) {
            Some(IpAddr::V6(ip)) => {
                Self::Address(Ipv6Addr::from_bits(ip.to_bits() >> 64 << 64).into())
            }
            Some(ip) => Self::Address(ip),
            None => Self::Unknown,
        }
    }
}

impl Callers {
    fn enter(self: &Arc<Self>, source: Source) -> Option<CallersPlace> {
        let mut waits = self.waits.lock().unwrap_or_else(PoisonError::into_inner);
        let count = waits.entry(source).or_default();
        if *count >= self.each {
            return None;
        }
        *count += 1;
        let callers = Arc::clone(self);
        Some(CallersPlace { callers, source })
    }
}

impl Drop for CallersPlace {
    fn drop(&mut self) {
        let mut waits = self
            .callers
            .waits
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = waits.get_mut(&self.source) {
            *count -= 1;
            if *count == 0 {
                waits.remove(&self.source);
            }
        }
    }
}

impl UnderWay {
    pub fn new(limits: &LimitArgs, stop: Stop, grants: Arc<Recent>) -> Self {
        let each = limits
            .max_waiting_per_caller
            .unwrap_or(limits.max_waiting.div_ceil(2));
        let semaphore = |permits: u32| Arc::new(Semaphore::new(permits as usize));
        Self {
            free: semaphore(limits.max_requests),
            free_waits: semaphore(limits.max_waiting),
            callers: Arc::new(Callers {
                each: each as usize,
                waits: Mutex::default(),
            }),
            grants,
            stop,
            drain: limits.drain,
            sent_away: Arc::default(),
        }
    }

    /// A place for this request, or what there is too much of.
    fn place(&self, request: &Request, may_wait: bool) -> Result<Place, &'static str> {
        let semaphore = if may_wait {
            &self.free_waits
        } else {
            &self.free
        };
        let permit = Arc::clone(semaphore).try_acquire_owned();
        match (permit, may_wait) {
            (Ok(_permit), false) => Ok(Place::Request { _permit }),
            (Err(_), false) => Err("as many requests are under way as the server takes"),
            (Err(_), true) => Err("as many requests wait for leases as the server takes"),
            (Ok(_permit), true) => {
                let _caller = self.callers.enter(Source::of(request));
                let _caller = _caller
                    .ok_or("as many requests of this caller wait for leases as the server takes")?;
                Ok(Place::Wait { _permit, _caller })
            }
        }
    }

    /// Waits until the requests that were sent away have left the queue, and what was granted to them meanwhile is
    /// released: tasks in the background do that, so until none of them has ended for a while. What is not done then
    /// ends by its time.
    pub async fn settle(&self) {
        if !self.sent_away.load(Relaxed) {
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

    /// Records what the store has made of a grant.
    fn record(&self, response: &Response) {
        match response.extensions().get() {
            Some(Rejection::Lease(LeaseError::Unavailable(cause))) => self.grants.failed(&**cause),
            Some(Rejection::Lease(LeaseError::Held { .. })) => self.grants.answered(),
            None if response.status().is_success() => self.grants.answered(),
            _ => {}
        }
    }

    /// Waits until a request has to end because the server closes.
    async fn over(&self, body: Option<&Seen>) {
        self.stop.closing().await;
        let closed = Instant::now();
        sleep(QUEUE_GRACE.min(self.drain)).await;
        if !body.is_some_and(Seen::asks_to_wait) {
            sleep(self.drain.saturating_sub(closed.elapsed())).await;
        }
    }
}

/// Answers a request, or says that the server takes none.
pub async fn limit(State(under_way): State<UnderWay>, request: Request, next: Next) -> Response {
    let method = request.method().clone();
    let route = request.extensions().get::<MatchedPath>().cloned();
    let may_wait = method == Method::POST
        && route
            .as_ref()
            .is_some_and(|route| !route.as_str().ends_with("/break"));
    let _place = match under_way.place(&request, may_wait) {
        Ok(place) => place,
        Err(detail) => return busy(detail),
    };
    let (request, body) = match may_wait {
        true => Seen::through(request),
        false => (request, None),
    };
    let began = Instant::now();
    let response = tokio::select! {
        response = next.run(request) => {
            if may_wait {
                under_way.record(&response);
            }
            response
        }
        // A request that is dropped leaves the queue, and the next one gets what was granted to it.
        () = under_way.over(body.as_ref()) => {
            under_way.sent_away.store(true, Relaxed);
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

/// What the issuer has read of a body.
#[derive(Clone, Default)]
struct Seen(Arc<Mutex<Vec<u8>>>);

struct Watched {
    body: Body,
    seen: Seen,
}

impl Seen {
    fn through(request: Request) -> (Request, Option<Self>) {
        let seen = Self::default();
        let watched = seen.clone();
        let request = request.map(|body| {
            Body::new(Watched {
                body,
                seen: watched,
            })
        });
        (request, Some(seen))
    }

    /// Whether the request waits in the queue if the lease is held. Without a time to wait it only waits for the store.
    fn asks_to_wait(&self) -> bool {
        let seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let body = serde_json::from_slice::<serde_json::Value>(&seen);
        body.is_ok_and(|body| body["wait_ms"].as_f64().is_some_and(|wait| wait > 0.0))
    }
}

impl http_body::Body for Watched {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        if let Some(Ok(frame)) = &frame
            && let Some(data) = frame.data_ref()
        {
            let mut seen = self.seen.0.lock().unwrap_or_else(PoisonError::into_inner);
            let room = BODY_LIMIT_BYTES.saturating_sub(seen.len()).min(data.len());
            seen.extend_from_slice(&data[..room]);
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

fn busy(detail: &str) -> Response {
    super::metrics::refused(ProblemType::ServerBusy.name());
    Problem::new(ProblemType::ServerBusy)
        .detail(detail)
        .retry_after(Duration::from_secs(1))
        .into_response()
}
