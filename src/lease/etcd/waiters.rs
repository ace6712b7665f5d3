//! The requests that wait in line at this process, and how they hear of their turn.
//!
//! 1. A place in line is a key with an etcd lease of its own, which this process keeps alive for as long as the request
//!    waits. Where the process dies, or is frozen, the place ends and the next one moves up.
//! 2. Places are served in the order in which they were made, by etcd's own count of revisions.
//! 3. The process has one watch for each resource that somebody waits for, over the lease and the line. When it is the
//!    turn of one of its own, it wakes that one, and nobody else: no herd, and nobody polls.
//! 4. A watch that is lost, or has nothing to tell for ten seconds, begins anew with a look at the whole line. Where that
//!    fails, every waiter asks: for its place, its grant, or an error.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::Duration,
};

use serde_json::json;
use tokio::{
    sync::{Notify, OwnedSemaphorePermit, Semaphore, oneshot},
    time::{sleep, timeout},
};

use super::{
    gateway::EtcdError,
    line::Line,
    messages::{Streamed, TxnAnswer, WatchAnswer, base64, get, get_range},
    server::{Etcd, random_id},
};
use crate::{
    lease::{WaiterLimits, stored_id::StoredId},
    token::Resource,
};

/// How long a place lasts without its process, in seconds.
pub(super) const PLACE_SECONDS: u64 = 10;
/// How often places are kept alive.
const BEAT: Duration = Duration::from_millis(1_500);
/// How many places are kept alive by one call.
const BEAT_SIZE: usize = 500;
/// How long a watch may be silent.
const LONGEST_SILENCE: Duration = Duration::from_secs(10);
/// The pause after a watch that was lost.
const PAUSE: Duration = Duration::from_millis(50);

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
    /// Whether there is a task that keeps the places alive.
    beats: bool,
}

/// Those who wait here for one resource.
struct LocalLine {
    /// By stored id: more than one where a request is repeated while the first one still waits.
    seats: HashMap<StoredId, Vec<(i64, Arc<Notify>)>>,
    /// Dropped, it ends the watch.
    _watched: oneshot::Sender<()>,
}

/// A place among the waiters of this process, and the etcd lease of its place in line. Dropped, it ends both.
pub(super) struct Seat {
    waiters: Arc<Waiters>,
    resource: Resource,
    id: StoredId,
    etcd_lease: i64,
    wake: Arc<Notify>,
    _permit: OwnedSemaphorePermit,
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
        };
        let mut waiting = self.waiting();
        if !waiting.beats {
            waiting.beats = true;
            tokio::spawn(keep_places(Arc::downgrade(self)));
        }
        let line = waiting.lines.entry(resource.clone()).or_insert_with(|| {
            let (watched, end) = oneshot::channel();
            tokio::spawn(watch_line(Arc::downgrade(self), resource.clone(), end));
            LocalLine {
                seats: HashMap::new(),
                _watched: watched,
            }
        });
        let same_id = line.seats.entry(id.clone()).or_default();
        same_id.push((seat.etcd_lease, Arc::clone(&seat.wake)));
        Some(seat)
    }

    /// Wakes those who wait here for a resource and are chosen by their stored id.
    fn wake(&self, resource: &Resource, chosen: impl Fn(&str) -> bool) {
        if let Some(line) = self.waiting().lines.get(resource) {
            let chosen = line.seats.iter().filter(|(id, _)| chosen(id.as_str()));
            for (_, wake) in chosen.flat_map(|(_, seats)| seats) {
                wake.notify_one();
            }
        }
    }

    /// Wakes the one with this stored id.
    fn wake_one(&self, resource: &Resource, id: &str) {
        if let Some(line) = self.waiting().lines.get(resource) {
            let same_id = line.seats.get(id).into_iter().flatten();
            same_id.for_each(|(_, wake)| wake.notify_one());
        }
    }

    /// The etcd leases of all places; none where nobody waits, and the task that asks ends.
    fn places(&self) -> Vec<i64> {
        let mut waiting = self.waiting();
        let seats = waiting.lines.values().flat_map(|line| line.seats.values());
        let places: Vec<i64> = seats.flatten().map(|(etcd_lease, _)| *etcd_lease).collect();
        waiting.beats = !places.is_empty();
        places
    }

    /// Reads a line, and the revision at which it was so.
    async fn read_line(&self, resource: &Resource) -> Result<(Line, i64), EtcdError> {
        let (keys, line) = (self.etcd.keys(), self.etcd.keys().line(resource));
        let reads = [get(&keys.lease(resource)), get_range(line.range())];
        let body = json!({ "success": reads });
        let answer: TxnAnswer = self.etcd.gateway().call("/v3/kv/txn", &body).await?;
        let revision = answer.header.revision;
        let mut reads = answer.reads().into_iter();
        let mut keys = || reads.next().unwrap_or_default().kvs;
        let (lease, places) = (keys(), keys());
        let is_closed = !lease.is_empty();
        Ok((Line::read(is_closed, &places, &line.places), revision))
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        // Nothing panics while the lock is held.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Watches one line until nobody here waits in it.
async fn watch_line(waiters: Weak<Waiters>, resource: Resource, end: oneshot::Receiver<()>) {
    let watching = async {
        loop {
            let Some(waiters) = waiters.upgrade() else {
                return;
            };
            if watch_once(&waiters, &resource).await.is_err() {
                waiters.wake(&resource, |_| true);
            }
            drop(waiters);
            sleep(PAUSE).await;
        }
    };
    tokio::select! {
        _ = end => {}
        () = watching => {}
    }
}

/// Reads a line and follows it, until the watch is lost or silent.
async fn watch_once(waiters: &Waiters, resource: &Resource) -> Result<(), EtcdError> {
    let (mut line, revision) = waiters.read_line(resource).await?;
    let keys = waiters.etcd.keys();
    let line_keys = keys.line(resource);
    waiters.wake(resource, |id| !line.has(id));
    if let Some(first) = line.turn() {
        waiters.wake_one(resource, first);
    }
    let next = revision.saturating_add(1).to_string();
    let (first, end) = line_keys.range();
    let watches = [
        json!({ "create_request": { "key": base64(keys.lease(resource)), "start_revision": next } }),
        json!({ "create_request": {
            "key": base64(first), "range_end": base64(end), "start_revision": next,
        } }),
    ];
    let mut told = waiters.etcd.gateway().open("/v3/watch", &watches).await?;
    while let Ok(Some(Streamed { result })) =
        timeout(LONGEST_SILENCE, told.next::<Streamed<WatchAnswer>>()).await
    {
        if result.canceled {
            // The revisions that it was to begin with are compacted; or users were changed.
            return Ok(());
        }
        for event in &result.events {
            if let Some(lost) = line.apply(event, first) {
                waiters.wake_one(resource, &lost);
            }
        }
        if let Some(first) = line.turn() {
            waiters.wake_one(resource, first);
        }
    }
    Ok(())
}

/// Keeps the places of this process alive, until nobody waits.
async fn keep_places(waiters: Weak<Waiters>) {
    loop {
        sleep(BEAT).await;
        let Some(waiters) = waiters.upgrade() else {
            return;
        };
        let places = waiters.places();
        if places.is_empty() {
            return;
        }
        for places in places.chunks(BEAT_SIZE) {
            // A place that has ended is told by the watch; where etcd does not answer, the next beat tries again.
            let _ = waiters.etcd.keep_alive(places).await;
        }
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
        self.waiters.etcd.revoke_later(self.etcd_lease);
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
    }
}
