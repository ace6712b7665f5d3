//! Waiting requests of this process.
//!
//! 1. The requests for one resource are ordered by arrival. If an earlier request waits under the
//!    same lease id, a new request displaces the earlier one and takes its position.
//! 2. A request retries when the store notifies it. All other requests sleep.
//! 3. When the resource is no longer blocked, only the first request retries. When that request
//!    leaves, the next one becomes the first and is notified.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU8, Ordering::SeqCst},
    },
    time::Duration,
};

use tokio::{
    sync::{Notify, OwnedSemaphorePermit, Semaphore},
    time::{Instant, sleep_until},
};

use crate::lease::backend::Ask;
use crate::{announce::LeaseDigest, token::Resource};

/// Maximum time until the first request retries, regardless of the store's replies. If the store
/// has lost a queue unnoticed, this maximum limits the delay of the requests in it.
pub(in crate::lease) const LONGEST_SLEEP: Duration = Duration::from_secs(10);
/// Minimum time until the first request retries. This minimum prevents a busy loop if a store
/// always reports a remaining time of zero, for example for a key that never expires.
const SHORTEST_SLEEP: Duration = Duration::from_millis(10);

/// All waiting requests.
pub(in crate::lease) struct Queue {
    lines: Mutex<Lines>,
    /// One permit per waiting request, for all resources together.
    permits: Arc<Semaphore>,
    /// One permit per position that is kept for a client that may retry. Their number is a tenth of
    /// the number of `permits`, so that clients that never retry cannot use up all `permits`.
    kept: Arc<Semaphore>,
}

#[derive(Default)]
struct Lines {
    by_resource: HashMap<Resource, Line>,
    by_ticket: HashMap<i64, Arc<Waiter>>,
    joined: u64,
}

/// Waiting requests for one resource.
struct Line {
    waiters: BTreeMap<u64, Arc<Waiter>>,
    positions: HashMap<LeaseDigest, u64>,
    /// When the first request will retry.
    look_at: Instant,
}

struct Waiter {
    resource: Resource,
    ticket: i64,
    notify: Notify,
    told: AtomicU8,
    /// Whether the caller has dropped the request.
    is_abandoned: AtomicBool,
    /// Whether the client has renewed the lease after it dropped the request.
    is_renewed: AtomicBool,
}

const ASK: u8 = 1;
const DISPLACED: u8 = 2;
const DISMISSED: u8 = 4;
const REJOIN: u8 = 8;

impl Waiter {
    fn tell(&self, what: u8) {
        self.told.fetch_or(what, SeqCst);
        self.notify.notify_one();
    }
}

/// Reason why a request stops waiting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// The store has notified this request, or all requests.
    Called,
    /// A late step of a displaced request may have taken the position in the store, so this request
    /// must join the queue again.
    Rejoin,
    /// The resource is no longer blocked, the request must poll, or its wait has timed out.
    Over,
    /// Another request under the same lease id has taken the position of this request.
    Displaced,
    /// The lease id was released, so the client will not retry.
    Dismissed,
}

/// Position among the requests of this process. Dropping it removes the request from the queue.
pub(super) struct Seat {
    queue: Arc<Queue>,
    resource: Resource,
    lease: LeaseDigest,
    position: u64,
    waiter: Arc<Waiter>,
    _permit: OwnedSemaphorePermit,
}

impl Queue {
    pub(super) fn new(max_waiters: usize) -> Arc<Self> {
        let permits = max_waiters.min(Semaphore::MAX_PERMITS);
        Arc::new(Self {
            lines: Mutex::default(),
            permits: Arc::new(Semaphore::new(permits)),
            kept: Arc::new(Semaphore::new(permits.div_ceil(10))),
        })
    }

    /// Adds a request. Returns `None`, and changes nothing, if too many requests are waiting.
    pub(super) fn join(self: &Arc<Self>, resource: &Resource, ask: &Ask) -> Option<Seat> {
        let permit = Arc::clone(&self.permits).try_acquire_owned().ok()?;
        let waiter = Arc::new(Waiter {
            resource: resource.clone(),
            ticket: ask.ticket,
            notify: Notify::default(),
            told: AtomicU8::new(0),
            is_abandoned: AtomicBool::new(false),
            is_renewed: AtomicBool::new(false),
        });
        let mut lines = self.lines();
        lines.joined += 1;
        let joined = lines.joined;
        let line = lines
            .by_resource
            .entry(resource.clone())
            .or_insert_with(|| Line {
                waiters: BTreeMap::new(),
                positions: HashMap::new(),
                look_at: Instant::now() + LONGEST_SLEEP,
            });
        let before = line.positions.get(&ask.lease).copied();
        let position = before.unwrap_or(joined);
        line.positions.insert(ask.lease.clone(), position);
        let displaced = line.waiters.insert(position, Arc::clone(&waiter));
        lines.by_ticket.insert(ask.ticket, Arc::clone(&waiter));
        if let Some(displaced) = displaced {
            lines.by_ticket.remove(&displaced.ticket);
            displaced.tell(DISPLACED);
        }
        Some(Seat {
            queue: Arc::clone(self),
            resource: resource.clone(),
            lease: ask.lease.clone(),
            position,
            waiter,
            _permit: permit,
        })
    }

