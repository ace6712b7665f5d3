//! Leases in Postgres on a distributed fence. Leases and queues are on the coordinator, and each
//! grant is announced on the worker that has its resource.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    time::Duration,
};

use sqlx::Postgres;
use tokio::sync::Mutex;
use tower_fence::{
    AdmitError, Fence, Resource, TokenUse,
    lease::{
        Acquire, LeaseAdmin, Leases, PostgresLeases, Renew,
        conformance::{self, Subject},
    },
};

use super::{
    distributed::{is_stale, resource, take, token},
    failover::{EPOCH, fail_over, resources_of},
};
use crate::support::{
    citus::Cluster,
    eventually,
    lease::{LONG, grant, is_unavailable},
    proxy::{Passage, Proxy},
    standby::{Replication, Standby},
};

struct OnCitus {
    cluster: Cluster,
    fences: [Fence<Postgres>; 2],
}

impl Subject for OnCitus {
    type Leases = PostgresLeases;
    const SHORT: Duration = Duration::from_secs(1);

    async fn fresh(&self) -> (PostgresLeases, PostgresLeases) {
        self.cluster
            .execute("TRUNCATE tower_fence.leases, tower_fence.queues, tower_fence.waiters")
            .await;
        let [one, two] = self.fences.clone().map(PostgresLeases::new);
        (one, two)
    }
}

#[tokio::test]
async fn leases_on_the_coordinator_pass_the_public_suite() {
    let cluster = Cluster::with_distributed_fence().await;
    let fences = [cluster.fence().await, cluster.fence().await];
    conformance::run(&OnCitus { cluster, fences }).await;
}

#[tokio::test]
async fn a_grant_makes_older_tokens_stale_on_the_worker() {
    let cluster = Cluster::with_distributed_fence().await;
    let fence = cluster
        .fence_with(|fence| fence.lock_timeout(Duration::from_millis(400)))
        .await;
    let leases = PostgresLeases::new(fence.clone());
    // One resource of each worker.
    for worker in 0..2 {
        let sku = resource(resources_of(&cluster, worker).await[0]);
        let first = grant(&leases, &sku, LONG).await;
        let value = first.token.get();
        leases.release(&sku, &first.id).await.unwrap();
        let second = grant(&leases, &sku, LONG).await;
        assert_eq!(second.token.get(), value + 1);
        is_stale(take(&fence, &sku, value).await, value, value);
        take(&fence, &sku, value + 1).await.unwrap();
        is_stale(take(&fence, &sku, value + 1).await, value + 1, value + 1);
        let renewed = leases.renew(&sku, &second.id, Renew::new(LONG).with_new_token());
        let renewed = renewed.await.unwrap().token.get();
        take(&fence, &sku, renewed).await.unwrap();
        // This token stands for one that another issuer has granted, possibly to another holder.
        take(&fence, &sku, renewed + 9).await.unwrap();
        let lost = leases.renew(&sku, &second.id, Renew::new(LONG));
        assert!(lost.await.is_err());
        let third = grant(&leases, &sku, LONG).await.token.get();
        assert_eq!(third, renewed + 10);
        // A grant waits for a write in progress, but not longer than its timeout.
        leases.break_lease(&sku, None).await.unwrap();
        let written = fence.begin(&sku, token(third), TokenUse::SingleUse).await;
        let written = written.unwrap();
        is_unavailable(leases.acquire(&sku, Acquire::new(LONG)).await);
        written.commit().await.unwrap();
        assert_eq!(
            grant(&leases, &sku, LONG).await.token.get(),
            third + 1,
            "worker {worker}"
        );
    }
}

/// The worker fails after it has prepared a grant, and before it receives the second phase.
#[tokio::test]
async fn a_grant_that_misses_its_second_phase_blocks_older_tokens() {
    let mut cluster = Cluster::with_distributed_fence().await;
    let sku = resource(resources_of(&cluster, 0).await[0]);
    let (cutting, cuts) = (
        Arc::new(AtomicBool::new(false)),
        Arc::<AtomicU64>::default(),
    );
    let (cuts_second, counting) = (Arc::clone(&cutting), Arc::clone(&cuts));
    let address = cluster.workers[0].addr();
    let proxy = Proxy::judging(address, move |_, message| {
        let second = message.windows(15).any(|part| part == b"COMMIT PREPARED");
        if second && cuts_second.load(SeqCst) {
            counting.fetch_add(1, SeqCst);
            return Passage::CutAfter(0);
        }
        Passage::Whole
    })
    .await;
    cluster.update_node(address, proxy.addr).await;
    cluster
        .execute("ALTER SYSTEM SET citus.recover_2pc_interval = -1; SELECT pg_reload_conf()")
        .await;
    let fence = cluster
        .fence_with(|fence| fence.lock_timeout(Duration::from_millis(400)))
        .await;
    let leases = PostgresLeases::new(fence.clone());
    let first = grant(&leases, &sku, LONG).await;
    let old = first.token.get();
    leases.release(&sku, &first.id).await.unwrap();

    cutting.store(true, SeqCst);
    let second = grant(&leases, &sku, LONG).await.token.get();
    assert_eq!(cuts.load(SeqCst), 1, "the second phase arrived");
    cutting.store(false, SeqCst);
    cluster.workers[0].crash().await;
    cluster.workers[0].restart().await;
    let begun = eventually_begun(&fence, &sku, old).await;
    assert_matches!(begun, AdmitError::Busy(_));

    cluster
        .execute("SELECT recover_prepared_transactions()")
        .await;
    is_stale(take(&fence, &sku, old).await, old, old);
    take(&fence, &sku, second).await.unwrap();
}

