//! Commands to the server or the cluster of a store: their connection, their timeout, and their
//! repetition.

use std::{io, sync::Arc, time::Duration};

use futures_util::future::BoxFuture;
use redis::{ErrorKind, FromRedisValue, PushInfo, RedisError, RedisResult, ServerErrorKind};
use tokio::{
    sync::{Mutex, mpsc, watch},
    task::AbortHandle,
    time::{Instant, sleep, timeout, timeout_at},
};

use super::{connection::Connection, script::Call, source::Source};
use crate::{lease::LeaseError, time::after};

/// Server or cluster of a store, with the connection for commands.
pub(super) struct Server {
    pub(super) source: Source,
    connections: Mutex<Connections>,
    /// The number of command connections that have been opened.
    connected: watch::Sender<u64>,
    command_timeout: Duration,
}

/// The connection for commands, with its number.
#[derive(Default)]
struct Connections {
    current: Option<(u64, Connection)>,
    /// The number of the connection that this task replaces. The task may have ended.
    replaced: Option<(u64, AbortHandle)>,
}

/// How many times a command may run.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Runs {
    Once,
    UpToTwice,
}

impl Server {
    pub(super) fn new(source: Source, command_timeout: Duration) -> Self {
        Self {
            source,
            connections: Mutex::default(),
            connected: watch::Sender::new(0),
            command_timeout,
        }
    }

    /// Runs a command. If the connection breaks, and the command may run twice, the command is
    /// repeated, because servers close idle connections and a response can be lost. The command
    /// timeout limits both attempts together. Also returns whether the command may have run twice.
    pub(super) async fn run<T, F>(
        self: &Arc<Self>,
        runs: Runs,
        command: impl Fn(Connection) -> F,
    ) -> RedisResult<(T, bool)>
    where
        F: Future<Output = RedisResult<T>>,
    {
        let until = self.deadline();
        let run = || find_server(until, || self.attempt(&command, until));
        match run().await {
            Err(error)
                if runs == Runs::UpToTwice
                    && error.is_unrecoverable_error()
                    && !error.is_timeout() =>
            {
                if self.source.is_cluster() {
                    // The client opens a new connection to the node in the background. In the
                    // meantime, it sends commands to other nodes, over connections that may be
                    // broken as well.
                    sleep(LOOK_AGAIN).await;
                }
                Ok((run().await?, true))
            }
            outcome => Ok((outcome?, false)),
        }
    }

    /// Like [`run`](Self::run), for a script.
    pub(super) async fn call<T: FromRedisValue>(
        self: &Arc<Self>,
        runs: Runs,
        script: &Call<'_>,
    ) -> RedisResult<(T, bool)> {
        let invoke = |mut connection| async move { script.invoke(&mut connection).await };
        self.run(runs, invoke).await
    }

    async fn attempt<T, F>(
        self: &Arc<Self>,
        command: impl Fn(Connection) -> F,
        until: Instant,
    ) -> RedisResult<T>
    where
        F: Future<Output = RedisResult<T>>,
    {
        let mut used = None;
        let run = async {
            let (number, connection) = self.connection().await?;
            used = Some(number);
            command(connection).await
        };
        let outcome = in_time(until, run).await;
        if let (Err(error), Some(number)) = (&outcome, used)
            && self.is_gone(error)
        {
            // If another request is connecting at this moment, it has already replaced the
            // connection.
            if let Ok(mut all) = self.connections.try_lock() {
                match self.source.is_cluster() {
                    true => self.replace(&mut all, number),
                    false => drop(all.current.take_if(|(current, _)| *current == number)),
                }
            }
        }
        outcome
    }

    /// Replaces this connection to a cluster with a new one, which is opened in the background. In
    /// the meantime, requests use the old connection, because its other nodes may still respond.
    fn replace(self: &Arc<Self>, all: &mut Connections, number: u64) {
        let Some((current, connection)) = all.current.clone() else {
            return;
        };
        let is_replacing =
            |(replaced, task): &(u64, AbortHandle)| *replaced == number && !task.is_finished();
        if current != number || all.replaced.as_ref().is_some_and(is_replacing) {
            return;
        }
        let server = Arc::clone(self);
        let task = tokio::spawn(async move {
            server.note_nodes_of(connection).await;
            let opened = server.open(None).await;
            let mut all = server.connections.lock().await;
            // If `find_again` has dropped the old connection in the meantime, the new one may also
            // lead to the demoted master.
            if let (Some(current), Ok(connection)) = (&mut all.current, opened)
                && current.0 == number
            {
                *current = server.numbered(connection);
            }
        });
        all.replaced = Some((number, task.abort_handle()));
    }

