//! Waiting requests of this process.
//!
//! 1. The requests for one resource are ordered by arrival. If an earlier request waits under the
//!    same lease id, a new request displaces the earlier one and takes its position.
//! 2. A request retries when the store notifies it. All other requests sleep.
//! 3. When the resource is no longer blocked, only the first request retries. When that request
//!    leaves, the next one becomes the first and is notified.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use derive_where::derive_where;
use tokio::{
    sync::{Notify, OwnedSemaphorePermit, Semaphore, watch},
    time::{Instant, sleep_until},
};

use super::listener::Listening;
use crate::{announce::LeaseDigest, lease::backend::Ask, token::Resource};

/// Maximum time until the first request retries, regardless of the store's replies. If the store
/// has lost a queue and no process has detected this, the maximum limits the delay of the requests.
pub(in crate::lease) const LONGEST_SLEEP: Duration = Duration::from_secs(10);
/// Minimum time until the first request retries. This minimum prevents a busy loop if a store
/// always reports a remaining time of zero, for example for a key that never expires.
const SHORTEST_SLEEP: Duration = Duration::from_millis(10);

/// Handle with which a backend passes notifications on to the waiting requests of this process.
#[derive(Clone)]
#[derive_where(Debug)]
#[derive_where(skip_inner)]
pub struct Turns(pub(super) Arc<Shared>);

/// All waiting requests of this process, and whether it receives notifications.
pub(super) struct Shared {
    queues: Mutex<Queues>,
    pub(super) max_waiters: usize,
    /// One permit per waiting request, for all resources together.
    permits: Arc<Semaphore>,
    /// One permit per position that is kept for a client that may retry. Their number is a tenth of
    /// the number of `permits`, so that clients that never retry cannot use up all `permits`.
    kept: Arc<Semaphore>,
    pub(super) listening: watch::Sender<Listening>,
    /// Notified when a request is about to wait.
    pub(super) wanted: Notify,
}

#[derive(Default)]
struct Queues {
    by_resource: HashMap<Resource, ResourceQueue>,
    by_ticket: HashMap<i64, Arc<Waiter>>,
    /// The number of requests that have joined. It is the order of the latest new position.
    joined: u64,
}

/// Waiting requests for one resource.
struct ResourceQueue {
    /// The requests by their order, so the first entry is the first request.
    waiters: BTreeMap<u64, Arc<Waiter>>,
    /// The order of the request that waits under each lease id.
    orders: HashMap<LeaseDigest, u64>,
    /// When the first request will retry.
    retry_at: Instant,
}

struct Waiter {
    resource: Resource,
    ticket: i64,
    notify: Notify,
    state: Mutex<State>,
}

/// State of a waiting request.
#[derive(Default)]
struct State {
    /// The strongest reason to stop waiting. The request clears a reason to retry when it reads it.
    turn: Option<Turn>,
    /// Whether the caller has dropped the request.
    has_left: bool,
    /// Whether, after that, the client has released the lease id in this process.
    is_released: bool,
}

/// Reason why a request stops waiting. Each reason is stronger than the previous ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Turn {
    /// The store has notified this request or all requests, or a timer has expired: the resource is
    /// no longer blocked, the request must poll, or its wait has timed out.
    Retry,
    /// A late step of a displaced request may have taken the position in the store, so this request
    /// must join the queue again.
    Rejoin,
    /// The caller has dropped the request. Either its lease id was released, so the client will not
    /// retry, or the store's queue no longer has the request.
    Dismissed,
    /// Another request under the same lease id has taken the position of this request.
    Displaced,
}

impl State {
    /// Returns the reason to stop waiting, if there is one.
    fn next(&mut self) -> Option<Turn> {
        let turn = self.turn;
        self.turn.take_if(|turn| *turn < Turn::Dismissed);
        turn
    }
}

