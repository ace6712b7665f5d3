//! Leases inside the process: no server, for one process and for trying things out.

mod cursor;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod partition;

use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::{
    sync::{Notify, Semaphore, SemaphorePermit},
    time::{Instant, sleep, sleep_until},
};

use self::{
    cursor::Cursor,
    partition::{Outcome, Partition},
};
use super::{
    Acquire, Announced, Held, Lease, LeaseError, LeaseId, Leases, ListError, Operate, Page, Renew,
    WaiterLimits, memory::Memory, time::after,
};
use crate::{
    announce::Announce,
    epochs::{Epochs, partition_of},
    metrics,
    token::{Resource, Token},
};

/// Leases in the memory of this process, with tokens that go on increasing after a restart. Cheap
/// to clone; clones are one store.
///
/// Leases end with the process. Two processes do not see each other's leases: where more than one
/// grants leases on the same resources, use `PostgresLeases` or `RedisLeases`.
#[derive(Clone)]
pub struct EmbeddedLeases {
    partitions: Arc<[Mutex<Partition>]>,
    memory: Arc<Memory>,
    limits: WaiterLimits,
    seats: Arc<Semaphore>,
}

impl EmbeddedLeases {
    /// An empty store. Each partition takes a new epoch at its first grant.
    pub fn new(epochs: impl Epochs + 'static) -> Self {
        Self {
            partitions: (0..=u8::MAX).map(|_| Mutex::default()).collect(),
            memory: Memory::new(Arc::new(epochs)),
            limits: WaiterLimits::default(),
            seats: WaiterLimits::default().seats(),
        }
    }

    /// How many may wait for one resource. Default: 1,000. Above that a request to wait is answered
    /// [`LeaseError::TooManyWaiters`]. To be set before the store is cloned.
    #[must_use]
    pub const fn max_waiters_per_resource(mut self, limit: usize) -> Self {
        self.limits.per_resource = limit;
        self
    }

    /// How many may wait, for any resource. Default: 10,000. Above that a request to wait is answered
    /// [`LeaseError::TooManyWaiters`]. To be set before the store is cloned.
    #[must_use]
    pub fn max_waiters(mut self, limit: usize) -> Self {
        self.limits.in_all = limit;
        self.seats = self.limits.seats();
        self
    }

    /// These leases, each grant announced to `resources`, a `Fence`, before it is answered. What that
    /// promises: [`Announced`].
    pub fn announced_to<A: Announce>(self, resources: A) -> Announced<Self, A> {
        Announced::new(self, resources)
    }

    fn partition(&self, resource: &Resource) -> MutexGuard<'_, Partition> {
        // Nothing panics while the lock is held.
        self.partitions[usize::from(partition_of(resource))]
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// The same without what is over: an epoch whose tokens are all dead, and the leases under it.
    fn current(&self, resource: &Resource) -> MutexGuard<'_, Partition> {
        let highest = self.memory.highest(partition_of(resource));
        let mut partition = self.partition(resource);
        partition.end_epoch(highest);
        partition
    }

    /// Begins an epoch above one that has no token left.
    async fn begin_epoch(&self, resource: &Resource, last: i64) -> Result<(), LeaseError> {
        let partition = partition_of(resource);
        let flight = self.memory.flight(partition).await?;
        if self.partition(resource).used_up() != Some(last) {
            // Another request has begun one.
            return Ok(());
        }
        match self.memory.next_epoch(partition, last).await {
            Ok(epoch) => self.partition(resource).begin_epoch(epoch),
            Err(error) => return Err(flight.fail(error)),
        }
        metrics::count("tower_fence_epochs_begun_total");
        Ok(())
    }

    /// A grant, of which the source of epochs is reminded from time to time: it may have forgotten. `None`
    /// where the epoch is over.
    async fn granted(&self, lease: Lease) -> Result<Option<Lease>, LeaseError> {
        let partition = partition_of(&lease.resource);
        let epoch = self.partition(&lease.resource).epoch();
        let counts = match epoch {
            Some(epoch) => self.memory.record_grant(partition, epoch, 0).await?,
            None => true,
        };
        Ok(counts.then_some(lease))
    }
}

