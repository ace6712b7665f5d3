//! How the waiters of this process hear of their turns, and keep their places.
//!
//! 1. The process has one watch for each resource that somebody waits for, over the lease and the line. When it is the
//!    turn of one of its own, it wakes that one, and nobody else: no herd, and nobody polls.
//! 2. A watch that is lost, or has nothing to tell for ten seconds, begins anew with a look at the whole line. Where that
//!    fails, every waiter asks: for its place, its grant, or an error.
//! 3. What watches, and what keeps places alive, are tasks of the runtime in which somebody has waited first. Where that
//!    ends, those who wait in another one ask again, and begin them there.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use serde_json::json;
use tokio::{
    sync::oneshot,
    time::{sleep, timeout},
};

use super::{
    gateway::EtcdError,
    line::Line,
    messages::{Streamed, TxnAnswer, WatchAnswer, base64, get, get_range},
    server::Etcd,
    waiters::{Unserved, Waiters},
};
use crate::token::Resource;

/// How often places are kept alive.
const BEAT: Duration = Duration::from_millis(1_500);
/// How many places are kept alive by one call.
const BEAT_SIZE: usize = 500;
/// How long a watch may be silent.
const LONGEST_SILENCE: Duration = Duration::from_secs(10);
/// The pause after a watch that was lost.
const PAUSE: Duration = Duration::from_millis(50);

/// What is done for those who wait, in a task of its own.
enum Service {
    /// The line of a resource is watched.
    Watch(Resource),
    /// All places are kept alive.
    Keep,
}

/// A task that serves, until nobody needs it or its runtime ends. Then those whom it has served ask again.
struct Serving {
    waiters: Weak<Waiters>,
    service: Service,
    end: oneshot::Receiver<()>,
}

/// Begins what serves those who wait for a resource, unless it runs.
pub(super) fn serve(waiters: &Arc<Waiters>, resource: &Resource) {
    let Unserved { line, places } = waiters.unserved(resource);
    let watch = line.map(|end| (Service::Watch(resource.clone()), end));
    let keep = places.map(|end| (Service::Keep, end));
    for (service, end) in [watch, keep].into_iter().flatten() {
        let waiters = Arc::downgrade(waiters);
        let serving = Serving {
            waiters,
            service,
            end,
        };
        tokio::spawn(serving.run());
    }
}

impl Serving {
    async fn run(mut self) {
        let waiters = &self.waiters;
        let serving = async {
            match &self.service {
                Service::Watch(resource) => watch_line(waiters, resource).await,
                Service::Keep => keep_places(waiters).await,
            }
        };
        tokio::select! {
            _ = &mut self.end => {}
            () = serving => {}
        }
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.end.close();
        if let Some(waiters) = self.waiters.upgrade() {
            match &self.service {
                Service::Watch(resource) => waiters.wake(resource, |_| true),
                Service::Keep => waiters.wake_all(),
            }
        }
    }
}

/// Watches one line.
async fn watch_line(waiters: &Weak<Waiters>, resource: &Resource) {
    loop {
        let Some(waiters) = waiters.upgrade() else {
            return;
        };
        if watch_once(&waiters, resource).await.is_err() {
            waiters.wake(resource, |_| true);
        }
        drop(waiters);
        sleep(PAUSE).await;
    }
}

/// Reads a line and follows it, until the watch is lost or silent.
async fn watch_once(waiters: &Waiters, resource: &Resource) -> Result<(), EtcdError> {
    let (mut line, revision) = read_line(waiters.etcd(), resource).await?;
    let keys = waiters.etcd().keys();
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
    let mut told = waiters.etcd().gateway().open("/v3/watch", &watches).await?;
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

/// Reads a line, and the revision at which it was so.
async fn read_line(etcd: &Etcd, resource: &Resource) -> Result<(Line, i64), EtcdError> {
    let (keys, line) = (etcd.keys(), etcd.keys().line(resource));
    let reads = [get(&keys.lease(resource)), get_range(line.range())];
    let body = json!({ "success": reads });
    let answer: TxnAnswer = etcd.gateway().call("/v3/kv/txn", &body).await?;
    let revision = answer.header.revision;
    let mut reads = answer.reads().into_iter();
    let mut keys = || reads.next().unwrap_or_default().kvs;
    let (lease, places) = (keys(), keys());
    let is_closed = !lease.is_empty();
    Ok((Line::read(is_closed, &places, &line.places), revision))
}

/// Keeps the places of this process alive.
async fn keep_places(waiters: &Weak<Waiters>) {
    loop {
        sleep(BEAT).await;
        let Some(waiters) = waiters.upgrade() else {
            return;
        };
        let places = waiters.places();
        for places in places.chunks(BEAT_SIZE) {
            // A place that has ended is told by the watch; where etcd does not answer, the next beat tries again.
            let _ = waiters.etcd().keep_alive(places).await;
        }
    }
}
