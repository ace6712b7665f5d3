//! Settings of the store, and what connects it.

use std::{fmt, sync::Arc, time::Duration};

use redis::{Client, cluster::ClusterClientBuilder, sentinel::SentinelClient};

use super::{
    credentials::Credentials,
    scripts::Scripts,
    server::Server,
    store::{RedisBackend, RedisLeases},
};
use crate::{
    epochs::Epochs,
    lease::{Driver, LeaseError, driver::MAX_WAITERS},
};

/// Settings of [`RedisLeases`], from [`RedisLeases::builder`].
pub struct RedisLeasesBuilder {
    epochs: Arc<dyn Epochs>,
    key_prefix: String,
    command_timeout: Duration,
    max_waiters: usize,
    credentials: Credentials,
}

impl RedisLeasesBuilder {
    fn new(epochs: Arc<dyn Epochs>) -> Self {
        Self {
            epochs,
            key_prefix: "tower-fence".into(),
            command_timeout: Duration::from_secs(2),
            max_waiters: MAX_WAITERS,
            credentials: Credentials::default(),
        }
    }

    /// What the names of all keys and channels begin with: any text without braces. Default:
    /// `tower-fence`.
    ///
    /// Stores with different prefixes are different stores; they may share one source of epochs.
    /// **Two sources of epochs, each with a database of its own, may not share a prefix**: choose a
    /// prefix for each database that issues leases over one Redis. Otherwise the clocks are those of
    /// the source that came first, and the other's grants are refused, with an error that says so.
    #[must_use]
    pub fn key_prefix(mut self, prefix: impl Into<String>) -> Self {
        self.key_prefix = prefix.into();
        self
    }

    /// How long to wait for the answer to a command, reconnection included. Default: 2 s.
    #[must_use]
    pub const fn command_timeout(mut self, limit: Duration) -> Self {
        self.command_timeout = limit;
        self
    }

    /// How many may wait at this issuer, for any resource; each costs about 25 KB of memory. Default:
    /// 10,000. Above that a request to wait is answered [`LeaseError::TooManyWaiters`].
    #[must_use]
    pub const fn max_waiters(mut self, limit: usize) -> Self {
        self.max_waiters = limit;
        self
    }

    /// Sets the ACL user of the master that sentinels name. Default: the user `default`.
    #[must_use]
    pub fn master_username(mut self, username: &str) -> Self {
        self.credentials.master = self.credentials.master.set_username(username);
        self
    }

    /// Sets the password of the master that sentinels name. Default: none. The passwords of the
    /// sentinels themselves are in their URLs.
    #[must_use]
    pub fn master_password(mut self, password: &str) -> Self {
        self.credentials.master = self.credentials.master.set_password(password);
        self
    }

    /// Sets the number of the database in the master that sentinels name. Default: 0.
    #[must_use]
    pub fn master_database(mut self, number: i64) -> Self {
        self.credentials.master = self.credentials.master.set_db(number);
        self
    }

    /// Sets whether the master that sentinels name is reached over TLS. Default: no. The sentinels
    /// themselves are reached over TLS if their URLs begin with `rediss://`.
    ///
    /// The certificate of the master has to be for the address that the sentinels report: an IP
    /// address, unless they have `resolve-hostnames yes` and `announce-hostnames yes`.
    #[must_use]
    pub const fn master_tls(mut self, yes: bool) -> Self {
        self.credentials.master_tls = yes;
        self
    }

    /// Sets the authorities (PEM) whose certificates are trusted, instead of those of the system.
    ///
    /// They count for each connection with TLS; without any, connecting is an error.
    #[cfg(feature = "redis-tls")]
    #[must_use]
    pub fn certificate_authority(mut self, pem: impl Into<Vec<u8>>) -> Self {
        self.credentials.trust_only(pem.into());
        self
    }

    /// Sets the certificate that this client shows, with its chain, and its key (PEM). Default: none.
    ///
    /// It counts for each connection with TLS; without any, connecting is an error.
    #[cfg(feature = "redis-tls")]
    #[must_use]
    pub fn client_certificate(
        mut self,
        pem: impl Into<Vec<u8>>,
        key_pem: impl Into<Vec<u8>>,
    ) -> Self {
        self.credentials.show(pem.into(), key_pem.into());
        self
    }

