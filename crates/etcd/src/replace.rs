//! Replacement of a lease's key: a renewal or a repeated request writes the key again, and may move
//! it to another etcd lease.

use std::{sync::Arc, time::Duration};

use serde_json::Value;
use tower_fence::{
    Resource,
    lease::backend::{Granted, Reply, Seen},
};

use crate::{
    counter::Counter,
    error::EtcdError,
    etcd::Etcd,
    messages::{put, written_at},
    stored::{FoundLease, StoredLease, value},
    view::{Reads, View},
};

/// New value of a held lease's key, and the etcd lease to which the key will be attached.
pub(crate) struct Replacement<'a> {
    pub(crate) held: &'a FoundLease,
    pub(crate) counter: &'a Counter,
    pub(crate) stored: &'a StoredLease,
    pub(crate) etcd_lease: i64,
    /// The remaining time of the etcd lease in seconds.
    pub(crate) lasts: u64,
    /// Further writes of the same transaction.
    pub(crate) also: Vec<Value>,
}

/// Outcome of a replacement.
pub(crate) enum Replaced {
    /// The lease is held.
    Reply(Reply),
    /// The key or the counter has changed since it was read, or the etcd lease has ended.
    Changed,
    /// The key was written, but the token of the lease is no longer valid, for example because etcd
    /// was restored from a snapshot.
    Invalid,
}

impl Etcd {
    /// Replaces the key of a held lease. The transaction may be executed twice, because it compares
    /// the revision of the key, which changes with each write.
    pub(crate) async fn replace(
        self: &Arc<Self>,
        resource: &Resource,
        replacement: Replacement<'_>,
        seen: &mut Seen<'_>,
    ) -> Result<Replaced, EtcdError> {
        let Replacement {
            held,
            counter,
            stored,
            etcd_lease,
            lasts,
            also,
        } = replacement;
        // The key may move to another etcd lease, so a later release must not rely on the etcd
        // lease in memory.
        let known = (resource.clone(), stored.id.clone());
        self.memory.leases.take(&known);
        let key = self.keys.lease(resource);
        let mut compare = self.is_unchanged(resource, counter).to_vec();
        compare.push(written_at(&key, held.revision));
        let writes = [vec![put(&key, &value(stored), etcd_lease)], also].concat();
        let written = self.write(resource, Reads::default(), &compare, writes);
        let after = match written.await {
            Err(error) if error.is_not_found() => return Ok(Replaced::Changed),
            after => after?,
        };
        counter.note_write(seen);
        let moves = etcd_lease != held.etcd_lease;
        if !after.is_written(stored, etcd_lease) {
            if !after.is_blocked_by(etcd_lease) {
                if moves {
                    self.revoke_later(etcd_lease);
                }
            } else if after.lease.is_none() {
                // The epoch ran out of tokens in the meantime, so the key has no token. The next
                // read must not find it.
                self.revoke_if_there(etcd_lease).await?;
            }
            // If the key has left the earlier etcd lease, this request may have moved it: the
            // answer to the write may have been lost before another request moved the key again.
            if moves && !after.is_blocked_by(held.etcd_lease) {
                self.revoke_if_there(held.etcd_lease).await?;
            }
            return Ok(Replaced::Changed);
        }
        if moves {
            // Revoke the earlier etcd lease. Otherwise a process that has it in memory would revoke
            // it on a release and report success, although the lease is still held.
            self.revoke_if_there(held.etcd_lease).await?;
        }
        let confirmed = self.confirm(resource, after, &stored.id, (etcd_lease, lasts), seen);
        Ok(confirmed.await?.map_or(Replaced::Invalid, Replaced::Reply))
    }

    /// Checks that a lease is held, under this id, with this etcd lease, and in the current
    /// incarnation of etcd. The etcd lease lasts for `lasts` seconds. If the lease is held, records
    /// it, and returns the reply.
    pub(crate) async fn confirm(
        &self,
        resource: &Resource,
        mut view: View,
        id: &str,
        (etcd_lease, lasts): (i64, u64),
        seen: &Seen<'_>,
    ) -> Result<Option<Reply>, EtcdError> {
        let lease = view.lease_of(id).cloned();
        let Some(lease) = lease.filter(|lease| lease.etcd_lease == etcd_lease) else {
            return Ok(None);
        };
        let header = view.counter.header;
        view.counter.log = self.log_after(&header).await?;
        let counter = view.counter.valid(seen);
        let Some(counter) = counter.filter(|counter| counter.granted(&lease)) else {
            return Ok(None);
        };
        let left = lasts.saturating_sub(lease.stored.delay);
        let memory = &self.memory;
        memory.note_lease(resource, &lease.stored, etcd_lease, left);
        let granted = Granted::new(lease.token, Duration::from_secs(left));
        let granted = granted.counted(counter.epoch, counter.counted(header.revision));
        Ok(Some(Reply::Granted(granted)))
    }
}