    /// Returns whether the connection must be replaced, because it is broken, does not respond, or
    /// leads to a demoted master. A cluster connection reconnects to its nodes by itself, unless a
    /// node does not respond.
    fn is_gone(&self, error: &RedisError) -> bool {
        match self.source.is_cluster() {
            true => error.is_timeout(),
            false => error.is_io_error() || error.is_unrecoverable_error() || is_read_only(error),
        }
    }

    /// Returns the connection for commands, and its number. If there is none, opens one.
    async fn connection(&self) -> RedisResult<(u64, Connection)> {
        let mut all = self.connections.lock().await;
        if let Some(current) = &all.current {
            return Ok(current.clone());
        }
        let connection = self.open(None).await?;
        Ok(all.current.insert(self.numbered(connection)).clone())
    }

    /// Opens a connection, which can subscribe to channels if `pushes` is given.
    async fn open(
        &self,
        pushes: Option<mpsc::UnboundedSender<PushInfo>>,
    ) -> RedisResult<Connection> {
        let limit = self.command_timeout;
        // Box this future, so that it does not enlarge every future that may connect.
        let connecting: BoxFuture<'_, _> = Box::pin(self.source.connect(limit, pushes));
        in_time(after(limit), connecting).await
    }

    /// Returns a new connection for commands with its number.
    fn numbered(&self, connection: Connection) -> (u64, Connection) {
        self.connected.send_modify(|count| *count += 1);
        (*self.connected.borrow(), connection)
    }

    /// Makes the next command look up the server again.
    pub(super) async fn find_again(self: &Arc<Self>) {
        let dropped = self.connections.lock().await.current.take();
        if let Some((_, connection)) = dropped {
            let server = Arc::clone(self);
            // The request does not wait for the answer of the nodes.
            tokio::spawn(async move { server.note_nodes_of(connection).await });
        }
    }

    /// Records the nodes that a connection to a cluster has discovered, for later connections. Does
    /// nothing if no node answers in time.
    async fn note_nodes_of(&self, connection: Connection) {
        let limit = self.command_timeout / 2;
        let noting: BoxFuture<'_, _> = Box::pin(self.source.note_nodes_of(connection));
        let _ = timeout(limit, noting).await;
    }

    /// Returns a receiver that is notified of each new command connection. Such a connection may
    /// lead to another server.
    pub(super) fn changes(&self) -> watch::Receiver<u64> {
        self.connected.subscribe()
    }

    /// Opens a connection for subscriptions, which sends published messages to `pushes`.
    pub(super) async fn subscriber(
        &self,
        pushes: mpsc::UnboundedSender<PushInfo>,
    ) -> RedisResult<Connection> {
        // If a request is connecting at this moment, do not wait for it.
        let all = self.connections.try_lock().ok();
        let current = all.and_then(|all| all.current.clone());
        if let Some((_, connection)) = current {
            self.note_nodes_of(connection).await;
        }
        self.open(Some(pushes)).await
    }

    /// Subscribes to channels of one slot, with the command timeout.
    pub(super) async fn subscribe(
        &self,
        subscriber: &Connection,
        channels: &[String],
    ) -> RedisResult<()> {
        let until = self.deadline();
        find_server(until, || in_time(until, subscriber.subscribe(channels))).await
    }

    /// Checks that the user may subscribe.
    pub(super) async fn check_subscribe(&self, channel: String) -> RedisResult<()> {
        let (sender, _pushes) = mpsc::unbounded_channel();
        let subscriber = self.subscriber(sender).await?;
        self.subscribe(&subscriber, &[channel]).await
    }

