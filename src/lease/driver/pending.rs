//! Pending request for a lease. It sends a step to the store, waits for its turn, and retries.
//!
//! 1. The first step does not wait, because most leases are free. If other requests of this process
//!    are already waiting for the resource, the new request first joins the queue behind them.
//! 2. A step that was sent is always completed, even if the request is dropped. Then the traces of
//!    the request are removed: its position in the queue, and a lease that was not returned.
//! 3. A client that has chosen its lease id may retry. If its request was dropped, has timed out or
//!    was displaced, the position is kept for [`POSITION_KEPT`], and so is a lease that is granted
//!    in the meantime. After that time, the request removes its position, unless the retry has
//!    taken it over. The number of kept positions is limited.

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::OwnedSemaphorePermit,
    time::{Instant, sleep, sleep_until, timeout_at},
};

use super::{
    Driver,
    decision::{Next, Stage, decide},
    lease,
    queue::{Position, Turn},
};
use crate::{
    announce::LeaseDigest,
    chain::Chain,
    events,
    lease::{
        Acquire, Backend, Lease, LeaseError, LeaseId, Owner, TooMuchChange,
        backend::{Ask, End, Reply, Step, Waits},
        release_guard::Background,
    },
    time::{after, at_least_1_ms, of_ms, whole_ms},
    token::Resource,
};

/// A request that is not at the stage `New` has a position.
const HAS_POSITION: &str = "a waiting request has a position";
/// Time for which the position of a client that may retry is kept.
const POSITION_KEPT: Duration = Duration::from_secs(3);
/// Maximum time for which a conflicting step is repeated after the end of the wait.
const AFTER_WAIT_BUSY_TIMEOUT: Duration = Duration::from_secs(2);
/// Shortest pause between two attempts. Each further pause is twice as long as the previous one, up
/// to [`LONGEST_PAUSE`].
const SHORTEST_PAUSE: Duration = Duration::from_millis(2);
/// Longest pause between two attempts.
const LONGEST_PAUSE: Duration = Duration::from_millis(250);
/// Pause of a waiting request before it retries while the store is unavailable.
const PAUSE_AFTER_FAILURE: Duration = Duration::from_secs(1);

type Call = futures_util::future::BoxFuture<'static, Result<Reply, LeaseError>>;

/// Acquires a lease. After a failure, or if the caller drops the future, a background task removes
/// the traces of the request.
pub(super) async fn acquire<B: Backend>(
    driver: &Driver<B>,
    resource: &Resource,
    request: Acquire,
) -> Result<Lease, LeaseError> {
    let deadline = after(request.wait);
    let mut guard = Guard {
        pending: None,
        background: Background::here(),
    };
    let pending = Pending::new(driver, resource, request);
    guard.pending.insert(pending).run(deadline).await
}

/// Guard that is dropped with the future of a request, and then undoes the request.
struct Guard<B: Backend> {
    pending: Option<Pending<B>>,
    background: Background,
}

impl<B: Backend> Drop for Guard<B> {
    fn drop(&mut self) {
        let Some(mut pending) = self.pending.take().filter(|one| one.may_have_traces) else {
            return;
        };
        if let Some(position) = &pending.position {
            position.mark_left();
            if pending.chosen_id {
                pending.kept = pending.driver.turns.keep();
            }
        }
        self.background.spawn(pending.undo());
    }
}

struct Pending<B> {
    driver: Driver<B>,
    // The request.
    resource: Resource,
    id: LeaseId,
    chosen_id: bool,
    ask: Arc<Ask>,
    // Its steps, and their effects in the store.
    /// A step that was sent and has no reply yet.
    call: Option<Call>,
    /// Whether the store may hold a lease or a position for the request.
    may_have_traces: bool,
    /// How long the resource was blocked according to the last reply, and the time of that reply.
    blocked: (Duration, Instant),
    // Its wait in this process.
    stage: Stage,
    /// The position in this process, unless the request is new.
    position: Option<Position>,
    /// The permit that keeps the position for a caller that may retry.
    kept: Option<OwnedSemaphorePermit>,
}

impl<B: Backend> Pending<B> {
    fn new(driver: &Driver<B>, resource: &Resource, request: Acquire) -> Self {
        let ask = Ask {
            lease: LeaseDigest::of(request.lease_id.expose()),
            ticket: rand::random_range(1..=i64::MAX),
            ttl: of_ms(at_least_1_ms(request.ttl)),
            lock_delay: of_ms(whole_ms(request.lock_delay)),
            owner: request.owner,
        };
        Self {
            driver: driver.clone(),
            resource: resource.clone(),
            id: request.lease_id,
            chosen_id: request.chosen_id,
            ask: Arc::new(ask),
            call: None,
            may_have_traces: false,
            blocked: (Duration::ZERO, Instant::now()),
            stage: Stage::New,
            position: None,
            kept: None,
        }
    }

