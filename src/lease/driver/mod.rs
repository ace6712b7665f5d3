//! What all stores do the same way, over the few steps of a [`Backend`].

mod epochs;
mod listener;
mod pending;
mod queue;

use std::{fmt, sync::Arc, time::Duration};

use tokio::time::{Instant, sleep};

pub use self::listener::Turns;
use self::{
    epochs::TooMuchChange,
    listener::Listener,
    pending::{Pending, unexpected},
    queue::Queue,
};
use super::{
    Acquire, Announced, Backend, Held, Lease, LeaseAdmin, LeaseError, LeaseId, Leases, ListError,
    Page, Renew,
    backend::{Counters, End, Renewal, Reply, Step},
    counters::KnownCounters,
    time::{after, at_least_1_ms, of_ms},
};
use crate::{
    announce::{Announce, LeaseDigest},
    epochs::{Epochs, partition_of},
    token::{Resource, Token},
};

/// How often a step is repeated that another one is in the way of, and for how long.
const BUSY_PAUSE: Duration = Duration::from_millis(2);
const BUSY_TIMEOUT: Duration = Duration::from_secs(1);
/// How many requests may wait at a process, unless that is set.
pub(super) const MAX_WAITERS: usize = 10_000;

/// A lease store over the steps of a [`Backend`]. Cheap to clone; clones are one store.
///
/// The stores of this crate are drivers, and have constructors of their own. With
/// [`over`](Self::over) a program makes one over a backend of its own:
///
/// 1. A request that waits asks when it is its turn: one task hears of that, and connects again when its
///    connection is lost. A store that notifies nobody is polled by the first request of each process.
/// 2. A request that is dropped leaves nothing behind. The step that was sent is completed first, then
///    undone.
/// 3. A second request that waits under the same lease id displaces the first, and has its position. A
///    position whose client has chosen the lease id is kept for three seconds without a request.
/// 4. A step that needs an epoch gets one, from [`Epochs`]; one request of a process at a time takes it.
pub struct Driver<B> {
    store: Arc<Store<B>>,
    queue: Arc<Queue>,
    listener: Arc<Listener>,
}

/// A backend, and what this process knows of its counters.
struct Store<B> {
    backend: Arc<B>,
    memory: Option<Arc<KnownCounters>>,
}

impl<B: Backend> Driver<B> {
    /// A store over a backend that counts its tokens by itself.
    pub fn over(backend: B) -> Self {
        Self::build(backend, None)
    }

    /// A store over a backend whose tokens are from epochs. `epochs` is a `Fence`, or another durable
    /// source.
    pub fn with_epochs(backend: B, epochs: impl Epochs + 'static) -> Self {
        Self::build(backend, Some(Arc::new(epochs)))
    }

    pub(super) fn build(backend: B, epochs: Option<Arc<dyn Epochs>>) -> Self {
        let queue = Queue::new(MAX_WAITERS);
        Self {
            store: Arc::new(Store {
                backend: Arc::new(backend),
                memory: epochs.map(KnownCounters::new),
            }),
            listener: Arc::new(Listener::new(&queue)),
            queue,
        }
    }

    /// Sets how many requests may wait at this process, for any resource. Default: 10,000. Above that
    /// a request to wait is answered [`LeaseError::TooManyWaiters`]. To be set before the store is cloned.
    #[must_use]
    pub fn max_waiters(mut self, limit: usize) -> Self {
        self.queue = Queue::new(limit);
        self.listener = Arc::new(Listener::new(&self.queue));
        self
    }

    /// These leases, each grant announced to `resources`, a `Fence`, before it is answered. What that
    /// promises: [`Announced`].
    ///
    /// `PostgresLeases` need none of this: they grant in the transaction that raises the fence.
    pub fn announced_to<A: Announce>(self, resources: A) -> Announced<Self, A> {
        Announced::new(self, resources)
    }

    /// The backend.
    pub fn backend(&self) -> &B {
        &self.store.backend
    }

    /// The same over another backend, to which its requests listen from now on.
    #[cfg_attr(not(feature = "postgres"), allow(dead_code))]
    pub(super) fn with_backend(self, backend: B) -> Self {
        let store = Store {
            backend: Arc::new(backend),
            memory: self.store.memory.clone(),
        };
        Self {
            store: Arc::new(store),
            listener: Arc::new(Listener::new(&self.queue)),
            queue: self.queue,
        }
    }

    /// Makes sure that this process hears of the turns of a resource. Returns the name under which it does.
    async fn listen(&self, resource: &Resource) -> Result<Arc<str>, LeaseError> {
        let listener = self.listener.listen(&self.store.backend).await?;
        self.store.backend.follow(resource).await?;
        Ok(listener)
    }
}

impl<B: Backend> Leases for Driver<B> {
    async fn acquire(&self, resource: &Resource, request: Acquire) -> Result<Lease, LeaseError> {
        let deadline = after(request.wait);
        Pending::new(self, resource, request).run(deadline).await
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
        if let (Some(memory), Some(_)) = (&self.store.memory, request.at_least) {
            // The resource has seen a higher token than this store's.
            memory.doubt(partition_of(resource));
        }
        let renew = || async {
            let step = Step::Renew(&renewal);
            match request.new_token || request.at_least.is_some() {
                true => self.store.take_token(resource, step).await,
                false => self.store.keep_token(resource, step).await,
            }
        };
        match repeat(renew).await? {
            Reply::Granted(granted) => Ok(Lease::new(
                resource.clone(),
                id.clone(),
                granted.token,
                granted.ttl,
            )),
            Reply::Lost => Err(LeaseError::lost(resource)),
            Reply::Exhausted(max_token) => Err(LeaseError::Exhausted {
                resource: resource.clone(),
                max_token,
            }),
            other => Err(unexpected(&other)),
        }
    }

    async fn release(&self, resource: &Resource, id: &LeaseId) -> Result<(), LeaseError> {
        let lease = LeaseDigest::of(id.expose());
        if let Some(ticket) = self.queue.dismiss(resource, &lease) {
            // It leaves the queue before this is answered.
            let lease = lease.clone();
            let abandon = End::Abandon { lease, ticket };
            self.store.end(resource, &abandon).await?;
        }
        match self.store.end(resource, &End::Release(lease)).await? {
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
    async fn list(&self, limit: usize, cursor: Option<&str>) -> Result<Page, ListError> {
        let counters = Counters::of(self.store.memory.as_deref());
        self.store.backend.page(limit, cursor, counters).await
    }

    async fn break_lease(
        &self,
        resource: &Resource,
        seen: Option<Token>,
    ) -> Result<bool, LeaseError> {
        self.store.end(resource, &End::Break(seen)).await
    }
}

impl<B: Backend> Store<B> {
    /// Ends a lease; false if there was none.
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

/// Repeats a step that another one is in the way of.
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

impl<B> Clone for Driver<B> {
    fn clone(&self) -> Self {
        Self {
            store: Arc::clone(&self.store),
            queue: Arc::clone(&self.queue),
            listener: Arc::clone(&self.listener),
        }
    }
}

impl<B: fmt::Debug> fmt::Debug for Driver<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Driver").field(&self.store.backend).finish()
    }
}
