//! Requests for leases that are under way: how many there may be, and how they end when the server stops.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use axum::{
    extract::{MatchedPath, Request, State},
    middleware::Next,
    response::{IntoResponse, Response},
};
use http::Method;
use tokio::{runtime::Handle, sync::Semaphore, time::sleep};
use tower_fence::problem::{Problem, ProblemType};

use super::{args::LimitArgs, stop::Stop};

/// How long a request for a lease may take once the server stops: who still waits then waits in line.
const LINE_GRACE: Duration = Duration::from_secs(1);

/// How long nothing has to happen in the background.
const CALM: Duration = Duration::from_millis(500);

/// The limit of requests, and the signal to stop.
#[derive(Clone)]
pub struct UnderWay {
    free: Arc<Semaphore>,
    stop: Stop,
    drain: Duration,
    sent_away: Arc<AtomicBool>,
}

impl UnderWay {
    pub fn new(limits: &LimitArgs, stop: Stop) -> Self {
        Self {
            free: Arc::new(Semaphore::new(limits.max_requests as usize)),
            stop,
            drain: limits.drain,
            sent_away: Arc::default(),
        }
    }

    /// Waits until those who were sent away have left the line, and what was granted to them meanwhile is given back:
    /// tasks in the background do that, so until none of them has ended for a while. What is not done then ends by its
    /// time.
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

    /// Waits until a request has to end because the server stops.
    async fn over(&self, waits_in_line: bool) {
        self.stop.begun().await;
        sleep(if waits_in_line {
            LINE_GRACE.min(self.drain)
        } else {
            self.drain
        })
        .await;
    }
}

/// Answers a request, or says that the server takes none.
pub async fn limit(State(under_way): State<UnderWay>, request: Request, next: Next) -> Response {
    let Ok(_permit) = under_way.free.try_acquire() else {
        return busy("as many requests are under way as the server takes");
    };
    let method = request.method().clone();
    let route = request.extensions().get::<MatchedPath>().cloned();
    let waits_in_line = method == Method::POST
        && route
            .as_ref()
            .is_some_and(|route| !route.as_str().ends_with("/break"));
    let began = Instant::now();
    let response = tokio::select! {
        response = next.run(request) => response,
        // A request that is dropped leaves the line, and the next one gets what was granted to it.
        () = under_way.over(waits_in_line) => {
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

fn busy(detail: &str) -> Response {
    super::metrics::refused(ProblemType::ServerBusy.name());
    Problem::new(ProblemType::ServerBusy)
        .detail(detail)
        .retry_after(Duration::from_secs(1))
        .into_response()
}
