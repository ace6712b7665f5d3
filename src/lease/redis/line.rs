//! The issuer's side of a line: who of this process waits, and how they hear of their turn.
//!
//! 1. A waiter stands in line in Redis, under the channel of its issuer.
//! 2. The script that ends a lease grants it to the first in line and publishes that on the
//!    channel of its issuer; where nobody listens there, the issuer has died, and the next one has
//!    it. The waiter claims the lease by asking again; unclaimed, it ends after a second.
//! 3. Each grant and each renewal is also published to all issuers that have waiters in the
//!    partition, with the time it lasts. When that time is over, each of them looks once per
//!    resource; the first one hands the lease over. Nobody polls.
//!    As a safety net, each issuer also looks every ten seconds, whatever the number of waiters.
//! 4. When the connection that listens is lost, or silent, every waiter asks again: it finds its
//!    place, its grant, or an error.

use std::{
    collections::HashMap,
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::Duration,
};

use tokio::{
    sync::{Notify, OwnedSemaphorePermit, Semaphore, mpsc, oneshot, watch},
    time::{Instant, sleep_until},
};

use super::{
    answer::{Answer, parse_ms},
    listener::{Subscription, listen},
    scripts::Scripts,
    server::in_time,
};
use crate::{
    epochs::partition_of,
    lease::{LeaseError, LeaseId, WaiterLimits},
    token::Resource,
};

/// The lines in which somebody of this process waits.
pub(super) struct Lines {
    scripts: Arc<Scripts>,
    issuer: LeaseId,
    lines: Mutex<HashMap<Box<str>, Line>>,
    /// A seat for each that may wait, for one resource and in all.
    per_resource: usize,
    seats: Arc<Semaphore>,
    subscriptions: mpsc::UnboundedSender<Subscription>,
}

/// Those who wait for one resource, by lease id.
struct Line {
    /// More than one where a request is repeated while the first one still waits.
    waiters: HashMap<Box<str>, Vec<Arc<Notify>>>,
    /// How many these are.
    count: usize,
    /// When the lease ends that is in the way.
    ends: watch::Sender<Instant>,
}

/// How long to sleep where nothing is known, or the end is far: so late a line is found that was
/// lost without a word (FLUSHALL).
const FAR: Duration = Duration::from_secs(10);

impl Lines {
    pub(super) fn new(scripts: Arc<Scripts>, limits: WaiterLimits) -> Arc<Self> {
        let (subscriptions, wanted) = mpsc::unbounded_channel();
        let lines = Arc::new(Self {
            issuer: LeaseId::random(),
            scripts,
            lines: Mutex::default(),
            per_resource: limits.per_resource,
            seats: limits.seats(),
            subscriptions,
        });
        tokio::spawn(listen(Arc::downgrade(&lines), wanted));
        lines
    }

    /// Whether somebody of this process waits.
    pub(super) fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    /// The scripts, and the server that they run on.
    pub(super) fn scripts(&self) -> &Scripts {
        &self.scripts
    }

    /// How many may wait for one resource.
    pub(super) const fn per_resource(&self) -> usize {
        self.per_resource
    }

    /// The channel on which this issuer alone listens, for a partition.
    pub(super) fn channel(&self, partition: u8) -> String {
        self.scripts.own_channel(partition, self.issuer.expose())
    }

    /// The channel on which all issuers listen that have waiters in a partition.
    pub(super) fn everybody(&self, partition: u8) -> String {
        self.scripts.everybody(partition)
    }

    /// Makes sure that this issuer listens to the partition of a resource.
    pub(super) async fn listen(&self, resource: &Resource) -> Result<(), LeaseError> {
        let (done, listening) = oneshot::channel();
        let _ = self.subscriptions.send((partition_of(resource), done));
        // Nobody answers where the runtime has ended in which this store was made.
        let nobody = || Err(io::Error::from(io::ErrorKind::BrokenPipe).into());
        let listening = async { listening.await.unwrap_or_else(|_| nobody()) };
        let listening = in_time(self.scripts.server().limit(), listening).await;
        listening.map_err(LeaseError::unavailable)
    }

    /// A request that begins.
    pub(super) fn enter(self: &Arc<Self>, resource: &Resource, id: &LeaseId) -> Place {
        Place {
            lines: Arc::clone(self),
            resource: resource.clone(),
            id: id.clone(),
            key: self.scripts.lease_key(resource).into(),
            called: Arc::default(),
            seat: None,
            ticket: rand::random(),
            arrived: false,
        }
    }

    /// Hands on what was published.
    pub(super) fn published(&self, channel: &str, message: &str) {
        let Some((first, key)) = message.split_once(' ') else {
            return;
        };
        let lines = self.lock();
        let Some(line) = lines.get(key) else {
            return;
        };
        if !channel.ends_with(self.issuer.expose()) {
            line.ends
                .send_replace(Instant::now() + parse_ms(first).min(FAR));
        } else if let Some(same_id) = line.waiters.get(first) {
            same_id.iter().for_each(|waiter| waiter.notify_one());
        } else if first == "*" {
            // All that were passed over.
            let waiters = line.waiters.values().flatten();
            waiters.for_each(|waiter| waiter.notify_one());
        }
    }

