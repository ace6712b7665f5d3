//! The requests that wait in line at this issuer, and on which channels the issuer hears of grants.
//!
//! 1. A waiter stands in line in Redis, under the channel of its issuer.
//! 2. The script that ends a lease grants it to the first in line and publishes that on the
//!    channel of its issuer; where nobody listens there, the issuer has died, and the next one has
//!    it. The waiter confirms the lease by asking again; unconfirmed, it ends after a second.
//! 3. Each grant and each renewal is also published to all issuers that have waiters in the
//!    partition, with the time it lasts. When that time is over, each of them looks once per
//!    resource; the first one hands the lease over. No waiter polls.
//!    As a safety net, each issuer also looks every ten seconds, whatever the number of waiters.
//! 4. When the connection that listens is lost, or silent, every waiter asks again: it finds its
//!    place, its grant, or an error.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{
    sync::{Notify, Semaphore, watch},
    time::Instant,
};

use super::{answer::parse_ms, scripts::Scripts};
use crate::lease::{LeaseId, WaiterLimits, stored_id::StoredId};

/// The waiters of this issuer.
pub(super) struct Waiters {
    scripts: Arc<Scripts>,
    /// The last part of the names of this issuer's own channels.
    issuer: Box<str>,
    /// By the key of the lease.
    lines: Mutex<HashMap<Box<str>, Line>>,
    max_per_resource: usize,
    /// A permit for each request that may wait, whatever for.
    seats: Arc<Semaphore>,
}

/// The waiters for one resource, by lease id.
pub(super) struct Line {
    /// More than one where a request is repeated while the first one still waits.
    pub(super) waiters: HashMap<StoredId, Vec<Arc<Notify>>>,
    /// How many these are.
    pub(super) count: usize,
    /// When the lease ends that is in the way.
    pub(super) ends: watch::Sender<Instant>,
}

/// How long to sleep where nothing is known, or the end is far. This bounds how late a line is found
/// that was lost without a message (FLUSHALL).
pub(super) const LONGEST_SLEEP: Duration = Duration::from_secs(10);

impl Waiters {
    pub(super) fn new(scripts: Arc<Scripts>, limits: WaiterLimits) -> Arc<Self> {
        Arc::new(Self {
            issuer: LeaseId::random().expose().into(),
            scripts,
            lines: Mutex::default(),
            max_per_resource: limits.per_resource,
            seats: limits.seats(),
        })
    }

    /// Whether there is no waiter.
    pub(super) fn is_empty(&self) -> bool {
        self.lines().is_empty()
    }

    /// The scripts, and the server that they run on.
    pub(super) const fn scripts(&self) -> &Arc<Scripts> {
        &self.scripts
    }

    /// How many may wait for one resource.
    pub(super) const fn max_per_resource(&self) -> usize {
        self.max_per_resource
    }

    /// The permits to wait.
    pub(super) const fn seats(&self) -> &Arc<Semaphore> {
        &self.seats
    }

    /// The channel of a partition on which this issuer alone listens.
    pub(super) fn own_channel(&self, partition: u8) -> String {
        self.scripts.own_channel(partition, &self.issuer)
    }

    /// The channel of a partition on which all issuers listen that have waiters there.
    pub(super) fn shared_channel(&self, partition: u8) -> String {
        self.scripts.shared_channel(partition)
    }

    /// Takes in what a script has published.
    pub(super) fn deliver(&self, channel: &str, message: &str) {
        let Some((first, key)) = message.split_once(' ') else {
            return;
        };
        let lines = self.lines();
        let Some(line) = lines.get(key) else {
            return;
        };
        if !channel.ends_with(&*self.issuer) {
            line.ends
                .send_replace(Instant::now() + parse_ms(first).min(LONGEST_SLEEP));
        } else if let Some(same_id) = line.waiters.get(first) {
            same_id.iter().for_each(|waiter| waiter.notify_one());
        } else if first == "*" {
            // All waiters of this issuer were passed over.
            line.wake_all();
        }
    }

    /// Has every waiter ask again.
    pub(super) fn wake_all(&self) {
        self.lines().values().for_each(Line::wake_all);
    }

    /// Has every waiter for one resource ask again.
    pub(super) fn wake_line(&self, key: &str) {
        if let Some(line) = self.lines().get(key) {
            line.wake_all();
        }
    }

    /// The lines, locked.
    pub(super) fn lines(&self) -> MutexGuard<'_, HashMap<Box<str>, Line>> {
        // Nothing panics while the lock is held.
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Line {
    fn wake_all(&self) {
        let waiters = self.waiters.values().flatten();
        waiters.for_each(|waiter| waiter.notify_one());
    }
}
