//! The requests of this process that wait, and how they learn that asking may help.
//!
//! 1. Requests for one resource stand in the order in which they came. A request takes the position of an
//!    earlier one under the same lease id, which is displaced.
//! 2. A request that the store calls asks it. The others sleep.
//! 3. When the time is over for which the resource is blocked, the first one asks, and nobody else.
//!    When it goes, the next one is the first, and learns of that.

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

/// The longest time that passes before the first one asks, whatever the store has answered. It bounds how late the
/// loss of a queue is noticed that nobody was told of.
const LONGEST_SLEEP: Duration = Duration::from_secs(10);
/// The shortest one. A key that never ends is none of the store's, and to look all the time does not help.
const SHORTEST_SLEEP: Duration = Duration::from_millis(10);

/// All requests that wait.
pub(in crate::lease) struct Queue {
    lines: Mutex<Lines>,
    /// A permit for each request that may wait, whatever for.
    permits: Arc<Semaphore>,
    /// A permit for each position that is kept for a client that may come back: a tenth of those that may wait, so
    /// that clients who go away keep out nobody who waits.
    kept: Arc<Semaphore>,
}

#[derive(Default)]
struct Lines {
    by_resource: HashMap<Resource, Line>,
    by_ticket: HashMap<i64, Arc<Waiter>>,
    joined: u64,
}

/// The requests for one resource.
struct Line {
    waiters: BTreeMap<u64, Arc<Waiter>>,
    positions: HashMap<LeaseDigest, u64>,
    /// When the first one asks.
    look_at: Instant,
}

struct Waiter {
    resource: Resource,
    ticket: i64,
    notify: Notify,
    told: AtomicU8,
    /// Whether its caller has gone.
    is_abandoned: AtomicBool,
}

const ASK: u8 = 1;
const DISPLACED: u8 = 2;
const DISMISSED: u8 = 4;

impl Waiter {
    fn tell(&self, what: u8) {
        self.told.fetch_or(what, SeqCst);
        self.notify.notify_one();
    }
}

/// Why a request stops to wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// The store has called it, or all.
    Called,
    /// The time is over for which the resource was blocked, or that of the request.
    Over,
    /// Another request under its lease id has its position.
    Displaced,
    /// The lease id was released: nobody comes back for it.
    Dismissed,
}

