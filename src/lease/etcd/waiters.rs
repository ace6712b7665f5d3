//! The requests that wait in line at this process.
//!
//! 1. A place in line is a key with an etcd lease of its own, which this process keeps alive for as long as the request
//!    waits. Where the process dies, or is frozen, the place ends and the next one moves up.
//! 2. Places are served in the order in which they were made, by etcd's own count of revisions.
//! 3. How a process hears of the turn of one of its own: see [`service`](super::service).

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, oneshot};

use super::server::{Etcd, random_id};
use crate::{
    lease::{WaiterLimits, background::Background, stored_id::StoredId},
    token::Resource,
};

/// How long a place lasts without its process, in seconds.
pub(super) const PLACE_SECONDS: u64 = 10;

/// The waiters of this process.
pub(super) struct Waiters {
    etcd: Arc<Etcd>,
    waiting: Mutex<Waiting>,
    max_per_resource: u64,
    /// A permit for each request that may wait, whatever for.
    seats: Arc<Semaphore>,
}

#[derive(Default)]
struct Waiting {
    lines: HashMap<Resource, LocalLine>,
    /// Dropped, it ends the task that keeps the places alive.
    kept: Option<oneshot::Sender<()>>,
}

/// Those who wait here for one resource.
#[derive(Default)]
struct LocalLine {
    /// By stored id: more than one where a request is repeated while the first one still waits.
    seats: HashMap<StoredId, Vec<(i64, Arc<Notify>)>>,
    /// Dropped, it ends the watch.
    watched: Option<oneshot::Sender<()>>,
}

/// A place among the waiters of this process, and the etcd lease of its place in line. Dropped, it ends both.
pub(super) struct Seat {
    waiters: Arc<Waiters>,
    resource: Resource,
    id: StoredId,
    etcd_lease: i64,
    wake: Arc<Notify>,
    _permit: OwnedSemaphorePermit,
    background: Background,
}

/// What is to be done in tasks: each ends when its receiver is told, and is missing again when that is closed.
#[derive(Default)]
pub(super) struct Unserved {
    /// To watch the line.
    pub(super) line: Option<oneshot::Receiver<()>>,
    /// To keep all places alive.
    pub(super) places: Option<oneshot::Receiver<()>>,
}

fn begin(running: &mut Option<oneshot::Sender<()>>) -> Option<oneshot::Receiver<()>> {
    if running.as_ref().is_some_and(|running| !running.is_closed()) {
        return None;
    }
    let (needed, end) = oneshot::channel();
    *running = Some(needed);
    Some(end)
}

impl Waiters {
    pub(super) fn new(etcd: Arc<Etcd>, limits: WaiterLimits) -> Arc<Self> {
        Arc::new(Self {
            etcd,
            waiting: Mutex::default(),
            max_per_resource: limits.per_resource as u64,
            seats: limits.seats(),
        })
    }

    pub(super) const fn etcd(&self) -> &Arc<Etcd> {
        &self.etcd
    }

    /// How many may wait for one resource.
    pub(super) const fn max_per_resource(&self) -> u64 {
        self.max_per_resource
    }

    /// Joins the waiters of this process; `None`, and nothing changes, where too many wait.
    pub(super) fn join(self: &Arc<Self>, resource: &Resource, id: &StoredId) -> Option<Seat> {
        let permit = Arc::clone(&self.seats).try_acquire_owned().ok()?;
        let seat = Seat {
            waiters: Arc::clone(self),
            resource: resource.clone(),
            id: id.clone(),
            etcd_lease: random_id(),
            wake: Arc::default(),
            _permit: permit,
            background: Background::here(),
        };
        let mut waiting = self.waiting();
        let line = waiting.lines.entry(resource.clone()).or_default();
        let same_id = line.seats.entry(id.clone()).or_default();
        same_id.push((seat.etcd_lease, Arc::clone(&seat.wake)));
        Some(seat)
    }

    /// What nobody does for those who wait for a resource. From now on somebody does.
    pub(super) fn unserved(&self, resource: &Resource) -> Unserved {
        let mut waiting = self.waiting();
        let Waiting { lines, kept } = &mut *waiting;
        match lines.get_mut(resource) {
            None => Unserved::default(),
            Some(line) => Unserved {
                line: begin(&mut line.watched),
                places: begin(kept),
            },
        }
    }

    /// Wakes all who wait here, for whatever resource.
    pub(super) fn wake_all(&self) {
        let waiting = self.waiting();
        let seats = waiting.lines.values().flat_map(|line| line.seats.values());
        seats.flatten().for_each(|(_, wake)| wake.notify_one());
    }

