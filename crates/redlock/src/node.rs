//! Redis server of a quorum.

use std::{
    io,
    sync::{
        Arc, Mutex as SyncMutex,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::Duration,
};

use redis::{
    AsyncConnectionConfig, Client, ErrorKind, RedisError, RedisResult, ServerErrorKind,
    aio::MultiplexedConnection,
};
use tokio::{
    sync::Mutex,
    time::{Instant, sleep, timeout_at},
};
use tower_fence::lease::LeaseError;

use super::{
    answer::{Answer, Unfit},
    health::{Health, QUIET, lock},
    scripts::Call,
};

/// Independent Redis server of the quorum. If the connection to the server is lost, the node opens
/// a new one.
pub(crate) struct Node {
    client: Client,
    /// The host, the port and the database, without a password.
    name: Arc<str>,
    key_prefix: Box<str>,
    /// The current connection, with a number that distinguishes it from earlier ones, and the time
    /// at which it was opened.
    current: Arc<Mutex<Option<(Opened, MultiplexedConnection)>>>,
    timeout: Duration,
    /// The run id that the server reported at its last check, if it is still known.
    run_id: SyncMutex<Option<Arc<str>>>,
    /// The time of the last check that was made because another node had the same run id.
    checked_again_at: SyncMutex<Option<Instant>>,
    /// Whether the last call has timed out or lost its connection, or the last probe has failed. If
    /// so, and if the other nodes are a majority, the node gets no further requests until a probe
    /// succeeds.
    late: AtomicBool,
    probing: AtomicBool,
    watched: AtomicBool,
    health: Health,
}

/// Random number of a connection, and the time at which it was opened.
type Opened = (u64, Instant);

/// Pause after a probe without a reply.
const PROBE_INTERVAL: Duration = Duration::from_millis(100);
/// Minimum timeout for opening a connection in the background.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// Minimum time between two checks of a node that another node has made necessary, because both are
/// the same server.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

impl Node {
    pub(crate) fn new(client: Client, timeout: Duration, key_prefix: &str) -> Self {
        let info = client.get_connection_info();
        let name = format!("{}/{}", info.addr(), info.redis_settings().db()).into();
        Self {
            client,
            name,
            key_prefix: key_prefix.into(),
            current: Arc::default(),
            timeout,
            run_id: SyncMutex::default(),
            checked_again_at: SyncMutex::default(),
            late: AtomicBool::new(false),
            probing: AtomicBool::new(false),
            watched: AtomicBool::new(false),
            health: Health::default(),
        }
    }

    /// Returns the host, the port and the database, without a password.
    pub(crate) fn name(&self) -> &str {
        &self.name
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
            return Err(
                self.unfit("it is part of a cluster, which may move its keys to another server")
            );
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

    /// Drops the connection. The next request opens a new one, perhaps to another server.
    pub(crate) fn disconnect(&self) {
        // If the lock is taken, another request is already opening a new connection.
        if let Ok(mut current) = self.current.try_lock() {
            current.take();
        }
    }

    /// Runs a script. Every script may run twice.
    pub(crate) async fn run(&self, call: &Call) -> Result<Answer, LeaseError> {
        let invoke = |mut connection| async move { call.invoke_async(&mut connection).await };
        let called: RedisResult<(Vec<String>, bool)> = self.command(invoke).await;
        let away = |error: &RedisError| error.is_timeout() || error.is_io_error();
        self.late.store(called.as_ref().is_err_and(away), SeqCst);
        let (texts, is_repeated) = called.map_err(|error| self.unavailable(error))?;
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
        if !self.health.note(&self.name, outcome) || self.watched.swap(true, SeqCst) {
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
                node.health.note(&node.name, &checked);
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

    /// Runs a command within the timeout, and returns whether it may have run twice. If the
    /// connection breaks, the command is repeated, because the server may have closed an idle
    /// connection, or its reply may have been lost.
    pub(crate) async fn command<T, F>(
        &self,
        command: impl Fn(MultiplexedConnection) -> F,
    ) -> RedisResult<(T, bool)>
    where
        F: Future<Output = RedisResult<T>>,
    {
        let until = Instant::now() + self.timeout;
        match self.attempt(&command, until).await {
            Err(error) if error.is_unrecoverable_error() && !error.is_timeout() => {
                Ok((self.attempt(&command, until).await?, true))
            }
            outcome => Ok((outcome?, false)),
        }
    }

    async fn attempt<T, F>(
        &self,
        command: impl Fn(MultiplexedConnection) -> F,
        until: Instant,
    ) -> RedisResult<T>
    where
        F: Future<Output = RedisResult<T>>,
    {
        let mut used = None;
        let run = async {
            let (opened, connection) = self.connection().await?;
            used = Some(opened);
            command(connection).await
        };
        let outcome = match timeout_at(until, run).await {
            Ok(outcome) => outcome,
            Err(_) => Err(io::Error::from(io::ErrorKind::TimedOut).into()),
        };
        let began = until - self.timeout;
        if let (Err(error), Some(opened)) = (&outcome, used)
            && (error.is_io_error() || error.is_unrecoverable_error())
            // If the connection was opened during this call, the next call may be in time.
            && !(error.is_timeout() && opened.1 > began)
            // If the lock is taken, another request is already opening a new connection.
            && let Ok(mut current) = self.current.try_lock()
        {
            current.take_if(|(current, _)| *current == opened);
        }
        outcome
    }

    /// Returns the current connection, or opens one. If the caller does not wait until the
    /// connection is open, a task continues to open it. Otherwise, a node to which a connection
    /// takes longer than the timeout could never be used.
    async fn connection(&self) -> RedisResult<(Opened, MultiplexedConnection)> {
        let mut current = Arc::clone(&self.current).lock_owned().await;
        if let Some(current) = &*current {
            return Ok(current.clone());
        }
        let client = self.client.clone();
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(self.timeout.max(CONNECT_TIMEOUT)))
            // `attempt` limits the time of each command.
            .set_response_timeout(None);
        let connecting = tokio::spawn(async move {
            let connection = client.get_multiplexed_async_connection_with_config(&config);
            let connection = connection.await?;
            let opened = (rand::random(), Instant::now());
            Ok(current.insert((opened, connection)).clone())
        });
        connecting.await.map_err(io::Error::other)?
    }

    /// Returns the error of the store for a failure of this server. It is
    /// [`Misconfigured`](LeaseError::Misconfigured) if the server would refuse the command again,
    /// and [`Unavailable`](LeaseError::Unavailable) otherwise.
    pub(crate) fn unavailable(&self, error: RedisError) -> LeaseError {
        // A failed login may be temporary: redis-rs also reports one if the server has too many
        // clients.
        let is_permanent = matches!(
            error.kind(),
            ErrorKind::InvalidClientConfig | ErrorKind::Server(ServerErrorKind::NoPerm)
        ) || error.detail().is_some_and(has_permanent_cause);
        let error = ServerError {
            name: Arc::clone(&self.name),
            source: error,
        };
        match is_permanent {
            true => LeaseError::misconfigured(error),
            false => LeaseError::unavailable(error),
        }
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

/// Returns whether Redis would refuse the command again. Redis reports such errors with the general
/// error code, at least for a command in a script, so only their texts identify them.
fn has_permanent_cause(detail: &str) -> bool {
    let texts = [
        // The user lacks a right. The first text is that of Redis 7.2 and later.
        "ACL failure in script",
        "The user executing the script can't",
        // The command was renamed, or a proxy does not support it.
        "unknown command",
        "Unknown Redis command called from script",
        "DB index is out of range",
        // Another program has written the key.
        "wrong kind of value",
    ];
    texts.iter().any(|text| detail.contains(text))
}

/// Error of the server, with its address.
#[derive(Debug, thiserror::Error)]
#[error("Redis at {name} cannot be used")]
struct ServerError {
    name: Arc<str>,
    source: RedisError,
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
        let scripts = Scripts::new("tower-fence", "a b c");
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