    /// Retries until a lease is granted or the wait is over.
    async fn run(&mut self, deadline: Instant) -> Result<Lease, LeaseError> {
        let busy_until = deadline + AFTER_WAIT_BUSY_TIMEOUT;
        let mut pause = SHORTEST_PAUSE;
        let turns = self.driver.turns.clone();
        if self.position.is_none() && Instant::now() < deadline && turns.has_waiters(&self.resource)
        {
            self.join()?;
        }
        loop {
            let was_late = Instant::now() >= deadline;
            let reply = self.step(deadline).await;
            // After the wait, another step could be as slow, so it is only sent after a conflict,
            // or to leave the queue. A request leaves the queue before its caller is answered,
            // unless the client may retry: the position is then kept.
            let is_queued = self.position.is_some() && matches!(reply, Ok(Reply::Queued { .. }));
            let must_leave = is_queued && !self.chosen_id && !was_late;
            let is_late = Instant::now() >= deadline && !must_leave;
            if let Ok(Reply::Held { left } | Reply::Queued { left, .. }) = reply {
                self.blocked = (left, Instant::now());
            }
            let next = decide(&reply, is_late, self.stage, self.chosen_id);
            let poll_in = match next {
                Next::Repeat if Instant::now() < busy_until => {
                    sleep_until(after(jitter(pause)).min(busy_until)).await;
                    pause = (2 * pause).min(LONGEST_PAUSE);
                    continue;
                }
                Next::Repeat => return self.outcome(reply),
                Next::Return { may_have_traces } => {
                    self.may_have_traces &= may_have_traces;
                    return self.outcome(reply);
                }
                Next::Join => {
                    self.may_have_traces = false;
                    self.join()?;
                    continue;
                }
                Next::Queue { was_lost } => {
                    self.stage = Stage::Queued;
                    if was_lost {
                        // All requests of this process for the resource must join again.
                        turns.call_all_for(&self.resource);
                    }
                    pause = SHORTEST_PAUSE;
                    self.position().retry_within(self.blocked.0);
                    None
                }
                Next::PollFirst => {
                    self.stage = Stage::Waiting;
                    turns.retry_in(&self.resource, jitter(pause));
                    pause = (2 * pause).min(LONGEST_PAUSE);
                    None
                }
                Next::PollEach => {
                    self.position().retry_within(self.blocked.0);
                    pause = (2 * pause).min(LONGEST_PAUSE);
                    Some(jitter(LONGEST_PAUSE))
                }
                Next::PollLater => {
                    if let (Err(error), Some(suppressed)) =
                        (&reply, self.driver.listener.failures.next())
                    {
                        tracing::warn!(
                            error = Chain(error).to_string(),
                            suppressed,
                            "the lease store is unavailable; waiting requests retry"
                        );
                    }
                    let pause = jitter(PAUSE_AFTER_FAILURE);
                    self.position().retry_within(pause);
                    Some(pause)
                }
            };
            match self.position().turn(deadline, poll_in.map(after)).await {
                Turn::Retry => {}
                Turn::Rejoin => {
                    if self.stage == Stage::Queued {
                        self.stage = Stage::Waiting;
                    }
                }
                Turn::Displaced => return Err(self.displaced()),
                Turn::Dismissed => return Err(LeaseError::lost(&self.resource)),
            }
        }
    }

    /// Returns the lease, or the error that the last reply means for the caller.
    fn outcome(&self, reply: Result<Reply, LeaseError>) -> Result<Lease, LeaseError> {
        match reply? {
            Reply::Granted(granted) => Ok(lease(&self.resource, &self.id, granted)),
            Reply::Exhausted(max_token) => Err(LeaseError::exhausted(&self.resource, max_token)),
            Reply::Held { left } | Reply::Queued { left, .. } => {
                Err(LeaseError::held(&self.resource, left))
            }
            Reply::Displaced => Err(self.displaced()),
            Reply::Again => Err(LeaseError::unavailable(TooMuchChange)),
            other => Err(unexpected(&other)),
        }
    }

    /// Sends the next step, unless a step is in progress, and returns the reply.
    async fn step(&mut self, deadline: Instant) -> Result<Reply, LeaseError> {
        if self.call.is_none() {
            let waits = self.waits(deadline).await?;
            if self.is_displaced() {
                // A further step would take the position back from the other request.
                return Err(self.displaced());
            }
            let (store, resource) = (Arc::clone(&self.driver.store), self.resource.clone());
            let ask = Arc::clone(&self.ask);
            self.may_have_traces = true;
            self.call = Some(Box::pin(async move {
                let step = Step::Acquire(&ask, &waits);
                store.take_token(&resource, step).await
            }));
        }
        self.answered().await.unwrap_or(Ok(Reply::Again))
    }

    /// Waits for the reply to the step in progress, if there is one.
    async fn answered(&mut self) -> Option<Result<Reply, LeaseError>> {
        let reply = self.call.as_mut()?.await;
        self.call = None;
        if matches!(reply, Ok(Reply::Queued { .. }) | Err(_)) && self.is_displaced() {
            // This step may have arrived after a step of the request that displaced this one.
            self.driver.turns.rejoin(&self.resource, &self.ask.lease);
        }
        Some(reply)
    }

