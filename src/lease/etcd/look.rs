//! What one transaction reads of a resource: the clock of its partition, its lease, and its line.

use super::{
    clock::ClockState,
    life::Log,
    messages::{Header, KeyValue},
    stored::{FoundLease, FoundPlace},
};

/// A resource at one moment.
#[derive(Debug)]
pub(super) struct Look {
    pub(super) header: Header,
    /// How long the log was afterwards.
    pub(super) log: Log,
    pub(super) clock: ClockState,
    /// What closes the resource: a lease, or what another program has put there.
    pub(super) closed_by: Option<KeyValue>,
    /// The lease, where it is one.
    pub(super) lease: Option<FoundLease>,
    /// How many wait.
    pub(super) waiting: u64,
    /// The place in line of the lease id that was asked for.
    pub(super) place: Option<FoundPlace>,
}

impl Look {
    /// Whether a lease is one that this clock has granted, and not one that came back from the past: its token may be
    /// outranked then.
    pub(super) fn counts(&self, lease: &FoundLease) -> bool {
        let stored = &lease.stored;
        self.clock
            .usable()
            .is_some_and(|clock| (stored.epoch, stored.clock) == (clock.epoch.get(), clock.base))
    }

    /// How far the clock has counted.
    pub(super) fn counted(&self, base: i64) -> i64 {
        self.header.revision.saturating_sub(base)
    }

    /// Whether the resource is closed by what ends with this etcd lease.
    pub(super) fn is_closed_by(&self, etcd_lease: i64) -> bool {
        self.closed_by
            .as_ref()
            .is_some_and(|kv| kv.lease == etcd_lease)
    }
}