impl Waiter {
    fn signal(&self, turn: Turn) {
        let mut state = self.state();
        state.turn = state.turn.max(Some(turn));
        drop(state);
        self.notify.notify_one();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No code panics while it holds the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Position among the requests of this process. Dropping it removes the request from the queue.
pub(super) struct Position {
    turns: Turns,
    resource: Resource,
    lease: LeaseDigest,
    order: u64,
    waiter: Arc<Waiter>,
    _permit: OwnedSemaphorePermit,
}

impl Turns {
    pub(super) fn new(max_waiters: usize) -> Self {
        let permits = max_waiters.min(Semaphore::MAX_PERMITS);
        Self(Arc::new(Shared {
            queues: Mutex::default(),
            max_waiters,
            permits: Arc::new(Semaphore::new(permits)),
            kept: Arc::new(Semaphore::new(permits.div_ceil(10))),
            listening: watch::Sender::new(None),
            wanted: Notify::default(),
        }))
    }

    /// Records that this process now receives notifications. `listener` is the number under which
    /// the store notifies this process, or 0 if the store needs no number.
    pub fn ready(&self, listener: i64) {
        self.0.listening.send_replace(Some(Ok(listener)));
    }

    /// Adds a request. Returns `None`, and changes nothing, if too many requests are waiting.
    pub(super) fn join(&self, resource: &Resource, ask: &Ask) -> Option<Position> {
        let permit = Arc::clone(&self.0.permits).try_acquire_owned().ok()?;
        let waiter = Arc::new(Waiter {
            resource: resource.clone(),
            ticket: ask.ticket,
            notify: Notify::default(),
            state: Mutex::default(),
        });
        let mut queues = self.queues();
        queues.joined += 1;
        let joined = queues.joined;
        let queue = queues
            .by_resource
            .entry(resource.clone())
            .or_insert_with(|| ResourceQueue {
                waiters: BTreeMap::new(),
                orders: HashMap::new(),
                retry_at: Instant::now() + LONGEST_SLEEP,
            });
        let before = queue.orders.get(&ask.lease).copied();
        let order = before.unwrap_or(joined);
        queue.orders.insert(ask.lease.clone(), order);
        let displaced = queue.waiters.insert(order, Arc::clone(&waiter));
        queues.by_ticket.insert(ask.ticket, Arc::clone(&waiter));
        if let Some(displaced) = displaced {
            queues.by_ticket.remove(&displaced.ticket);
            displaced.signal(Turn::Displaced);
        }
        Some(Position {
            turns: self.clone(),
            resource: resource.clone(),
            lease: ask.lease.clone(),
            order,
            waiter,
            _permit: permit,
        })
    }

    /// Keeps a position without a request until the permit is dropped. Returns `None` if too many
    /// positions are kept.
    pub(super) fn keep(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.0.kept).try_acquire_owned().ok()
    }

    /// Returns whether a request waits for this resource.
    pub(super) fn has_waiters(&self, resource: &Resource) -> bool {
        self.queues().by_resource.contains_key(resource)
    }

    /// Makes the request with this [ticket](crate::lease::backend::Ask::ticket) retry, because it
    /// is the request's turn.
    pub fn call(&self, ticket: i64) {
        if let Some(waiter) = self.queues().by_ticket.get(&ticket) {
            waiter.signal(Turn::Retry);
        }
    }

    /// Ends the wait of the request with this ticket if its client has disconnected, and otherwise
    /// makes the request retry. If the request has already been granted the lease, it keeps the
    /// lease.
    ///
    /// A backend calls this method if the lease id of the request was released, perhaps through
    /// another process, or if the request is no longer in the queue.
    pub fn call_off(&self, ticket: i64) {
        if let Some(waiter) = self.queues().by_ticket.get(&ticket) {
            let turn = match waiter.state().has_left {
                true => Turn::Dismissed,
                false => Turn::Retry,
            };
            waiter.signal(turn);
        }
    }

    /// Makes the request that waits under this lease id join the store's queue again.
    pub(super) fn rejoin(&self, resource: &Resource, lease: &LeaseDigest) {
        if let Some(queue) = self.queues().by_resource.get(resource)
            && let Some(order) = queue.orders.get(lease)
            && let Some(waiter) = queue.waiters.get(order)
        {
            waiter.signal(Turn::Rejoin);
        }
    }

    /// Records how long the resource of the request with this ticket stays blocked, unless the
    /// lease is released or renewed. After that time, one request of this process retries.
    pub fn call_in(&self, ticket: i64, left: Duration) {
        let waiter = self.queues().by_ticket.get(&ticket).cloned();
        if let Some(waiter) = waiter {
            self.retry_in(&waiter.resource, left);
        }
    }

    /// Records how long a resource stays blocked, unless the lease is released or renewed. After
    /// that time, one request of this process retries. This time replaces an earlier one.
    pub fn retry_in(&self, resource: &Resource, left: Duration) {
        if let Some(queue) = self.queues().by_resource.get_mut(resource) {
            queue.retry_in(left);
        }
    }

    /// Makes all requests for a resource retry, because the store may have lost their positions.
    pub fn call_all_for(&self, resource: &Resource) {
        if let Some(queue) = self.queues().by_resource.get(resource) {
            for waiter in queue.waiters.values() {
                waiter.signal(Turn::Retry);
            }
        }
    }

    /// Makes all requests retry.
    pub fn call_all(&self) {
        for waiter in self.queues().by_ticket.values() {
            waiter.signal(Turn::Retry);
        }
    }

    /// If the caller has dropped the request under this lease id, ends its wait and returns its
    /// ticket.
    pub(super) fn dismiss(&self, resource: &Resource, lease: &LeaseDigest) -> Option<i64> {
        let queues = self.queues();
        let queue = queues.by_resource.get(resource)?;
        let waiter = queue.waiters.get(queue.orders.get(lease)?)?;
        let mut state = waiter.state();
        if !state.has_left {
            return None;
        }
        state.is_released = true;
        drop(state);
        waiter.signal(Turn::Dismissed);
        Some(waiter.ticket)
    }

    /// Returns the resources that requests of this process wait for.
    #[must_use]
    pub fn resources(&self) -> Vec<Resource> {
        self.queues().by_resource.keys().cloned().collect()
    }

    fn queues(&self) -> MutexGuard<'_, Queues> {
        // No code panics while it holds the lock.
        let queues = self.0.queues.lock();
        queues.unwrap_or_else(PoisonError::into_inner)
    }
}

