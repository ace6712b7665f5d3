//! The queue of waiters: one suite for all lease stores that have a queue. It contains what the
//! public suite ([`conformance`](super::conformance)) does not test.

use std::{sync::Arc, time::Duration};

use tokio::{sync::Mutex, time::timeout};
use tower_fence::lease::{Acquire, Leases, Renew};

use crate::support::{
    lease::{LONG, grant, granted, sku, wait, waiters},
    soon,
    store::TestStore,
};

on_every_store_with_a_queue!(
    many_waiters_are_served_in_order_despite_cancellations,
    new_first_waiter_notices_a_shortened_lease,
);

async fn many_waiters_are_served_in_order_despite_cancellations<S: TestStore>() {
    let (one, two, _db) = S::fresh().await;
    let first = grant(&one, &sku(), LONG).await;
    let served = Arc::new(Mutex::new(vec![]));
    let mut line = vec![];
    for n in 0..S::MANY {
        let (leases, served) = ([&one, &two][n % 2].clone(), served.clone());
        line.push(tokio::spawn(async move {
            let lease = leases
                .acquire(&sku(), Acquire::new(LONG).wait(LONG))
                .await
                .unwrap();
            served.lock().await.push((n, lease.token));
            leases.release(&sku(), &lease.id).await.unwrap();
        }));
        // The waiters join one after the other, so that their order is known.
        while waiters(&one).await <= n as u64 {
            tokio::task::yield_now().await;
        }
    }
    let (gone, stay): (Vec<_>, Vec<_>) = line.into_iter().enumerate().partition(|(n, _)| n % 4 > 1);
    let staying: Vec<_> = stay.iter().map(|(n, _)| *n).collect();
    for (_, waiting) in &gone {
        waiting.abort();
    }
    one.release(&sku(), &first.id).await.unwrap();
    for (_, waiting) in stay {
        timeout(LONG, waiting)
            .await
            .expect("the waiter was never granted the lease")
            .unwrap();
    }
    let served = served.lock().await;
    let order: Vec<_> = served.iter().map(|(n, _)| *n).collect();
    let order: Vec<_> = order.into_iter().filter(|n| n % 4 <= 1).collect();
    assert_eq!(order, staying);
    assert!(served.is_sorted_by_key(|(_, token)| *token));
    soon("the lease is free", async || {
        one.inspect(&sku()).await.unwrap().is_none()
    })
    .await;
}

async fn new_first_waiter_notices_a_shortened_lease<S: TestStore>() {
    let (one, two, _db) = S::fresh().await;
    let first = grant(&one, &sku(), LONG).await;
    let leaves = wait(&two, LONG).await;
    let stays = wait(&one, LONG).await;
    one.renew(&sku(), &first.id, Renew::new(Duration::from_secs(2)))
        .await
        .unwrap();
    leaves.abort();
    granted(stays).await;
}
