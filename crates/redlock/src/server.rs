//! Commands to one Redis server: connection, timeout and repetition.

use std::{io, sync::Arc, time::Duration};

use redis::{
    AsyncConnectionConfig, Client, ErrorKind, RedisError, RedisResult, ServerErrorKind,
    aio::MultiplexedConnection,
};
use tokio::{
    sync::Mutex,
    time::{Instant, timeout_at},
};
use tower_fence::lease::LeaseError;

/// Minimum timeout for opening a connection in the background.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// Longest timeout of a command. It can be added to any `Instant`.
const LONGEST_TIMEOUT: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// Redis server. If the connection to it is lost, the next command opens a new one.
pub(crate) struct Server {
    client: Client,
    /// The host, the port and the database, without a password.
    pub(crate) name: Arc<str>,
    /// The current connection, and the time at which it was opened, which distinguishes it from
    /// earlier connections.
    current: Arc<Mutex<Option<(Instant, MultiplexedConnection)>>>,
    timeout: Duration,
}

impl Server {
    pub(crate) fn new(client: Client, timeout: Duration) -> Self {
        let info = client.get_connection_info();
        let name = format!("{}/{}", info.addr(), info.redis_settings().db()).into();
        Self {
            client,
            name,
            current: Arc::default(),
            timeout: timeout.min(LONGEST_TIMEOUT),
        }
    }

    /// Drops the connection. The next request opens a new one, perhaps to another server.
    pub(crate) fn disconnect(&self) {
        // If the lock is taken, another request is already opening a new connection.
        if let Ok(mut current) = self.current.try_lock() {
            current.take();
        }
    }

    /// Runs a command within the timeout, and returns whether it may have run twice. If the
    /// connection breaks, the command is repeated, because the server may have closed an idle
    /// connection, or its reply may have been lost.
    pub(crate) async fn command<T, F>(
        &self,
        command: impl Fn(MultiplexedConnection) -> F,
    ) -> RedisResult<(T, bool)>
    where
        F: Future<Output = RedisResult<T>>,
    {
        let until = Instant::now() + self.timeout;
        match self.attempt(&command, until).await {
            Err(error) if error.is_unrecoverable_error() && !error.is_timeout() => {
                Ok((self.attempt(&command, until).await?, true))
            }
            outcome => Ok((outcome?, false)),
        }
    }

    async fn attempt<T, F>(
        &self,
        command: impl Fn(MultiplexedConnection) -> F,
        until: Instant,
    ) -> RedisResult<T>
    where
        F: Future<Output = RedisResult<T>>,
    {
        let mut used = None;
        let run = async {
            let (opened, connection) = self.connection().await?;
            used = Some(opened);
            command(connection).await
        };
        let outcome = match timeout_at(until, run).await {
            Ok(outcome) => outcome,
            Err(_) => Err(io::Error::from(io::ErrorKind::TimedOut).into()),
        };
        let began = until - self.timeout;
        if let (Err(error), Some(opened)) = (&outcome, used)
            && (error.is_io_error() || error.is_unrecoverable_error())
            // If the connection was opened during this call, the next call may be in time.
            && !(error.is_timeout() && opened > began)
            // If the lock is taken, another request is already opening a new connection.
            && let Ok(mut current) = self.current.try_lock()
        {
            current.take_if(|(current, _)| *current == opened);
        }
        outcome
    }

    /// Returns the current connection, or opens one. If the caller does not wait until the
    /// connection is open, a task continues to open it. Otherwise, a node to which a connection
    /// takes longer than the timeout could never be used.
    async fn connection(&self) -> RedisResult<(Instant, MultiplexedConnection)> {
        let mut current = Arc::clone(&self.current).lock_owned().await;
        if let Some(current) = &*current {
            return Ok(current.clone());
        }
        let client = self.client.clone();
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(self.timeout.max(CONNECT_TIMEOUT)))
            // `attempt` limits the time of each command.
            .set_response_timeout(None);
        let connecting = tokio::spawn(async move {
            let opening = client.get_multiplexed_async_connection_with_config(&config);
            let connection = opening.await?;
            Ok(current.insert((Instant::now(), connection)).clone())
        });
        connecting.await.map_err(io::Error::other)?
    }

    /// Returns the [`LeaseError`] for an error of this server. It is
    /// [`Misconfigured`](LeaseError::Misconfigured) if the server would refuse the command again,
    /// and [`Unavailable`](LeaseError::Unavailable) otherwise.
    pub(crate) fn lease_error(&self, error: RedisError) -> LeaseError {
        // A failed login may be temporary: redis-rs also reports one if the server has too many
        // clients.
        let is_permanent = matches!(
            error.kind(),
            ErrorKind::InvalidClientConfig | ErrorKind::Server(ServerErrorKind::NoPerm)
        ) || error.detail().is_some_and(has_permanent_cause);
        let error = ServerError {
            name: Arc::clone(&self.name),
            source: error,
        };
        match is_permanent {
            true => LeaseError::misconfigured(error),
            false => LeaseError::unavailable(error),
        }
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
        "DB index is out of range",
        // Another program has written the key.
        "wrong kind of value",
    ];
    texts.iter().any(|text| detail.contains(text))
}

/// Error of the server, with its address.
#[derive(Debug, thiserror::Error)]
#[error("Redis at {name} cannot be used")]
struct ServerError {
    name: Arc<str>,
    source: RedisError,
}