impl ResourceQueue {
    /// Makes the first request retry when the resource has been blocked for this time.
    fn retry_in(&mut self, left: Duration) {
        self.retry_at = end_of(left);
        self.wake_first();
    }

    /// Like [`retry_in`](Self::retry_in), but keeps an earlier time that has not passed. That time
    /// may come from a newer notification, and a retry that is too early does no harm.
    fn retry_within(&mut self, left: Duration) {
        let end = end_of(left);
        if end < self.retry_at || self.retry_at <= Instant::now() {
            self.retry_at = end;
            self.wake_first();
        }
    }

    /// Notifies the first request that it is now the first, or that its time to retry has changed.
    fn wake_first(&self) {
        if let Some(first) = self.waiters.values().next() {
            first.notify.notify_one();
        }
    }
}

/// Returns when the first request retries if its resource stays blocked for this time.
fn end_of(left: Duration) -> Instant {
    Instant::now() + left.clamp(SHORTEST_SLEEP, LONGEST_SLEEP)
}

impl Position {
    /// Waits until a retry may help, at most until `deadline`. At `poll_at`, the request retries
    /// without a notification.
    pub(super) async fn turn(&self, deadline: Instant, poll_at: Option<Instant>) -> Turn {
        let mut timer = None;
        loop {
            if let Some(turn) = self.waiter.state().next() {
                return turn;
            }
            if timer.is_some_and(|timer| timer <= Instant::now()) {
                return Turn::Retry;
            }
            let next = self.next_timer(deadline);
            let next = poll_at.map_or(next, |poll_at| poll_at.min(next));
            timer = Some(next);
            tokio::select! {
                // The notification may have changed the time, so read it again.
                () = self.waiter.notify.notified() => timer = None,
                () = sleep_until(next) => {}
            }
        }
    }

    /// Returns whether another request has taken this position.
    pub(super) fn is_displaced(&self) -> bool {
        self.waiter.state().turn == Some(Turn::Displaced)
    }

    /// Waits until the client releases the granted lease through this process. If the store calls
    /// the request off, the lease is kept, because the grant may have removed the request from the
    /// store's queue.
    pub(super) async fn released(&self) {
        while !self.waiter.state().is_released {
            self.waiter.notify.notified().await;
        }
    }

