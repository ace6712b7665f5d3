//! One server of a quorum.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::Duration,
};

use redis::{RedisError, RedisResult};
use tokio::time::sleep;

use super::{
    answer::{Answer, Unfit},
    scripts::Call,
};
use crate::lease::{
    LeaseError,
    redis::{Credentials, Server},
};

/// A server that stands alone.
pub(super) struct Node {
    server: Server,
    /// Which server it was found to be at the first contact.
    run_id: OnceLock<String>,
    /// Whether it failed to answer in time. It is left out until it answers again, where the others are a majority.
    late: AtomicBool,
    probing: AtomicBool,
}

/// The pause after a probe that was not answered.
const PROBE_AGAIN: Duration = Duration::from_millis(100);

impl Node {
    pub(super) fn new(url: &str, credentials: &Credentials, wait: Duration) -> RedisResult<Self> {
        Ok(Self {
            server: Server::alone(url, credentials, wait)?,
            run_id: OnceLock::new(),
            late: AtomicBool::new(false),
            probing: AtomicBool::new(false),
        })
    }

    /// Its host, port and database.
    pub(super) fn name(&self) -> String {
        format!("{}/{}", self.server.address(), self.server.database())
    }

    pub(super) fn run_id(&self) -> Option<&str> {
        self.run_id.get().map(String::as_str)
    }

    pub(super) fn is_late(&self) -> bool {
        self.late.load(SeqCst)
    }

    pub(super) const fn server(&self) -> &Server {
        &self.server
    }

    /// Makes sure that this is a server that can be a node. Answers [`Answer::Unfit`] where its clocks are those of
    /// others.
    ///
    /// # Errors
    ///
    /// [`LeaseError::Unavailable`] where it does not answer, or cannot be one.
    pub(super) async fn check(&self, check: Call) -> Result<Answer, LeaseError> {
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
                self.unfit("it is part of a cluster, which may give its keys to another server")
            );
        }
        if eviction.starts_with("allkeys") || eviction.starts_with("volatile") {
            tracing::warn!(
                node = self.server.address(),
                maxmemory_policy = eviction,
                "this Redis may evict leases that are held; use `noeviction`"
            );
        }
        let _ = self.run_id.set(run_id.clone());
        Ok(answer)
    }

    /// Runs a script, within the node's time limit.
    pub(super) async fn run(&self, call: Call) -> Result<Answer, LeaseError> {
        let words: RedisResult<(Vec<String>, bool)> = self.server.call(&call).await;
        let away = |error: &RedisError| error.is_timeout() || error.is_io_error();
        self.late.store(words.as_ref().is_err_and(away), SeqCst);
        let (answer, _) = words.map_err(|error| self.server.unavailable(error))?;
        match Answer::parse(answer)? {
            Answer::Unfit(Unfit::NoHistory) => Err(self.unfit(
                "it does not tell its master_replid (INFO replication), without which tokens would not survive a \
                 restart",
            )),
            Answer::Unfit(Unfit::Replicated) => Err(self.unfit(
                "it is a replica or has replicas, so that another server may take its place which knows less; the \
                 nodes of a quorum stand alone",
            )),
            answer => Ok(answer),
        }
    }

    /// Asks in the background whether it answers again, unless that is under way.
    pub(super) fn probe(self: &Arc<Self>, check: Call) {
        if self.probing.swap(true, SeqCst) {
            return;
        }
        let node = Arc::clone(self);
        let probe = Probe(node);
        tokio::spawn(async move {
            let answered = probe.0.run(check).await;
            if answered.is_err() {
                sleep(PROBE_AGAIN).await;
            }
        });
    }

    pub(super) fn unfit(&self, reason: &'static str) -> LeaseError {
        LeaseError::unavailable(UnfitNode {
            address: self.server.address().into(),
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

/// Whether an error says that a server cannot be a node, and not that it could not be asked.
pub(super) fn is_unfit(error: &LeaseError) -> bool {
    matches!(error, LeaseError::Unavailable(cause) if cause.is::<UnfitNode>())
}

/// A server that cannot be a node.
#[derive(Debug, thiserror::Error)]
#[error("Redis at {address} cannot be a node of a quorum: {reason}")]
struct UnfitNode {
    address: Box<str>,
    reason: &'static str,
}
