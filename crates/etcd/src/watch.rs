//! Watches that report the turns of the waiters of this process, and the renewal of their
//! positions.
//!
//! 1. A process watches the lease and the queue of each resource for which one of its requests
//!    waits. When it is a waiter's turn, the process notifies the request with the waiter's ticket.
//!    If the waiter belongs to another process, the notification has no effect. If a waiter has
//!    lost its position, for example because its lease id was released through another process, the
//!    process makes it retry, or abandons the request if its client has disconnected.
//! 2. If a watch is lost, or silent for ten seconds, the process reads the whole queue and watches
//!    it again. If that fails, every waiter of the resource retries, and receives its position, its
//!    grant, or an error. If the calls of the process and the watch use different endpoints, one
//!    second of silence is enough.
//! 3. If the etcd lease of the positions has ended, the process listens again, and every waiter
//!    retries.
//! 4. All positions of a process have one etcd lease. A renewal would therefore also keep a
//!    position without a request, for example one that could not be deleted, or that was restored
//!    from a snapshot. After a lost call or watch, the waiters move their positions to a new etcd
//!    lease, without changing their order. A position that no waiter moves expires with the old
//!    etcd lease.

use std::{
    collections::{HashMap, HashSet, hash_map::Entry},
    sync::{Arc, PoisonError},
    time::Duration,
};

use futures_util::{
    StreamExt,
    future::{AbortHandle, abortable},
    stream::FuturesUnordered,
};
use serde_json::json;
use tokio::{
    sync::mpsc,
    time::{Instant, interval, sleep, timeout},
};
use tower_fence::{
    Resource,
    lease::{LeaseError, Turns},
};

use crate::{
    EtcdBackend,
    error::EtcdError,
    etcd::Etcd,
    etcd_lease::random_id,
    messages::{Streamed, WatchAnswer, base64, get, get_range},
    watched_queue::WatchedQueue,
};

/// Time that positions last without a renewal, in seconds.
const POSITION_TTL: u64 = 10;
/// Interval between renewals of the positions.
const BEAT: Duration = Duration::from_millis(1_500);
/// Maximum time for which a watch may be silent.
const LONGEST_SILENCE: Duration = Duration::from_secs(10);
/// Time of silence after which the process checks whether its calls still go to the endpoint of the
/// watch.
const SILENCE: Duration = Duration::from_secs(1);
/// Pause after a watch was lost.
const PAUSE: Duration = Duration::from_millis(50);

impl EtcdBackend {
    /// Reports turns until no request waits, or the positions have expired.
    pub(crate) async fn report_turns(&self, turns: &Turns) -> Result<(), LeaseError> {
        let etcd = &self.etcd;
        let positions = random_id();
        etcd.make_lease(positions, POSITION_TTL).await?;
        let (follow, followed) = mpsc::unbounded_channel();
        *self.followed() = Some(follow);
        turns.ready(positions);
        tokio::select! {
            () = etcd.keep_positions(positions, turns) => {}
            () = etcd.watch_all(followed, turns) => {}
        }
        Ok(())
    }

    /// Begins to watch a resource, unless it is already watched.
    pub(crate) fn begin_watch(&self, resource: &Resource) {
        if let Some(followed) = &*self.followed() {
            // If the receiver has been dropped, this process no longer listens, and the request
            // cannot take a position either.
            let _ = followed.send(resource.clone());
        }
    }

