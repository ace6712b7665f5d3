//! Settings of the store, and what connects it.

use std::{fmt, sync::Arc, time::Duration};

use reqwest::{Client, redirect::Policy};
use zeroize::Zeroizing;

use super::{
    endpoints::parse_all,
    gateway::{Credentials, Gateway},
    keys::Keys,
    server::Etcd,
    store::EtcdLeases,
};
use crate::{
    epochs::Epochs,
    lease::{LeaseError, WaiterLimits, memory::Memory},
};

/// Settings of [`EtcdLeases`], from [`EtcdLeases::builder`].
pub struct EtcdLeasesBuilder {
    epochs: Arc<dyn Epochs>,
    key_prefix: String,
    call_wait: Duration,
    waiters: WaiterLimits,
    credentials: Option<Credentials>,
    client: Option<Client>,
}

impl EtcdLeasesBuilder {
    fn new(epochs: Arc<dyn Epochs>) -> Self {
        Self {
            epochs,
            key_prefix: "tower-fence".into(),
            call_wait: Duration::from_secs(2),
            waiters: WaiterLimits::default(),
            credentials: None,
            client: None,
        }
    }

    /// What the names of all keys begin with, a colon behind it: any text without colons and control characters.
    /// Default: `tower-fence`.
    ///
    /// Stores with different prefixes are different stores; they may share one source of epochs.
    /// **Two sources of epochs, each with a database of its own, may not share a prefix**: the grants of the one that
    /// came second are refused, with an error that says so.
    #[must_use]
    pub fn key_prefix(mut self, prefix: impl Into<String>) -> Self {
        self.key_prefix = prefix.into();
        self
    }

    /// How long to wait for the answer to a call, over all endpoints. Default: 2 s.
    ///
    /// Each endpoint has its share of it, so with three of them one that is silent costs two thirds of a second. While
    /// etcd elects a leader (one second by default, and somewhat more) calls wait; with a limit below that they fail.
    #[must_use]
    pub const fn call_wait(mut self, limit: Duration) -> Self {
        self.call_wait = limit;
        self
    }

    /// How many may wait for one resource, over all issuers. Default: 1,000. Above that a request to
    /// wait is answered [`LeaseError::TooManyWaiters`]; some more may come in at the same moment.
    #[must_use]
    pub const fn max_waiters_per_resource(mut self, limit: usize) -> Self {
        self.waiters.per_resource = limit;
        self
    }

    /// How many may wait at this issuer, for any resource. Default: 10,000. Above that a request to wait is answered
    /// [`LeaseError::TooManyWaiters`]. Each costs etcd a key and a lease; each resource that somebody waits for, a
    /// connection.
    #[must_use]
    pub const fn max_waiters(mut self, limit: usize) -> Self {
        self.waiters.in_all = limit;
        self
    }

    /// Which user of etcd's authentication to be. Default: none. The user needs to read and write the keys that begin
    /// with the prefix.
    #[must_use]
    pub fn user(mut self, name: impl Into<String>, password: impl Into<String>) -> Self {
        self.credentials = Some(Credentials {
            name: name.into(),
            password: Zeroizing::new(password.into()),
        });
        self
    }

    /// The HTTP client: with roots and a certificate for TLS, for example. Default: one without TLS, unless you enable a
    /// TLS feature of `reqwest` in your own `Cargo.toml`. Do not let it follow redirections, and give it no time-out of
    /// its own: a watch lasts.
    #[must_use]
    pub fn client(mut self, client: Client) -> Self {
        self.client = Some(client);
        self
    }

    /// Connects to a cluster: `["http://127.0.0.1:2379"]`, for example. Name all members, since each is asked where
    /// the one before does not answer; but of one cluster only. The path of an endpoint stands before those of etcd:
    /// `https://proxy/etcd` where a reverse proxy has etcd below `/etcd`.
    ///
    /// # Errors
    ///
    /// - [`LeaseError::Invalid`] as [`connect_lazy`](Self::connect_lazy).
    /// - [`LeaseError::Unavailable`] when no endpoint answers, or etcd refuses the user.
    pub async fn connect<E: AsRef<str>>(self, endpoints: &[E]) -> Result<EtcdLeases, LeaseError> {
        let leases = self.connect_lazy(endpoints)?;
        leases.etcd().check().await?;
        Ok(leases)
    }

    /// As [`connect`](Self::connect), but without a contact yet: etcd need not be up.
    ///
    /// # Errors
    ///
    /// - [`LeaseError::Invalid`] when there is no endpoint, when one is no URL of HTTP, or has a user, a query or a
    ///   fragment in it, or when the key prefix has a colon.
    /// - [`LeaseError::Unavailable`] when no HTTP client can be built.
    pub fn connect_lazy<E: AsRef<str>>(self, endpoints: &[E]) -> Result<EtcdLeases, LeaseError> {
        if self
            .key_prefix
            .contains(|c: char| c == ':' || c.is_control())
        {
            return Err(LeaseError::Invalid {
                field: "key_prefix".into(),
                detail: "a key prefix has no colons and no control characters".into(),
            });
        }
        let endpoints = parse_all(endpoints).map_err(|detail| LeaseError::Invalid {
            field: "endpoints".into(),
            detail,
        })?;
        let client = match self.client {
            Some(client) => client,
            None => Client::builder()
                .redirect(Policy::none())
                .connect_timeout(self.call_wait)
                .build()
                .map_err(LeaseError::unavailable)?,
        };
        let gateway = Gateway::new(client, endpoints, self.credentials, self.call_wait);
        let keys = Keys::new(&self.key_prefix);
        let etcd = Etcd::new(gateway, Memory::new(self.epochs), keys);
        Ok(EtcdLeases::new(etcd, self.waiters))
    }
}

impl EtcdLeases {
    /// Connects with the default settings. `epochs` is a `Fence`, or another durable source.
    ///
    /// # Errors
    ///
    /// As [`EtcdLeasesBuilder::connect`].
    pub async fn connect<E: AsRef<str>>(
        endpoints: &[E],
        epochs: impl Epochs + 'static,
    ) -> Result<Self, LeaseError> {
        Self::builder(epochs).connect(endpoints).await
    }

    /// Leases with the default settings in an etcd that need not be up yet.
    ///
    /// # Errors
    ///
    /// As [`EtcdLeasesBuilder::connect_lazy`].
    pub fn connect_lazy<E: AsRef<str>>(
        endpoints: &[E],
        epochs: impl Epochs + 'static,
    ) -> Result<Self, LeaseError> {
        Self::builder(epochs).connect_lazy(endpoints)
    }

    /// Settings, to be changed before connecting.
    pub fn builder(epochs: impl Epochs + 'static) -> EtcdLeasesBuilder {
        EtcdLeasesBuilder::new(Arc::new(epochs))
    }
}

impl fmt::Debug for EtcdLeasesBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdLeasesBuilder")
            .field("key_prefix", &self.key_prefix)
            .field("call_wait", &self.call_wait)
            .field("waiters", &self.waiters)
            .finish_non_exhaustive()
    }
}
