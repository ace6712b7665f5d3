#![doc = include_str!("../README.md")]
//!
//! # How it works
//!
//! 1. A lease is a key with its own etcd lease, which has a random id. When the etcd lease ends,
//!    etcd deletes the key. The key is written if it does not exist and no earlier request waits.
//! 2. A token is `epoch * 1_000_000_000 + n`, where n is the number of revisions of etcd since the
//!    epoch began on the counter of the partition. Counting needs no write to a key, because n
//!    follows from the revision in which the key of the lease is written.
//! 3. A counter is valid in one incarnation of etcd. An incarnation lasts from the creation of
//!    etcd, or its restore from a snapshot, to the next restore. No lease is granted if the counter
//!    belongs to an earlier incarnation, is missing, or is lower than the highest state that this
//!    process has seen. In this case the store takes an epoch from
//!    [`Epochs`](tower_fence::epochs::Epochs) and begins it on a blank counter.
//! 4. A grant takes three calls: LeaseGrant, a transaction that compares the counter and the
//!    incarnation, and a Status call, which shows whether etcd was restored from a snapshot. If the
//!    lease has no lock delay, its release takes one LeaseRevoke in the process that granted or
//!    renewed it, and two calls in any other process.
//! 5. In that process, a renewal of such a lease with the same TTL and token takes KeepAlive, a
//!    transaction that reads the key, and a Status call. A lease is valid only if its token comes
//!    from the current counter. If a lease was restored from a snapshot, its holder has lost it,
//!    but it blocks its resource for the rest of its time.
//! 6. The queue is a range of keys in the order in which they were created. A process watches the
//!    queues in which its own requests wait, and keeps all their positions alive with one etcd
//!    lease.

mod acquire;
mod builder;
mod counter;
mod end;
mod endpoints;
mod epochs;
mod error;
mod etcd;
mod etcd_lease;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzz;
mod gateway;
mod incarnation;
mod keys;
mod list;
mod memory;
mod messages;
mod queue;
mod renew;
mod replace;
mod stored;
mod view;
mod watch;
mod watched_queue;

use std::{
    fmt,
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::{
    sync::{Semaphore, mpsc},
    time::timeout,
};
use tower_fence::{
    Resource,
    epochs::Epoch,
    lease::{
        Backend, Driver, Held, LeaseError, Page, Turns,
        backend::{BlankCounter, Counters, Reply, Seen, Step},
    },
};

pub use self::builder::EtcdLeasesBuilder;
use self::{acquire::Acquiring, etcd::Etcd};

/// Leases in etcd, created by [`EtcdLeasesBuilder`].
///
/// The value is cheap to clone, and its clones share one store.
pub type EtcdLeases = Driver<EtcdBackend>;

/// Backend of [`EtcdLeases`].
pub struct EtcdBackend {
    etcd: Arc<Etcd>,
    /// The channel on which the resources to watch are sent to the task that watches them.
    followed: Mutex<Option<mpsc::UnboundedSender<Resource>>>,
    /// The permits for steps of acquisitions. When a watch is lost, all waiting requests retry at
    /// the same time. Without permits, their calls would delay each other beyond the timeout.
    acquisitions: Semaphore,
}

/// Error for a driver that is newer than this store.
#[derive(Debug, thiserror::Error)]
#[error("the lease store does not know this step: update tower-fence-etcd")]
struct UnknownStep;

/// Error of an acquisition that has not called etcd.
#[derive(Debug, thiserror::Error)]
#[error("too many acquisitions are waiting for answers from etcd")]
struct Overloaded;

/// Maximum number of acquisitions that call etcd at the same time.
const ACQUISITIONS: usize = 64;

/// Maximum time for which an acquisition waits until it may call etcd.
const PERMIT_TIMEOUT: Duration = Duration::from_secs(10);

impl Backend for EtcdBackend {
    async fn step(
        &self,
        resource: &Resource,
        step: Step<'_>,
        seen: Seen<'_>,
    ) -> Result<Reply, LeaseError> {
        match step {
            Step::Acquire(ask, waits) => {
                // While etcd does not respond, requests must not accumulate.
                let permit = timeout(PERMIT_TIMEOUT, self.acquisitions.acquire());
                let _permit = permit
                    .await
                    .map_err(|_| LeaseError::unavailable(Overloaded))?;
                let acquiring = Acquiring::new(&self.etcd, resource, ask, waits, seen);
                acquiring.run().await
            }
            Step::Renew(renewal) => self.etcd.renew(resource, renewal, &seen).await,
            Step::End(end) => self.etcd.end(resource, end).await,
            _ => Err(LeaseError::misconfigured(UnknownStep)),
        }
    }

    async fn begin_epoch(
        &self,
        resource: &Resource,
        counter: &BlankCounter,
        epoch: Epoch,
        _: Seen<'_>,
    ) -> Result<bool, LeaseError> {
        Ok(self.etcd.begin_epoch(resource, counter, epoch).await?)
    }

    async fn inspect(
        &self,
        resource: &Resource,
        seen: Seen<'_>,
    ) -> Result<Option<Held>, LeaseError> {
        self.etcd.inspect(resource, &seen).await
    }

    async fn page(
        &self,
        limit: usize,
        cursor: Option<&str>,
        counters: Counters<'_>,
    ) -> Result<Page, LeaseError> {
        self.etcd.page(limit, cursor, counters).await
    }

    async fn listen(&self, turns: &Turns) -> Result<(), LeaseError> {
        self.report_turns(turns).await
    }

    async fn follow(&self, resource: &Resource) -> Result<(), LeaseError> {
        self.begin_watch(resource);
        Ok(())
    }

    fn key_prefix(&self) -> &str {
        &self.etcd.keys.prefix
    }
}

impl fmt::Debug for EtcdBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdBackend").finish_non_exhaustive()
    }
}
