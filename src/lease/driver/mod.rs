//! [`Driver`]: the part that all stores share, built on the steps of a [`Backend`].

mod decision;
mod epochs;
mod listener;
mod pending;
mod queue;

use std::{fmt, sync::Arc, time::Duration};

use derive_where::derive_where;
use tokio::time::{Instant, sleep};

#[cfg(feature = "testing")]
pub(super) use self::queue::LONGEST_SLEEP;
pub use self::queue::Turns;
use self::{listener::Listener, pending::unexpected};
use super::{
    Acquire, Announced, Backend, Held, Lease, LeaseAdmin, LeaseError, LeaseId, Leases, Page, Renew,
    TooMuchChange,
    backend::{Counters, End, Granted, Renewal, Reply, Step},
    counters::KnownCounters,
};
use crate::{
    announce::{Announce, LeaseDigest},
    chain::Chain,
    epochs::{Epochs, partition_of},
    events, metrics,
    time::{after, at_least_1_ms, of_ms},
    token::{Resource, Token},
};

/// Pause between repetitions of a conflicting step.
const BUSY_PAUSE: Duration = Duration::from_millis(2);
/// Maximum time for which a conflicting step is repeated.
const BUSY_TIMEOUT: Duration = Duration::from_secs(1);
/// Default limit of waiting requests per process.
const MAX_WAITERS: usize = 10_000;

/// Lease store built on the steps of a [`Backend`].
///
/// A driver is cheap to clone, and all clones share one store. The stores of this crate are drivers
/// with their own constructors. For your own backend, use [`over`](Self::over) or
/// [`with_epochs`](Self::with_epochs). Every driver follows these rules:
///
/// 1. A waiting request retries when it is its turn. One task receives the notifications, and
///    reconnects if its connection is lost. If a store sends no notifications, the first waiting
///    request of each process polls the store. While the store is unavailable, a waiting request
///    keeps waiting, until its timeout.
/// 2. A dropped request leaves no traces. A step that was already sent is completed and then
///    undone.
/// 3. If a second request waits under the same lease id, it displaces the first one and takes its
///    position. If the client has chosen the lease id, the position is kept for three seconds after
///    the request was dropped or has timed out, or until the lease id is released.
/// 4. If a step needs an epoch, the driver takes one from [`Epochs`]. In each process, only one
///    request per partition does so at a time.
#[derive_where(Clone)]
pub struct Driver<B> {
    store: Arc<Store<B>>,
    turns: Turns,
    listener: Arc<Listener>,
}

/// Backend, and the highest states of its counters that this process has seen.
struct Store<B> {
    backend: B,
    counters: Option<Arc<KnownCounters>>,
}

impl<B: Backend> Driver<B> {
    /// Creates a store over a backend that counts its tokens by itself.
    pub fn over(backend: B) -> Self {
        Self::build(backend, None)
    }

    /// Creates a store over a backend that counts within epochs. `epochs` is a `Fence` or another
    /// durable source.
    pub fn with_epochs(backend: B, epochs: impl Epochs + 'static) -> Self {
        Self::build(backend, Some(Arc::new(epochs)))
    }

    fn build(backend: B, epochs: Option<Arc<dyn Epochs>>) -> Self {
        let store = Store {
            backend,
            counters: epochs.map(KnownCounters::new),
        };
        Self::with_queue(Arc::new(store), MAX_WAITERS)
    }

    /// Creates a driver with an empty queue.
    fn with_queue(store: Arc<Store<B>>, max_waiters: usize) -> Self {
        let turns = Turns::new(max_waiters);
        Self {
            store,
            listener: Arc::new(Listener::new(turns.clone())),
            turns,
        }
    }

    /// Sets how many requests may wait in this process, for all resources together. Default:
    /// 10,000.
    ///
    /// If a request would exceed this limit, it gets [`LeaseError::TooManyWaiters`]. Each waiting
    /// request needs about 25 KB of memory. In etcd, it also needs a key, and each resource with
    /// waiting requests needs a connection. Call this method before the store is cloned.
    #[must_use]
    pub fn max_waiters(self, limit: usize) -> Self {
        Self::with_queue(self.store, limit)
    }

    /// Announces each grant of these leases to `resources`, for example a `Fence`, before returning
    /// it.
    ///
    /// [`Announced`] describes the guarantee. `PostgresLeases` needs no announcements, because it
    /// grants a lease in the transaction that raises the fence.
    pub fn announced_to<A: Announce>(self, resources: A) -> Announced<Self, A> {
        Announced::new(self, resources)
    }

    /// Returns the backend.
    pub fn backend(&self) -> &B {
        &self.store.backend
    }

    /// Replaces the backend and its listener. The queue of the returned driver is empty.
    #[cfg_attr(not(feature = "postgres"), allow(dead_code))]
    pub(super) fn with_backend(self, backend: B) -> Self {
        let store = Store {
            backend,
            counters: self.store.counters.clone(),
        };
        Self::with_queue(Arc::new(store), self.turns.0.max_waiters)
    }