    /// Keeps a position without a request until the permit is dropped. Returns `None` if too many
    /// positions are kept.
    pub(super) fn keep(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.kept).try_acquire_owned().ok()
    }

    /// Returns whether a request waits for this resource.
    pub(super) fn has_line(&self, resource: &Resource) -> bool {
        self.lines().by_resource.contains_key(resource)
    }

    /// Makes the request with this ticket retry.
    pub(super) fn call(&self, ticket: i64) {
        if let Some(waiter) = self.lines().by_ticket.get(&ticket) {
            waiter.tell(ASK);
        }
    }

    /// Makes the request that waits under this lease id join the store's queue again.
    pub(super) fn rejoin(&self, resource: &Resource, lease: &LeaseDigest) {
        if let Some(line) = self.lines().by_resource.get(resource)
            && let Some(position) = line.positions.get(lease)
            && let Some(waiter) = line.waiters.get(position)
        {
            waiter.tell(REJOIN);
        }
    }

    /// Makes the first request for a resource retry after `left`. `ticket` is the ticket of any
    /// request for that resource.
    pub(super) fn call_in(&self, ticket: i64, left: Duration) {
        let mut lines = self.lines();
        let Lines {
            by_resource,
            by_ticket,
            ..
        } = &mut *lines;
        if let Some(waiter) = by_ticket.get(&ticket)
            && let Some(line) = by_resource.get_mut(&waiter.resource)
        {
            line.look_in(left);
        }
    }

    /// Makes the first request for a resource retry after this time.
    pub(super) fn blocked(&self, resource: &Resource, left: Duration) {
        if let Some(line) = self.lines().by_resource.get_mut(resource) {
            line.look_in(left);
        }
    }

    /// Makes all requests for a resource retry.
    pub(super) fn call_line(&self, resource: &Resource) {
        if let Some(line) = self.lines().by_resource.get(resource) {
            line.waiters.values().for_each(|waiter| waiter.tell(ASK));
        }
    }

    /// Makes all requests retry.
    pub(super) fn call_all(&self) {
        let lines = self.lines();
        lines.by_ticket.values().for_each(|waiter| waiter.tell(ASK));
    }

    /// If the caller has dropped the request under this lease id, ends its wait and returns its
    /// ticket.
    pub(super) fn dismiss(&self, resource: &Resource, lease: &LeaseDigest) -> Option<i64> {
        let waiter = self.abandoned(resource, lease)?;
        waiter.tell(DISMISSED);
        Some(waiter.ticket)
    }

    /// Records that a client has renewed the lease of its dropped request. The lease is then kept.
    pub(super) fn renewed(&self, resource: &Resource, lease: &LeaseDigest) {
        if let Some(waiter) = self.abandoned(resource, lease) {
            waiter.is_renewed.store(true, SeqCst);
            waiter.notify.notify_one();
        }
    }

    /// Returns the request under this lease id, if the caller has dropped it.
    fn abandoned(&self, resource: &Resource, lease: &LeaseDigest) -> Option<Arc<Waiter>> {
        let lines = self.lines();
        let line = lines.by_resource.get(resource)?;
        let waiter = line.waiters.get(line.positions.get(lease)?)?;
        let is_abandoned = waiter.is_abandoned.load(SeqCst);
        is_abandoned.then(|| Arc::clone(waiter))
    }

    /// Returns the resources that requests wait for.
    pub(super) fn resources(&self) -> Vec<Resource> {
        self.lines().by_resource.keys().cloned().collect()
    }

    fn lines(&self) -> MutexGuard<'_, Lines> {
        // No code panics while the lock is held.
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Line {
    fn look_in(&mut self, left: Duration) {
        self.look_at = Instant::now() + left.clamp(SHORTEST_SLEEP, LONGEST_SLEEP);
        self.wake_first();
    }

    /// Notifies the first request that it is now the first, or that its time to retry has changed.
    fn wake_first(&self) {
        if let Some(first) = self.waiters.values().next() {
            first.notify.notify_one();
        }
    }
}

