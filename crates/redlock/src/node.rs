//! Node of a quorum: whether its server can be used.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::Duration,
};

use redis::{Client, RedisError, RedisResult};
use tokio::time::{Instant, sleep};
use tower_fence::lease::LeaseError;

use super::{
    answer::{Answer, Unfit},
    health::{Health, QUIET, lock},
    scripts::Call,
    server::Server,
};

/// Server of the quorum, and what this process knows about it.
pub(crate) struct Node {
    pub(crate) server: Server,
    key_prefix: Box<str>,
    /// The run id that the server reported at its last check, if it is still known.
    run_id: Mutex<Option<Arc<str>>>,
    /// The time of the last check that was made because another node had the same run id.
    checked_again_at: Mutex<Option<Instant>>,
    /// Whether the last call has timed out or lost its connection, or the last probe has failed. If
    /// so, and if the other nodes are a majority, the node gets no further requests until a probe
    /// succeeds.
    late: AtomicBool,
    /// Whether a probe is in progress.
    probing: AtomicBool,
    /// Whether a task checks the node each minute, because the node has failed.
    watched: AtomicBool,
    health: Health,
}

/// Pause after a probe without a reply.
const PROBE_INTERVAL: Duration = Duration::from_millis(100);
/// Minimum time between two checks of a node that another node has made necessary, because both are
/// the same server.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

impl Node {
    pub(crate) fn new(client: Client, timeout: Duration, key_prefix: &str) -> Self {
        Self {
            server: Server::new(client, timeout),
            key_prefix: key_prefix.into(),
            run_id: Mutex::default(),
            checked_again_at: Mutex::default(),
            late: AtomicBool::new(false),
            probing: AtomicBool::new(false),
            watched: AtomicBool::new(false),
            health: Health::default(),
        }
    }

    pub(crate) fn name(&self) -> &str {
        &self.server.name
    }

    pub(crate) fn run_id(&self) -> Option<Arc<str>> {
        lock(&self.run_id).clone()
    }

    pub(crate) fn is_late(&self) -> bool {
        self.late.load(SeqCst)
    }

    /// Checks whether the server can be a node. Returns [`Answer::OtherNodes`] if its counters
    /// belong to a quorum of other nodes.
    ///
    /// # Errors
    ///
    /// Returns [`LeaseError::Unavailable`] if the server does not reply, and
    /// [`LeaseError::Misconfigured`] if it cannot be a node.
    pub(crate) async fn check(&self, check: &Call) -> Result<Answer, LeaseError> {
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
            return Err(self.clustered());
        }
        let is_new = self.run_id().as_deref() != Some(run_id.as_str());
        if is_new && (eviction.starts_with("allkeys") || eviction.starts_with("volatile")) {
            tracing::warn!(
                node = self.name(),
                maxmemory_policy = eviction,
                "this Redis may evict held leases: set maxmemory-policy to `noeviction`"
            );
        }
        *lock(&self.run_id) = Some(run_id.as_str().into());
        Ok(answer)
    }

    /// Clears the run id, so that the node is checked before it is used again.
    pub(crate) fn forget_run_id(&self) {
        lock(&self.run_id).take();
    }

    /// Returns whether the node may be checked again now, because another node is the same server.
    pub(crate) fn may_check_again(&self) -> bool {
        let (mut last, now) = (lock(&self.checked_again_at), Instant::now());
        if last.is_some_and(|last| now < last + CHECK_INTERVAL) {
            return false;
        }
        *last = Some(now);
        true
    }

    /// Runs a script. Every script may run twice.
    pub(crate) async fn run(&self, call: &Call) -> Result<Answer, LeaseError> {
        let invoke = |mut connection| async move { call.invoke_async(&mut connection).await };
        let called: RedisResult<(Vec<String>, bool)> = self.server.command(invoke).await;
        let away = |error: &RedisError| error.is_timeout() || error.is_io_error();
        self.late.store(called.as_ref().is_err_and(away), SeqCst);
        let (texts, is_repeated) = called.map_err(|error| match is_clustered(&error) {
            true => self.clustered(),
            false => self.server.lease_error(error),
        })?;
        match Answer::parse(&texts)? {
            Answer::None if is_repeated => Ok(Answer::MayHaveEnded),
            Answer::Unfit(Unfit::NoHistory) => Err(self.unfit(
                "it does not report its master_replid (INFO replication), so tokens could repeat after a restart",
            )),
            Answer::Unfit(Unfit::Replicated) => Err(self.unfit(
                "it is a replica or has replicas, so a server that lacks its latest data may replace it; the \
                 nodes of a quorum must be standalone servers",
            )),
            Answer::Unfit(Unfit::OtherSource(theirs)) => {
                Err(LeaseError::misconfigured(OtherSource {
                    node: self.name().into(),
                    key_prefix: self.key_prefix.clone(),
                    theirs,
                }))
            }
            answer => Ok(answer),
        }
    }

    /// Records the outcome of a call, for the log and the metrics. A node that has failed is
    /// checked each minute until it counts as usable, because there may be no further calls. At
    /// most one such watch runs for each node, even if the node fails again within a minute.
    pub(crate) fn note<T>(
        self: &Arc<Self>,
        outcome: &Result<T, LeaseError>,
        check: impl FnOnce() -> Call,
    ) {
        if !self.health.note(self.name(), outcome) || self.watched.swap(true, SeqCst) {
            return;
        }
        let (node, check) = (Arc::downgrade(self), check());
        tokio::spawn(async move {
            loop {
                sleep(QUIET).await;
                let Some(node) = node.upgrade() else {
                    return;
                };
                // A failure from now on begins another watch, unless this one continues.
                node.watched.store(false, SeqCst);
                if !node.health.has_failed() || node.watched.swap(true, SeqCst) {
                    return;
                }
                let checked = node.check(&check).await;
                node.health.note(node.name(), &checked);
            }
        });
    }

    /// Checks in the background whether the node can be used again, unless a probe is in progress.
    /// Another server may have replaced the node.
    pub(crate) fn probe(self: &Arc<Self>, check: Call) {
        if self.probing.swap(true, SeqCst) {
            return;
        }
        let probe = Probe(Arc::clone(self));
        tokio::spawn(async move {
            let checked = probe.0.check(&check).await;
            probe.0.note(&checked, || check);
            if checked.is_err() {
                probe.0.late.store(true, SeqCst);
                sleep(PROBE_INTERVAL).await;
            }
        });
    }

    fn clustered(&self) -> LeaseError {
        self.unfit("it is part of a cluster, which may move its keys to another server")
    }

    pub(crate) fn unfit(&self, reason: &'static str) -> LeaseError {
        LeaseError::misconfigured(UnfitNode {
            node: self.name().into(),
            reason,
        })
    }
}