    /// Returns the command that publishes a message and counts its receivers. In a cluster, PUBLISH
    /// would count only the receivers on one node. SPUBLISH counts all receivers, because they
    /// subscribe on the node of the slot.
    pub(super) const fn publish(&self) -> &'static str {
        match self.source.is_cluster() {
            true => "SPUBLISH",
            false => "PUBLISH",
        }
    }

    /// Returns the deadline of a command that starts now.
    fn deadline(&self) -> Instant {
        after(self.command_timeout)
    }

    /// Returns the [`LeaseError`] for an error of the server. It is
    /// [`Misconfigured`](LeaseError::Misconfigured) if the server would refuse the command again,
    /// and [`Unavailable`](LeaseError::Unavailable) otherwise.
    pub(super) fn unavailable(&self, error: RedisError) -> LeaseError {
        // A failed login may be temporary: redis-rs also reports the refusal of a server with too
        // many clients as a failed login.
        let is_permanent = matches!(
            error.kind(),
            ErrorKind::InvalidClientConfig | ErrorKind::Server(ServerErrorKind::NoPerm)
        ) || error.detail().is_some_and(has_permanent_cause);
        let error = ServerError {
            address: Arc::clone(&self.source.address),
            source: error,
        };
        match is_permanent {
            true => LeaseError::misconfigured(error),
            false => LeaseError::unavailable(error),
        }
    }
}

/// Pause before a command is repeated. In the meantime, the other servers can complete a failover
/// or the move of a slot, and the client of a cluster can open a new connection.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// Repeats a command that was refused because another server has the data now.
async fn find_server<T, F>(until: Instant, attempt: impl Fn() -> F) -> RedisResult<T>
where
    F: Future<Output = RedisResult<T>>,
{
    loop {
        match attempt().await {
            Err(error) if is_misdirected(&error) && Instant::now() + LOOK_AGAIN < until => {
                sleep(LOOK_AGAIN).await;
            }
            outcome => return outcome,
        }
    }
}

/// Returns the outcome, or an error after the deadline.
async fn in_time<T>(
    until: Instant,
    outcome: impl Future<Output = RedisResult<T>>,
) -> RedisResult<T> {
    match timeout_at(until, outcome).await {
        Ok(outcome) => outcome,
        Err(_) => Err(io::Error::from(io::ErrorKind::TimedOut).into()),
    }
}

/// Returns whether Redis would refuse the command again. Redis reports such errors with the general
/// error code, at least for a command in a script, so only their texts identify them.
fn has_permanent_cause(detail: &str) -> bool {
    let texts = [
        // The user lacks a permission. The first text is that of Redis 7.2 and later.
        "ACL failure in script",
        "The user executing the script can't",
        // The user is not allowed to select the database (all versions) or to use it (Valkey 9.1).
        "has no permissions to run",
        "No permissions to access database",
        // The URL contains no password (all versions).
        "Authentication required",
        // The command was renamed, or a proxy does not support it.
        "unknown command",
        "Unknown Redis command called from script",
        // The module that runs scripts is not loaded (Valkey 9.1).
        "Could not find scripting engine",
        // The server has no such database (all versions), or it is part of a cluster (Redis, and
        // Valkey before 9).
        "DB index is out of range",
        "SELECT is not allowed in cluster mode",
        // A server of the cluster was started without cluster mode (all versions).
        "cluster support disabled",
        // Another program has written the key.
        "wrong kind of value",
    ];
    texts.iter().any(|text| detail.contains(text))
}

/// Error of the server, with its address.
#[derive(Debug, thiserror::Error)]
#[error("Redis at {address} cannot be used")]
struct ServerError {
    address: Arc<str>,
    source: RedisError,
}

/// Returns whether the server replied that it is no longer a master. Redis 6.2 reports this for a
/// command of a script with the general error code.
fn is_read_only(error: &RedisError) -> bool {
    let detail = error.detail();
    error.kind() == ErrorKind::Server(ServerErrorKind::ReadOnly)
        || detail.is_some_and(|detail| detail.contains("-READONLY "))
}

/// Returns whether the server refused the command, before executing it, because another server has
/// the data.
fn is_misdirected(error: &RedisError) -> bool {
    is_read_only(error)
        || error.is_cluster_error()
        || error.kind() == ErrorKind::ClusterConnectionNotFound
}
