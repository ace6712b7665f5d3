//! Builder of the store: its settings, and the connection to its nodes.

use std::{fmt, sync::Arc, time::Duration};

use redis::{Client, RedisError};
use tower_fence::{
    epochs::Epochs,
    lease::{
        Driver, LeaseError,
        backend::{Expiring, check_key_prefix},
    },
};

use super::{QuorumBackend, QuorumLeases, attempt::Attempts, nodes::Nodes};

/// Maximum number of nodes. Each grant sends a request to all of them.
const MAX_NODES: usize = 15;

/// Builder of [`QuorumLeases`], with its settings.
pub struct QuorumLeasesBuilder {
    epochs: Arc<dyn Epochs>,
    key_prefix: String,
    node_timeout: Duration,
}

impl QuorumLeasesBuilder {
    /// Creates a builder with the default settings. `epochs` is a `Fence` or another durable
    /// source.
    pub fn new(epochs: impl Epochs + 'static) -> Self {
        Self {
            epochs: Arc::new(epochs),
            key_prefix: "tower-fence".into(),
            node_timeout: Duration::from_millis(50),
        }
    }

    /// Sets the prefix of all key names: one or more characters of `A-Z a-z 0-9 - _ .`. Default:
    /// `tower-fence`.
    ///
    /// In each name, a colon follows the prefix. Stores with different prefixes are independent of
    /// each other, and may share one source of epochs if they grant different resources. Two
    /// sources of epochs must not share a prefix. Otherwise the grants of the second source are
    /// refused with [`LeaseError::Misconfigured`].
    #[must_use]
    pub fn key_prefix(mut self, prefix: impl Into<String>) -> Self {
        self.key_prefix = prefix.into();
        self
    }

    /// Sets the timeout for the reply of one node, including a reconnection. Default: 50 ms.
    ///
    /// If a node exceeds the timeout, and the other nodes are a majority, the node gets no further
    /// requests until a probe succeeds. Choose a timeout of several round trips to the farthest
    /// node. A connection that takes longer is opened in the background, for at most one second.
    #[must_use]
    pub const fn node_timeout(mut self, timeout: Duration) -> Self {
        self.node_timeout = timeout;
        self
    }

    /// Connects to an odd number of nodes from 3 to 15, usually three or five, for example
    /// `redis://a:6379`, in any order.
    ///
    /// All issuers must use the same names for the nodes.
    ///
    /// # Errors
    ///
    /// - [`LeaseError::Invalid`] if there are fewer than three nodes, more than 15, or an even
    ///   number, if a node is named twice, or if the [key prefix](Self::key_prefix) is invalid.
    /// - [`LeaseError::Misconfigured`] if a URL is invalid. The error contains the position of the
    ///   URL in the list.
    /// - [`LeaseError::Misconfigured`] if a server that replies cannot be a node. Such a server is
    ///   a replica or has replicas, belongs to a cluster, is the same server as another node, or
    ///   does not report its replication id. A server whose token counter belongs to other nodes
    ///   cannot be a node either.
    /// - [`LeaseError::Unavailable`] if no majority of the nodes replies.
    pub async fn connect(self, nodes: &[&str]) -> Result<QuorumLeases, LeaseError> {
        let leases = self.connect_lazy(nodes)?;
        leases.backend().nodes.check().await?;
        Ok(leases)
    }

    /// Creates the store without connecting to the nodes, which need not be running. Each node is
    /// checked at its first request.
    ///
    /// # Errors
    ///
    /// - [`LeaseError::Invalid`] in the same cases as [`connect`](Self::connect).
    /// - [`LeaseError::Misconfigured`] if a URL is invalid.
    pub fn connect_lazy(self, nodes: &[&str]) -> Result<QuorumLeases, LeaseError> {
        let clients = nodes.iter().zip(1..).map(|(url, place)| {
            Client::open(*url).map_err(|source| {
                LeaseError::misconfigured(InvalidUrl {
                    place,
                    nodes: nodes.len(),
                    source,
                })
            })
        });
        let clients = clients.collect::<Result<_, _>>()?;
        self.with_clients(clients)
    }

    /// Creates the store for nodes whose clients the application has built, for example with
    /// credentials and certificates.
    ///
    /// The store opens its own connections, with the settings of the clients. Like
    /// [`connect_lazy`](Self::connect_lazy), this method does not connect to the nodes.
    ///
    /// # Errors
    ///
    /// Returns [`LeaseError::Invalid`] in the same cases as [`connect`](Self::connect).
    pub fn with_clients(self, clients: Vec<Client>) -> Result<QuorumLeases, LeaseError> {
        check_key_prefix(&self.key_prefix)?;
        if !(3..=MAX_NODES).contains(&clients.len()) || clients.len().is_multiple_of(2) {
            let detail = "a quorum needs an odd number of nodes from 3 to 15: an even number tolerates no more \
                          failures than the odd number below it";
            return Err(LeaseError::invalid("nodes", detail));
        }
        let nodes = Nodes::new(clients, self.node_timeout, &self.key_prefix);
        if nodes.has_repeated_name() {
            return Err(LeaseError::invalid("nodes", "a node is named twice"));
        }
        let backend = QuorumBackend {
            nodes,
            attempts: Attempts::default(),
            grants: Expiring::default(),
        };
        Ok(Driver::with_epochs(backend, self.epochs))
    }
}

impl fmt::Debug for QuorumLeasesBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QuorumLeasesBuilder")
            .field("key_prefix", &self.key_prefix)
            .field("node_timeout", &self.node_timeout)
            .finish_non_exhaustive()
    }
}

/// Error for an invalid URL of a node. It does not contain the URL, which may contain a password.
#[derive(Debug, thiserror::Error)]
#[error("node {place} of {nodes} has an invalid Redis URL")]
struct InvalidUrl {
    place: usize,
    nodes: usize,
    source: RedisError,
}