    /// Has every waiter ask again.
    pub(super) fn call_all(&self, key: Option<&str>) {
        for (name, line) in &*self.lock() {
            if key.is_none_or(|key| **name == *key) {
                let waiters = line.waiters.values().flatten();
                waiters.for_each(|waiter| waiter.notify_one());
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Box<str>, Line>> {
        // Nothing panics while the lock is held.
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A request that is under way. Dropped before it has arrived, it leaves the line and gives back
/// what was granted to it, in Redis too.
pub(super) struct Place {
    lines: Arc<Lines>,
    resource: Resource,
    id: LeaseId,
    key: Box<str>,
    called: Arc<Notify>,
    seat: Option<OwnedSemaphorePermit>,
    ticket: u64,
    arrived: bool,
}

impl Place {
    /// What tells this request from others under the same lease id.
    pub(super) const fn ticket(&self) -> u64 {
        self.ticket
    }

    /// Notes that somebody of this process waits, to be called. False, and nothing is noted, where
    /// too many wait.
    pub(super) fn join(&mut self) -> bool {
        if self.seat.is_some() {
            return true;
        }
        let mut lines = self.lines.lock();
        let before = lines.get(&self.key).map_or(0, |line| line.count);
        if before >= self.lines.per_resource {
            return false;
        }
        self.seat = Arc::clone(&self.lines.seats).try_acquire_owned().ok();
        if self.seat.is_none() {
            return false;
        }
        let line = lines.entry(self.key.clone()).or_insert_with(|| {
            let (ends, watched) = watch::channel(Instant::now() + FAR);
            let lines = Arc::downgrade(&self.lines);
            tokio::spawn(watch_line(lines, self.resource.clone(), watched));
            Line {
                waiters: HashMap::new(),
                count: 0,
                ends,
            }
        });
        let same_id = line.waiters.entry(self.id.expose().into()).or_default();
        same_id.push(Arc::clone(&self.called));
        line.count += 1;
        true
    }

    /// Waits until asking again may help.
    pub(super) async fn called(&self) {
        self.called.notified().await;
    }

    /// Notes how long the resource stays closed.
    pub(super) fn closed_for(&self, left: Duration) {
        let end = Instant::now() + left.min(FAR);
        if let Some(line) = self.lines.lock().get(&self.key) {
            // What was published meanwhile is newer than this answer. To look too early does no
            // harm.
            line.ends.send_if_modified(|ends| {
                let earlier = end < *ends;
                *ends = end.min(*ends);
                earlier
            });
        }
    }

    /// The request is over, and Redis knows.
    pub(super) fn arrived(mut self) {
        self.arrived = true;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.leave() || self.arrived {
            return;
        }
        let (lines, resource, id) = (self.lines.clone(), self.resource.clone(), self.id.clone());
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            let ticket = self.ticket;
            runtime.spawn(async move { lines.scripts.abandon(&resource, &id, ticket).await });
        }
    }
}

impl Place {
    /// Leaves the line of this process; true when a request with the same id still waits.
    fn leave(&self) -> bool {
        let mut lines = self.lines.lock();
        let Some(line) = lines.get_mut(&self.key) else {
            return false;
        };
        let Some(same_id) = line.waiters.get_mut(self.id.expose()) else {
            return false;
        };
        let before = same_id.len();
        same_id.retain(|waiter| !Arc::ptr_eq(waiter, &self.called));
        line.count -= before - same_id.len();
        if !same_id.is_empty() {
            return true;
        }
        line.waiters.remove(self.id.expose());
        if line.waiters.is_empty() {
            lines.remove(&self.key);
        }
        false
    }
}

/// Looks when the lease that is in the way has ended, as long as somebody waits.
async fn watch_line(lines: Weak<Lines>, resource: Resource, mut ends: watch::Receiver<Instant>) {
    loop {
        let end = *ends.borrow_and_update();
        tokio::select! {
            biased;
            changed = ends.changed() => match changed {
                Ok(()) => continue,
                // Nobody waits any more.
                Err(_) => return,
            },
            // Redis counts whole milliseconds.
            () = sleep_until(end + Duration::from_millis(1)) => {}
        }
        let Some(lines) = lines.upgrade() else {
            return;
        };
        let scripts = &lines.scripts;
        let key = scripts.lease_key(&resource);
        let some_waiter = {
            let lines = lines.lock();
            let waiters = lines.get(&*key).and_then(|line| line.waiters.keys().next());
            waiters.cloned().unwrap_or_default()
        };
        let next_look = match scripts.tick(&resource, &some_waiter).await {
            Ok(Answer::Watched { left, in_line }) => {
                if !in_line {
                    // Passed over, or the line was lost.
                    lines.call_all(Some(&key));
                }
                left
            }
            Ok(_) => {
                lines.call_all(Some(&key));
                scripts.server().command_wait()
            }
            Err(_) => scripts.server().command_wait(),
        };
        let lines = lines.lock();
        // What was published meanwhile is newer than this answer.
        if let Some(line) = lines.get(&*key)
            && !ends.has_changed().unwrap_or(true)
        {
            // A key without an end is none of ours; looking at it all the time does not help.
            let next_look = next_look.clamp(Duration::from_millis(20), FAR);
            line.ends.send_replace(Instant::now() + next_look);
        }
    }
}