    /// Makes sure that the store notifies this process of turns in the queue of the resource.
    /// Returns the number under which the store does so.
    async fn listen(&self, resource: &Resource) -> Result<i64, LeaseError> {
        let listening = match self.listener.listen(&self.store).await {
            Ok(number) => self.store.backend.follow(resource).await.map(|()| number),
            Err(error) => Err(error),
        };
        if let Err(error) = &listening
            && let Some(suppressed) = self.listener.failures.next()
        {
            tracing::warn!(
                error = Chain(error).to_string(),
                suppressed,
                "cannot receive notifications from the lease store; waiting requests poll instead"
            );
        }
        listening
    }
}

impl<B: Backend> Leases for Driver<B> {
    async fn acquire(&self, resource: &Resource, request: Acquire) -> Result<Lease, LeaseError> {
        pending::acquire(self, resource, request).await
    }

    async fn renew(
        &self,
        resource: &Resource,
        id: &LeaseId,
        request: Renew,
    ) -> Result<Lease, LeaseError> {
        let renewal = Renewal {
            lease: LeaseDigest::of(id.expose()),
            ttl: of_ms(at_least_1_ms(request.ttl)),
            new_token: request.new_token,
            at_least: request.at_least,
        };
        if let (Some(counters), Some(_)) = (&self.store.counters, request.at_least) {
            // The resource has received a token that is higher than the lease's, so the epoch may
            // have ended.
            counters.doubt(partition_of(resource));
        }
        let renew = || async {
            let step = Step::Renew(&renewal);
            match renewal.may_take_token() {
                true => self.store.take_token(resource, step).await,
                false => self.store.keep_token(resource, step).await,
            }
        };
        match repeat(renew).await? {
            Reply::Granted(granted) => Ok(lease(resource, id, granted)),
            Reply::Lost => Err(LeaseError::lost(resource)),
            Reply::Exhausted(max_token) => Err(LeaseError::exhausted(resource, max_token)),
            other => Err(unexpected(&other)),
        }
    }

    async fn release(&self, resource: &Resource, id: &LeaseId) -> Result<(), LeaseError> {
        let lease = LeaseDigest::of(id.expose());
        let released = self.store.end(resource, &End::Release(lease.clone())).await;
        // Dismiss the request after the release, because a dismissed request also releases the
        // lease that was granted to it.
        let dismissed = self.turns.dismiss(resource, &lease);
        let released = released?;
        if let Some(ticket) = dismissed {
            // The abandoned request leaves the queue before this method returns.
            let abandon = End::Abandon { lease, ticket };
            let abandoned = self.store.end(resource, &abandon).await;
            // After a successful release, a failure does not matter, because the task of the
            // dismissed request also removes the position.
            if !released {
                abandoned?;
            }
        }
        match released {
            true => Ok(()),
            false => Err(LeaseError::lost(resource)),
        }
    }

    async fn inspect(&self, resource: &Resource) -> Result<Option<Held>, LeaseError> {
        let seen = self.store.seen(resource);
        self.store.backend.inspect(resource, seen).await
    }
}

impl<B: Backend> LeaseAdmin for Driver<B> {
    async fn list(&self, limit: usize, cursor: Option<&str>) -> Result<Page, LeaseError> {
        let counters = Counters::of(self.store.counters.as_deref());
        self.store.backend.page(limit, cursor, counters).await
    }

    async fn break_lease(
        &self,
        resource: &Resource,
        seen: Option<Token>,
    ) -> Result<bool, LeaseError> {
        let broken = self.store.end(resource, &End::Break(seen)).await?;
        if broken {
            metrics::count("tower_fence_leases_broken_total");
            events::broken(resource);
        }
        Ok(broken)
    }
}

impl<B: Backend> Store<B> {
    /// Releases, abandons or breaks a lease. Returns false if the lease was not held.
    async fn end(&self, resource: &Resource, end: &End) -> Result<bool, LeaseError> {
        let step = || {
            let seen = self.seen(resource);
            self.backend.step(resource, Step::End(end), seen)
        };
        match repeat(step).await? {
            Reply::Ended => Ok(true),
            Reply::Lost => Ok(false),
            other => Err(unexpected(&other)),
        }
    }
}

/// Returns the lease that a step has granted or renewed.
fn lease(resource: &Resource, id: &LeaseId, Granted { token, ttl, .. }: Granted) -> Lease {
    Lease::new(resource.clone(), id.clone(), token, ttl)
}

/// Repeats a step while a conflicting one is in progress.
async fn repeat<F>(step: impl Fn() -> F) -> Result<Reply, LeaseError>
where
    F: Future<Output = Result<Reply, LeaseError>>,
{
    let until = after(BUSY_TIMEOUT);
    loop {
        match step().await? {
            Reply::Again if Instant::now() < until => sleep(BUSY_PAUSE).await,
            Reply::Again => return Err(LeaseError::unavailable(TooMuchChange)),
            reply => return Ok(reply),
        }
    }
}

impl<B: fmt::Debug> fmt::Debug for Driver<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Driver").field(&self.store.backend).finish()
    }
}
