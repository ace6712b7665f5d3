//! Builder of the store in Redis, and the constructors.

use std::{sync::Arc, time::Duration};

use derive_where::derive_where;
use redis::{Client, RedisResult, cluster::ClusterClientBuilder, sentinel::SentinelClient};

use super::{
    scripts::Scripts,
    server::Server,
    source::Source,
    store::{RedisBackend, RedisLeases},
};
use crate::{
    epochs::Epochs,
    lease::{Driver, LeaseError, backend::check_key_prefix},
};

/// Builder of [`RedisLeases`], returned by [`RedisLeases::builder`].
#[derive_where(Debug)]
pub struct RedisLeasesBuilder {
    #[derive_where(skip)]
    epochs: Arc<dyn Epochs>,
    key_prefix: String,
    command_timeout: Duration,
}

impl RedisLeasesBuilder {
    /// Sets the prefix of all keys and channels: one or more characters of `A-Z a-z 0-9 - _ .`.
    /// Default: `tower-fence`.
    ///
    /// In each name, a colon follows the prefix. Stores with different prefixes are independent,
    /// and may share one source of epochs if they grant different resources. A change of the prefix
    /// is a [move to another store](crate::guide::stores#moving-from-one-store-to-another). **Two
    /// sources of epochs, each with its own database, must not share a prefix.** Choose a prefix
    /// for each database whose leases are in the same Redis. Otherwise the token counters (in a
    /// cluster, those of each partition) belong to the source that used them first, and an issuer
    /// with the other source gets an error that names the conflict.
    #[must_use]
    pub fn key_prefix(mut self, prefix: impl Into<String>) -> Self {
        self.key_prefix = prefix.into();
        self
    }

    /// Sets the timeout of a command, including reconnection. Default: 2 s. In a cluster, each node
    /// must answer within half of this timeout.
    #[must_use]
    pub const fn command_timeout(mut self, limit: Duration) -> Self {
        self.command_timeout = limit;
        self
    }

    /// Connects to a standalone server, for example `redis://127.0.0.1:6379`.
    ///
    /// # Errors
    ///
    /// - [`LeaseError::Invalid`] if the [key prefix](Self::key_prefix) is invalid.
    /// - [`LeaseError::Misconfigured`] if the URL is invalid, or if the server does not report its
    ///   replication id.
    /// - [`LeaseError::Misconfigured`] if the user is not allowed to publish and subscribe on the
    ///   channels of the prefix, `PREFIX:*`.
    /// - [`LeaseError::Unavailable`] if the server does not respond.
    pub async fn connect(self, url: &str) -> Result<RedisLeases, LeaseError> {
        let leases = self.connect_lazy(url)?;
        leases.backend().scripts.check_once().await?;
        Ok(leases)
    }

    /// Builds the same store as [`connect`](Self::connect), but does not connect yet, so the server
    /// need not be running.
    ///
    /// The first call connects and runs the checks of `connect`. If the connection or a check
    /// fails, the call returns the error, and the next call tries again.
    ///
    /// # Errors
    ///
    /// - [`LeaseError::Invalid`] if the [key prefix](Self::key_prefix) is invalid.
    /// - [`LeaseError::Misconfigured`] if the URL is invalid.
    pub fn connect_lazy(self, url: &str) -> Result<RedisLeases, LeaseError> {
        self.build(Client::open(url).map(Source::of_client))
    }

    /// Creates a store for the server of a client that the application has created.
    ///
    /// The store uses the credentials and certificates of the client, and opens its own connections
    /// with the settings of the client. It does not connect yet; see
    /// [`connect_lazy`](Self::connect_lazy).
    ///
    /// # Errors
    ///
    /// Returns [`LeaseError::Invalid`] if the [key prefix](Self::key_prefix) is invalid.
    pub fn with_client(self, client: Client) -> Result<RedisLeases, LeaseError> {
        self.build(Ok(Source::of_client(client)))
    }

