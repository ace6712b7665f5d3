//! Builder of the store.

use std::{
    fmt,
    sync::{Arc, Mutex, Once},
    time::Duration,
};

use reqwest::{Client, redirect::Policy};
use tokio::sync::Semaphore;
use tower_fence::{
    epochs::Epochs,
    lease::{Driver, LeaseError, backend::check_key_prefix},
};
use zeroize::Zeroizing;

use crate::{
    ACQUISITIONS, EtcdBackend, EtcdLeases,
    endpoints::parse_all,
    etcd::Etcd,
    gateway::{Credentials, Gateway},
    keys::Keys,
    memory::Memory,
};

/// Builder of [`EtcdLeases`], with its settings.
pub struct EtcdLeasesBuilder {
    epochs: Arc<dyn Epochs>,
    key_prefix: String,
    call_timeout: Duration,
    credentials: Option<Credentials>,
    client: Option<Client>,
}

impl EtcdLeasesBuilder {
    /// Creates a builder with the default settings. `epochs` is a `Fence` or another durable
    /// source.
    pub fn new(epochs: impl Epochs + 'static) -> Self {
        Self {
            epochs: Arc::new(epochs),
            key_prefix: "tower-fence".into(),
            call_timeout: Duration::from_secs(2),
            credentials: None,
            client: None,
        }
    }

    /// Sets the prefix of all key names: one or more characters of `A-Z a-z 0-9 - _ .`. Default:
    /// `tower-fence`.
    ///
    /// In each name, a colon follows the prefix. Stores with different prefixes are independent of
    /// each other, and may share one source of epochs if they grant different resources. **Two
    /// sources of epochs, each with its own database, must not share a prefix**. Otherwise the
    /// grants of the second source are refused with [`LeaseError::Misconfigured`].
    #[must_use]
    pub fn key_prefix(mut self, prefix: impl Into<String>) -> Self {
        self.key_prefix = prefix.into();
        self
    }

    /// Sets the timeout of a call, over all endpoints. Default: 2 s.
    ///
    /// Each endpoint has an equal share of the timeout. With three endpoints, an endpoint that does
    /// not respond delays a call by two thirds of a second. While etcd elects a leader (by default
    /// a little more than one second), calls wait, and fail if the timeout is shorter than the
    /// election.
    #[must_use]
    pub const fn call_timeout(mut self, timeout: Duration) -> Self {
        self.call_timeout = timeout;
        self
    }

    /// Sets the user of etcd's authentication. Default: none.
    ///
    /// The user needs permission to read and write the keys that begin with the prefix.
    #[must_use]
    pub fn user(mut self, name: impl Into<String>, password: impl Into<String>) -> Self {
        self.credentials = Some(Credentials {
            name: name.into(),
            password: Zeroizing::new(password.into()),
        });
        self
    }

    /// Sets the HTTP client, for example one with root certificates and a client certificate for
    /// TLS. Default: a client without TLS, unless you enable a TLS feature of `reqwest` in your own
    /// `Cargo.toml`, and without a proxy, because a proxy would receive the password.
    ///
    /// The client must not follow redirects, and must not have a timeout, because a watch stays
    /// open. If etcd requires client certificates and has authentication enabled, the certificate
    /// must have no common name (CN), or etcd refuses it.
    #[must_use]
    pub fn client(mut self, client: Client) -> Self {
        self.client = Some(client);
        self
    }

    /// Connects to a cluster, for example `["http://127.0.0.1:2379"]`.
    ///
    /// Name all members of one cluster. If a member does not respond, the store calls the next one.
    /// The path of an endpoint precedes the paths of etcd. For example, use `https://proxy/etcd` if
    /// a reverse proxy serves etcd below `/etcd`.
    ///
    /// # Errors
    ///
    /// - [`LeaseError::Invalid`] in the same cases as [`connect_lazy`](Self::connect_lazy).
    /// - [`LeaseError::Misconfigured`] if etcd refuses the user, the user is not allowed to read
    ///   the keys, or the HTTP gateway is disabled.
    /// - [`LeaseError::Unavailable`] if no endpoint responds.
    pub async fn connect<E: AsRef<str>>(self, endpoints: &[E]) -> Result<EtcdLeases, LeaseError> {
        let leases = self.connect_lazy(endpoints)?;
        leases.backend().etcd.check().await?;
        Ok(leases)
    }

    /// Creates the store without connecting to etcd, which need not be running yet.
    ///
    /// # Errors
    ///
    /// - [`LeaseError::Invalid`] if there is no endpoint, or if an endpoint is an invalid URL or
    ///   contains a user, a query or a fragment.
    /// - [`LeaseError::Invalid`] if the [key prefix](Self::key_prefix) is invalid.
    /// - [`LeaseError::Misconfigured`] if no HTTP client can be built.
    pub fn connect_lazy<E: AsRef<str>>(self, endpoints: &[E]) -> Result<EtcdLeases, LeaseError> {
        check_key_prefix(&self.key_prefix)?;
        let endpoints = parse_all(endpoints);
        let endpoints = endpoints.map_err(|detail| LeaseError::invalid("endpoints", detail))?;
        let client = match self.client {
            Some(client) => client,
            None => Client::builder()
                .redirect(Policy::none())
                // Over HTTP/2, all calls and watches would share one connection, which may be lost.
                .http1_only()
                // With `http://` URLs, a proxy would receive the password.
                .no_proxy()
                .connect_timeout(self.call_timeout)
                // After a burst, many connections are idle. If all of them were silently lost, the
                // retries over them would outlast a lease.
                .pool_idle_timeout(Duration::from_secs(5))
                .build()
                .map_err(LeaseError::misconfigured)?,
        };
        let etcd = Etcd {
            gateway: Gateway::new(client, endpoints, self.credentials, self.call_timeout),
            keys: Keys {
                prefix: self.key_prefix.into(),
            },
            memory: Memory::default(),
            status_warning: Once::new(),
        };
        let backend = EtcdBackend {
            etcd: Arc::new(etcd),
            followed: Mutex::default(),
            acquisitions: Semaphore::new(ACQUISITIONS),
        };
        Ok(Driver::with_epochs(backend, self.epochs))
    }
}

impl fmt::Debug for EtcdLeasesBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdLeasesBuilder")
            .field("key_prefix", &self.key_prefix)
            .field("call_timeout", &self.call_timeout)
            .finish_non_exhaustive()
    }
}
