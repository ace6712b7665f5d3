//! The requests that wait in line at this process.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

use crate::{lease::WaiterLimits, token::Resource};

/// The waiters of this process.
pub(super) struct Waiters {
    waiting: Mutex<Waiting>,
    max_per_resource: usize,
    /// A permit for each request that may wait, whatever for.
    seats: Arc<Semaphore>,
}

#[derive(Default)]
struct Waiting {
    by_ticket: HashMap<i64, Arc<Wake>>,
    /// The tickets of each line, in the order in which they joined.
    lines: HashMap<Resource, BTreeMap<u64, i64>>,
    joined: u64,
}

/// What a waiter is told: to ask again, or for how long that is of no use.
#[derive(Default)]
pub(super) struct Wake {
    notify: Notify,
    closed_ms: AtomicU64,
}

impl Wake {
    /// Waits until the waiter is told how long the resource stays closed; zero where it may ask again.
    pub(super) async fn told(&self) -> Duration {
        self.notify.notified().await;
        Duration::from_millis(self.closed_ms.load(Relaxed))
    }

    fn tell(&self, closed_ms: u64) {
        self.closed_ms.store(closed_ms, Relaxed);
        self.notify.notify_one();
    }
}

/// A place among the waiters of this process, until it is dropped.
pub(super) struct Seat {
    waiters: Arc<Waiters>,
    resource: Resource,
    ticket: i64,
    order: u64,
    pub(super) wake: Arc<Wake>,
    _permit: OwnedSemaphorePermit,
}

impl Waiters {
    pub(super) fn new(limits: WaiterLimits) -> Arc<Self> {
        Arc::new(Self {
            waiting: Mutex::default(),
            max_per_resource: limits.per_resource,
            seats: limits.seats(),
        })
    }

    /// How many may wait for one resource.
    pub(super) const fn max_per_resource(&self) -> usize {
        self.max_per_resource
    }

    /// Joins the waiters; `None`, and nothing changes, where too many wait.
    pub(super) fn join(self: &Arc<Self>, resource: &Resource, ticket: i64) -> Option<Seat> {
        let permit = Arc::clone(&self.seats).try_acquire_owned().ok()?;
        let mut waiting = self.waiting();
        waiting.joined += 1;
        let order = waiting.joined;
        let line = waiting.lines.entry(resource.clone()).or_default();
        line.insert(order, ticket);
        let wake = Arc::clone(waiting.by_ticket.entry(ticket).or_default());
        Some(Seat {
            waiters: Arc::clone(self),
            resource: resource.clone(),
            ticket,
            order,
            wake,
            _permit: permit,
        })
    }

    /// Whether somebody waits for this resource.
    pub(super) fn have_line(&self, resource: &Resource) -> bool {
        self.waiting().lines.contains_key(resource)
    }

    /// Takes in what a function has notified: a ticket, and how long the resource stays closed.
    pub(super) fn deliver(&self, payload: &str) {
        let Some((ticket, closed_ms)) = payload.split_once(' ') else {
            return;
        };
        if let (Ok(ticket), Ok(closed_ms)) = (ticket.parse(), closed_ms.parse())
            && let Some(wake) = self.waiting().by_ticket.get(&ticket)
        {
            wake.tell(closed_ms);
        }
    }

    /// The resources that somebody waits for.
    pub(super) fn resources(&self) -> Vec<String> {
        let waiting = self.waiting();
        waiting.lines.keys().map(ToString::to_string).collect()
    }

    /// Has the first waiter for a resource ask again.
    pub(super) fn wake_first(&self, resource: &str) {
        let Ok(resource) = Resource::new(resource) else {
            return;
        };
        let waiting = self.waiting();
        let line = waiting.lines.get(&resource);
        let first = line.and_then(|line| line.values().next());
        if let Some(wake) = first.and_then(|ticket| waiting.by_ticket.get(ticket)) {
            wake.tell(0);
        }
    }

    /// Has every waiter ask again.
    pub(super) fn wake_all(&self) {
        self.waiting()
            .by_ticket
            .values()
            .for_each(|wake| wake.tell(0));
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        // Nothing panics while the lock is held.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut waiting = self.waiters.waiting();
        waiting.by_ticket.remove(&self.ticket);
        if let Some(line) = waiting.lines.get_mut(&self.resource) {
            line.remove(&self.order);
            if line.is_empty() {
                waiting.lines.remove(&self.resource);
            }
        }
    }
}
