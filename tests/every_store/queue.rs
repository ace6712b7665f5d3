//! The queue of waiters: one suite for all lease stores that have a queue. It contains what the
//! public suite ([`conformance`](super::conformance)) does not test.

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::Mutex,
    time::{Instant, sleep, timeout},
};
use tower_fence::lease::{Acquire, LeaseAdmin, LeaseId, Leases, Owner, Renew};

use crate::support::{
    lease::{LONG, grant, granted, is_lost, join, sku, wait, waiters},
    soon,
    store::TestStore,
};

on_every_store_with_a_queue!(
    waiter_is_granted_when_the_lease_expires,
    many_waiters_are_served_in_order_despite_cancellations,
    broken_lease_is_granted_to_the_next_waiter,
    new_first_waiter_notices_a_shortened_lease,
    repeated_request_in_the_queue_keeps_the_owner,
);

async fn waiter_is_granted_when_the_lease_expires<S: TestStore>() {
    let (one, two, _db) = S::fresh().await;
    let ttl = Duration::from_millis(400);
    let asked_at = Instant::now();
    let first = grant(&one, &sku(), ttl).await;
    let waiting = wait(&two, LONG).await;
    let second = granted(waiting).await;
    assert!(
        asked_at.elapsed() >= ttl - Duration::from_millis(5),
        "granted before the lease expired"
    );
    assert!(second.token > first.token);
    // If a waiter with a shorter TTL is granted the lease, the expiry for the waiter behind it
    // moves as well.
    let (short, last) = (wait(&two, S::SHORT).await, wait(&one, LONG).await);
    one.release(&sku(), &second.id).await.unwrap();
    granted(short).await;
    granted(last).await;
}

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

async fn broken_lease_is_granted_to_the_next_waiter<S: TestStore>() {
    let (one, two, _db) = S::fresh().await;
    let first = grant(&one, &sku(), LONG).await;
    let waiting = wait(&two, LONG).await;
    assert!(two.break_lease(&sku(), None).await.unwrap());
    assert!(granted(waiting).await.token > first.token);
    is_lost(one.renew(&sku(), &first.id, Renew::new(LONG)).await);
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

async fn repeated_request_in_the_queue_keeps_the_owner<S: TestStore>() {
    let (one, two, _db) = S::fresh().await;
    let owner = |name: &str| Some(Owner::new(name).unwrap());
    for repeated in [None, owner("worker-8")] {
        let held = grant(&one, &sku(), LONG).await;
        let id = LeaseId::random();
        let mut request = Acquire::new(LONG).wait(LONG).lease_id(id.clone());
        request.owner = owner("worker-7");
        let first = join(&one, request.clone()).await;
        request.owner = repeated;
        let leases = two.clone();
        let second = tokio::spawn(async move { leases.acquire(&sku(), request).await });
        // A store that counts requests instead of lease ids would count the second one, too.
        sleep(S::SHORT).await;
        // The repeated request remains, and takes the position of the first one.
        first.abort();
        sleep(S::SHORT).await;
        one.release(&sku(), &held.id).await.unwrap();
        granted(second).await;
        let held = one.inspect(&sku()).await.unwrap().unwrap();
        assert_eq!(held.owner, owner("worker-7"));
        one.release(&sku(), &id).await.unwrap();
    }
}