    fn followed(&self) -> std::sync::MutexGuard<'_, Option<mpsc::UnboundedSender<Resource>>> {
        // No code panics while it holds the lock.
        self.followed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Etcd {
    /// Renews the positions until no request waits, or until they have expired.
    async fn keep_positions(self: &Arc<Self>, mut positions: i64, turns: &Turns) {
        loop {
            sleep(BEAT).await;
            if turns.resources().is_empty() {
                return self.revoke_later(positions);
            }
            if self.memory.take_stray() {
                let next = random_id();
                if self.make_lease(next, POSITION_TTL).await.is_ok() {
                    positions = next;
                    turns.ready(positions);
                    turns.call_all();
                    continue;
                }
                self.memory.note_stray();
            }
            match self.keep_alive(positions).await {
                Ok(0) => return,
                Ok(_) => {}
                // After a lost call, the next iteration moves all positions to a new etcd lease.
                Err(_) => self.memory.note_stray(),
            }
        }
    }

    /// Watches the resources that requests wait for.
    async fn watch_all(&self, mut followed: mpsc::UnboundedReceiver<Resource>, turns: &Turns) {
        let mut watches = FuturesUnordered::new();
        let mut watched: HashMap<Resource, AbortHandle> = HashMap::new();
        let mut beat = interval(BEAT);
        loop {
            tokio::select! {
                Some(resource) = followed.recv() => {
                    if let Entry::Vacant(entry) = watched.entry(resource) {
                        let (watch, handle) =
                            abortable(self.watch(entry.key().clone(), turns));
                        entry.insert(handle);
                        watches.push(watch);
                    }
                }
                Some(_) = watches.next() => {}
                _ = beat.tick() => {
                    let wanted: HashSet<Resource> = turns.resources().into_iter().collect();
                    watched.retain(|resource, watch| {
                        let is_wanted = wanted.contains(resource);
                        if !is_wanted {
                            watch.abort();
                        }
                        is_wanted
                    });
                }
            }
        }
    }

    /// Watches a resource until the future is dropped.
    async fn watch(&self, resource: Resource, turns: &Turns) {
        let mut queue = WatchedQueue::default();
        loop {
            if self.watch_once(&resource, &mut queue, turns).await.is_err() {
                self.memory.note_stray();
                turns.call_all_for(&resource);
            }
            sleep(PAUSE).await;
        }
    }

    /// Reads a queue and follows it, until the watch is lost or silent.
    async fn watch_once(
        &self,
        resource: &Resource,
        queue: &mut WatchedQueue,
        turns: &Turns,
    ) -> Result<(), EtcdError> {
        let (lease, positions) = (self.keys.lease(resource), self.keys.queue(resource));
        let answer = self.read(&[get(&lease), get_range(&positions)]).await?;
        let next = answer.header.revision.saturating_add(1).to_string();
        let mut reads = answer.reads();
        let mut read = || reads.next().unwrap_or_default().kvs;
        let is_blocked = !read().is_empty();
        for lost in queue.read(is_blocked, &read()) {
            turns.call_off(lost);
        }
        if let Some(first) = queue.turn() {
            turns.call(first);
        }
        let watches = [
            json!({ "create_request": { "key": base64(&lease), "start_revision": next } }),
            json!({ "create_request": {
                "key": base64(&positions.0), "range_end": base64(&positions.1), "start_revision": next,
            } }),
        ];
        let mut stream = self.gateway.open("/v3/watch", &watches).await?;
        let (endpoint, mut received_at) = (self.gateway.current(), Instant::now());
        // After `LONGEST_SILENCE` without a message, the queue is read again. If the calls of this
        // process go to another endpoint by now, the queue is read after `SILENCE`, because the
        // endpoint of the watch may no longer respond.
        while received_at.elapsed() < LONGEST_SILENCE {
            let next = stream.next::<Streamed<WatchAnswer>>();
            let Ok(answer) = timeout(SILENCE, next).await else {
                if self.gateway.current() != endpoint {
                    break;
                }
                continue;
            };
            received_at = Instant::now();
            let Some(Streamed { result }) = answer else {
                self.memory.note_stray();
                break;
            };
            if result.canceled {
                // etcd has compacted the revisions at which the watches begin, or its users have
                // changed.
                return Ok(());
            }
            for event in &result.events {
                if let Some(lost) = queue.apply(event, lease.as_bytes()) {
                    turns.call_off(lost);
                }
            }
            if let Some(first) = queue.turn() {
                turns.call(first);
            }
        }
        Ok(())
    }
}