    /// Creates a store for the master that a client of the application finds through sentinels.
    ///
    /// The store follows the master through failovers, and uses the credentials and certificates of
    /// the client. It does not connect yet; see [`connect_lazy`](Self::connect_lazy). `database`
    /// must be the database number of the client, which is 0 unless the client sets another one. If
    /// the numbers differ, every call fails. `address` names the master in error messages.
    ///
    /// The [guide](crate::guide::stores#leases-behind-sentinels) contains an example.
    ///
    /// # Errors
    ///
    /// Returns [`LeaseError::Invalid`] if the [key prefix](Self::key_prefix) is invalid.
    pub fn with_sentinels(
        self,
        client: SentinelClient,
        database: i64,
        address: &str,
    ) -> Result<RedisLeases, LeaseError> {
        self.build(Ok(Source::of_sentinels(client, database, address)))
    }

    /// Creates a store for a Redis Cluster (7.0 or later), with credentials and certificates of the
    /// application.
    ///
    /// The store follows the cluster through failovers. `nodes` are the URLs of some of its nodes,
    /// preferably of several shards on several hosts, from which the client discovers the others.
    /// Resources are spread over 256 slots. While the slot of a resource has no master, or is being
    /// moved, calls for the resource return [`Unavailable`](LeaseError::Unavailable). Leases in
    /// other slots stay available, but calls can be slower while a node does not respond.
    ///
    /// The store does not connect yet; see [`connect_lazy`](Self::connect_lazy). It calls
    /// `settings` for each connection, and overrides the database, the retries, the timeouts, the
    /// protocol, and the push sender. The settings must not route reads to replicas.
    ///
    /// ```no_run
    /// # fn example(
    /// #     fence: tower_fence::Fence<sqlx::Postgres>,
    /// # ) -> Result<(), tower_fence::lease::LeaseError> {
    /// # use tower_fence::lease::RedisLeases;
    /// let leases = RedisLeases::builder(fence).with_cluster(
    ///     &["redis://node-1:6379", "redis://node-2:6379"],
    ///     |client| client.username("locks").password("…"),
    /// )?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// - [`LeaseError::Invalid`] if the [key prefix](Self::key_prefix) is invalid.
    /// - [`LeaseError::Misconfigured`] if a URL or the settings are invalid, or if a URL contains a
    ///   database other than 0.
    pub fn with_cluster(
        self,
        nodes: &[&str],
        settings: impl Fn(ClusterClientBuilder) -> ClusterClientBuilder + Send + Sync + 'static,
    ) -> Result<RedisLeases, LeaseError> {
        self.build(Source::of_cluster(nodes, settings))
    }

    fn build(self, source: RedisResult<Source>) -> Result<RedisLeases, LeaseError> {
        let source = source.map_err(LeaseError::misconfigured)?;
        check_key_prefix(&self.key_prefix)?;
        let server = Server::new(source, self.command_timeout);
        let backend = RedisBackend::new(Scripts::new(server, &self.key_prefix));
        Ok(Driver::with_epochs(backend, self.epochs))
    }
}

impl Driver<RedisBackend> {
    /// Connects to a standalone server with the default settings. `epochs` is a `Fence` or another
    /// durable source.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`RedisLeasesBuilder::connect`].
    pub async fn connect(url: &str, epochs: impl Epochs + 'static) -> Result<Self, LeaseError> {
        Self::builder(epochs).connect(url).await
    }

    /// Creates a store with the default settings. The server need not be running yet, because the
    /// first call connects.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`RedisLeasesBuilder::connect_lazy`].
    pub fn connect_lazy(url: &str, epochs: impl Epochs + 'static) -> Result<Self, LeaseError> {
        Self::builder(epochs).connect_lazy(url)
    }

    /// Returns a builder with the default settings.
    pub fn builder(epochs: impl Epochs + 'static) -> RedisLeasesBuilder {
        RedisLeasesBuilder {
            epochs: Arc::new(epochs),
            key_prefix: "tower-fence".into(),
            command_timeout: Duration::from_secs(2),
        }
    }
}
