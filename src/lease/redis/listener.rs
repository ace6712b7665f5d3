//! The connection on which an issuer hears of grants: one for all its waiters, as long as there are
//! any.

use std::{
    collections::BTreeSet,
    io,
    sync::{Arc, OnceLock, Weak},
    time::Duration,
};

use futures_util::{StreamExt, stream::FuturesUnordered};
use redis::{Msg, PushInfo, PushKind, RedisResult};
use tokio::{
    sync::{mpsc, oneshot, watch},
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
    subscriptions: Arc<OnceLock<mpsc::UnboundedSender<Subscription>>>,
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
        let subscriptions = self.subscriptions.get_or_init(|| {
            let (subscriptions, requests) = mpsc::unbounded_channel();
            tokio::spawn(run(Arc::downgrade(&self.waiters), requests));
            subscriptions
        });
        let (done, outcome) = oneshot::channel();
        let _ = subscriptions.send(Subscription { partition, done });
        // The task has ended where the runtime has in which it was spawned.
        let ended = || Err(io::Error::from(io::ErrorKind::BrokenPipe).into());
        let outcome = async { outcome.await.unwrap_or_else(|_| ended()) };
        let server = self.waiters.scripts().server();
        let outcome = in_time(server.limit(), outcome).await;
        outcome.map_err(|error| server.unavailable(error))
    }
}

/// Listens on one connection for all waiters, and connects again when it is lost. No partition is
/// subscribed to then, until a waiter that was woken asks for that.
async fn run(waiters: Weak<Waiters>, mut requests: mpsc::UnboundedReceiver<Subscription>) {
    // Without a waiter there is no connection.
    while let Some(first) = requests.recv().await {
        let Some(connecting) = waiters.upgrade() else {
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
                while let Ok(other) = requests.try_recv() {
                    let _ = other.done.send(Err(error.clone()));
                }
                continue;
            }
        };
        drop(connecting);
        hear(
            subscriber,
            pushes,
            &waiters,
            &mut requests,
            &mut changes,
            first,
        )
        .await;
        // Each waiter asks again: for its place, or for an error.
        let Some(waiters) = waiters.upgrade() else {
            return;
        };
        waiters.wake_all();
        sleep(Duration::from_millis(10)).await;
    }
}

/// Hands on what is published, until the connection is lost or leads to the wrong server.
async fn hear(
    subscriber: Subscriber,
    mut pushes: mpsc::UnboundedReceiver<PushInfo>,
    waiters: &Weak<Waiters>,
    requests: &mut mpsc::UnboundedReceiver<Subscription>,
    changes: &mut watch::Receiver<u64>,
    first: Subscription,
) {
    let mut partitions = BTreeSet::new();
    // Beside what is heard meanwhile: a server of a cluster may be silent, while others go on.
    let mut attempts = FuturesUnordered::new();
    let Subscription { partition, done } = first;
    attempts.push(subscribe(&subscriber, waiters, partition, Some(done)));
    let mut next_beat = Instant::now() + HEARTBEAT;
    loop {
        tokio::select! {
            request = requests.recv() => {
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
