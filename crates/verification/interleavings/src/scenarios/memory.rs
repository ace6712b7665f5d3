//! The leases in the process: each waiter gets its turn, with a token above those of all earlier
//! holders.

use std::time::Duration;

use super::{
    FOR_EVER, Source, all, resource, some_ms, tasks, waiters::every_waiter_gets_the_lease,
};
use crate::{
    lease::{Acquire, Leases, MemoryLeases, Renew},
    model::{clock::sleep, tokio::time::timeout},
};

pub async fn every_waiter_in_memory_gets_the_lease() {
    let leases = MemoryLeases::new(Source);
    every_waiter_gets_the_lease([leases.clone(), leases], || {}).await;
}

/// A renewal shortens the lease, and its holder never releases it. The first waiter is notified of
/// the new end of the lease. If that waiter is dropped, the next waiter is notified.
pub async fn first_waiter_is_notified_of_a_new_end() {
    let leases = MemoryLeases::new(Source);
    let held = leases.acquire(&resource(), Acquire::new(FOR_EVER)).await;
    let held = held.unwrap();
    let waiters = tasks(3, |n| {
        let leases = leases.clone();
        async move {
            let acquire = Acquire::new(Duration::from_millis(5)).wait(FOR_EVER);
            let resource = resource();
            let acquiring = leases.acquire(&resource, acquire);
            match n {
                0 => drop(timeout(some_ms([1, 5, 9]), acquiring).await),
                _ => drop(acquiring.await.unwrap()),
            }
        }
    });
    sleep(some_ms([0, 1, 5])).await;
    let renew = Renew::new(Duration::from_millis(5));
    leases.renew(&resource(), &held.id, renew).await.unwrap();
    all(waiters).await;
}