impl Leases for EmbeddedLeases {
    async fn acquire(&self, resource: &Resource, request: Acquire) -> Result<Lease, LeaseError> {
        let deadline = after(request.wait);
        let pending = PendingAcquire {
            leases: self,
            resource,
            id: &request.lease_id,
            wake: Arc::default(),
            seat: (!request.wait.is_zero())
                .then(|| self.seats.try_acquire().ok())
                .flatten(),
        };
        loop {
            let late = Instant::now() >= deadline;
            let line = (!late && pending.seat.is_some())
                .then_some((&pending.wake, self.limits.per_resource));
            let outcome = self.current(resource).ask(resource, &request, line);
            match outcome {
                Outcome::Granted(lease) => {
                    if let Some(lease) = self.granted(lease).await? {
                        return Ok(lease);
                    }
                }
                Outcome::NeedsEpoch { last } => {
                    self.begin_epoch(resource, last).await?;
                }
                Outcome::Held { left } if late => {
                    return Err(LeaseError::Held {
                        resource: resource.clone(),
                        retry_after: left,
                    });
                }
                Outcome::Full => return Err(LeaseError::too_many_waiters(resource)),
                Outcome::Held { .. } if pending.seat.is_none() => {
                    return Err(LeaseError::too_many_waiters(resource));
                }
                // The lease may have been granted to this request, or may have ended by itself: the
                // next attempt tells.
                Outcome::Held { left } => tokio::select! {
                    () = pending.wake.notified() => {}
                    () = sleep(left) => {}
                    () = sleep_until(deadline) => {}
                },
            }
        }
    }

    async fn renew(
        &self,
        resource: &Resource,
        id: &LeaseId,
        request: Renew,
    ) -> Result<Lease, LeaseError> {
        loop {
            let renewed = self.current(resource).renew(resource, id, request)?;
            match renewed {
                Outcome::Granted(lease) => {
                    if let Some(lease) = self.granted(lease).await? {
                        return Ok(lease);
                    }
                }
                Outcome::NeedsEpoch { last } => self.begin_epoch(resource, last).await?,
                Outcome::Held { .. } | Outcome::Full => return Err(LeaseError::lost(resource)),
            }
        }
    }

    async fn release(&self, resource: &Resource, id: &LeaseId) -> Result<(), LeaseError> {
        self.partition(resource).release(resource, id)
    }

    async fn inspect(&self, resource: &Resource) -> Result<Option<Held>, LeaseError> {
        Ok(self.partition(resource).inspect(resource))
    }
}

impl Operate for EmbeddedLeases {
    async fn list(&self, limit: usize, cursor: Option<&str>) -> Result<Page, ListError> {
        let mut at = cursor.map_or(Ok(Cursor::default()), Cursor::parse)?;
        let mut page = Page::default();
        for (number, partition) in (0..=u8::MAX)
            .zip(&*self.partitions)
            .skip(at.partition.into())
        {
            at.partition = number;
            let held = partition
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .list(&at.after);
            for (resource, held) in held {
                if page.leases.len() == limit.max(1) {
                    page.cursor = Some(at.to_string());
                    return Ok(page);
                }
                at.after = resource.to_string();
                page.leases.push((resource, held));
            }
            at.after.clear();
        }
        Ok(page)
    }

    async fn break_lease(
        &self,
        resource: &Resource,
        seen: Option<Token>,
    ) -> Result<bool, LeaseError> {
        Ok(self.partition(resource).break_lease(resource, seen))
    }
}

/// A request that is under way. When it is over, or dropped, it leaves the line; a lease that was
/// granted to it and not confirmed goes to the next in line.
struct PendingAcquire<'a> {
    leases: &'a EmbeddedLeases,
    resource: &'a Resource,
    id: &'a LeaseId,
    wake: Arc<Notify>,
    /// The permit to wait; `None` where the request does not wait, or too many do.
    seat: Option<SemaphorePermit<'a>>,
}

impl Drop for PendingAcquire<'_> {
    fn drop(&mut self) {
        let mut partition = self.leases.partition(self.resource);
        partition.leave(self.resource, self.id, &self.wake);
    }
}

impl fmt::Debug for EmbeddedLeases {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EmbeddedLeases").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::epochs::{Epoch, EpochFuture, SourceId};

    struct Counter(std::sync::atomic::AtomicI64);

    impl Epochs for Arc<Counter> {
        fn next_epoch(&self, _: u8, at_least: Epoch) -> EpochFuture<'_> {
            let next = self.0.fetch_add(1, std::sync::atomic::Ordering::SeqCst) + 1;
            Box::pin(async move {
                tokio::task::yield_now().await;
                Epoch::new(next.max(at_least.get()))
            })
        }

