//! Data that this process keeps in memory, so that most steps need not read first. Without the
//! data, a step takes more calls, and a repeated release may be reported as lost.

use std::{
    collections::HashMap,
    hash::Hash,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use quick_cache::sync::Cache;
use tokio::time::Instant;
use tower_fence::{Resource, epochs::Epoch, lease::backend::Seen};

use crate::{counter::Counter, stored::StoredId};

/// Maximum number of entries of each map that can grow.
const ENTRIES: usize = 65_536;

#[derive(Default)]
pub(crate) struct Memory {
    counters: Mutex<HashMap<u8, (String, Counter)>>,
    /// Blocked resources for which a request was refused.
    refused: Timed<Resource, ()>,
    /// Leases without a lock delay that this process has granted or renewed.
    leases: Timed<(Resource, StoredId), Known>,
    /// The etcd leases of grants whose outcome is unknown, by the ticket of the request.
    attempts: Timed<i64, i64>,
    /// Whether a queue may contain a position of this process without a request.
    has_stray: AtomicBool,
}

/// Etcd lease of a lease that this process has granted or renewed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Known {
    pub(crate) etcd_lease: i64,
    /// The TTL of the lease in seconds.
    pub(crate) ttl: u64,
    /// Whether a release was sent and got no response.
    pub(crate) is_released: bool,
}

impl Memory {
    /// Returns the counter of a partition, unless it belongs to another source of epochs or its
    /// epoch is over.
    pub(crate) fn counter(&self, partition: u8, seen: &Seen<'_>) -> Option<Counter> {
        let counters = self.counters();
        let (source, counter) = counters.get(&partition)?;
        let is_ours = seen.source.is_some_and(|ours| ours.as_str() == source);
        let is_over = (counter.epoch.get(), Epoch::SIZE - 1) <= (seen.epoch, seen.n);
        (is_ours && !is_over).then(|| counter.clone())
    }

    pub(crate) fn note_counter(&self, partition: u8, seen: &Seen<'_>, counter: &Counter) {
        if let Some(source) = seen.source {
            let row = (source.to_string(), counter.clone());
            self.counters().insert(partition, row);
        }
    }

    pub(crate) fn forget_counter(&self, partition: u8) {
        self.counters().remove(&partition);
    }

    pub(crate) fn note_refused(&self, resource: &Resource, left: Duration) {
        self.refused.insert(resource.clone(), (), left);
    }

    /// Returns whether a request for this resource was refused. Removes the entry, because the
    /// caller reads the resource next.
    pub(crate) fn take_refused(&self, resource: &Resource) -> bool {
        self.refused.take(resource).is_some()
    }

    pub(crate) fn note_lease(
        &self,
        resource: &Resource,
        id: &StoredId,
        known: Known,
        lasts: Duration,
    ) {
        self.leases
            .insert((resource.clone(), id.clone()), known, lasts);
    }

    pub(crate) fn lease(&self, resource: &Resource, id: &StoredId) -> Option<Known> {
        self.leases.get(&(resource.clone(), id.clone()))
    }

    pub(crate) fn take_lease(&self, resource: &Resource, id: &StoredId) -> Option<Known> {
        self.leases.take(&(resource.clone(), id.clone()))
    }

    pub(crate) fn note_attempt(&self, ticket: i64, etcd_lease: i64, lasts: Duration) {
        self.attempts.insert(ticket, etcd_lease, lasts);
    }

    /// Records that a queue may contain a position of this process without a request.
    pub(crate) fn note_stray(&self) {
        self.has_stray.store(true, Relaxed);
    }

    pub(crate) fn take_stray(&self) -> bool {
        self.has_stray.swap(false, Relaxed)
    }

    pub(crate) fn take_attempt(&self, ticket: i64) -> Option<i64> {
        self.attempts.take(&ticket)
    }

    fn counters(&self) -> MutexGuard<'_, HashMap<u8, (String, Counter)>> {
        // No code panics while it holds the lock.
        self.counters.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Map of limited size whose entries expire.
struct Timed<K, V>(Cache<K, (V, Instant)>);

impl<K: Hash + Eq, V: Copy> Timed<K, V> {
    fn insert(&self, key: K, value: V, lasts: Duration) {
        if let Some(end) = Instant::now().checked_add(lasts) {
            self.0.insert(key, (value, end));
        }
    }

    fn get(&self, key: &K) -> Option<V> {
        let (value, end) = self.0.get(key)?;
        (end > Instant::now()).then_some(value)
    }

    fn take(&self, key: &K) -> Option<V> {
        let (_, (value, end)) = self.0.remove(key)?;
        (end > Instant::now()).then_some(value)
    }
}

impl<K: Hash + Eq, V: Copy> Default for Timed<K, V> {
    fn default() -> Self {
        Self(Cache::new(ENTRIES))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn entry_expires() {
        let timed = Timed::default();
        timed.insert("a", 1, Duration::from_millis(10));
        timed.insert("b", 2, Duration::from_millis(11));
        tokio::time::advance(Duration::from_millis(10)).await;
        assert_eq!((timed.get(&"a"), timed.get(&"b")), (None, Some(2)));
        assert_eq!((timed.take(&"a"), timed.take(&"b")), (None, Some(2)));
        assert_eq!(timed.take(&"b"), None);
    }
}
