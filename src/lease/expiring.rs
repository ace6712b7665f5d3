//! Map whose entries expire, for the lease data that a process keeps in memory.

use std::{
    collections::HashMap,
    hash::Hash,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use derive_where::derive_where;
use tokio::time::Instant;

use crate::time::after;

/// Map whose entries expire, for a [`Backend`](super::Backend) that keeps lease data in memory.
///
/// An insertion removes the expired entries whenever the number of entries has about doubled since
/// the last removal. The map therefore has at most 16 entries more than twice the largest number of
/// entries that were valid at the same time. If entries last as long as their leases, the number of
/// held leases limits the map.
#[derive_where(Debug, Default)]
#[derive_where(skip_inner(Debug))]
pub struct Expiring<K, V>(Mutex<Entries<K, V>>);

#[derive_where(Default)]
struct Entries<K, V> {
    /// The values, and when they expire.
    values: HashMap<K, (V, Instant)>,
    /// The number of entries after the last removal of expired entries.
    swept: usize,
}

impl<K: Hash + Eq, V> Expiring<K, V> {
    /// Adds or replaces an entry, which expires after `lasts`.
    pub fn insert(&self, key: K, value: V, lasts: Duration) {
        let mut entries = self.lock();
        if entries.values.len() >= 2 * entries.swept + 16 {
            let now = Instant::now();
            entries.values.retain(|_, (_, end)| *end > now);
            entries.swept = entries.values.len();
            let capacity = 2 * entries.swept;
            entries.values.shrink_to(capacity);
        }
        entries.values.insert(key, (value, after(lasts)));
    }

    /// Returns a value, unless it has expired.
    pub fn get(&self, key: &K) -> Option<V>
    where
        V: Clone,
    {
        let entries = self.lock();
        let (value, end) = entries.values.get(key)?;
        (*end > Instant::now()).then(|| value.clone())
    }

    /// Removes an entry. Returns its value, unless it has expired.
    pub fn take(&self, key: &K) -> Option<V> {
        let (value, end) = self.lock().values.remove(key)?;
        (end > Instant::now()).then_some(value)
    }
}

impl<K, V> Expiring<K, V> {
    fn lock(&self) -> MutexGuard<'_, Entries<K, V>> {
        // No code panics while it holds the lock.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn expired_entries_free_their_memory() {
        let map = Expiring::default();
        map.insert(-1, -1, Duration::MAX);
        for n in 0..20_000 {
            map.insert(n, n, Duration::from_millis(10));
            assert_eq!(map.get(&n), Some(n));
            advance(Duration::from_millis(1)).await;
            // At most 11 entries are valid at the same time.
            assert!(map.lock().values.len() <= 2 * 11 + 16);
        }
        assert!(map.lock().values.capacity() < 80);
        assert_eq!((map.get(&19_980), map.take(&19_980)), (None, None));
        assert_eq!(map.take(&19_995), Some(19_995));
        assert_eq!((map.take(&19_995), map.get(&-1)), (None, Some(-1)));
    }
}
