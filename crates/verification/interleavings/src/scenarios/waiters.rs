//! The queues in Redis and in Postgres. Each waiter of two processes gets its turn, even if
//! connections are cut.

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering::SeqCst},
    },
    time::Duration,
};

use super::{FOR_EVER, all, by_chance, resource, some_ms, tasks};
use crate::{
    lease::{Acquire, Driver, Lease, Leases},
    model::{
        clock::sleep, postgres::Postgres, redis::Redis, scripts::scripts::Scripts,
        tokio::time::timeout,
    },
    postgres_queue::store::PostgresLeases,
    redis_queue::store::RedisBackend,
};

pub async fn every_waiter_in_redis_gets_the_lease() {
    let redis = Redis::default();
    let process = || Driver::over(RedisBackend::new(Scripts::new(&redis)));
    let processes = [process(), process()];
    let cut = redis.clone();
    every_waiter_gets_the_lease(processes, move || cut.cut()).await;
}

pub async fn every_waiter_in_postgres_gets_the_lease() {
    let postgres = Postgres::default();
    let processes = [postgres.clone(), postgres.clone()].map(PostgresLeases::new);
    every_waiter_gets_the_lease(processes, move || postgres.cut()).await;
}

/// Each waiter gets the lease. Leases do not expire, and no waiter polls, so a waiter that is not
/// woken waits forever.
pub async fn every_waiter_gets_the_lease<L: Leases + Clone>(
    processes: [L; 2],
    cut: impl Fn() + Clone + Send + 'static,
) {
    let resource = resource();
    let highest = Arc::new(AtomicI64::new(0));
    let mut holders = tasks(5, |n| {
        let (leases, highest, resource) =
            (processes[n % 2].clone(), highest.clone(), resource.clone());
        async move {
            let wait = match n {
                0..3 => FOR_EVER,
                _ => some_ms([0, 1, 5]),
            };
            let acquiring = leases.acquire(&resource, Acquire::new(FOR_EVER).wait(wait));
            let acquired = match n {
                // The dropped request may have the lease already.
                3 => match timeout(some_ms([0, 1, 5]), acquiring).await {
                    Ok(acquired) => acquired,
                    Err(_) => return,
                },
                _ => acquiring.await,
            };
            assert!(acquired.is_ok() || n > 2, "{acquired:?}");
            if let Ok(lease) = acquired {
                hold(&leases, &lease, &highest).await;
            }
        }
    });
    holders.extend(tasks(2, |_| {
        let cut = cut.clone();
        async move {
            sleep(some_ms([0, 1, 5, 25])).await;
            if by_chance() {
                cut();
            }
        }
    }));
    all(holders).await;
    becomes_free(&processes[0]).await;
}

/// Holds the lease for a moment, and releases it. `highest` is the token of the last holder.
pub async fn hold(leases: &impl Leases, lease: &Lease, highest: &AtomicI64) {
    let token = lease.token.get();
    let before = highest.swap(token, SeqCst);
    assert!(before < token, "tokens do not increase");
    sleep(some_ms([0, 1, 3])).await;
    assert_eq!(highest.load(SeqCst), token, "two holders have the lease");
    leases.release(&lease.resource, &lease.id).await.unwrap();
}

/// Waits until no lease is held. The release of the lease of a dropped request may not have run
/// yet.
pub async fn becomes_free(leases: &impl Leases) {
    while leases.inspect(&resource()).await.unwrap().is_some() {
        sleep(Duration::from_millis(5)).await;
    }
}
