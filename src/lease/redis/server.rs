//! The server to talk to: one that stands alone, or the master that sentinels name.

use std::time::Duration;

use redis::{
    Client, ErrorKind, RedisError, RedisResult, ServerErrorKind,
    aio::{ConnectionManager, ConnectionManagerConfig},
    sentinel::{SentinelClient, SentinelServerType},
};
use tokio::sync::{Mutex, watch};

pub(super) struct Server {
    source: Source,
    current: Mutex<Option<Current>>,
    /// Counts the servers that were talked to.
    changes: watch::Sender<u64>,
    command_wait: Duration,
}

enum Source {
    Alone(Client),
    Sentinels(Box<Mutex<SentinelClient>>),
}

#[derive(Clone)]
struct Current {
    client: Client,
    connection: ConnectionManager,
}

impl Server {
    pub(super) fn alone(url: &str, command_wait: Duration) -> RedisResult<Self> {
        let source = Source::Alone(Client::open(url)?);
        Ok(Self::new(source, command_wait))
    }

    pub(super) fn behind_sentinels(
        sentinels: &[&str],
        service: &str,
        command_wait: Duration,
    ) -> RedisResult<Self> {
        let master = SentinelServerType::Master;
        let client = SentinelClient::build(sentinels.to_vec(), service.to_owned(), None, master)?;
        let source = Source::Sentinels(Box::new(Mutex::new(client)));
        Ok(Self::new(source, command_wait))
    }

    fn new(source: Source, command_wait: Duration) -> Self {
        Self {
            source,
            current: Mutex::default(),
            changes: watch::Sender::new(0),
            command_wait,
        }
    }

    /// How long one command may take.
    pub(super) const fn command_wait(&self) -> Duration {
        self.command_wait
    }

    /// The connection for commands.
    pub(super) async fn connection(&self) -> RedisResult<ConnectionManager> {
        Ok(self.current().await?.connection)
    }

    /// The server behind it.
    pub(super) async fn client(&self) -> RedisResult<Client> {
        Ok(self.current().await?.client)
    }

    /// Tells when another server is talked to.
    pub(super) fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Notes that a command failed. A server that stands alone is connected to again by itself;
    /// sentinels are asked who is the master now.
    pub(super) async fn failed(&self, error: &RedisError) {
        let gone = error.is_io_error() || error.is_unrecoverable_error() || is_read_only(error);
        if gone && matches!(self.source, Source::Sentinels(_)) {
            self.current.lock().await.take();
        }
    }

    async fn current(&self) -> RedisResult<Current> {
        let mut current = self.current.lock().await;
        if let Some(current) = &*current {
            return Ok(current.clone());
        }
        let client = match &self.source {
            Source::Alone(client) => client.clone(),
            Source::Sentinels(sentinels) => sentinels.lock().await.async_get_client().await?,
        };
        // Each caller waits no longer than `command_wait`; the next one tries again.
        let config = ConnectionManagerConfig::new()
            .set_connection_timeout(Some(self.command_wait))
            .set_response_timeout(Some(self.command_wait))
            .set_number_of_retries(1);
        let connection = ConnectionManager::new_with_config(client.clone(), config).await?;
        self.changes.send_modify(|count| *count += 1);
        Ok(current.insert(Current { client, connection }).clone())
    }
}

/// A master that was deposed, and knows it.
pub(super) fn is_read_only(error: &RedisError) -> bool {
    error.kind() == ErrorKind::Server(ServerErrorKind::ReadOnly)
}