    /// Returns how the next step waits. If the step waits in the store's queue, first makes sure
    /// that this process is notified of the request's turn.
    async fn waits(&mut self, deadline: Instant) -> Result<Waits, LeaseError> {
        if self.stage == Stage::New {
            return Ok(Waits::No);
        }
        // After the client has disconnected, a retry of the client may have the position, although
        // this request has seen only failures. A request that was queued before does not displace
        // it.
        let queued = self.kept.is_some() || self.stage == Stage::Queued;
        let left = deadline.saturating_duration_since(Instant::now());
        let is_late = left.is_zero();
        // If the client may retry, the position is kept for that retry.
        if is_late && !(self.chosen_id && queued) {
            return Ok(Waits::Leaves);
        }
        match self.driver.listen(&self.resource).await {
            Ok(listener) => {
                if self.stage == Stage::Unnotified {
                    self.stage = Stage::Waiting;
                }
                Ok(Waits::Yes {
                    listener,
                    left: left.saturating_add(POSITION_KEPT),
                    queued,
                })
            }
            // Without notifications, the request may time out before its first poll. It would then
            // report a held lease instead of this error.
            Err(error @ LeaseError::Misconfigured(_))
                if after(LONGEST_PAUSE) >= deadline
                    && !is_late
                    && self.stage != Stage::Unnotified =>
            {
                Err(error)
            }
            // Without notifications, the request would miss its turn, so it does not wait in the
            // store's queue.
            Err(_) => {
                self.stage = Stage::Unnotified;
                Ok(Waits::Leaves)
            }
        }
    }

    /// Joins the waiting requests of this process.
    fn join(&mut self) -> Result<(), LeaseError> {
        let position = self.driver.turns.join(&self.resource, &self.ask);
        self.position = Some(position.ok_or_else(|| LeaseError::TooManyWaiters {
            resource: self.resource.clone(),
        })?);
        self.stage = Stage::Waiting;
        let owner = self.ask.owner.as_ref().map(Owner::as_str);
        events::waiting(&self.resource, owner);
        Ok(())
    }

    fn position(&self) -> &Position {
        self.position.as_ref().expect(HAS_POSITION)
    }

    /// Returns whether another request of this process has displaced this one. The other request
    /// takes over the position in the store, unless it ends first.
    fn is_displaced(&self) -> bool {
        self.position.as_ref().is_some_and(Position::is_displaced)
    }

    /// Returns the error for a request that another request has displaced.
    fn displaced(&self) -> LeaseError {
        let (left, since) = self.blocked;
        LeaseError::held(&self.resource, left.saturating_sub(since.elapsed()))
    }

    /// Removes the traces of the request, after its client has had time to retry.
    async fn undo(mut self) {
        if self.kept.is_some() && !self.is_displaced() && self.wait_for_client().await {
            return;
        }
        self.answered().await;
        let is_displaced = self.is_displaced();
        self.position = None;
        if is_displaced && self.kept.is_some() {
            // In this time, the other request takes over the position, unless it ends first.
            sleep(POSITION_KEPT).await;
        }
        let (store, resource) = (Arc::clone(&self.driver.store), self.resource.clone());
        let (lease, ticket) = (self.ask.lease.clone(), self.ask.ticket);
        drop(self);
        // If a trace cannot be removed, it expires.
        let _ = store.end(&resource, &End::Abandon { lease, ticket }).await;
    }

    /// Keeps the position, or the lease that is granted to it, while the client may retry. Returns
    /// whether nothing remains to be removed, because the store has no traces.
    async fn wait_for_client(&mut self) -> bool {
        let until = after(POSITION_KEPT);
        let lease = match self.run(until).await {
            Ok(lease) => lease,
            Err(error) => {
                return matches!(error, LeaseError::Held { .. }) && !self.may_have_traces;
            }
        };
        // Keep the lease until the client releases it, the lease expires, or the time for a retry
        // is over. Then the caller releases the lease, unless another request has used it or a
        // client has renewed it. If it has a lock delay, it is released before it expires.
        let kept = match self.ask.lock_delay.is_zero() {
            true => lease.ttl,
            false => lease.ttl / 2,
        };
        let until = until.min(after(kept));
        let _ = timeout_at(until, self.position().released()).await;
        false
    }
}

/// Returns a random pause of about this length, so that requests that were refused together do not
/// retry together.
fn jitter(pause: Duration) -> Duration {
    pause.mul_f64(rand::random_range(0.5..1.5))
}

/// Returns the error for a reply that does not match the step, which is a fault of the backend.
pub(super) fn unexpected(reply: &Reply) -> LeaseError {
    LeaseError::misconfigured(Unexpected(reply.clone()))
}

#[derive(Debug, thiserror::Error)]
#[error("unexpected reply from the lease store: {0:?}")]
struct Unexpected(Reply);