    /// Records how long the resource stays blocked according to a reply. Unlike
    /// [`Turns::retry_in`], keeps an earlier time that has not passed.
    pub(super) fn retry_within(&self, left: Duration) {
        let mut queues = self.turns.queues();
        if let Some(queue) = queues.by_resource.get_mut(&self.resource) {
            queue.retry_within(left);
        }
    }

    /// Records that the caller has dropped the request.
    pub(super) fn mark_left(&self) {
        self.waiter.state().has_left = true;
    }

    /// Returns `deadline` or, if this request is the first and its time to retry is earlier, that
    /// time.
    fn next_timer(&self, deadline: Instant) -> Instant {
        let queues = self.turns.queues();
        let queue = queues.by_resource.get(&self.resource);
        let first = queue.and_then(|queue| Some((queue.waiters.keys().next()?, queue.retry_at)));
        match first {
            Some((order, retry_at)) if *order == self.order => retry_at.min(deadline),
            _ => deadline,
        }
    }
}

impl Drop for Position {
    fn drop(&mut self) {
        let mut queues = self.turns.queues();
        let queues = &mut *queues;
        if let Some(queue) = queues.by_resource.get_mut(&self.resource)
            && let Some(waiter) = queue.waiters.get(&self.order)
            && Arc::ptr_eq(waiter, &self.waiter)
        {
            queue.waiters.remove(&self.order);
            queue.orders.remove(&self.lease);
            queues.by_ticket.remove(&self.waiter.ticket);
            queue.wake_first();
            if queue.waiters.is_empty() {
                queues.by_resource.remove(&self.resource);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    const LONG: Duration = Duration::from_secs(600);

    fn join(turns: &Turns, lease: &str, ticket: i64) -> Position {
        let ask = Ask {
            lease: LeaseDigest::of(lease),
            ticket,
            ttl: LONG,
            lock_delay: Duration::ZERO,
            owner: None,
        };
        turns.join(&sku(), &ask).unwrap()
    }

    fn sku() -> Resource {
        Resource::new("sku-1").unwrap()
    }

    /// Returns the reason why the request would retry now, or `None` if it would not.
    fn turn(position: &Position) -> Option<Turn> {
        position.turn(Instant::now() + LONG, None).now_or_never()
    }

    #[tokio::test(start_paused = true)]
    async fn second_waiter_has_its_turn_after_the_first_leaves() {
        let turns = Turns::new(9);
        let (first, second) = (join(&turns, "a", 1), join(&turns, "b", 2));
        turns.retry_in(&sku(), SHORTEST_SLEEP);
        tokio::time::advance(SHORTEST_SLEEP).await;
        assert_eq!((turn(&first), turn(&second)), (Some(Turn::Retry), None));
        drop(first);
        assert_eq!(turn(&second), Some(Turn::Retry));
        drop(second);
        assert!(!turns.has_waiters(&sku()), "an empty queue is kept");
    }

    #[tokio::test]
    async fn only_a_position_without_a_client_is_dismissed() {
        let turns = Turns::new(9);
        let position = join(&turns, "a", 1);
        turns.dismiss(&sku(), &LeaseDigest::of("a"));
        assert_eq!(turn(&position), None);
        position.mark_left();
        turns.dismiss(&sku(), &LeaseDigest::of("a"));
        assert_eq!(turn(&position), Some(Turn::Dismissed));
    }

    #[tokio::test]
    async fn only_a_reason_to_retry_is_cleared() {
        let turns = Turns::new(9);
        let position = join(&turns, "a", 1);
        let twice = || [turn(&position), turn(&position)];
        turns.rejoin(&sku(), &LeaseDigest::of("a"));
        turns.call_off(1);
        assert_eq!(twice(), [Some(Turn::Rejoin), None]);
        position.mark_left();
        turns.call_off(1);
        turns.call(1);
        assert_eq!(twice(), [Some(Turn::Dismissed); 2]);
        let _second = join(&turns, "a", 2);
        assert_eq!(twice(), [Some(Turn::Displaced); 2]);
    }
}
