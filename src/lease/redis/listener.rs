//! The connection on which an issuer hears of grants: one for all its waiters, as long as there are
//! any. The task that listens is one of the runtime in which somebody has waited first. Where that
//! ends, those who wait in another one ask again, and begin it there.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, PoisonError, Weak},
    time::Duration,
};

use futures_util::{StreamExt, stream::FuturesUnordered};
use redis::{Msg, PushInfo, PushKind, RedisResult};
use tokio::{
    sync::{mpsc, oneshot, watch},
    task::yield_now,
    time::{Instant, sleep, sleep_until},
};

use super::{connection::Subscriber, server::in_time, waiters::Waiters};
use crate::lease::LeaseError;

/// How often to make sure that the connection still hears, while there are waiters.
const HEARTBEAT: Duration = Duration::from_secs(2);

/// A request to listen to a partition.
struct Subscription {
    partition: u8,
    /// Takes the outcome.
    done: oneshot::Sender<RedisResult<()>>,
}

/// What has this issuer listen to partitions. Clones share one connection, which is closed with the
/// last of them.
#[derive(Clone)]
pub(super) struct Listener {
    waiters: Arc<Waiters>,
    /// Leads to the task that listens, from the first subscription on.
    subscriptions: Arc<Mutex<Option<mpsc::UnboundedSender<Subscription>>>>,
}

impl Listener {
    pub(super) fn new(waiters: Arc<Waiters>) -> Self {
        Self {
            waiters,
            subscriptions: Arc::default(),
        }
    }

    /// Makes sure that this issuer listens to a partition.
    pub(super) async fn listen(&self, partition: u8) -> Result<(), LeaseError> {
        let server = self.waiters.scripts().server();
        let listening = async {
            loop {
                let (done, outcome) = oneshot::channel();
                let _ = self.subscriptions().send(Subscription { partition, done });
                match outcome.await {
                    Ok(outcome) => return outcome,
                    // The task ends, with the runtime in which it was spawned.
                    Err(_) => yield_now().await,
                }
            }
        };
        let outcome = in_time(server.limit(), listening).await;
        outcome.map_err(|error| server.unavailable(error))
    }

    /// Leads to the task that listens, which is begun where none runs.
    fn subscriptions(&self) -> mpsc::UnboundedSender<Subscription> {
        // Nothing panics while the lock is held.
        let running = self.subscriptions.lock();
        let mut running = running.unwrap_or_else(PoisonError::into_inner);
        if let Some(running) = running.as_ref().filter(|running| !running.is_closed()) {
            return running.clone();
        }
        let (subscriptions, requests) = mpsc::unbounded_channel();
        *running = Some(subscriptions.clone());
        // A runtime that is about to end drops a task at once.
        drop(running);
        let waiters = Arc::downgrade(&self.waiters);
        tokio::spawn(Task { waiters, requests }.run());
        subscriptions
    }
}

/// The task that listens. When it ends every waiter asks again.
struct Task {
    waiters: Weak<Waiters>,
    requests: mpsc::UnboundedReceiver<Subscription>,
}

impl Drop for Task {
    fn drop(&mut self) {
        self.requests.close();
        if let Some(waiters) = self.waiters.upgrade() {
            waiters.wake_all();
        }
    }
}

impl Task {
    /// Listens on one connection for all waiters, and connects again when it is lost. No partition is
    /// subscribed to then, until a waiter that was woken asks for that.
    async fn run(mut self) {
        // Without a waiter there is no connection.
        while let Some(first) = self.requests.recv().await {
            let Some(connecting) = self.waiters.upgrade() else {
                return;
            };
            let server = connecting.scripts().server();
            let mut changes = server.changes();
            let (sender, pushes) = mpsc::unbounded_channel();
            let subscriber = match server.subscriber(sender).await {
                Ok(subscriber) => subscriber,
                Err(error) => {
                    // Those that asked meanwhile fail with the first one.
                    let _ = first.done.send(Err(error.clone()));
                    while let Ok(other) = self.requests.try_recv() {
                        let _ = other.done.send(Err(error.clone()));
                    }
                    continue;
                }
            };
            drop(connecting);
            self.hear(subscriber, pushes, &mut changes, first).await;
            // Each waiter asks again: for its place, or for an error.
            let Some(waiters) = self.waiters.upgrade() else {
                return;
            };
            waiters.wake_all();
            sleep(Duration::from_millis(10)).await;
        }
    }

