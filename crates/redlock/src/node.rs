//! Redis server of a quorum.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::Duration,
};

use redis::{Client, RedisError, RedisResult};
use tokio::time::sleep;
use tower_fence::lease::LeaseError;

use super::{
    answer::{Answer, Unfit},
    scripts::Call,
    server::Server,
};

/// Node of the quorum, which is an independent Redis server.
pub(crate) struct Node {
    server: Server,
    /// The run id that the server reported at its first request.
    run_id: OnceLock<String>,
    /// Whether the last call has timed out or lost its connection. If so, and if the other nodes
    /// are a majority, the node gets no further requests until it replies to a probe.
    late: AtomicBool,
    probing: AtomicBool,
}

/// Pause after a probe without a reply.
const PROBE_INTERVAL: Duration = Duration::from_millis(100);

impl Node {
    pub(crate) fn new(client: Client, timeout: Duration) -> Self {
        Self {
            server: Server::new(client, timeout),
            run_id: OnceLock::new(),
            late: AtomicBool::new(false),
            probing: AtomicBool::new(false),
        }
    }

    /// Returns the host, the port and the database of the server.
    pub(crate) fn name(&self) -> &str {
        self.server.name()
    }

    pub(crate) fn run_id(&self) -> Option<&str> {
        self.run_id.get().map(String::as_str)
    }

    pub(crate) fn is_late(&self) -> bool {
        self.late.load(SeqCst)
    }

    pub(crate) const fn server(&self) -> &Server {
        &self.server
    }

    /// Checks whether the server can be a node. Returns [`Answer::Unfit`] if its counters belong to
    /// other nodes or to another source of epochs.
    ///
    /// # Errors
    ///
    /// Returns [`LeaseError::Unavailable`] if the server does not reply, and
    /// [`LeaseError::Misconfigured`] if it cannot be a node.
    pub(crate) async fn check(&self, check: Call) -> Result<Answer, LeaseError> {
        let answer = self.run(check).await?;
        let Answer::Node {
            run_id,
            clustered,
            eviction,
        } = &answer
        else {
            return Ok(answer);
        };
        if *clustered {
            return Err(
                self.unfit("it is part of a cluster, which may move its keys to another server")
            );
        }
        if eviction.starts_with("allkeys") || eviction.starts_with("volatile") {
            tracing::warn!(
                node = self.name(),
                maxmemory_policy = eviction,
                "this Redis may evict held leases: set maxmemory-policy to `noeviction`"
            );
        }
        let _ = self.run_id.set(run_id.clone());
        Ok(answer)
    }

    /// Runs a script, within the node's timeout.
    pub(crate) async fn run(&self, call: Call) -> Result<Answer, LeaseError> {
        let called: RedisResult<(Vec<String>, bool)> = self.server.call(&call).await;
        let away = |error: &RedisError| error.is_timeout() || error.is_io_error();
        self.late.store(called.as_ref().is_err_and(away), SeqCst);
        let (texts, is_repeated) = called.map_err(|error| self.server.unavailable(error))?;
        match Answer::parse(&texts)? {
            Answer::None if is_repeated => Ok(Answer::MayHaveEnded),
            Answer::Unfit(Unfit::NoHistory) => Err(self.unfit(
                "it does not report its master_replid (INFO replication), without which tokens would not survive \
                 a restart",
            )),
            Answer::Unfit(Unfit::Replicated) => Err(self.unfit(
                "it is a replica or has replicas, so a server that lacks its latest data may replace it; the \
                 nodes of a quorum must be standalone servers",
            )),
            answer => Ok(answer),
        }
    }

    /// Checks in the background whether the node replies again, unless a probe is in progress.
    pub(crate) fn probe(self: &Arc<Self>, check: Call) {
        if self.probing.swap(true, SeqCst) {
            return;
        }
        let probe = Probe(Arc::clone(self));
        tokio::spawn(async move {
            let answered = probe.0.run(check).await;
            if answered.is_err() {
                sleep(PROBE_INTERVAL).await;
            }
        });
    }

    pub(crate) fn unfit(&self, reason: &'static str) -> LeaseError {
        LeaseError::misconfigured(UnfitNode {
            node: self.name().into(),
            reason,
        })
    }
}

/// Probe that is in progress. When it is dropped, the next one may begin.
struct Probe(Arc<Node>);

impl Drop for Probe {
    fn drop(&mut self) {
        self.0.probing.store(false, SeqCst);
    }
}

/// Error for a server that cannot be a node.
#[derive(Debug, thiserror::Error)]
#[error("Redis at {node} cannot be a node of a quorum: {reason}")]
struct UnfitNode {
    node: Box<str>,
    reason: &'static str,
}
