//! Settings of the store, and what connects it.

use std::{fmt, time::Duration};

use redis::{Client, RedisError};
use tower_fence::{
    epochs::Epochs,
    lease::{Driver, LeaseError},
};

use super::{QuorumBackend, QuorumLeases, nodes::Nodes};

/// The most nodes. Each grant asks all of them.
const MAX_NODES: usize = 15;

/// Settings of [`QuorumLeases`].
///
/// `E` is the source of epochs: a `Fence`, or another durable source.
pub struct QuorumLeasesBuilder<E> {
    epochs: E,
    key_prefix: String,
    node_timeout: Duration,
}

impl<E: Epochs + 'static> QuorumLeasesBuilder<E> {
    /// The default settings, with this source of epochs.
    pub fn new(epochs: E) -> Self {
        Self {
            epochs,
            key_prefix: "tower-fence".into(),
            node_timeout: Duration::from_millis(50),
        }
    }

    /// Sets what the names of all keys begin with: any text without braces. Default: `tower-fence`.
    ///
    /// Stores with different prefixes are different stores; they may share one source of epochs.
    /// Two sources of epochs may not share a prefix.
    #[must_use]
    pub fn key_prefix(mut self, prefix: impl Into<String>) -> Self {
        self.key_prefix = prefix.into();
        self
    }

    /// Sets how long the answer of one node may take, reconnection included. Default: 50 ms.
    ///
    /// A node that takes longer is left out until it answers again, if the others are a majority.
    /// Choose several round trips to the farthest node.
    #[must_use]
    pub const fn node_timeout(mut self, timeout: Duration) -> Self {
        self.node_timeout = timeout;
        self
    }

    /// Connects to the nodes, `redis://a:6379` for example: three or five, by the names that all
    /// issuers have for them, in any order.
    ///
    /// # Errors
    ///
    /// - [`LeaseError::Invalid`] if there are fewer than three nodes, more than 15, or an even
    ///   number, if one is named twice, or if the key prefix has a brace.
    /// - [`LeaseError::Misconfigured`] if a URL is invalid, which the error names by its place, or
    ///   if a server that answers cannot be a node: it has replicas or is one, belongs to a
    ///   cluster, is the same server as another node, does not report its history, or its token
    ///   counters belong to other nodes or to another source of epochs.
    /// - [`LeaseError::Unavailable`] if no majority of the nodes answers.
    pub async fn connect(self, nodes: &[&str]) -> Result<QuorumLeases, LeaseError> {
        let leases = self.connect_lazy(nodes)?;
        leases.backend().nodes.check().await?;
        Ok(leases)
    }

    /// Like [`connect`](Self::connect), but without a contact yet: the nodes need not be up. Each
    /// is checked at the first contact.
    ///
    /// # Errors
    ///
    /// - [`LeaseError::Invalid`] like [`connect`](Self::connect).
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

    /// Leases in the servers of clients that the application has made, with their credentials and
    /// certificates. Without a contact yet: see [`connect_lazy`](Self::connect_lazy).
    ///
    /// The store makes connections of its own with the settings of the clients.
    ///
    /// # Errors
    ///
    /// [`LeaseError::Invalid`] like [`connect`](Self::connect).
    pub fn with_clients(self, clients: Vec<Client>) -> Result<QuorumLeases, LeaseError> {
        if self.key_prefix.contains(['{', '}']) {
            let detail = "a key prefix has no braces: the keys have";
            return Err(invalid("key_prefix", detail));
        }
        if !(3..=MAX_NODES).contains(&clients.len()) || clients.len().is_multiple_of(2) {
            let detail = "a quorum has three nodes, or five, an odd number up to 15: with two or four, no more of \
                          them may fail than with one less";
            return Err(invalid("nodes", detail));
        }
        let nodes = Nodes::new(clients, self.node_timeout, &self.key_prefix);
        if nodes.has_twins() {
            return Err(invalid("nodes", "one of the nodes is named twice"));
        }
        Ok(Driver::with_epochs(QuorumBackend::new(nodes), self.epochs))
    }
}

fn invalid(field: &str, detail: &str) -> LeaseError {
    LeaseError::Invalid {
        field: field.into(),
        detail: detail.into(),
    }
}

impl<E> fmt::Debug for QuorumLeasesBuilder<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QuorumLeasesBuilder")
            .field("key_prefix", &self.key_prefix)
            .field("node_timeout", &self.node_timeout)
            .finish_non_exhaustive()
    }
}

/// A URL of a node is invalid. It is not quoted: it may hold a password.
#[derive(Debug, thiserror::Error)]
#[error("node {place} of {nodes} has an invalid Redis URL")]
struct InvalidUrl {
    place: usize,
    nodes: usize,
    source: RedisError,
}
