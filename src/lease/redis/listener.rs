//! Connection on which a process receives notifications. One connection serves all its waiters.
//!
//! 1. A waiter is in the queue in Redis, with the channel of its process.
//! 2. The script that releases or breaks a lease grants the resource to the first waiter in the
//!    queue, and publishes the grant on the channel of the waiter's process. If no process listens
//!    on the channel, the waiter's process has terminated, and the script grants the lease to the
//!    next waiter. The waiter confirms the lease with a retry. An unconfirmed lease expires after a
//!    second.
//! 3. Each grant and each renewal is also published, with the TTL of the lease, to all processes
//!    with waiters in the partition. When the TTL has elapsed, each of these processes retries once
//!    for the resource, and the first retry makes the script grant the lease to the first waiter.
//!    No waiter polls.

use std::{collections::BTreeSet, time::Duration};

use futures_util::{StreamExt, stream::FuturesUnordered};
use redis::{Msg, PushInfo, PushKind, RedisResult};
use tokio::{
    sync::{mpsc, oneshot, watch},
    time::{Instant, sleep_until},
};

use super::{
    answer::parse_ms,
    connection::Connection,
    list::resource_of_key,
    server::in_time,
    store::{RedisBackend, Subscription},
};
use crate::lease::{LeaseError, Turns};

/// Interval at which the connection is checked while requests wait.
const HEARTBEAT: Duration = Duration::from_secs(2);

impl RedisBackend {
    /// Makes sure that this process is subscribed to a partition.
    pub(super) async fn subscribe(&self, partition: u8) -> Result<(), LeaseError> {
        let server = self.scripts().server();
        let (done, outcome) = oneshot::channel();
        let sent = self
            .subscriptions()
            .as_ref()
            .is_some_and(|listening| listening.send(Subscription { partition, done }).is_ok());
        if !sent {
            return Err(LeaseError::unavailable(NotHeard));
        }
        let outcome = async {
            match outcome.await {
                Ok(outcome) => Ok(outcome),
                Err(_) => Ok(Err(std::io::Error::from(
                    std::io::ErrorKind::ConnectionReset,
                )
                .into())),
            }
        };
        let subscribed = in_time(server.limit(), outcome).await.and_then(|done| done);
        subscribed.map_err(|error| server.unavailable(error))
    }

    /// Receives notifications for all waiters on one connection until the connection is lost. The
    /// connection has no subscriptions at first.
    pub(super) async fn hear(&self, turns: &Turns) -> Result<(), LeaseError> {
        let server = self.scripts().server();
        let mut changes = server.changes();
        let (sender, pushes) = mpsc::unbounded_channel();
        let connected = server.subscriber(sender).await;
        let subscriber = connected.map_err(|error| server.unavailable(error))?;
        let (subscriptions, requests) = mpsc::unbounded_channel();
        self.listens(Some(subscriptions));
        turns.ready(&self.issuer);
        self.hand_on(turns, subscriber, pushes, requests, &mut changes)
            .await;
        self.listens(None);
        Ok(())
    }

    /// Passes notifications on until the connection is lost or leads to the wrong server.
    async fn hand_on(
        &self,
        turns: &Turns,
        subscriber: Connection,
        mut pushes: mpsc::UnboundedReceiver<PushInfo>,
        mut requests: mpsc::UnboundedReceiver<Subscription>,
        changes: &mut watch::Receiver<u64>,
    ) {
        let mut partitions = BTreeSet::new();
        // Subscriptions run concurrently with receiving, because in a cluster, other servers may
        // send messages while one server does not respond.
        let mut attempts = FuturesUnordered::new();
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
                        attempts.push(self.subscribe_to(&subscriber, partition, Some(done)));
                    }
                }
                Some((partition, done, outcome)) = attempts.next() => {
                    if outcome.is_ok() {
                        partitions.insert(partition);
                    } else if partitions.remove(&partition) {
                        if !subscriber.has_many_servers() {
                            return;
                        }
                        // All waiters retry, although only those of this partition must. An
                        // unnecessary retry does no harm.
                        turns.call_all();
                    }
                    if let Some(done) = done {
                        let _ = done.send(outcome);
                    }
                }
                push = pushes.recv() => {
                    let Some(push) = push else {
                        return;
                    };
                    // A slot was moved, or a connection was lost.
                    if matches!(push.kind, PushKind::Disconnection | PushKind::SUnsubscribe) {
                        return;
                    }
                    if let Some(message) = Msg::from_push_info(push)
                        && let Ok(payload) = message.get_payload::<String>()
                    {
                        self.deliver(turns, message.get_channel_name(), &payload);
                    }
                }
                _ = changes.changed() => return,
                () = sleep_until(next_beat) => {
                    // A repeated subscription has no effect, but the server must answer it.
                    if !turns.resources().is_empty() && attempts.is_empty() {
                        let again = partitions.iter();
                        attempts.extend(again.map(|one| self.subscribe_to(&subscriber, *one, None)));
                    }
                    next_beat = Instant::now() + HEARTBEAT;
                }
            }
        }
    }

    /// Evaluates a message that a script has published.
    fn deliver(&self, turns: &Turns, channel: &str, message: &str) {
        let Some((first, key)) = message.split_once(' ') else {
            return;
        };
        if channel.ends_with(&*self.issuer)
            && let Ok(ticket) = first.parse()
        {
            return turns.call(ticket);
        }
        let begin = self.scripts().key_begin();
        let Some(resource) = resource_of_key(&begin, key.as_bytes().to_vec()) else {
            return;
        };
        match first {
            // All waiters of this process were skipped.
            "*" => turns.call_all_for(&resource),
            left => turns.blocked(&resource, parse_ms(left)),
        }
    }

    /// Subscribes to a partition, or checks an existing subscription. Returns the partition, the
    /// receiver of the outcome, and the outcome.
    async fn subscribe_to(
        &self,
        subscriber: &Connection,
        partition: u8,
        done: Option<oneshot::Sender<RedisResult<()>>>,
    ) -> (
        u8,
        Option<oneshot::Sender<RedisResult<()>>>,
        RedisResult<()>,
    ) {
        let scripts = self.scripts();
        let channels = [
            scripts.own_channel(partition, &self.issuer),
            scripts.shared_channel(partition),
        ];
        let outcome = scripts.server().subscribe(subscriber, channels).await;
        (partition, done, outcome)
    }
}

/// Error for a listening connection that is not open.
#[derive(Debug, thiserror::Error)]
#[error("the listening connection is not open yet")]
struct NotHeard;
