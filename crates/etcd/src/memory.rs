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

use tokio::time::Instant;
use tower_fence::{Resource, epochs::Epoch, lease::backend::Seen};

use crate::{counter::Counter, stored::StoredId};

#[derive(Default)]
pub(crate) struct Memory {
    counters: Mutex<HashMap<u8, (String, Counter)>>,
    /// Blocked resources for which a request was refused.
    refused: Mutex<Timed<Resource, ()>>,
    /// Leases without a lock delay that this process has granted or renewed.
    leases: Mutex<Timed<(Resource, StoredId), Known>>,
    /// The etcd leases of grants whose outcome is unknown, by the ticket of the request.
    attempts: Mutex<Timed<i64, i64>>,
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
        let counters = lock(&self.counters);
        let (source, counter) = counters.get(&partition)?;
        let is_ours = seen.source.is_some_and(|ours| ours.as_str() == source);
        let is_over = (counter.epoch.get(), Epoch::SIZE - 1) <= (seen.epoch, seen.n);
        (is_ours && !is_over).then(|| counter.clone())
    }

    pub(crate) fn note_counter(&self, partition: u8, seen: &Seen<'_>, counter: &Counter) {
        if let Some(source) = seen.source {
            let row = (source.to_string(), counter.clone());
            lock(&self.counters).insert(partition, row);
        }
    }

    pub(crate) fn forget_counter(&self, partition: u8) {
        lock(&self.counters).remove(&partition);
    }

    pub(crate) fn note_refused(&self, resource: &Resource, left: Duration) {
        lock(&self.refused).insert(resource.clone(), (), left);
    }

    /// Returns whether a request for this resource was refused. Removes the entry, because the
    /// caller reads the resource next.
    pub(crate) fn take_refused(&self, resource: &Resource) -> bool {
        lock(&self.refused).take(resource).is_some()
    }

    pub(crate) fn note_lease(
        &self,
        resource: &Resource,
        id: &StoredId,
        known: Known,
        lasts: Duration,
    ) {
        lock(&self.leases).insert((resource.clone(), id.clone()), known, lasts);
    }

    pub(crate) fn lease(&self, resource: &Resource, id: &StoredId) -> Option<Known> {
        lock(&self.leases).get(&(resource.clone(), id.clone()))
    }

    pub(crate) fn take_lease(&self, resource: &Resource, id: &StoredId) -> Option<Known> {
        lock(&self.leases).take(&(resource.clone(), id.clone()))
    }

    pub(crate) fn note_attempt(&self, ticket: i64, etcd_lease: i64, lasts: Duration) {
        lock(&self.attempts).insert(ticket, etcd_lease, lasts);
    }

    /// Records that a queue may contain a position of this process without a request.
    pub(crate) fn note_stray(&self) {
        self.has_stray.store(true, Relaxed);
    }

    pub(crate) fn take_stray(&self) -> bool {
        self.has_stray.swap(false, Relaxed)
    }

    pub(crate) fn take_attempt(&self, ticket: i64) -> Option<i64> {
        lock(&self.attempts).take(&ticket)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No code panics while it holds the lock.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Map whose entries expire.
struct Timed<K, V> {
    entries: HashMap<K, (V, Instant)>,
    /// The number of entries after the last sweep.
    swept: usize,
}

impl<K: Hash + Eq, V: Copy> Timed<K, V> {
    /// Adds an entry. Removes expired entries each time the number of entries may have doubled.
    fn insert(&mut self, key: K, value: V, lasts: Duration) {
        let now = Instant::now();
        if self.entries.len() >= 2 * self.swept + 16 {
            self.entries.retain(|_, (_, end)| *end > now);
            self.swept = self.entries.len();
        }
        if let Some(end) = now.checked_add(lasts) {
            self.entries.insert(key, (value, end));
        }
    }

    fn get(&self, key: &K) -> Option<V> {
        let (value, end) = self.entries.get(key)?;
        (*end > Instant::now()).then_some(*value)
    }

    fn take(&mut self, key: &K) -> Option<V> {
        let (value, end) = self.entries.remove(key)?;
        (end > Instant::now()).then_some(value)
    }
}

impl<K, V> Default for Timed<K, V> {
    fn default() -> Self {
        Self {
            entries: HashMap::new(),
            swept: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn ended_entries_free_their_memory() {
        let mut timed = Timed::default();
        for n in 0..20_000 {
            timed.insert(n, n, Duration::from_millis(10));
            assert_eq!(timed.get(&n), Some(n));
            tokio::time::advance(Duration::from_millis(1)).await;
        }
        assert!(timed.entries.len() <= 64, "10 entries have not ended");
        assert_eq!(
            (timed.get(&19_980), timed.take(&19_995)),
            (None, Some(19_995))
        );
        assert_eq!(timed.take(&19_995), None);
    }
}