    /// Hands on what is published, until the connection is lost or leads to the wrong server.
    async fn hear(
        &mut self,
        subscriber: Subscriber,
        mut pushes: mpsc::UnboundedReceiver<PushInfo>,
        changes: &mut watch::Receiver<u64>,
        first: Subscription,
    ) {
        let waiters = &self.waiters;
        let mut partitions = BTreeSet::new();
        // Beside what is heard meanwhile: a server of a cluster may be silent, while others go on.
        let mut attempts = FuturesUnordered::new();
        let Subscription { partition, done } = first;
        attempts.push(subscribe(&subscriber, waiters, partition, Some(done)));
        let mut next_beat = Instant::now() + HEARTBEAT;
        loop {
            tokio::select! {
                request = self.requests.recv() => {
                    let Some(Subscription { partition, done }) = request else {
                        return;
                    };
                    if partitions.contains(&partition) {
                        let _ = done.send(Ok(()));
                    } else {
                        attempts.push(subscribe(&subscriber, waiters, partition, Some(done)));
                    }
                }
                Some((partition, done, outcome)) = attempts.next() => {
                    if outcome.is_ok() {
                        partitions.insert(partition);
                    } else if partitions.remove(&partition) {
                        if !subscriber.has_many_servers() {
                            return;
                        }
                        // Its waiters ask again; to the others that does no harm.
                        if let Some(waiters) = waiters.upgrade() {
                            waiters.wake_all();
                        }
                    }
                    if let Some(done) = done {
                        let _ = done.send(outcome);
                    }
                }
                push = pushes.recv() => {
                    let (Some(push), Some(waiters)) = (push, waiters.upgrade()) else {
                        return;
                    };
                    // A slot has moved, or a connection was lost.
                    if matches!(push.kind, PushKind::Disconnection | PushKind::SUnsubscribe) {
                        return;
                    }
                    if let Some(message) = Msg::from_push_info(push)
                        && let Ok(payload) = message.get_payload::<String>()
                    {
                        waiters.deliver(message.get_channel_name(), &payload);
                    }
                }
                _ = changes.changed() => return,
                () = sleep_until(next_beat) => {
                    let Some(waiters_now) = waiters.upgrade() else {
                        return;
                    };
                    // Subscribing again changes nothing, and is answered.
                    if !waiters_now.is_empty() && attempts.is_empty() {
                        let again = partitions.iter();
                        attempts.extend(again.map(|one| subscribe(&subscriber, waiters, *one, None)));
                    }
                    next_beat = Instant::now() + HEARTBEAT;
                }
            }
        }
    }
}

/// Subscribes to a partition, or makes sure that this was done and holds. Returns the outcome with
/// the partition and with what takes it.
async fn subscribe(
    subscriber: &Subscriber,
    waiters: &Weak<Waiters>,
    partition: u8,
    done: Option<oneshot::Sender<RedisResult<()>>>,
) -> (
    u8,
    Option<oneshot::Sender<RedisResult<()>>>,
    RedisResult<()>,
) {
    let outcome = match waiters.upgrade() {
        Some(waiters) => {
            let channels = [
                waiters.own_channel(partition),
                waiters.shared_channel(partition),
            ];
            let server = waiters.scripts().server();
            server.subscribe(subscriber, channels).await
        }
        None => Ok(()),
    };
    (partition, done, outcome)
}