/// A position among the requests of this process, until it is dropped.
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

    /// Joins the requests that wait; `None`, and nothing changes, if too many do.
    pub(super) fn join(self: &Arc<Self>, resource: &Resource, ask: &Ask) -> Option<Seat> {
        let permit = Arc::clone(&self.permits).try_acquire_owned().ok()?;
        let waiter = Arc::new(Waiter {
            resource: resource.clone(),
            ticket: ask.ticket,
            notify: Notify::default(),
            told: AtomicU8::new(0),
            is_abandoned: AtomicBool::new(false),
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

    /// Keeps a position for a client that has gone, until the permit is dropped; `None` if too many are kept.
    pub(super) fn keep(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.kept).try_acquire_owned().ok()
    }

    /// Whether a request waits for this resource.
    pub(super) fn has_line(&self, resource: &Resource) -> bool {
        self.lines().by_resource.contains_key(resource)
    }

    /// Has a request ask that the store calls.
    pub(super) fn call(&self, ticket: i64) {
        if let Some(waiter) = self.lines().by_ticket.get(&ticket) {
            waiter.tell(ASK);
        }
    }

    /// Has the first request ask when this time is over, beside one that the store has told this.
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

    /// Has the first request for a resource ask when this time is over.
    pub(super) fn blocked(&self, resource: &Resource, left: Duration) {
        if let Some(line) = self.lines().by_resource.get_mut(resource) {
            line.look_in(left);
        }
    }

    /// Has all requests for a resource ask.
    pub(super) fn call_line(&self, resource: &Resource) {
        if let Some(line) = self.lines().by_resource.get(resource) {
            line.waiters.values().for_each(|waiter| waiter.tell(ASK));
        }
    }

    /// Has all requests ask.
    pub(super) fn call_all(&self) {
        let lines = self.lines();
        lines.by_ticket.values().for_each(|waiter| waiter.tell(ASK));
    }

    /// Ends the wait under a lease id whose client has gone, and does not come back. Returns its ticket.
    pub(super) fn dismiss(&self, resource: &Resource, lease: &LeaseDigest) -> Option<i64> {
        let lines = self.lines();
        let line = lines.by_resource.get(resource)?;
        let waiter = line.waiters.get(line.positions.get(lease)?)?;
        if !waiter.is_abandoned.load(SeqCst) {
            return None;
        }
        waiter.tell(DISMISSED);
        Some(waiter.ticket)
    }

    /// The resources that requests wait for.
    pub(super) fn resources(&self) -> Vec<Resource> {
        self.lines().by_resource.keys().cloned().collect()
    }

    fn lines(&self) -> MutexGuard<'_, Lines> {
        // Nothing panics while the lock is held.
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Line {
    fn look_in(&mut self, left: Duration) {
        self.look_at = Instant::now() + left.clamp(SHORTEST_SLEEP, LONGEST_SLEEP);
        self.wake_first();
    }

    /// Has the first one learn that it is that, or when to look.
    fn wake_first(&self) {
        if let Some(first) = self.waiters.values().next() {
            first.notify.notify_one();
        }
    }
}

impl Seat {
    /// Waits until asking may help, at most until then. `poll_at` is when the request asks by itself.
    pub(super) async fn turn(&self, deadline: Instant, poll_at: Option<Instant>) -> Turn {
        let mut look_at = None;
        loop {
            let told = self.waiter.told.swap(0, SeqCst);
            if told & DISPLACED != 0 {
                return Turn::Displaced;
            }
            if told & DISMISSED != 0 {
                return Turn::Dismissed;
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

    /// Notes for how long the resource is blocked. What the store has told meanwhile is newer, and to look too early
    /// does no harm.
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

    /// Has the first one look in so long, whatever was to be before.
    pub(super) fn look_in(&self, left: Duration) {
        self.queue.blocked(&self.resource, left);
    }

    /// Notes that the caller has gone.
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

    /// Whether it asks by now, and why.
    fn turn(seat: &Seat) -> Option<Turn> {
        seat.turn(Instant::now() + LONG, None).now_or_never()
    }

    #[tokio::test(start_paused = true)]
    async fn only_the_first_looks_and_the_next_one_when_it_has_gone() {
        let queue = Queue::new(9);
        let (first, second) = (join(&queue, "a", 1), join(&queue, "b", 2));
        queue.blocked(&sku(), SHORTEST_SLEEP);
        tokio::time::advance(SHORTEST_SLEEP).await;
        assert_eq!((turn(&first), turn(&second)), (Some(Turn::Over), None));
        drop(first);
        assert_eq!(turn(&second), Some(Turn::Over));
        drop(second);
        assert!(!queue.has_line(&sku()), "an empty line is kept");
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_has_the_position_of_the_one_that_it_displaces() {
        let queue = Queue::new(9);
        let (first, second) = (join(&queue, "a", 1), join(&queue, "b", 2));
        let again = join(&queue, "a", 3);
        assert_eq!(turn(&first), Some(Turn::Displaced));
        drop(first);
        queue.call(1);
        queue.call(3);
        assert_eq!((turn(&again), turn(&second)), (Some(Turn::Called), None));
        queue.blocked(&sku(), Duration::ZERO);
        tokio::time::advance(SHORTEST_SLEEP).await;
        assert_eq!((turn(&again), turn(&second)), (Some(Turn::Over), None));
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

    #[test]
    fn no_more_requests_wait_than_may() {
        let queue = Queue::new(1);
        let seat = join(&queue, "a", 1);
        let ask = Ask {
            lease: LeaseDigest::of("b"),
            ticket: 2,
            ttl: LONG,
            lock_delay: Duration::ZERO,
            owner: None,
        };
        assert!(queue.join(&sku(), &ask).is_none());
        drop(seat);
        assert!(queue.join(&sku(), &ask).is_some());
    }
}