/// Returns whether a server replied that it is part of a cluster. A server of a cluster replies
/// this, instead of running a script, if another server has one of the keys.
fn is_clustered(error: &RedisError) -> bool {
    // Redis, and Valkey before 9, reply the second text to a connection with a database other than
    // 0.
    let texts = ["non local key", "SELECT is not allowed in cluster mode"];
    let has = |detail: &str| texts.iter().any(|text| detail.contains(text));
    error.is_cluster_error() || error.detail().is_some_and(has)
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

/// Error for a node whose counters belong to another source of epochs.
#[derive(Debug, thiserror::Error)]
#[error(
    "the token counters under the key prefix `{key_prefix}` on the node `{node}` belong to the source of epochs \
     `{theirs}`, which is not this issuer's: choose a key prefix for each database (`key_prefix`), or, if the \
     database was recreated, stop all issuers and delete the keys `{key_prefix}:quorum:*` on all nodes; if an issuer \
     with that source was started by mistake, stop it and delete only the counters `{key_prefix}:quorum:*:counter` \
     that name the source"
)]
struct OtherSource {
    node: Box<str>,
    key_prefix: Box<str>,
    theirs: String,
}

#[cfg(test)]
mod tests {
    use super::{
        super::{answer::unexpected, scripts::Scripts},
        *,
    };

    #[tokio::test(start_paused = true)]
    async fn node_that_fails_again_has_one_watch() {
        let client = Client::open("redis://127.0.0.1:1").unwrap();
        let node = Arc::new(Node::new(client, Duration::from_secs(1), "tower-fence"));
        let scripts = Scripts {
            key_prefix: "tower-fence".into(),
            nodes: "a b c".into(),
        };
        let note = |outcome| node.note(&outcome, || scripts.check(""));
        // Each watch has a weak reference to the node.
        let watches = || Arc::weak_count(&node);
        let fail_and_recover = async || {
            note(Err(unexpected()));
            assert_eq!(watches(), 1);
            // The time advances before a new watch begins to wait.
            tokio::time::advance(QUIET).await;
            note(Ok(()));
            assert!(!node.health.has_failed());
        };
        fail_and_recover().await;
        sleep(2 * QUIET).await;
        assert_eq!(watches(), 0);
        fail_and_recover().await;
        note(Err(unexpected()));
        assert_eq!(watches(), 1);
    }
}
