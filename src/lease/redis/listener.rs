//! Connection on which a process receives notifications. One connection serves all its waiters.
//!
//! 1. A waiter is in the queue in Redis, with the channel of its process.
//! 2. The script that releases or breaks a lease grants the resource to the first waiter in the
//!    queue, with a new token, and publishes the grant on the channel of the waiter's process. If
//!    no process listens on the channel, the waiter's process has terminated, and the script grants
//!    the lease to the next waiter. The waiter confirms the lease with a retry. An unconfirmed
//!    lease expires after a second.
//! 3. Each grant and each renewal is also published, with the TTL of the lease, to all processes
//!    with waiters in the partition. When the TTL has elapsed, each of these processes retries once
//!    for the resource, and the first retry makes the script grant the lease to the first waiter.
//!    No waiter polls.
//! 4. If a client releases a lease id under which a request still waits, the script notifies the
//!    request's process, which need not be the process that ran the script. If the client has
//!    stopped waiting, the request's process removes the request from the queue.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use futures_util::{StreamExt, stream::FuturesUnordered};
use redis::{Msg, PushKind, RedisResult};
use tokio::{
    sync::mpsc,
    time::{Instant, sleep_until},
};

use super::{
    answer::parse_ms,
    connection::Connection,
    list::resource_of_key,
    store::{RedisBackend, Subscriptions},
};
use crate::lease::{LeaseError, Turns};

/// Interval at which the connection is checked while requests wait.
const HEARTBEAT: Duration = Duration::from_secs(2);

/// Guard that removes the listening connection when the listener ends or is dropped.
struct SubscriptionsGuard<'a>(&'a RedisBackend);

impl Drop for SubscriptionsGuard<'_> {
    fn drop(&mut self) {
        *lock(&self.0.subscriptions) = None;
    }
}

impl RedisBackend {
    /// Makes sure that this process is subscribed to a partition.
    pub(super) async fn subscribe(&self, partition: u8) -> Result<(), LeaseError> {
        let not_listening = || LeaseError::unavailable(NotListening);
        let subscriptions = lock(&self.subscriptions)
            .clone()
            .ok_or_else(not_listening)?;
        if lock(&subscriptions.partitions).contains(&partition) {
            return Ok(());
        }
        let (_, outcome) = self
            .subscribe_to(&subscriptions.subscriber, partition)
            .await;
        outcome.map_err(|error| self.scripts.server().unavailable(error))?;
        lock(&subscriptions.partitions).insert(partition);
        // The listening connection may have been replaced in the meantime. The new one does not
        // have this subscription.
        let current = lock(&self.subscriptions);
        let is_current = current
            .as_ref()
            .is_some_and(|now| Arc::ptr_eq(now, &subscriptions));
        is_current.then_some(()).ok_or_else(not_listening)
    }

    /// Receives notifications for all waiters on one connection, until the connection is lost or
    /// leads to the wrong server. The connection has no subscriptions at first.
    pub(super) async fn receive(&self, turns: &Turns) -> Result<(), LeaseError> {
        let server = self.scripts.server();
        let mut changes = server.changes();
        let (sender, mut pushes) = mpsc::unbounded_channel();
        let connected = server.subscriber(sender).await;
        let subscriptions = Arc::new(Subscriptions {
            subscriber: connected.map_err(|error| server.unavailable(error))?,
            partitions: Mutex::default(),
        });
        *lock(&self.subscriptions) = Some(Arc::clone(&subscriptions));
        let _guard = SubscriptionsGuard(self);
        turns.ready(self.issuer);
        // Heartbeats run concurrently with receiving, because in a cluster, other servers may send
        // messages while one server does not respond.
        let mut beats = FuturesUnordered::new();
        let mut next_beat = Instant::now() + HEARTBEAT;
        loop {
            tokio::select! {
                Some(beat) = beats.next() => {
                    if let (partition, Err(_)) = beat {
                        if !server.source.is_cluster() {
                            return Ok(());
                        }
                        lock(&subscriptions.partitions).remove(&partition);
                        // All waiters retry, although only those of this partition have to.
                        turns.call_all();
                    }
                }
                push = pushes.recv() => {
                    let Some(push) = push else {
                        return Ok(());
                    };
                    // A slot was moved, or a connection was lost.
                    if matches!(push.kind, PushKind::Disconnection | PushKind::SUnsubscribe) {
                        return Ok(());
                    }
                    if let Some(message) = Msg::from_push_info(push)
                        && let Ok(payload) = message.get_payload::<String>()
                    {
                        self.deliver(turns, message.get_channel_name(), &payload);
                    }
                }
                _ = changes.changed() => return Ok(()),
                () = sleep_until(next_beat) => {
                    // A repeated subscription has no effect, but the server must answer it.
                    if !turns.resources().is_empty() && beats.is_empty() {
                        let partitions = lock(&subscriptions.partitions);
                        let again = partitions.iter();
                        beats.extend(again.map(|one| {
                            self.subscribe_to(&subscriptions.subscriber, *one)
                        }));
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
        let issuer = channel.rsplit(':').next().map(str::parse);
        if issuer == Some(Ok(self.issuer))
            && let Ok(ticket) = first.trim_start_matches('-').parse()
        {
            return match first.starts_with('-') {
                true => turns.call_off(ticket),
                false => turns.call(ticket),
            };
        }
        let begin = self.scripts.lease_key_prefix();
        let Some(resource) = resource_of_key(&begin, key.as_bytes().to_vec()) else {
            return;
        };
        match first {
            // All waiters of this process were skipped.
            "*" => turns.call_all_for(&resource),
            left => turns.retry_in(&resource, parse_ms(left)),
        }
    }

    /// Subscribes to a partition, or checks an existing subscription. Returns the partition and the
    /// outcome.
    async fn subscribe_to(&self, subscriber: &Connection, partition: u8) -> (u8, RedisResult<()>) {
        let scripts = &self.scripts;
        let channels = [
            scripts.own_channel(partition, self.issuer),
            scripts.shared_channel(partition),
        ];
        let outcome = scripts.server().subscribe(subscriber, &channels).await;
        (partition, outcome)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No code panics while it holds the lock.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Error for a listening connection that is not open.
#[derive(Debug, thiserror::Error)]
#[error("the listening connection is not open yet")]
struct NotListening;