impl Seat {
    /// Waits until a retry may help, at most until `deadline`. At `poll_at`, the request retries
    /// without a notification.
    pub(super) async fn turn(&self, deadline: Instant, poll_at: Option<Instant>) -> Turn {
        let mut look_at = None;
        loop {
            let told = self.waiter.told.fetch_and(!(ASK | REJOIN), SeqCst);
            if told & DISPLACED != 0 {
                return Turn::Displaced;
            }
            if told & DISMISSED != 0 {
                return Turn::Dismissed;
            }
            if told & REJOIN != 0 {
                return Turn::Rejoin;
            }
            if told & ASK != 0 {
                return Turn::Called;
            }
            if look_at.is_some_and(|look_at| look_at <= Instant::now()) {
                return Turn::Over;
            }
            let next = self.look_at(deadline);
            let next = poll_at.map_or(next, |poll_at| poll_at.min(next));
            look_at = Some(next);
            tokio::select! {
                () = self.waiter.notify.notified() => look_at = None,
                () = sleep_until(next) => {}
            }
        }
    }

    /// Returns whether another request has taken this position.
    pub(super) fn is_displaced(&self) -> bool {
        self.waiter.told.load(SeqCst) & DISPLACED != 0
    }

    /// Waits until the client renews or releases the lease. Returns whether the client has renewed
    /// the lease.
    pub(super) async fn claimed(&self) -> bool {
        while self.waiter.told.load(SeqCst) & DISMISSED == 0 {
            if self.waiter.is_renewed.load(SeqCst) {
                return true;
            }
            self.waiter.notify.notified().await;
        }
        false
    }

    /// Records how long the resource stays blocked, unless an earlier time is set that has not
    /// passed. That time may come from a newer notification, and a retry that is too early does no
    /// harm.
    pub(super) fn blocked(&self, left: Duration) {
        let mut lines = self.queue.lines();
        if let Some(line) = lines.by_resource.get_mut(&self.resource) {
            let end = Instant::now() + left.clamp(SHORTEST_SLEEP, LONGEST_SLEEP);
            if end < line.look_at || line.look_at <= Instant::now() {
                line.look_at = end;
                line.wake_first();
            }
        }
    }

    /// Makes the first request retry after this time, even if another time was set before.
    pub(super) fn look_in(&self, left: Duration) {
        self.queue.blocked(&self.resource, left);
    }

    /// Records that the caller has dropped the request.
    pub(super) fn is_left(&self) {
        self.waiter.is_abandoned.store(true, SeqCst);
    }

    fn look_at(&self, deadline: Instant) -> Instant {
        let lines = self.queue.lines();
        let line = lines.by_resource.get(&self.resource);
        let first = line.and_then(|line| Some((line.waiters.keys().next()?, line.look_at)));
        match first {
            Some((position, look_at)) if *position == self.position => look_at.min(deadline),
            _ => deadline,
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut lines = self.queue.lines();
        let lines = &mut *lines;
        if let Some(line) = lines.by_resource.get_mut(&self.resource)
            && let Some(waiter) = line.waiters.get(&self.position)
            && Arc::ptr_eq(waiter, &self.waiter)
        {
            line.waiters.remove(&self.position);
            line.positions.remove(&self.lease);
            lines.by_ticket.remove(&self.waiter.ticket);
            line.wake_first();
            if line.waiters.is_empty() {
                lines.by_resource.remove(&self.resource);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    const LONG: Duration = Duration::from_secs(600);

    fn join(queue: &Arc<Queue>, lease: &str, ticket: i64) -> Seat {
        let ask = Ask {
            lease: LeaseDigest::of(lease),
            ticket,
            ttl: LONG,
            lock_delay: Duration::ZERO,
            owner: None,
        };
        queue.join(&sku(), &ask).unwrap()
    }

    fn sku() -> Resource {
        Resource::new("sku-1").unwrap()
    }

    /// Returns the reason why the request would retry now, or `None` if it would not.
    fn turn(seat: &Seat) -> Option<Turn> {
        seat.turn(Instant::now() + LONG, None).now_or_never()
    }

    #[tokio::test(start_paused = true)]
    async fn second_waiter_has_its_turn_after_the_first_leaves() {
        let queue = Queue::new(9);
        let (first, second) = (join(&queue, "a", 1), join(&queue, "b", 2));
        queue.blocked(&sku(), SHORTEST_SLEEP);
        tokio::time::advance(SHORTEST_SLEEP).await;
        assert_eq!((turn(&first), turn(&second)), (Some(Turn::Over), None));
        drop(first);
        assert_eq!(turn(&second), Some(Turn::Over));
        drop(second);
        assert!(!queue.has_line(&sku()), "an empty queue is kept");
    }

    #[tokio::test]
    async fn only_a_position_without_a_client_is_dismissed() {
        let queue = Queue::new(9);
        let seat = join(&queue, "a", 1);
        queue.dismiss(&sku(), &LeaseDigest::of("a"));
        assert_eq!(turn(&seat), None);
        seat.is_left();
        queue.dismiss(&sku(), &LeaseDigest::of("a"));
        assert_eq!(turn(&seat), Some(Turn::Dismissed));
    }
}
