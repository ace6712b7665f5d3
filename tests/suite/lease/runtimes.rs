//! A store that is used from several runtimes, one of which ends. What serves waiters are tasks, and end with it.

use std::time::Duration;

use tokio::{
    runtime::{Builder, Runtime},
    time::timeout,
};
use tower_fence::lease::Leases;

use crate::support::{
    eventually,
    lease::{LONG, grant, granted, sku, wait, waiters},
    store::{Cluster, Etcd, Postgres, Redis, TestStore},
};

#[test]
fn who_waits_in_redis_is_served_when_another_runtime_ends() {
    who_waits_is_served::<Redis>();
}

#[test]
fn who_waits_in_a_cluster_is_served_when_another_runtime_ends() {
    who_waits_is_served::<Cluster>();
}

#[test]
fn who_waits_in_postgres_is_served_when_another_runtime_ends() {
    who_waits_is_served::<Postgres>();
}

#[test]
fn who_waits_in_etcd_is_served_when_another_runtime_ends() {
    who_waits_is_served::<Etcd>();
}

fn who_waits_is_served<S: TestStore<Leases: 'static>>() {
    let lasting = runtime();
    for is_released in [true, false] {
        let ending = runtime();
        // Its connections belong to this runtime as well.
        let (leases, _other, db) = ending.block_on(S::fresh());
        let ttl = match is_released {
            true => LONG,
            false => Duration::from_secs(3),
        };
        let held = ending.block_on(grant(&leases, &sku(), ttl));
        let first = ending.block_on(wait(&leases, LONG));
        let waiting = lasting.block_on(wait(&leases, LONG));
        ending.block_on(async {
            first.abort();
            eventually("it has left", async || waiters(&leases).await == 1).await;
        });
        drop(ending);
        lasting.block_on(async {
            if is_released {
                leases.release(&sku(), &held.id).await.unwrap();
            }
            let next = timeout(Duration::from_secs(8), waiting).await;
            let next = next.expect("nobody tells it").unwrap().unwrap();
            assert!(next.token > held.token);
            // Whoever comes later waits as well.
            let waiting = wait(&leases, LONG).await;
            leases.release(&sku(), &next.id).await.unwrap();
            let last = timeout(Duration::from_secs(5), granted(waiting)).await;
            assert!(last.expect("nobody tells it").token > next.token);
            drop((leases, _other, db));
        });
    }
}

fn runtime() -> Runtime {
    let mut runtime = Builder::new_multi_thread();
    runtime.worker_threads(2).enable_all().build().unwrap()
}
