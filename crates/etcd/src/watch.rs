//! How this process hears of the turns of its waiters, and keeps their positions.
//!
//! 1. Each resource that a request of this process waits for has a watch over its lease and its
//!    queue. When it is the turn of a waiter, its ticket is called: if it waits at another process,
//!    nothing happens.
//! 2. A watch that is lost, or silent for ten seconds, begins anew with a read of the whole queue.
//!    If that fails, every waiter of the resource asks: for its position, its grant, or an error.
//! 3. If the etcd lease of the positions has ended, the process listens anew and every waiter asks.

use std::{
    collections::{HashMap, HashSet, hash_map::Entry},
    sync::PoisonError,
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
    time::{interval, sleep, timeout},
};
use tower_fence::{
    Resource,
    lease::{LeaseError, Turns},
};

use crate::{
    EtcdBackend,
    error::EtcdError,
    etcd::{Etcd, random_id},
    line::Line,
    messages::{Streamed, WatchAnswer, base64, get, get_range},
};

/// How long positions last without their process, in seconds.
const POSITION_TTL: u64 = 10;
/// How often positions are kept alive.
const BEAT: Duration = Duration::from_millis(1_500);
/// How long a watch may be silent.
const LONGEST_SILENCE: Duration = Duration::from_secs(10);
/// The pause after a watch that was lost.
const PAUSE: Duration = Duration::from_millis(50);

impl EtcdBackend {
    /// Hears of turns until no request waits, or the positions have ended.
    pub(crate) async fn hear(&self, turns: &Turns) -> Result<(), LeaseError> {
        let etcd = &self.etcd;
        let positions = random_id();
        etcd.make_lease(positions, POSITION_TTL).await?;
        let (follow, followed) = mpsc::unbounded_channel();
        *self.followed() = Some(follow);
        turns.ready(positions.to_string());
        tokio::select! {
            () = etcd.keep_positions(positions, turns) => {}
            () = etcd.watch_all(followed, turns) => {}
        }
        etcd.revoke_later(positions);
        Ok(())
    }

    /// Has a resource watched from now on.
    pub(crate) fn watch(&self, resource: &Resource) {
        if let Some(followed) = &*self.followed() {
            // If nothing listens any more, the position cannot be taken either.
            let _ = followed.send(resource.clone());
        }
    }

    fn followed(&self) -> std::sync::MutexGuard<'_, Option<mpsc::UnboundedSender<Resource>>> {
        // Nothing panics while the lock is held.
        self.followed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Etcd {
    async fn keep_positions(&self, positions: i64, turns: &Turns) {
        loop {
            sleep(BEAT).await;
            if turns.resources().is_empty() {
                return;
            }
            // If etcd does not answer, the next beat tries again.
            if let Ok(0) = self.keep_alive(positions).await {
                return;
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

    async fn watch(&self, resource: Resource, turns: &Turns) {
        let mut line = Line::default();
        loop {
            if self.watch_once(&resource, &mut line, turns).await.is_err() {
                turns.call_all_for(&resource);
            }
            sleep(PAUSE).await;
        }
    }

    /// Reads a queue and follows it, until the watch is lost or silent.
    async fn watch_once(
        &self,
        resource: &Resource,
        line: &mut Line,
        turns: &Turns,
    ) -> Result<(), EtcdError> {
        let (lease, queue) = (self.keys.lease(resource), self.keys.queue(resource));
        let answer = self
            .txn(&[], &[get(&lease), get_range(&queue)], &[])
            .await?;
        let next = answer.header.revision.saturating_add(1).to_string();
        let mut reads = answer.reads();
        let mut read = || reads.next().unwrap_or_default().kvs;
        let is_blocked = !read().is_empty();
        for lost in line.read(is_blocked, &read()) {
            turns.call(lost);
        }
        if let Some(first) = line.turn() {
            turns.call(first);
        }
        let watches = [
            json!({ "create_request": { "key": base64(&lease), "start_revision": next } }),
            json!({ "create_request": {
                "key": base64(&queue.0), "range_end": base64(&queue.1), "start_revision": next,
            } }),
        ];
        let mut stream = self.gateway.open("/v3/watch", &watches).await?;
        while let Ok(Some(Streamed { result })) =
            timeout(LONGEST_SILENCE, stream.next::<Streamed<WatchAnswer>>()).await
        {
            if result.canceled {
                // The revisions that it was to begin with are compacted, or users were changed.
                return Ok(());
            }
            for event in &result.events {
                if let Some(lost) = line.apply(event, lease.as_bytes()) {
                    turns.call(lost);
                }
            }
            if let Some(first) = line.turn() {
                turns.call(first);
            }
        }
        Ok(())
    }
}
