//! The leases in the process: each waiter gets its turn, with a token above those of all earlier
//! holders.

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering::SeqCst},
    },
    time::Duration,
};

use shuttle::future::yield_now;

use super::{FOR_EVER, Source, all, by_chance, some_ms, tasks};
use crate::{
    lease::{Acquire, LeaseError, Leases, MemoryLeases, Renew},
    model::{clock::sleep, tokio::time::timeout},
    token::Resource,
};

fn resource() -> Resource {
    Resource::new("sku-1").unwrap()
}

/// Each waiter gets the lease. Leases do not expire, so a waiter that is not woken waits forever.
pub async fn every_waiter_gets_the_lease() {
    let leases = MemoryLeases::new(Source);
    // The highest granted token. Only the current holder changes it.
    let highest = Arc::new(AtomicI64::new(0));
    let holders = tasks(5, |n| {
        let (leases, highest) = (leases.clone(), highest.clone());
        async move {
            let wait = match n {
                0 | 1 | 2 => FOR_EVER,
                _ => some_ms([0, 1, 5]),
            };
            let acquire = Acquire::new(FOR_EVER).wait(wait);
            let resource = resource();
            let acquiring = leases.acquire(&resource, acquire);
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
                let token = lease.token.get();
                assert!(
                    highest.swap(token, SeqCst) < token,
                    "tokens do not increase"
                );
                sleep(some_ms([0, 1, 3])).await;
                assert_eq!(highest.load(SeqCst), token, "two holders have the lease");
                leases.release(&resource, &lease.id).await.unwrap();
            }
        }
    });
    all(holders).await;
    // A dropped request leaves no lease.
    while leases.inspect(&resource()).await.unwrap().is_some() {
        sleep(Duration::from_millis(1)).await;
    }
}

/// A renewal shortens the lease, and its holder never releases it. The first waiter is notified of
/// the new end of the lease. If that waiter is dropped, the next waiter is notified.
pub async fn first_waiter_is_notified_of_a_new_end() {
    let leases = MemoryLeases::new(Source);
    let resource = resource();
    let held = leases
        .acquire(&resource, Acquire::new(FOR_EVER))
        .await
        .unwrap();
    let waiters = tasks(3, |n| {
        let leases = leases.clone();
        async move {
            let acquire = Acquire::new(Duration::from_millis(5)).wait(FOR_EVER);
            let resource = self::resource();
            let acquiring = leases.acquire(&resource, acquire);
            match n {
                0 => drop(timeout(some_ms([1, 5, 9]), acquiring).await),
                _ => drop(acquiring.await.unwrap()),
            }
        }
    });
    sleep(some_ms([0, 1, 5])).await;
    let renew = Renew::new(Duration::from_millis(5));
    leases.renew(&resource, &held.id, renew).await.unwrap();
    all(waiters).await;
}
