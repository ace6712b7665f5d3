//! A request for a lease that is under way, and its place in line.

use std::{collections::HashMap, sync::Arc, time::Duration};

use tokio::{
    sync::{Notify, OwnedSemaphorePermit, watch},
    time::Instant,
};

use super::{
    lease_end::LeaseEnd,
    waiters::{LONGEST_SLEEP, Line, Waiters},
};
use crate::{
    lease::{LeaseId, background::Background, stored_id::StoredId},
    token::Resource,
};

/// A request that is under way. Dropped before it is [finished](Self::finish), it leaves the line
/// and releases what was granted to it, in Redis too.
pub(super) struct PendingAcquire {
    waiters: Arc<Waiters>,
    resource: Resource,
    id: StoredId,
    key: Box<str>,
    wake: Arc<Notify>,
    seat: Option<OwnedSemaphorePermit>,
    ticket: u64,
    finished: bool,
    background: Background,
}

impl PendingAcquire {
    pub(super) fn new(waiters: &Arc<Waiters>, resource: &Resource, id: &LeaseId) -> Self {
        Self {
            waiters: Arc::clone(waiters),
            resource: resource.clone(),
            id: StoredId::of(id),
            key: waiters.scripts().lease_key(resource).into(),
            wake: Arc::default(),
            seat: None,
            ticket: rand::random(),
            finished: false,
            background: Background::here(),
        }
    }

    /// What tells this request from others under the same lease id.
    pub(super) const fn ticket(&self) -> u64 {
        self.ticket
    }

    /// Joins the waiters of this issuer. False, and nothing changes, where too many wait.
    pub(super) fn join(&mut self) -> bool {
        if self.seat.is_some() {
            return true;
        }
        let mut lines = self.waiters.lines();
        let before = lines.get(&self.key).map_or(0, |line| line.count);
        if before >= self.waiters.max_per_resource() {
            return false;
        }
        self.seat = Arc::clone(self.waiters.seats()).try_acquire_owned().ok();
        if self.seat.is_none() {
            return false;
        }
        let line = lines.entry(self.key.clone()).or_insert_with(|| Line {
            waiters: HashMap::new(),
            count: 0,
            ends: watch::Sender::new(Instant::now() + LONGEST_SLEEP),
        });
        let same_id = line.waiters.entry(self.id.clone()).or_default();
        same_id.push(Arc::clone(&self.wake));
        line.count += 1;
        drop(lines);
        self.watch_lease_end();
        true
    }

    /// Has somebody look when the lease has ended, unless a task does.
    fn watch_lease_end(&self) {
        let unwatched = {
            let lines = self.waiters.lines();
            let line = lines.get(&self.key).filter(|line| line.ends.is_closed());
            line.map(|line| line.ends.subscribe())
        };
        // A runtime that is about to end drops a task at once.
        if let Some(ends) = unwatched {
            tokio::spawn(LeaseEnd::new(&self.waiters, &self.resource, ends).watch());
        }
    }

    /// Waits until asking again may help.
    pub(super) async fn woken(&self) {
        self.wake.notified().await;
    }

    /// Notes how long the resource stays closed.
    pub(super) fn closed_for(&self, left: Duration) {
        self.watch_lease_end();
        let end = Instant::now() + left.min(LONGEST_SLEEP);
        if let Some(line) = self.waiters.lines().get(&self.key) {
            // What was published meanwhile is newer than this answer. To look too early does no
            // harm.
            line.ends.send_if_modified(|ends| {
                let earlier = end < *ends;
                *ends = end.min(*ends);
                earlier
            });
        }
    }

    /// Ends the request without a message to Redis, which has nothing of it that may not stay.
    pub(super) fn finish(mut self) {
        self.finished = true;
    }

    /// Leaves the waiters of this issuer; true when a request with the same id still waits.
    fn leave(&self) -> bool {
        let mut lines = self.waiters.lines();
        let Some(line) = lines.get_mut(&self.key) else {
            return false;
        };
        let Some(same_id) = line.waiters.get_mut(&self.id) else {
            return false;
        };
        let before = same_id.len();
        same_id.retain(|waiter| !Arc::ptr_eq(waiter, &self.wake));
        line.count -= before - same_id.len();
        if !same_id.is_empty() {
            return true;
        }
        line.waiters.remove(&self.id);
        if line.waiters.is_empty() {
            lines.remove(&self.key);
        }
        false
    }
}

impl Drop for PendingAcquire {
    fn drop(&mut self) {
        if self.leave() || self.finished {
            return;
        }
        let scripts = Arc::clone(self.waiters.scripts());
        let (resource, id, ticket) = (self.resource.clone(), self.id.clone(), self.ticket);
        let abandon = async move { scripts.abandon(&resource, &id, ticket).await };
        self.background.spawn(abandon);
    }
}
