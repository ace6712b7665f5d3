//! The guard of a lease: how it keeps the lease, and how it loses the lease and reports the loss.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use futures_util::future::{join_all, pending};
use tokio::time::{Instant, sleep, timeout};
use tower_fence::{
    client::{Holder, Loss},
    lease::{Acquire, LeaseAdmin, Leases},
};

use super::issued::Issued;
use crate::support::{
    PATIENCE,
    lease::{is_lost, sku},
    proxy::Link,
};

/// Work that sets its flag when it is dropped.
struct Work(Arc<AtomicBool>);

impl Drop for Work {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_is_kept_over_ten_ttls_under_load() {
    let issued = Issued::start().await;
    let done = Arc::<AtomicBool>::default();
    let load = (0..8).map(|n| {
        let (leases, done) = (issued.leases(), done.clone());
        tokio::spawn(async move {
            let holder = Holder::new(leases);
            let mut grants = 0;
            while !done.load(Relaxed) {
                let lease = holder.acquire(format!("load-{n}")).await.unwrap();
                lease.release().await.unwrap();
                grants += 1;
            }
            grants
        })
    });
    let load: Vec<_> = load.collect();
    let ttl = Duration::from_millis(400);
    let lease = issued.holder(400).acquire("sku-1").await.unwrap();
    let began = Instant::now();
    while began.elapsed() < 10 * ttl {
        lease.check().unwrap();
        let held = issued.store.inspect(&sku()).await.unwrap().unwrap();
        assert_eq!(held.token, lease.token());
        assert!(lease.remaining() <= ttl);
        sleep(Duration::from_millis(20)).await;
    }
    done.store(true, Relaxed);
    let grants: u64 = join_all(load).await.into_iter().map(Result::unwrap).sum();
    assert!(grants > 100, "too little load: {grants}");
    lease.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn issuer_outage_shorter_than_the_ttl_loses_no_lease() {
    for away in [Link::Cut, Link::Silent] {
        let issued = Issued::start().await;
        let lease = issued.holder(4_500).acquire("sku-1").await.unwrap();
        let token = lease.token();
        issued.proxy.set(away);
        sleep(Duration::from_millis(1_000)).await;
        issued.proxy.set(Link::Whole);
        sleep(Duration::from_millis(5_000)).await;
        lease.check().unwrap();
        let held = issued.store.inspect(&sku()).await.unwrap().unwrap();
        assert_eq!((held.token, lease.token()), (token, token));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lease_is_lost_when_the_issuer_outage_exceeds_the_ttl() {
    for away in [Link::Cut, Link::Silent] {
        let issued = Issued::start().await;
        let ttl = Duration::from_millis(900);
        let lease = issued.holder(900).acquire("sku-1").await.unwrap();
        sleep(Duration::from_millis(500)).await;
        let dropped = Arc::<AtomicBool>::default();
        let work = Work(dropped.clone());
        issued.proxy.set(away);
        let cut_at = Instant::now();
        let lost = tokio::spawn(lease.lost());
        let loss = lease.run(async move {
            let _work = work;
            pending::<()>().await;
        });
        let loss = timeout(Duration::from_secs(10), loss).await.unwrap();
        let after = cut_at.elapsed();
        assert_matches!(loss, Err(Loss::Expired { cause: Some(_), .. }));
        assert!(dropped.load(Relaxed), "the work continues");
        // The last successful renewal preceded the cut by at most a third of the TTL.
        assert!(after < ttl + Duration::from_millis(100), "late: {after:?}");
        assert!(after > ttl / 2, "early: {after:?}");
        assert!(matches!(lost.await.unwrap(), Loss::Expired { .. }));
        assert!(lease.check().is_err() && lease.remaining().is_zero());
        // The guard stays lost when the issuer is reachable again.
        issued.proxy.set(Link::Whole);
        issued.is_free_soon().await;
        assert!(lease.run(async {}).await.is_err());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn broken_lease_is_lost_at_the_next_renewal() {
    let issued = Issued::start().await;
    let lease = issued.holder(6_000).acquire("sku-1").await.unwrap();
    issued.store.break_lease(&sku(), None).await.unwrap();
    let broken_at = Instant::now();
    let loss = lease.run(pending::<()>()).await.unwrap_err();
    let after = broken_at.elapsed();
    assert_matches!(loss, Loss::Refused { .. });
    // The guard renews the lease after 2 s, and again after 4 s.
    assert!(after < Duration::from_millis(3_900), "{after:?}");
    is_lost(lease.release().await);
}

/// The runtime does not poll the timer, as in a paused process.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn process_paused_past_its_lease_sees_the_loss_first() {
    let issued = Issued::start().await;
    let lease = issued.holder(1_000).acquire("sku-1").await.unwrap();
    // While a task on the only worker is ready, the worker seldom polls the timers.
    let task = tokio::spawn(async move {
        let (mut polls, mut slept) = (0, false);
        let work = std::future::poll_fn(|cx| {
            polls += 1;
            if !slept {
                std::thread::sleep(Duration::from_millis(1_100));
                slept = true;
            }
            cx.waker().wake_by_ref();
            std::task::Poll::<()>::Pending
        });
        (lease.run(work).await.unwrap_err(), polls)
    });
    let (loss, polls) = task.await.unwrap();
    assert_matches!(loss, Loss::Expired { .. });
    assert!(polls <= 1, "the work continued after its lease");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropped_guard_releases_its_lease() {
    let issued = Issued::start().await;
    let holder = issued.holder(60_000);
    drop(holder.acquire("sku-1").await.unwrap());
    issued.is_free_soon().await;

    // The work panics.
    let lease = holder.acquire("sku-1").await.unwrap();
    let panicked =
        tokio::spawn(async move { lease.run(async { panic!("an intended panic") }).await });
    panicked.await.unwrap_err();
    issued.is_free_soon().await;

    // The request is dropped while it waits in the queue.
    let other = holder.acquire("sku-1").await.unwrap();
    let waiting = holder.clone().wait(Duration::from_secs(60));
    timeout(Duration::from_millis(300), waiting.acquire("sku-1"))
        .await
        .unwrap_err();
    other.release().await.unwrap();
    issued.is_free_soon().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_renewal_outlives_its_runtime() {
    let issued = Issued::start().await;
    let holder = issued.holder(700);
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let lease = runtime.block_on(async move {
            let lease = holder.acquire("sku-1").await.unwrap();
            sleep(Duration::from_millis(1_000)).await;
            lease.check().unwrap();
            lease
        });
        runtime.shutdown_background();
        // No runtime is left to release the lease.
        drop(lease);
    })
    .join()
    .unwrap();
    assert!(issued.is_held().await);
    let ended_at = Instant::now();
    issued.is_free_soon().await;
    assert!(ended_at.elapsed() < Duration::from_millis(1_000));
}

#[tokio::test]
async fn lease_granted_again_with_its_id_is_lost() {
    let issued = Issued::start().await;
    let lease = issued.holder(1_500).acquire("sku-1").await.unwrap();
    let token = lease.token();
    let again = Acquire::new(Duration::from_secs(60)).lease_id(lease.lease_id().clone());
    assert!(issued.store.break_lease(&sku(), None).await.unwrap());
    // Another client holds the lease for a moment. Then a late copy of the holder's own request
    // arrives.
    let holder = issued.holder(60_000);
    holder
        .acquire("sku-1")
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
    let granted = issued.store.acquire(&sku(), again).await.unwrap();
    assert!(granted.token > token);
    let loss = timeout(PATIENCE, lease.lost()).await.unwrap();
    assert_matches!(loss, Loss::Refused { .. });
    assert_eq!(lease.token(), token);
}