/// Begins a write with a token that must not be admitted, and repeats it while the connections to
/// the worker are broken.
async fn eventually_begun(fence: &Fence<Postgres>, sku: &Resource, value: i64) -> AdmitError {
    let refused = Mutex::new(None);
    eventually("the worker answers", async || {
        let begun = fence.begin(sku, token(value), TokenUse::SingleUse).await;
        let error = begun.expect_err("an older token was admitted");
        let broken = matches!(error, AdmitError::Unavailable(_));
        *refused.lock().await = Some(error);
        !broken
    })
    .await;
    refused.into_inner().unwrap()
}

#[tokio::test]
async fn held_lease_survives_the_distribution_of_the_fence() {
    let cluster = Cluster::with_fence().await;
    let sku = resource(1);
    let leases = PostgresLeases::new(cluster.fence().await);
    let lease = grant(&leases, &sku, LONG).await;
    cluster.distribute().await;
    let renew = Renew::new(LONG).with_new_token();
    let renewed = leases.renew(&sku, &lease.id, renew).await.unwrap();
    assert_eq!(renewed.token.get(), lease.token.get() + 1);
    let fence = cluster.fence().await;
    let old = lease.token.get();
    is_stale(take(&fence, &sku, old).await, old, old);
    take(&fence, &sku, old + 1).await.unwrap();
}

/// Acquires a lease after a failover, while earlier transactions may still be ending.
async fn next_token(leases: &PostgresLeases, sku: &Resource) -> i64 {
    let next = Mutex::new(None);
    eventually("the lease is granted", async || {
        let granted = leases.acquire(sku, Acquire::new(LONG)).await;
        let mut next = next.lock().await;
        *next = granted.ok().map(|lease| lease.token.get());
        next.is_some()
    })
    .await;
    next.into_inner().unwrap()
}

/// After the failover, either the coordinator or the worker has lost its part of a grant.
#[tokio::test]
async fn no_token_is_granted_twice_after_a_failover() {
    for of_the_coordinator in [false, true] {
        let mut cluster = Cluster::with_distributed_fence().await;
        let own = resources_of(&cluster, 0).await;
        let (seen, unseen) = (resource(own[0]), resource(own[1]));
        let leases = PostgresLeases::new(cluster.fence().await);
        let kept = grant(&leases, &seen, LONG).await;
        let primary = match of_the_coordinator {
            true => &cluster.coordinator,
            false => &cluster.workers[0],
        };
        let standby = Standby::of(primary, Replication::Asynchronous).await;
        standby.hold_back();
        leases.release(&seen, &kept.id).await.unwrap();
        let mut lost = vec![];
        for sku in [&seen, &unseen] {
            lost.push(grant(&leases, sku, LONG).await);
        }
        match of_the_coordinator {
            true => cluster.fail_over_coordinator(standby).await,
            false => fail_over(&mut cluster, 0, standby).await,
        }
        let fence = cluster.fence().await;
        let leases = PostgresLeases::new(fence.clone());
        for (sku, lost) in [&seen, &unseen].into_iter().zip(lost) {
            let value = lost.token.get();
            if of_the_coordinator {
                // The failover has restored a released lease, but the lease cannot be renewed.
                let resurrected = leases.renew(&seen, &kept.id, Renew::new(LONG)).await;
                assert!(resurrected.is_err(), "{resurrected:?}");
            } else {
                // The coordinator has the lease, and the worker has lost its token.
                let outcome = leases.renew(sku, &lost.id, Renew::new(LONG)).await;
                assert!(outcome.is_err(), "{outcome:?}");
            }
            let next = next_token(&leases, sku).await;
            assert!(next > value, "{sku}: {next} after {value}");
            assert!(next > 1_000 * EPOCH, "{sku}: an epoch that may be lost");
            let refused = take(&fence, sku, value).await;
            assert!(refused.is_err(), "{sku}: {value} was admitted");
            take(&fence, sku, next).await.unwrap();
        }
    }
}
