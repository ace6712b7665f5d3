//! Data that this process keeps in memory, so that most steps need not read first. Without the
//! data, a step takes more calls, and a repeated release may be reported as lost.

use std::{
    collections::HashMap,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use tower_fence::{
    Resource,
    epochs::Epoch,
    lease::backend::{Expiring, Seen},
};

use crate::{counter::Counter, stored::StoredLease};

#[derive(Default)]
pub(crate) struct Memory {
    /// The counters that were valid when this process last read them, by partition.
    counters: Mutex<HashMap<u8, Counter>>,
    /// Blocked resources for which a request was refused. The next request that does not wait
    /// removes the entry, and reads the resource first.
    pub(crate) refused: Expiring<Resource, ()>,
    /// Leases without a lock delay that this process has granted or renewed, by resource and stored
    /// lease id.
    pub(crate) leases: Expiring<(Resource, String), Known>,
    /// The etcd leases of grants whose outcome is unknown, by the ticket of the request.
    pub(crate) attempts: Expiring<i64, i64>,
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
    /// Returns the counter of a partition, unless its epoch is over.
    pub(crate) fn counter(&self, partition: u8, seen: &Seen<'_>) -> Option<Counter> {
        let counters = self.counters();
        let counter = counters.get(&partition)?;
        let is_over = (counter.epoch.get(), Epoch::SIZE - 1) <= (seen.epoch, seen.n);
        (!is_over).then(|| counter.clone())
    }

    /// Records a counter of this process's source of epochs. The source never changes.
    pub(crate) fn note_counter(&self, partition: u8, counter: &Counter) {
        self.counters().insert(partition, counter.clone());
    }

    pub(crate) fn forget_counter(&self, partition: u8) {
        self.counters().remove(&partition);
    }

    /// Records the etcd lease of a lease that lasts for `left` seconds. A lease with a lock delay
    /// is not recorded, because its release has to read whether the lock delay has begun.
    pub(crate) fn note_lease(
        &self,
        resource: &Resource,
        stored: &StoredLease,
        etcd_lease: i64,
        left: u64,
    ) {
        if stored.delay == 0 {
            let known = Known {
                etcd_lease,
                ttl: stored.ttl,
                is_released: false,
            };
            let key = (resource.clone(), stored.id.clone());
            self.leases.insert(key, known, Duration::from_secs(left));
        }
    }

    /// Records that a queue may contain a position of this process without a request.
    pub(crate) fn note_stray(&self) {
        self.has_stray.store(true, Relaxed);
    }

    pub(crate) fn take_stray(&self) -> bool {
        self.has_stray.swap(false, Relaxed)
    }

    fn counters(&self) -> MutexGuard<'_, HashMap<u8, Counter>> {
        // No code panics while it holds the lock.
        self.counters.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
