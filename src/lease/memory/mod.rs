//! Leases in the memory of the process, for a single process and for evaluation.

mod partition;

use std::{
    mem,
    sync::{Mutex, MutexGuard, OnceLock, PoisonError},
};

use derive_where::derive_where;

use self::partition::Partition;
use super::{
    Backend, Driver, Held, LeaseError, Page, Turns,
    backend::{BlankCounter, Counters, Names, Reply, Seen, Step},
};
use crate::{
    epochs::{Epoch, Epochs, partition_of},
    token::Resource,
};

/// Leases in the memory of this process.
///
/// Tokens keep increasing after a restart. All leases are lost when the process exits, and two
/// processes do not see each other's leases. If several processes grant leases on the same
/// resources, use `PostgresLeases` or `RedisLeases`. The value is cheap to clone, and all clones
/// share one store.
pub type MemoryLeases = Driver<MemoryBackend>;

/// Backend of [`MemoryLeases`].
#[derive_where(Debug)]
#[derive_where(skip_inner)]
pub struct MemoryBackend {
    partitions: Box<[Mutex<Partition>]>,
    turns: OnceLock<Turns>,
}

impl Driver<MemoryBackend> {
    /// Creates an empty store. Each partition takes a new epoch at its first grant.
    pub fn new(epochs: impl Epochs + 'static) -> Self {
        let backend = MemoryBackend {
            partitions: (0..=u8::MAX).map(|_| Mutex::default()).collect(),
            turns: OnceLock::default(),
        };
        Self::with_epochs(backend, epochs)
    }
}

impl MemoryBackend {
    fn partition(&self, number: u8) -> MutexGuard<'_, Partition> {
        // No code panics while it holds the lock.
        self.partitions[usize::from(number)]
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs a step. If all tokens of the current epoch are stale, first ends the epoch and revokes
    /// its leases. After the step, notifies the requests that must retry.
    fn run<T>(
        &self,
        resource: &Resource,
        seen: Seen<'_>,
        step: impl FnOnce(&mut Partition) -> T,
    ) -> T {
        let mut partition = self.partition(partition_of(resource));
        partition.end_epoch((seen.epoch, seen.n));
        let outcome = step(&mut partition);
        let calls = mem::take(&mut partition.calls);
        drop(partition);
        if let Some(turns) = self.turns.get() {
            calls.into_iter().for_each(|ticket| turns.call(ticket));
        }
        outcome
    }
}

impl Backend for MemoryBackend {
    async fn step(
        &self,
        resource: &Resource,
        step: Step<'_>,
        seen: Seen<'_>,
    ) -> Result<Reply, LeaseError> {
        Ok(self.run(resource, seen, |partition| match step {
            Step::Acquire(ask, waits) => partition.acquire(resource, ask, waits),
            Step::Renew(renewal) => partition.renew(resource, renewal),
            Step::End(end) => partition.end(resource, end),
        }))
    }

    async fn begin_epoch(
        &self,
        resource: &Resource,
        _: &BlankCounter,
        epoch: Epoch,
        seen: Seen<'_>,
    ) -> Result<bool, LeaseError> {
        Ok(self.run(resource, seen, |partition| partition.begin_epoch(epoch)))
    }

    async fn inspect(
        &self,
        resource: &Resource,
        seen: Seen<'_>,
    ) -> Result<Option<Held>, LeaseError> {
        Ok(self.run(resource, seen, |partition| partition.inspect(resource)))
    }

    async fn page(
        &self,
        limit: usize,
        cursor: Option<&str>,
        counters: Counters<'_>,
    ) -> Result<Page, LeaseError> {
        let mut names = Names::after(cursor, limit)?;
        for number in 0..=u8::MAX {
            let partition = self.partition(number);
            partition.held().for_each(|name| names.add(name));
        }
        let (resources, cursor) = names.page();
        let held = resources.into_iter().filter_map(|name| {
            // The lease may have ended since the names were read.
            let seen = counters.seen(&name);
            let held = self.run(&name, seen, |partition| partition.inspect(&name))?;
            Some((name, held))
        });
        Ok(Page::new(held.collect(), cursor))
    }

