//! The guard of a lease: how it keeps the lease, and how it loses the lease and reports the loss.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering::Relaxed},
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
    clock::StoppedClock,
    eventually,
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

/// The clock stands still while the machine works, so a busy machine is never late.
#[tokio::test]
async fn a_lease_is_kept_over_ten_ttls_under_load() {
    /// The number of steps in which the clock advances by a TTL.
    const STEPS: u32 = 20;
    let (issued, clock) = (Issued::start().await, StoppedClock::stop());
    let (done, grants) = (Arc::<AtomicBool>::default(), Arc::<AtomicU32>::default());
    let load = (0..8).map(|n| {
        let (leases, done, grants) = (issued.leases(), done.clone(), grants.clone());
        tokio::spawn(async move {
            let holder = Holder::new(leases);
            while !done.load(Relaxed) {
                let lease = holder.acquire(format!("load-{n}")).await.unwrap();
                lease.release().await.unwrap();
                grants.fetch_add(1, Relaxed);
            }
        })
    });
    let load: Vec<_> = load.collect();
    let ttl = Duration::from_millis(400);
    let lease = issued.holder(400).acquire("sku-1").await.unwrap();
    for step in 1..=10 * STEPS {
        clock.advance(ttl / STEPS).await;
        // A renewal is due after a third of the TTL.
        let is_kept = async || lease.remaining() > ttl / 2;
        clock.until("the lease is renewed", is_kept).await;
        let is_loaded = async || grants.load(Relaxed) >= step;
        clock.until("other leases are granted", is_loaded).await;
        lease.check().unwrap();
        let held = issued.store.inspect(&sku()).await.unwrap().unwrap();
        assert_eq!(held.token, lease.token());
        assert!(lease.remaining() <= ttl);
    }
    done.store(true, Relaxed);
    join_all(load).await.into_iter().for_each(Result::unwrap);
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

#[tokio::test]
async fn lease_is_lost_when_the_issuer_outage_exceeds_the_ttl() {
    for away in [Link::Cut, Link::Silent] {
        let (issued, clock) = (Issued::start().await, StoppedClock::stop());
        let ttl = Duration::from_millis(900);
        let lease = issued.holder(900).acquire("sku-1").await.unwrap();
        clock.advance(ttl / 3 + Duration::from_millis(10)).await;
        let is_renewed = async || lease.remaining() > ttl * 2 / 3;
        clock.until("the lease is renewed", is_renewed).await;
        clock.advance(ttl / 5).await;
        let dropped = Arc::<AtomicBool>::default();
        let work = Work(dropped.clone());
        issued.proxy.set(away);
        let cut_at = Instant::now();
        let lost = tokio::spawn(lease.lost());
        let loss = lease.run(async move {
            let _work = work;
            pending::<()>().await;
        });
        let loss = tokio::select! {
            loss = timeout(Duration::from_secs(10), loss) => loss.unwrap(),
            () = clock.run() => unreachable!(),
        };
        let after = cut_at.elapsed();
        assert_matches!(loss, Err(Loss::Expired { cause: Some(_), .. }));
        assert!(dropped.load(Relaxed), "the work continues");
        // The last renewal was sent a fifth of the TTL before the cut.
        let left = ttl * 4 / 5;
        assert!(after >= left, "early: {after:?}");
        assert!(after < left + Duration::from_millis(10), "late: {after:?}");
        drop(clock);
        assert!(matches!(lost.await.unwrap(), Loss::Expired { .. }));
        assert!(lease.check().is_err() && lease.remaining().is_zero());
        // The guard stays lost when the issuer is reachable again.
        issued.proxy.set(Link::Whole);
        issued.is_free_soon().await;
        assert!(lease.run(async {}).await.is_err());
    }
}

#[tokio::test]
async fn broken_lease_is_lost_at_the_next_renewal() {
    let (issued, clock) = (Issued::start().await, StoppedClock::stop());
    let lease = issued.holder(6_000).acquire("sku-1").await.unwrap();
    issued.store.break_lease(&sku(), None).await.unwrap();
    clock.advance(Duration::from_millis(1_990)).await;
    lease.check().unwrap();
    // The guard renews the lease after a third of the TTL.
    clock.advance(Duration::from_millis(20)).await;
    let is_refused = async || matches!(lease.check(), Err(Loss::Refused { .. }));
    clock.until("the lease is lost", is_refused).await;
    let loss = lease.run(pending::<()>()).await.unwrap_err();
    assert_matches!(loss, Loss::Refused { .. });
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
    let ttl = Duration::from_secs(2);
    let holder = issued.holder(2_000);
    let renewed_at = std::thread::spawn(move || {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let (lease, renewed_at) = runtime.block_on(async move {
            let lease = holder.acquire("sku-1").await.unwrap();
            let mut left = ttl;
            eventually("the lease is renewed", async || {
                let before = std::mem::replace(&mut left, lease.remaining());
                left > before
            })
            .await;
            (lease, Instant::now())
        });
        runtime.shutdown_background();
        // No runtime is left to release the lease.
        drop(lease);
        renewed_at
    })
    .join()
    .unwrap();
    let is_held = issued.is_held().await;
    assert!(is_held || renewed_at.elapsed() > ttl / 2);
    issued.is_free_soon().await;
}

#[tokio::test]
async fn lease_granted_again_with_its_id_is_lost() {
    let (issued, clock) = (Issued::start().await, StoppedClock::stop());
    let lease = issued.holder(1_500).acquire("sku-1").await.unwrap();
    let token = lease.token();
    let again = Acquire::new(Duration::from_secs(60)).lease_id(lease.lease_id().clone());
    assert!(issued.store.break_lease(&sku(), None).await.unwrap());
    // Another client holds the lease for a moment. Then a late copy of the holder's own request
    // arrives.
    let other = issued.holder(60_000).acquire("sku-1").await.unwrap();
    other.release().await.unwrap();
    let granted = issued.store.acquire(&sku(), again).await.unwrap();
    assert!(granted.token > token);
    // The guard renews the lease after a third of the TTL.
    clock.advance(Duration::from_millis(510)).await;
    let is_refused = async || matches!(lease.check(), Err(Loss::Refused { .. }));
    clock.until("the lease is lost", is_refused).await;
    assert_eq!(lease.token(), token);
}
