//! The line of waiters in Redis, in Postgres and in etcd: whoever waits gets its turn, over two processes whose connections
//! are cut, and in one of which a runtime ends.

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering::SeqCst},
    },
    time::Duration,
};

use super::{FOR_EVER, Source, all, by_chance, some_ms, tasks};
use crate::{
    etcd_line::{keys::Keys, server::Etcd, store::EtcdLeases},
    lease::{Acquire, Driver, LeaseError, Leases, WaiterLimits, memory::Memory},
    model::{
        clock::sleep,
        etcd::{EtcdServer, gateway::Gateway},
        postgres::Postgres,
        redis::Redis,
        runtime::{Handle, spawn},
        scripts::scripts::Scripts,
        tokio::time::timeout,
    },
    postgres_line::store::PostgresLeases,
    redis_line::store::RedisBackend,
    token::Resource,
};

pub async fn everyone_in_redis_gets_the_lease() {
    let redis = Redis::default();
    let process = || Driver::over(RedisBackend::new(Scripts::new(&redis)));
    let processes = [process(), process()];
    let cut = redis.clone();
    everyone_gets_the_lease(processes, false, move || cut.cut()).await;
}

pub async fn everyone_in_postgres_gets_the_lease() {
    let postgres = Postgres::default();
    let processes = [postgres.clone(), postgres.clone()].map(PostgresLeases::new);
    everyone_gets_the_lease(processes, false, move || postgres.cut()).await;
}

pub async fn everyone_in_etcd_gets_the_lease() {
    let server = EtcdServer::default();
    let process = || {
        let memory = Memory::new(Arc::new(Source));
        let etcd = Etcd::new(Gateway(server.clone()), memory, Keys::new("locks"));
        EtcdLeases::new(etcd, WaiterLimits::default())
    };
    let processes = [process(), process()];
    everyone_gets_the_lease(processes, true, move || server.cut()).await;
}

/// Leases that never end by themselves, and nobody who looks by itself: who is not woken waits for ever.
async fn everyone_gets_the_lease<L: Leases + Clone>(
    processes: [L; 2],
    outlives_runtimes: bool,
    cut: impl Fn() + Clone + Send + 'static,
) {
    let resource = Resource::new("sku-1").unwrap();
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
                // Dropped, it may have the lease already.
                3 => match timeout(some_ms([0, 1, 5]), acquiring).await {
                    Ok(acquired) => acquired,
                    Err(_) => return,
                },
                _ => acquiring.await,
            };
            assert!(acquired.is_ok() || n > 2, "{acquired:?}");
            if let Ok(lease) = acquired {
                let token = lease.token.get();
                let before = highest.swap(token, SeqCst);
                assert!(before < token, "tokens do not increase");
                sleep(some_ms([0, 1, 3])).await;
                assert_eq!(highest.load(SeqCst), token, "two hold the lease");
                leases.release(&resource, &lease.id).await.unwrap();
            }
        }
    });
    // Its runtime has the tasks that serve the others, where it was the first to wait.
    if outlives_runtimes {
        let (ending, leases, asked) = (Handle::new(), processes[0].clone(), resource.clone());
        holders.push(spawn(async move {
            let leaves_in_time = ending.spawn(async move {
                let request = Acquire::new(FOR_EVER).wait(some_ms([1, 5]));
                match leases.acquire(&asked, request).await {
                    Ok(lease) => leases.release(&asked, &lease.id).await.is_ok(),
                    Err(error) => matches!(error, LeaseError::Held { .. }),
                }
            });
            // The lease never expires here, so a release that is missing shows.
            if leaves_in_time.await.unwrap() {
                ending.end();
            }
        }));
    }
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
    // A dropped request leaves no lease.
    while processes[0].inspect(&resource).await.unwrap().is_some() {
        sleep(Duration::from_millis(5)).await;
    }
}
