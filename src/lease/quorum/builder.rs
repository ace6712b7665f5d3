//! Settings of the store, and what connects it.

use std::{fmt, sync::Arc, time::Duration};

use super::{nodes::Nodes, store::QuorumLeases};
use crate::{
    epochs::Epochs,
    lease::{LeaseError, memory::Memory, redis::Credentials},
};

/// The most nodes. Each grant asks all of them, twice.
const MAX_NODES: usize = 15;

/// Settings of [`QuorumLeases`], from [`QuorumLeases::builder`].
pub struct QuorumLeasesBuilder {
    epochs: Arc<dyn Epochs>,
    key_prefix: String,
    node_wait: Duration,
    limit: Duration,
    max_waiters: usize,
    credentials: Credentials,
}

impl QuorumLeasesBuilder {
    fn new(epochs: Arc<dyn Epochs>) -> Self {
        Self {
            epochs,
            key_prefix: "tower-fence".into(),
            node_wait: Duration::from_millis(50),
            limit: Duration::from_secs(2),
            max_waiters: 1_000,
            credentials: Credentials::default(),
        }
    }

    /// What the names of all keys begin with: any text without braces. Default: `tower-fence`.
    ///
    /// Stores with different prefixes are different stores; they may share one source of epochs. Two sources of
    /// epochs may not share a prefix.
    #[must_use]
    pub fn key_prefix(mut self, prefix: impl Into<String>) -> Self {
        self.key_prefix = prefix.into();
        self
    }

    /// How long to wait for the answer of one node, reconnection included. Default: 50 ms.
    ///
    /// A node that takes longer is left out until it answers again, where the others are a majority. Choose several
    /// round trips to the farthest node.
    #[must_use]
    pub const fn node_wait(mut self, limit: Duration) -> Self {
        self.node_wait = limit;
        self
    }

    /// How long a request may take on the whole that meets others on its way and is repeated, beside the time that it
    /// waits for the lease. Default: 2 s.
    #[must_use]
    pub const fn command_wait(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// How many may wait at this issuer, for any resource. Each asks again after pauses at random, from some
    /// milliseconds up to half a second. Default: 1,000. Above that a request to wait is answered [`LeaseError::TooManyWaiters`].
    #[must_use]
    pub const fn max_waiters(mut self, limit: usize) -> Self {
        self.max_waiters = limit;
        self
    }

    /// Sets the authorities (PEM) whose certificates are trusted, instead of those of the system. Each node then needs
    /// TLS, `rediss://`.
    #[cfg(feature = "redis-tls")]
    #[must_use]
    pub fn certificate_authority(mut self, pem: impl Into<Vec<u8>>) -> Self {
        self.credentials.trust_only(pem.into());
        self
    }

    /// Sets the certificate that this client shows, with its chain, and its key (PEM). Default: none. Each node then
    /// needs TLS, `rediss://`.
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

    /// Connects to the nodes, `redis://a:6379`, for example: three or five, by the names that all issuers have for
    /// them, in any order.
    ///
    /// # Errors
    ///
    /// - [`LeaseError::Invalid`] when there are fewer than three nodes, more than 15, or an even number, when one is
    ///   named twice, or when the key prefix has a brace.
    /// - [`LeaseError::Unavailable`] when a URL is not one, which the error names by its place, when no majority of the nodes answers, or when one that
    ///   answers cannot be a node: it has replicas or is one, belongs to a cluster, is the same server as another node,
    ///   does not tell its history, or its clocks are those of other nodes or of another source of epochs.
    pub async fn connect(self, nodes: &[&str]) -> Result<QuorumLeases, LeaseError> {
        let leases = self.connect_lazy(nodes)?;
        leases.quorum().nodes.check().await?;
        Ok(leases)
    }

    /// As [`connect`](Self::connect), but without a contact yet: the nodes need not be up. Each is checked at the first
    /// contact.
    ///
    /// # Errors
    ///
    /// - [`LeaseError::Invalid`] as [`connect`](Self::connect).
    /// - [`LeaseError::Unavailable`] when a URL is not one.
    pub fn connect_lazy(self, nodes: &[&str]) -> Result<QuorumLeases, LeaseError> {
        let invalid = |field: &str, detail: &str| LeaseError::Invalid {
            field: field.into(),
            detail: detail.into(),
        };
        if self.key_prefix.contains(['{', '}']) {
            return Err(invalid(
                "key_prefix",
                "a key prefix has no braces: the keys have",
            ));
        }
        if nodes.len() < 3 || nodes.len() > MAX_NODES || nodes.len().is_multiple_of(2) {
            let detail = "a quorum has three nodes, or five, an odd number up to 15: with two or four, no more of them \
                          may fail than with one less";
            return Err(invalid("nodes", detail));
        }
        let nodes = Nodes::new(nodes, &self.credentials, self.node_wait, &self.key_prefix)?;
        if nodes.has_twins() {
            return Err(invalid("nodes", "one of the nodes is named twice"));
        }
        let memory = Memory::new(self.epochs);
        Ok(QuorumLeases::new(
            nodes,
            memory,
            self.limit,
            self.max_waiters,
        ))
    }
}

impl QuorumLeases {
    /// Connects to the nodes with the default settings. `epochs` is a `Fence`, or another durable source.
    ///
    /// # Errors
    ///
    /// As [`QuorumLeasesBuilder::connect`].
    pub async fn connect(
        nodes: &[&str],
        epochs: impl Epochs + 'static,
    ) -> Result<Self, LeaseError> {
        Self::builder(epochs).connect(nodes).await
    }

    /// Settings, to be changed before connecting.
    pub fn builder(epochs: impl Epochs + 'static) -> QuorumLeasesBuilder {
        QuorumLeasesBuilder::new(Arc::new(epochs))
    }
}

impl fmt::Debug for QuorumLeasesBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QuorumLeasesBuilder")
            .field("key_prefix", &self.key_prefix)
            .field("node_wait", &self.node_wait)
            .field("command_wait", &self.limit)
            .field("max_waiters", &self.max_waiters)
            .finish_non_exhaustive()
    }
}