    /// Connects to a server that stands alone: `redis://127.0.0.1:6379`, for example.
    ///
    /// # Errors
    ///
    /// - [`LeaseError::Invalid`] when the key prefix has a brace: it would break the hash tags.
    /// - [`LeaseError::Misconfigured`] when the URL is not one, when the server does not tell its
    ///   history, or when the user may not publish and subscribe on the channels of the prefix,
    ///   `PREFIX:*`.
    /// - [`LeaseError::Unavailable`] when the server does not answer.
    pub async fn connect(self, url: &str) -> Result<RedisLeases, LeaseError> {
        self.connect_lazy(url)?.checked().await
    }

    /// As [`connect`](Self::connect), but without a contact yet: the server need not be up. The first
    /// call connects and checks what `connect` checks; while that fails, each call is answered
    /// the error, and the next one tries again.
    ///
    /// # Errors
    ///
    /// - [`LeaseError::Invalid`] as [`connect`](Self::connect).
    /// - [`LeaseError::Misconfigured`] when the URL is not one.
    pub fn connect_lazy(self, url: &str) -> Result<RedisLeases, LeaseError> {
        let server = Server::alone(url, &self.credentials, self.command_timeout);
        self.build(server.map_err(LeaseError::misconfigured)?)
    }

    /// Leases in the server of a client that the application has made, with its credentials and
    /// certificates. Without a contact yet: see [`connect_lazy`](Self::connect_lazy).
    ///
    /// The store makes connections of its own with the settings of the client.
    ///
    /// # Errors
    ///
    /// [`LeaseError::Invalid`] as [`connect`](Self::connect).
    pub fn with_client(self, client: Client) -> Result<RedisLeases, LeaseError> {
        let server = Server::of_client(client, self.command_timeout);
        self.build(server)
    }

    /// Leases in the master that a client of the application finds by its sentinels, with its credentials and
    /// certificates. Without a contact yet: see [`connect_lazy`](Self::connect_lazy).
    ///
    /// `database` is the number of the master's database, the one of the client: 0 unless that sets another. A call fails
    /// if they differ.
    ///
    /// # Errors
    ///
    /// [`LeaseError::Invalid`] as [`connect`](Self::connect).
    pub fn with_sentinels(
        self,
        client: SentinelClient,
        database: i64,
    ) -> Result<RedisLeases, LeaseError> {
        let server = Server::of_sentinels(client, database, self.command_timeout);
        self.build(server)
    }

