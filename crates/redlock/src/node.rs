//! One server of a quorum.

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

/// A server that stands alone.
pub(crate) struct Node {
    server: Server,
    /// Which server it was found to be at the first contact.
    run_id: OnceLock<String>,
    /// Whether it failed to answer in time. It is left out until it answers again, if the others
    /// are a majority.
    late: AtomicBool,
    probing: AtomicBool,
}

/// The pause after a probe that was not answered.
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

    /// Its host, port and database.
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

    /// Makes sure that this is a server that can be a node. Answers [`Answer::Unfit`] if its
    /// counters belong elsewhere.
    ///
    /// # Errors
    ///
    /// [`LeaseError::Unavailable`] if it does not answer, [`LeaseError::Misconfigured`] if it
    /// cannot be a node.
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
                "this Redis may evict leases that are held; use `noeviction`"
            );
        }
        let _ = self.run_id.set(run_id.clone());
        Ok(answer)
    }

    /// Runs a script, within the node's timeout. If it may have run twice and there is nothing to
    /// end, the first run has ended it.
    pub(crate) async fn run(&self, call: Call) -> Result<Answer, LeaseError> {
        let called: RedisResult<(Vec<String>, bool)> = self.server.call(&call).await;
        let (words, is_repeated) = self.answered(called)?;
        match Answer::parse(&words)? {
            Answer::None if is_repeated => Ok(Answer::Ended),
            Answer::Unfit(Unfit::NoHistory) => Err(self.unfit(
                "it does not report its master_replid (INFO replication), without which tokens would not survive \
                 a restart",
            )),
            Answer::Unfit(Unfit::Replicated) => Err(self.unfit(
                "it is a replica or has replicas, so that another server, which knows less, may replace it; the \
                 nodes of a quorum stand alone",
            )),
            answer => Ok(answer),
        }
    }

    /// Runs a script that reads several leases.
    pub(crate) async fn look(&self, call: Call) -> Result<Answer, LeaseError> {
        let called: RedisResult<(Vec<Vec<String>>, bool)> = self.server.call(&call).await;
        let (looks, _) = self.answered(called)?;
        Answer::parse_looks(&looks)
    }

    fn answered<T>(&self, answer: RedisResult<T>) -> Result<T, LeaseError> {
        let away = |error: &RedisError| error.is_timeout() || error.is_io_error();
        self.late.store(answer.as_ref().is_err_and(away), SeqCst);
        answer.map_err(|error| self.server.unavailable(error))
    }

    /// Asks in the background whether it answers again, unless that is under way.
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

/// The probe that is under way, until it ends in any way.
struct Probe(Arc<Node>);

impl Drop for Probe {
    fn drop(&mut self) {
        self.0.probing.store(false, SeqCst);
    }
}

/// A server that cannot be a node.
#[derive(Debug, thiserror::Error)]
#[error("Redis at {node} cannot be a node of a quorum: {reason}")]
struct UnfitNode {
    node: Box<str>,
    reason: &'static str,
}
