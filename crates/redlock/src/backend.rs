//! Backend of the store. Each step runs one or more scripts on all nodes.

use std::{fmt, time::Duration};

use tokio::time::Instant;
use tower_fence::{
    Resource,
    epochs::Epoch,
    lease::{
        Backend, Driver, Held, LeaseError, Page,
        backend::{BlankCounter, Counters, End, Expiring, Reply, Seen, Step},
    },
};

use super::{
    attempt::{Attempts, Grant},
    grant::left_of,
    list::held_by,
    nodes::Nodes,
    scripts::Subject,
};

/// Leases on a majority of three or five independent Redis servers, created by a
/// [`QuorumLeasesBuilder`](crate::QuorumLeasesBuilder).
///
/// The value is cheap to clone, and its clones share their connections. Leases are granted while a
/// majority of the nodes is running, without a failover, even if the other nodes have lost their
/// data. If one Redis server or a Postgres database is enough, its store is simpler and equally
/// safe, because the fence makes writes safe.
///
/// - `Lease::ttl` is the remaining part of the requested time, minus 1 percent and 2 ms for clocks
///   that run at different speeds.
/// - **There is no queue.** A waiting request polls with random pauses, so leases are not granted
///   in the order of the requests.
/// - The nodes are independent: no replicas, no Sentinel, no Cluster. A server that has replicas,
///   is a replica, or belongs to a cluster is refused.
/// - Each token counter stores the names of all nodes: host, port and database, as in the URLs. An
///   issuer with other nodes, or with other names for them, is refused.
pub type QuorumLeases = Driver<QuorumBackend>;

/// Backend of [`QuorumLeases`].
pub struct QuorumBackend {
    pub(crate) nodes: Nodes,
    pub(crate) attempts: Attempts,
    /// The grants of held leases that this process has granted or renewed, by resource and stored
    /// lease id. With a grant in memory, a renewal or a release need not read the lease.
    pub(crate) grants: Expiring<(Resource, String), Grant>,
}

impl QuorumBackend {
    /// Checks each node, and whether it accepts writes. Returns the failures of the nodes that
    /// reply, and the number of nodes that do not reply. The command `check` of the server program
    /// uses this method.
    #[doc(hidden)]
    pub async fn failures(&self) -> (Vec<LeaseError>, usize) {
        self.nodes.failures().await
    }
}

impl Backend for QuorumBackend {
    async fn step(
        &self,
        resource: &Resource,
        step: Step<'_>,
        seen: Seen<'_>,
    ) -> Result<Reply, LeaseError> {
        match step {
            Step::Acquire(ask, _) => {
                check_ttl(ask.ttl)?;
                self.acquire(resource, ask, seen).await
            }
            Step::Renew(renewal) => {
                check_ttl(renewal.ttl)?;
                self.renew(resource, renewal, seen).await
            }
            Step::End(End::Release(lease)) => {
                self.release(&Subject::new(resource, lease, seen)).await
            }
            Step::End(End::Abandon { lease, ticket }) => {
                let subject = Subject::new(resource, lease, seen);
                self.abandon(&subject, *ticket).await
            }
            Step::End(End::Break(token)) => {
                let subject = Subject::any(resource, seen);
                match token {
                    Some(token) => self.break_token(&subject, *token).await,
                    None => self.break_all(&subject).await,
                }
            }
            _ => Err(LeaseError::misconfigured(UnknownStep)),
        }
    }

    async fn begin_epoch(
        &self,
        resource: &Resource,
        counter: &BlankCounter,
        epoch: Epoch,
        seen: Seen<'_>,
    ) -> Result<bool, LeaseError> {
        let subject = Subject::any(resource, seen);
        self.begin(&subject, counter, epoch).await
    }

    async fn inspect(
        &self,
        resource: &Resource,
        seen: Seen<'_>,
    ) -> Result<Option<Held>, LeaseError> {
        let answers = self.read(&Subject::any(resource, seen)).await?;
        let held = held_by(&answers, 0, self.nodes.majority());
        // The nodes without a reply may have the lease as well.
        let may_be_held = || held_by(&answers, 0, answers.needed()).is_some();
        match answers.are_enough() && (held.is_some() || !may_be_held()) {
            true => Ok(held),
            false => Err(answers.no_majority()),
        }
    }

    async fn page(
        &self,
        limit: usize,
        cursor: Option<&str>,
        _: Counters<'_>,
    ) -> Result<Page, LeaseError> {
        self.list(limit, cursor).await
    }

    fn key_prefix(&self) -> &str {
        &self.nodes.scripts.key_prefix
    }
}

/// Refuses a TTL that is not longer than the time that [`left_of`] subtracts from it.
fn check_ttl(ttl: Duration) -> Result<(), LeaseError> {
    match left_of(ttl, Instant::now()) {
        Some(_) => Ok(()),
        None => Err(LeaseError::invalid(
            "ttl_ms",
            "must be more than 2 ms plus one percent, which a quorum subtracts for clock drift",
        )),
    }
}

/// Error for a driver that is newer than this store.
#[derive(Debug, thiserror::Error)]
#[error("the lease store does not know this step: update tower-fence-redlock")]
struct UnknownStep;

impl fmt::Debug for QuorumBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QuorumBackend").finish_non_exhaustive()
    }
}