    async fn listen(&self, turns: &Turns) -> Result<(), LeaseError> {
        self.turns.get_or_init(|| turns.clone());
        turns.ready(0);
        std::future::pending().await
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, time::Duration};

    use tokio::{task::JoinHandle, time::Instant};

    use super::*;
    use crate::{
        epochs::{EpochFuture, SourceId},
        lease::{Acquire, Lease, LeaseAdmin, LeaseId, Leases, Renew},
    };

    struct Counter(std::sync::atomic::AtomicI64);

    impl Epochs for Arc<Counter> {
        fn next_epoch(&self, _: u8, at_least: Epoch) -> EpochFuture<'_> {
            let next = self.0.fetch_add(1, std::sync::atomic::Ordering::SeqCst) + 1;
            Box::pin(async move {
                tokio::task::yield_now().await;
                Epoch::new(next.max(at_least.get()))
            })
        }

        fn report_epoch(&self, _: u8, seen: Epoch) -> EpochFuture<'_> {
            // Failovers have made all tokens of the epochs up to `ended` stale.
            let ended = self.0.load(std::sync::atomic::Ordering::SeqCst) / 1_000 * 1_000;
            Box::pin(async move { Epoch::new(seen.get().max(ended + 1)) })
        }

        fn source_id(&self) -> EpochFuture<'_, SourceId> {
            Box::pin(async { Ok(SourceId::new("counter").unwrap()) })
        }
    }

    fn leases() -> MemoryLeases {
        MemoryLeases::new(Arc::new(Counter(0.into())))
    }

    fn partition<'a>(leases: &'a MemoryLeases, resource: &Resource) -> MutexGuard<'a, Partition> {
        leases.backend().partition(partition_of(resource))
    }

    fn resource(name: &str) -> Resource {
        Resource::new(name).unwrap()
    }

    async fn grant(leases: &MemoryLeases, name: &str, ttl: Duration) -> Lease {
        leases
            .acquire(&resource(name), Acquire::new(ttl))
            .await
            .unwrap()
    }

    /// Starts a waiting request in a separate task, and returns after it has joined the queue.
    async fn wait(leases: &MemoryLeases, sku: &Resource) -> JoinHandle<Lease> {
        let acquire = Acquire::new(Duration::from_secs(9)).wait(Duration::from_secs(9));
        let waiters = async || leases.inspect(sku).await.unwrap().unwrap().waiters;
        let before = waiters().await;
        let waiting = tokio::spawn({
            let (leases, sku) = (leases.clone(), sku.clone());
            async move { leases.acquire(&sku, acquire).await.unwrap() }
        });
        while waiters().await == before {
            tokio::task::yield_now().await;
        }
        waiting
    }

    #[tokio::test]
    async fn exhausted_epoch_is_followed_by_a_higher_one() {
        let (leases, sku) = (leases(), resource("sku-1"));
        partition(&leases, &sku).begin_epoch(Epoch::FIRST);
        partition(&leases, &sku).use_up(1);
        let last = grant(&leases, "sku-1", Duration::from_secs(9)).await;
        assert_eq!(Some(last.token), Epoch::FIRST.token(Epoch::SIZE - 1));
        // The epoch has no token left, so the release cannot grant the lease to a waiter. Instead,
        // the first waiter begins the next epoch, and keeps its position in the meantime.
        let first = wait(&leases, &sku).await;
        let second = wait(&leases, &sku).await;
        leases.release(&sku, &last.id).await.unwrap();
        let lease = first.await.unwrap();
        assert_eq!(Some(lease.token), Epoch::new(2).unwrap().token(1));
        leases.release(&sku, &lease.id).await.unwrap();
        let token = second.await.unwrap().token;
        assert_eq!(Some(token), Epoch::new(2).unwrap().token(2));
    }

    #[tokio::test(start_paused = true)]
    async fn ended_epoch_is_replaced_and_its_leases_are_lost() {
        let counter = Arc::new(Counter(0.into()));
        let leases = MemoryLeases::new(Arc::clone(&counter));
        let ttl = Duration::from_secs(600);
        let first = grant(&leases, "sku-1", ttl).await;
        counter.0.store(1_000, std::sync::atomic::Ordering::SeqCst);
        tokio::time::advance(Duration::from_secs(61)).await;
        let (waiting, began) = (wait(&leases, &first.resource).await, Instant::now());
        // This renewal reports the epoch to the source, in the background.
        let renew = Renew::new(ttl);
        leases
            .renew(&first.resource, &first.id, renew)
            .await
            .unwrap();
        tokio::task::yield_now().await;
        let listed = leases.list(9, None).await.unwrap();
        assert_eq!(listed.leases, []);
        let lost = leases.renew(&first.resource, &first.id, renew).await;
        assert!(matches!(lost, Err(LeaseError::Lost { .. })), "{lost:?}");
        let second = waiting.await.unwrap();
        assert_eq!(Some(second.token), Epoch::new(1_001).unwrap().token(1));
        assert!(began.elapsed().is_zero(), "the waiter was not woken");
    }

    #[tokio::test(start_paused = true)]
    async fn memory_is_used_only_for_held_leases() {
        let (leases, ttl) = (leases(), Duration::from_millis(10));
        for n in 0..20_000 {
            grant(&leases, &n.to_string(), ttl).await;
            // This request leaves the queue of the lease after a millisecond.
            let acquire = Acquire::new(ttl).wait(Duration::from_millis(1));
            let waited = leases.acquire(&resource(&n.to_string()), acquire).await;
            assert!(matches!(waited, Err(LeaseError::Held { .. })), "{waited:?}");
        }
        let kept: usize = (leases.backend().partitions.iter())
            .map(|partition| partition.lock().unwrap().entries())
            .sum();
        assert!(
            kept <= 256 * 16,
            "{kept} grants and queues are kept, but only 10 leases are held"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn lease_of_a_dropped_request_is_kept_if_the_client_renews_it() {
        let (leases, sku) = (leases(), resource("sku-1"));
        let (long, short) = (Duration::from_secs(600), Duration::from_millis(100));
        for renews in [true, false] {
            let held = grant(&leases, "sku-1", long).await;
            let id = LeaseId::random();
            let acquire = Acquire::new(long).wait(long).lease_id(id.clone());
            let gone = tokio::time::timeout(short, leases.acquire(&sku, acquire)).await;
            gone.unwrap_err();
            leases.release(&sku, &held.id).await.unwrap();
            tokio::time::sleep(short).await;
            if renews {
                leases.renew(&sku, &id, Renew::new(long)).await.unwrap();
            }
            tokio::time::sleep(Duration::from_secs(10)).await;
            assert_eq!(leases.release(&sku, &id).await.is_ok(), renews);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn lease_that_no_client_received_begins_no_lock_delay() {
        let (leases, sku) = (leases(), resource("sku-1"));
        let (long, short) = (Duration::from_secs(600), Duration::from_millis(100));
        let held = grant(&leases, "sku-1", long).await;
        let acquire = Acquire::new(short).wait(long).lock_delay(long);
        let acquire = leases.acquire(&sku, acquire.lease_id(LeaseId::random()));
        tokio::time::timeout(short, acquire).await.unwrap_err();
        leases.release(&sku, &held.id).await.unwrap();
        tokio::time::sleep(Duration::from_secs(5)).await;
        grant(&leases, "sku-1", long).await;
    }

    #[tokio::test(start_paused = true)]
    async fn tenth_of_the_positions_is_reserved_for_disconnected_clients() {
        let (leases, sku) = (leases().max_waiters(10), resource("sku-1"));
        let held = grant(&leases, "sku-1", Duration::from_secs(600)).await;
        let waiters = async || leases.inspect(&sku).await.unwrap().unwrap().waiters;
        for _ in 0..2 {
            let acquire = Acquire::new(Duration::from_secs(9))
                .wait(Duration::from_secs(60))
                .lease_id(LeaseId::random());
            let acquired = leases.acquire(&sku, acquire);
            let gone = tokio::time::timeout(Duration::from_millis(100), acquired).await;
            gone.unwrap_err();
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert_eq!(waiters().await, 1);
        tokio::time::sleep(Duration::from_secs(4)).await;
        assert_eq!(waiters().await, 0);
        leases.release(&sku, &held.id).await.unwrap();
    }
}
