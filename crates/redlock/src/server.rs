//! Connection to one Redis server.

use std::{io, sync::Arc, time::Duration};

use redis::{
    AsyncConnectionConfig, Client, ErrorKind, FromRedisValue, RedisError, RedisResult,
    ScriptInvocation, ServerErrorKind, aio::MultiplexedConnection,
};
use tokio::{
    sync::Mutex,
    time::{Instant, timeout_at},
};
use tower_fence::lease::LeaseError;

/// Redis server. If the connection is lost, it is opened again.
pub(crate) struct Server {
    client: Client,
    /// The host, the port and the database, without a password.
    name: Arc<str>,
    current: Mutex<Option<Current>>,
    timeout: Duration,
}

struct Current {
    number: u64,
    connection: MultiplexedConnection,
}

impl Server {
    pub(crate) fn new(client: Client, timeout: Duration) -> Self {
        let info = client.get_connection_info();
        let name = format!("{}/{}", info.addr(), info.redis_settings().db()).into();
        Self {
            client,
            name,
            current: Mutex::default(),
            timeout,
        }
    }

    /// Returns the host, the port and the database, without a password.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Returns the error of the store for a failure of this server.
    pub(crate) fn unavailable(&self, error: RedisError) -> LeaseError {
        // A failed login may be temporary: redis-rs also reports one if the server has too many
        // clients.
        let is_permanent = matches!(
            error.kind(),
            ErrorKind::InvalidClientConfig | ErrorKind::Server(ServerErrorKind::NoPerm)
        ) || error.detail().is_some_and(is_refused_in_script);
        let error = ServerError {
            name: Arc::clone(&self.name),
            source: error,
        };
        match is_permanent {
            true => LeaseError::misconfigured(error),
            false => LeaseError::unavailable(error),
        }
    }

    /// Runs a script, and returns whether it may have run twice. Every script may run twice.
    pub(crate) async fn call<T: FromRedisValue>(
        &self,
        script: &ScriptInvocation<'_>,
    ) -> RedisResult<(T, bool)> {
        self.run(|mut connection| async move { script.invoke_async(&mut connection).await })
            .await
    }

    /// Runs a command within the timeout, and returns whether it may have run twice. If the
    /// connection breaks, the command is repeated, because the server may have closed an idle
    /// connection, or its reply may have been lost.
    pub(crate) async fn run<T, F>(
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
            let (number, connection) = self.connection().await?;
            used = Some(number);
            command(connection).await
        };
        let outcome = match timeout_at(until, run).await {
            Ok(outcome) => outcome,
            Err(_) => Err(io::Error::from(io::ErrorKind::TimedOut).into()),
        };
        if let (Err(error), Some(number)) = (&outcome, used)
            && (error.is_io_error() || error.is_unrecoverable_error())
            // If the lock is taken, another request is already opening a new connection.
            && let Ok(mut current) = self.current.try_lock()
        {
            current.take_if(|current| current.number == number);
        }
        outcome
    }

    async fn connection(&self) -> RedisResult<(u64, MultiplexedConnection)> {
        let mut current = self.current.lock().await;
        if let Some(current) = &*current {
            return Ok((current.number, current.connection.clone()));
        }
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(self.timeout))
            // `attempt` limits the time of each command.
            .set_response_timeout(None);
        let connection = self
            .client
            .get_multiplexed_async_connection_with_config(&config);
        // Box this future, so that it does not enlarge every future that may connect.
        let connection = Box::pin(connection).await?;
        let number = rand::random();
        *current = Some(Current {
            number,
            connection: connection.clone(),
        });
        Ok((number, connection))
    }
}

/// Returns whether Redis has refused a command of a script because the user lacks a right. Redis
/// reports this with the general error code.
fn is_refused_in_script(detail: &str) -> bool {
    // The first text is that of Redis 7.2 and later.
    let texts = [
        "ACL failure in script",
        "The user executing the script can't",
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
