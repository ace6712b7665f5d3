//! Leases inside the process: no server, for one process and for trying things out.

use std::{
    collections::{HashMap, hash_map::Entry},
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

use super::{Acquire, Held, Lease, LeaseError, LeaseId, Leases, Owner, partition, whole_ms};
use crate::{
    epochs::{Epoch, EpochError, Epochs},
    token::{Resource, Token},
};

/// Leases in the memory of this process, with tokens that go on increasing after a restart. Cheap
/// to clone; clones are one store.
///
/// Leases end with the process. Two processes do not see each other's leases: where more than one
/// grants leases on the same resources, use `RedisLeases`.
#[derive(Clone)]
pub struct EmbeddedLeases {
    partitions: Arc<[Mutex<Partition>]>,
    epochs: Arc<dyn Epochs>,
}

#[derive(Default)]
struct Partition {
    clock: Option<Clock>,
    grants: HashMap<Resource, Grant>,
    /// How many grants there were after the last sweep.
    swept: usize,
}

/// The token that was granted last is `epoch.token(n)`.
struct Clock {
    epoch: Epoch,
    n: i64,
}

struct Grant {
    id: LeaseId,
    token: Token,
    owner: Option<Owner>,
    ends: Instant,
}

impl EmbeddedLeases {
    /// An empty store. Each partition takes a new epoch at its first grant.
    pub fn new(epochs: impl Epochs + 'static) -> Self {
        Self {
            partitions: (0..=u8::MAX).map(|_| Mutex::default()).collect(),
            epochs: Arc::new(epochs),
        }
    }

    fn partition(&self, resource: &Resource) -> MutexGuard<'_, Partition> {
        // Nothing panics while the lock is held.
        self.partitions[usize::from(partition(resource))]
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl Leases for EmbeddedLeases {
    async fn acquire(&self, resource: &Resource, request: Acquire) -> Result<Lease, LeaseError> {
        loop {
            let at_least = match self.partition(resource).grant(resource, &request)? {
                Granted::Lease(lease) => return Ok(lease),
                Granted::NeedsEpoch { at_least } => at_least,
            };
            let epoch = match at_least {
                Ok(at_least) => self.epochs.next_epoch(partition(resource), at_least).await,
                Err(error) => Err(error),
            };
            let epoch = epoch.map_err(LeaseError::unavailable)?;
            self.partition(resource).install(epoch);
        }
    }

    async fn renew(
        &self,
        resource: &Resource,
        id: &LeaseId,
        ttl: Duration,
    ) -> Result<Lease, LeaseError> {
        let mut partition = self.partition(resource);
        let grant = partition.held_under(resource, id)?;
        Ok(grant.renew(resource, ttl))
    }

    async fn release(&self, resource: &Resource, id: &LeaseId) -> Result<(), LeaseError> {
        let mut partition = self.partition(resource);
        partition.held_under(resource, id)?;
        partition.grants.remove(resource);
        Ok(())
    }

    async fn inspect(&self, resource: &Resource) -> Result<Option<Held>, LeaseError> {
        Ok(self.partition(resource).held(resource).map(|grant| Held {
            token: grant.token,
            owner: grant.owner.clone(),
            ttl: grant.left(),
        }))
    }
}

enum Granted {
    Lease(Lease),
    NeedsEpoch { at_least: Result<Epoch, EpochError> },
}

impl Partition {
    fn grant(&mut self, resource: &Resource, request: &Acquire) -> Result<Granted, LeaseError> {
        if let Some(grant) = self.held(resource) {
            if grant.id == request.lease_id {
                return Ok(Granted::Lease(grant.renew(resource, request.ttl)));
            }
            return Err(LeaseError::Held {
                resource: resource.clone(),
                retry_after: grant.left(),
            });
        }
        let Some(token) = self.next_token() else {
            let after = self.clock.as_ref().map_or(0, |clock| clock.epoch.get());
            let at_least = Epoch::new(after + 1);
            return Ok(Granted::NeedsEpoch { at_least });
        };
        self.sweep();
        let mut grant = Grant {
            id: request.lease_id.clone(),
            token,
            owner: request.owner.clone(),
            ends: Instant::now(),
        };
        let lease = grant.renew(resource, request.ttl);
        self.grants.insert(resource.clone(), grant);
        Ok(Granted::Lease(lease))
    }

    fn next_token(&mut self) -> Option<Token> {
        let clock = self.clock.as_mut()?;
        let token = clock.epoch.token(clock.n + 1)?;
        clock.n += 1;
        Some(token)
    }

    /// Begins an epoch, unless another caller was faster.
    fn install(&mut self, epoch: Epoch) {
        let needed = self
            .clock
            .as_ref()
            .is_none_or(|clock| clock.epoch < epoch && clock.epoch.token(clock.n + 1).is_none());
        if needed {
            self.clock = Some(Clock { epoch, n: 0 });
        }
    }

    fn held(&mut self, resource: &Resource) -> Option<&mut Grant> {
        match self.grants.entry(resource.clone()) {
            Entry::Occupied(grant) if grant.get().ends <= Instant::now() => {
                grant.remove();
                None
            }
            Entry::Occupied(grant) => Some(grant.into_mut()),
            Entry::Vacant(_) => None,
        }
    }

    fn held_under(&mut self, resource: &Resource, id: &LeaseId) -> Result<&mut Grant, LeaseError> {
        match self.held(resource) {
            Some(grant) if grant.id == *id => Ok(grant),
            _ => Err(LeaseError::Lost {
                resource: resource.clone(),
            }),
        }
    }

    /// Forgets leases that have ended, each time their number may have doubled: memory is held
    /// for held leases only, at a constant cost per grant.
    fn sweep(&mut self) {
        if self.grants.len() >= 2 * self.swept + 16 {
            let now = Instant::now();
            self.grants.retain(|_, grant| grant.ends > now);
            self.grants.shrink_to(2 * self.grants.len());
            self.swept = self.grants.len();
        }
    }
}

impl Grant {
    /// Starts the lease's time anew.
    fn renew(&mut self, resource: &Resource, ttl: Duration) -> Lease {
        let ttl = Duration::from_millis(whole_ms(ttl));
        let now = Instant::now();
        // A lease that no clock can count lasts for a century.
        let century = Duration::from_secs(100 * 365 * 24 * 60 * 60);
        self.ends = now.checked_add(ttl).unwrap_or(now + century);
        Lease {
            resource: resource.clone(),
            id: self.id.clone(),
            token: self.token,
            ttl,
        }
    }

    fn left(&self) -> Duration {
        self.ends.saturating_duration_since(Instant::now())
    }
}

impl fmt::Debug for EmbeddedLeases {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EmbeddedLeases").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::epochs::EpochFuture;

    struct Counter(std::sync::atomic::AtomicI64);

    impl Epochs for Counter {
        fn next_epoch(&self, _: u8, at_least: Epoch) -> EpochFuture<'_> {
            let next = self.0.fetch_add(1, std::sync::atomic::Ordering::SeqCst) + 1;
            Box::pin(async move { Epoch::new(next.max(at_least.get())) })
        }
    }

    fn leases() -> EmbeddedLeases {
        EmbeddedLeases::new(Counter(0.into()))
    }

    fn resource(name: &str) -> Resource {
        Resource::new(name).unwrap()
    }

    #[tokio::test]
    async fn an_epoch_that_is_used_up_is_followed_by_a_higher_one() {
        let (leases, sku) = (leases(), resource("sku-1"));
        let last = Epoch::FIRST.token(Epoch::SIZE - 1).unwrap();
        leases.partition(&sku).clock = Some(Clock {
            epoch: Epoch::FIRST,
            n: Epoch::SIZE - 2,
        });
        let ttl = Duration::from_secs(1);
        let lease = leases.acquire(&sku, Acquire::new(ttl)).await.unwrap();
        assert_eq!(lease.token, last);
        leases.release(&sku, &lease.id).await.unwrap();
        let lease = leases.acquire(&sku, Acquire::new(ttl)).await.unwrap();
        assert_eq!(lease.token, Epoch::new(2).unwrap().token(1).unwrap());
    }

    #[tokio::test(start_paused = true)]
    async fn memory_is_held_for_held_leases_only() {
        let leases = leases();
        for n in 0..20_000 {
            let ttl = Duration::from_millis(10);
            leases
                .acquire(&resource(&n.to_string()), Acquire::new(ttl))
                .await
                .unwrap();
            tokio::time::advance(Duration::from_millis(1)).await;
        }
        let kept: usize = (leases.partitions.iter())
            .map(|partition| partition.lock().unwrap().grants.len())
            .sum();
        assert!(kept <= 256 * 16, "{kept} grants are kept, 10 are held");
    }

    #[tokio::test]
    async fn a_ttl_beyond_any_clock_does_not_panic() {
        let leases = leases();
        let lease = leases
            .acquire(&resource("a"), Acquire::new(Duration::MAX))
            .await
            .unwrap();
        leases
            .renew(&resource("a"), &lease.id, Duration::MAX)
            .await
            .unwrap();
    }
}