        fn bring_back(&self, _: u8, seen: Epoch) -> EpochFuture<'_> {
            // Failovers have made all tokens dead.
            let dead = self.0.load(std::sync::atomic::Ordering::SeqCst) / 1_000 * 1_000;
            Box::pin(async move { Epoch::new(seen.get().max(dead + 1)) })
        }

        fn source_id(&self) -> EpochFuture<'_, SourceId> {
            Box::pin(async { Ok(SourceId::new("counter").unwrap()) })
        }
    }

    fn leases() -> EmbeddedLeases {
        EmbeddedLeases::new(Arc::new(Counter(0.into())))
    }

    fn resource(name: &str) -> Resource {
        Resource::new(name).unwrap()
    }

    async fn grant(leases: &EmbeddedLeases, name: &str, ttl: Duration) -> Lease {
        leases
            .acquire(&resource(name), Acquire::new(ttl))
            .await
            .unwrap()
    }

    #[tokio::test]
    async fn an_epoch_that_is_used_up_is_followed_by_a_higher_one() {
        let (leases, sku) = (leases(), resource("sku-1"));
        leases.partition(&sku).begin_epoch(Epoch::FIRST);
        leases.partition(&sku).use_up(1);
        let last = grant(&leases, "sku-1", Duration::from_secs(9)).await;
        assert_eq!(Some(last.token), Epoch::FIRST.token(Epoch::SIZE - 1));
        // A release cannot grant to the waiters: the first of them begins the epoch.
        let acquire = Acquire::new(Duration::from_secs(9)).wait(Duration::from_secs(9));
        let waiting = tokio::spawn({
            let (leases, sku) = (leases.clone(), sku.clone());
            async move { leases.acquire(&sku, acquire).await.unwrap() }
        });
        while leases.inspect(&sku).await.unwrap().unwrap().waiters == 0 {
            tokio::task::yield_now().await;
        }
        leases.release(&sku, &last.id).await.unwrap();
        let second: Token = waiting.await.unwrap().token;
        assert_eq!(Some(second), Epoch::new(2).unwrap().token(1));
    }

    #[tokio::test(start_paused = true)]
    async fn an_epoch_that_is_over_is_followed_by_a_higher_one_and_its_leases_are_lost() {
        let counter = Arc::new(Counter(0.into()));
        let leases = EmbeddedLeases::new(Arc::clone(&counter));
        let ttl = Duration::from_secs(600);
        let first = grant(&leases, "sku-1", ttl).await;
        counter.0.store(1_000, std::sync::atomic::Ordering::SeqCst);
        tokio::time::advance(Duration::from_secs(61)).await;
        // This one reminds the source, in the background.
        let renew = Renew::new(ttl);
        leases
            .renew(&first.resource, &first.id, renew)
            .await
            .unwrap();
        tokio::task::yield_now().await;
        let lost = leases.renew(&first.resource, &first.id, renew).await;
        assert!(matches!(lost, Err(LeaseError::Lost { .. })), "{lost:?}");
        let second = grant(&leases, "sku-1", ttl).await;
        assert_eq!(Some(second.token), Epoch::new(1_001).unwrap().token(1));
    }

    #[tokio::test]
    async fn of_those_who_need_an_epoch_at_once_one_takes_it() {
        let counter = Arc::new(Counter(0.into()));
        let leases = EmbeddedLeases::new(Arc::clone(&counter));
        let sku = resource("sku-1");
        let asking = (0..9).map(|_| leases.acquire(&sku, Acquire::new(Duration::from_secs(9))));
        let outcomes = futures_util::future::join_all(asking).await;
        assert_eq!(outcomes.iter().filter(|outcome| outcome.is_ok()).count(), 1);
        assert_eq!(counter.0.load(std::sync::atomic::Ordering::SeqCst), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn memory_is_held_for_held_leases_only() {
        let leases = leases();
        for n in 0..20_000 {
            grant(&leases, &n.to_string(), Duration::from_millis(10)).await;
            tokio::time::advance(Duration::from_millis(1)).await;
        }
        let kept: usize = (leases.partitions.iter())
            .map(|partition| partition.lock().unwrap().grants())
            .sum();
        assert!(kept <= 256 * 16, "{kept} grants are kept, 10 are held");
    }

    #[tokio::test]
    async fn a_ttl_beyond_any_clock_does_not_panic() {
        let leases = leases();
        let acquire = Acquire::new(Duration::MAX)
            .wait(Duration::MAX)
            .lock_delay(Duration::MAX);
        let lease = leases.acquire(&resource("a"), acquire).await.unwrap();
        leases
            .renew(&resource("a"), &lease.id, Renew::new(Duration::MAX))
            .await
            .unwrap();
        leases.inspect(&resource("a")).await.unwrap().unwrap();
    }
}