    /// Wakes those who wait here for a resource and are chosen by their stored id.
    pub(super) fn wake(&self, resource: &Resource, chosen: impl Fn(&str) -> bool) {
        if let Some(line) = self.waiting().lines.get(resource) {
            let chosen = line.seats.iter().filter(|(id, _)| chosen(id.as_str()));
            for (_, wake) in chosen.flat_map(|(_, seats)| seats) {
                wake.notify_one();
            }
        }
    }

    /// Wakes the one with this stored id.
    pub(super) fn wake_one(&self, resource: &Resource, id: &str) {
        if let Some(line) = self.waiting().lines.get(resource) {
            let same_id = line.seats.get(id).into_iter().flatten();
            same_id.for_each(|(_, wake)| wake.notify_one());
        }
    }

    /// The etcd leases of all places.
    pub(super) fn places(&self) -> Vec<i64> {
        let waiting = self.waiting();
        let seats = waiting.lines.values().flat_map(|line| line.seats.values());
        seats.flatten().map(|(etcd_lease, _)| *etcd_lease).collect()
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        // Nothing panics while the lock is held.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Seat {
    /// The etcd lease of its place in line.
    pub(super) const fn etcd_lease(&self) -> i64 {
        self.etcd_lease
    }

    /// Waits until asking again may help.
    pub(super) async fn woken(&self) {
        self.wake.notified().await;
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let etcd = &self.waiters.etcd;
        etcd.revoke_later(self.etcd_lease, &self.background);
        let mut waiting = self.waiters.waiting();
        let Some(line) = waiting.lines.get_mut(&self.resource) else {
            return;
        };
        if let Some(same_id) = line.seats.get_mut(&self.id) {
            same_id.retain(|(etcd_lease, _)| *etcd_lease != self.etcd_lease);
            if same_id.is_empty() {
                line.seats.remove(&self.id);
            }
        }
        if line.seats.is_empty() {
            waiting.lines.remove(&self.resource);
        }
        if waiting.lines.is_empty() {
            waiting.kept = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::sync::oneshot::error::TryRecvError;

    use super::{
        super::{gateway::Gateway, keys::Keys},
        *,
    };
    use crate::{
        epochs::testing::FirstEpoch,
        lease::{LeaseId, memory::Memory},
    };

    /// In an etcd that is away: what ends there ends by its time.
    fn waiters() -> Arc<Waiters> {
        let away = Box::new(["http://127.0.0.1:1".parse().unwrap()]);
        let gateway = Gateway::new(
            reqwest::Client::new(),
            away,
            None,
            Duration::from_millis(10),
        );
        let memory = Memory::new(Arc::new(FirstEpoch));
        let etcd = Etcd::new(gateway, memory, Keys::new("locks"));
        Waiters::new(Arc::new(etcd), WaiterLimits::default())
    }

    #[tokio::test]
    async fn nothing_is_remembered_of_those_who_have_left() {
        let waiters = waiters();
        let [resource, other] = ["sku-1", "sku-2"].map(|name| Resource::new(name).unwrap());
        let [first, second] = ["1", "2"].map(|n| {
            let id = LeaseId::new(n.repeat(22)).unwrap();
            StoredId::of(&id)
        });
        let join = |resource, id| waiters.join(resource, id).unwrap();
        let seats = [&first, &first, &second].map(|id| join(&resource, id));
        let elsewhere = join(&other, &second);
        let Unserved { line, places } = waiters.unserved(&resource);
        let [mut line, mut places] = [line, places].map(Option::unwrap);
        let [repeated, same_id, last] = seats;
        let has_place = |etcd_lease| waiters.places().contains(&etcd_lease);

        // Another request under the same id goes on waiting.
        let gone = repeated.etcd_lease();
        drop(repeated);
        assert!(!has_place(gone));
        assert!(has_place(same_id.etcd_lease()) && has_place(last.etcd_lease()));
        drop(same_id);
        assert!(
            !waiters.waiting().lines[&resource]
                .seats
                .contains_key(&first)
        );
        assert_eq!(line.try_recv(), Err(TryRecvError::Empty));
        drop(last);
        assert!(!waiters.waiting().lines.contains_key(&resource));
        // Nobody watches the line any more; places are kept alive for as long as there is one.
        assert_eq!(line.try_recv(), Err(TryRecvError::Closed));
        assert_eq!(places.try_recv(), Err(TryRecvError::Empty));
        drop(elsewhere);
        assert_eq!(places.try_recv(), Err(TryRecvError::Closed));
        assert!(waiters.waiting().lines.is_empty());
    }
}