    /// Leases in a cluster, with the credentials and certificates of a client of the application. Without a contact
    /// yet: see [`connect_lazy`](Self::connect_lazy).
    ///
    /// `settings` is called for each connection. The store sets the retries, the timeouts, the protocol and the receiver of
    /// publications.
    ///
    /// ```no_run
    /// # fn example(fence: tower_fence::Fence<sqlx::Postgres>) -> Result<(), tower_fence::lease::LeaseError> {
    /// # use tower_fence::lease::RedisLeases;
    /// use redis::cluster::ClusterClient;
    ///
    /// let leases = RedisLeases::builder(fence).with_cluster(|| {
    ///     ClusterClient::builder(["redis://node-1:6379"]).username("locks").password("…")
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`LeaseError::Invalid`] as [`connect`](Self::connect).
    pub fn with_cluster(
        self,
        settings: impl Fn() -> ClusterClientBuilder + Send + Sync + 'static,
    ) -> Result<RedisLeases, LeaseError> {
        let settings = Box::new(move || Ok(settings()));
        let server = Server::of_cluster(settings, "the cluster", self.command_timeout);
        self.build(server)
    }

    /// Connects to the master that sentinels name, and follows it through failovers. `sentinels`
    /// are URLs such as `redis://127.0.0.1:26379`, `service` is the master's name there.
    ///
    /// The user, the password and the scheme of these URLs are those of the sentinels, the same for
    /// all of them. Those of the master are settings of this builder.
    ///
    /// ```no_run
    /// # async fn example(fence: tower_fence::Fence<sqlx::Postgres>) -> Result<(), Box<dyn std::error::Error>> {
    /// # use tower_fence::lease::RedisLeases;
    /// let leases = RedisLeases::builder(fence)
    ///     .master_username("locks")
    ///     .master_password(&std::env::var("REDIS_PASSWORD")?)
    ///     .master_database(3)
    ///     .connect_sentinels(&["redis://sentinel-1:26379"], "mymaster")
    ///     .await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`connect`](Self::connect), when no sentinel knows a master, and when the sentinels differ
    /// in user, password or TLS.
    pub async fn connect_sentinels(
        self,
        sentinels: &[&str],
        service: &str,
    ) -> Result<RedisLeases, LeaseError> {
        self.connect_sentinels_lazy(sentinels, service)?
            .checked()
            .await
    }

    /// As [`connect_sentinels`](Self::connect_sentinels), without a contact yet: see
    /// [`connect_lazy`](Self::connect_lazy).
    ///
    /// # Errors
    ///
    /// As [`connect_lazy`](Self::connect_lazy).
    pub fn connect_sentinels_lazy(
        self,
        sentinels: &[&str],
        service: &str,
    ) -> Result<RedisLeases, LeaseError> {
        let credentials = &self.credentials;
        let server =
            Server::behind_sentinels(sentinels, service, credentials, self.command_timeout);
        self.build(server.map_err(LeaseError::misconfigured)?)
    }

    /// Connects to a Redis Cluster (7.0 or newer) and follows it through failovers. `nodes` are
    /// URLs of some of its nodes; it tells the others.
    ///
    /// Resources are spread over 256 slots. While the slot of a resource has no master, or moves
    /// to another one, its leases are [`Unavailable`](LeaseError::Unavailable); others go on, not as
    /// fast while a node is silent.
    ///
    /// # Errors
    ///
    /// As [`connect`](Self::connect).
    pub async fn connect_cluster(self, nodes: &[&str]) -> Result<RedisLeases, LeaseError> {
        self.connect_cluster_lazy(nodes)?.checked().await
    }

    /// As [`connect_cluster`](Self::connect_cluster), without a contact yet: see
    /// [`connect_lazy`](Self::connect_lazy).
    ///
    /// # Errors
    ///
    /// As [`connect_lazy`](Self::connect_lazy).
    pub fn connect_cluster_lazy(self, nodes: &[&str]) -> Result<RedisLeases, LeaseError> {
        let server = Server::cluster(nodes, self.credentials.clone(), self.command_timeout);
        self.build(server.map_err(LeaseError::misconfigured)?)
    }

    fn build(self, server: Server) -> Result<RedisLeases, LeaseError> {
        if self.key_prefix.contains(['{', '}']) {
            return Err(LeaseError::Invalid {
                field: "key_prefix".into(),
                detail: "a key prefix has no braces: a cluster finds the slot of a key by them"
                    .into(),
            });
        }
        let backend = RedisBackend::new(Scripts::new(server, &self.key_prefix));
        let leases = Driver::build(backend, Some(self.epochs));
        Ok(leases.max_waiters(self.max_waiters))
    }
}

impl Driver<RedisBackend> {
    /// Connects with the default settings. `epochs` is a `Fence`, or another durable source.
    ///
    /// # Errors
    ///
    /// As [`RedisLeasesBuilder::connect`].
    pub async fn connect(url: &str, epochs: impl Epochs + 'static) -> Result<Self, LeaseError> {
        Self::builder(epochs).connect(url).await
    }

    /// Leases with the default settings in a server that need not be up yet: the first call connects.
    ///
    /// # Errors
    ///
    /// As [`RedisLeasesBuilder::connect_lazy`].
    pub fn connect_lazy(url: &str, epochs: impl Epochs + 'static) -> Result<Self, LeaseError> {
        Self::builder(epochs).connect_lazy(url)
    }

    /// Settings, to be changed before connecting.
    pub fn builder(epochs: impl Epochs + 'static) -> RedisLeasesBuilder {
        RedisLeasesBuilder::new(Arc::new(epochs))
    }

    /// These leases, once their server was checked.
    async fn checked(self) -> Result<Self, LeaseError> {
        self.backend().scripts().check_once().await?;
        Ok(self)
    }
}

impl fmt::Debug for RedisLeasesBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisLeasesBuilder")
            .field("key_prefix", &self.key_prefix)
            .field("command_timeout", &self.command_timeout)
            .field("max_waiters", &self.max_waiters)
            .finish_non_exhaustive()
    }
}
