//! The queue of waiters: one suite for all lease stores that have a queue. It contains what the
//! public suite ([`conformance`](super::conformance)) does not test.

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::Mutex,
    time::{Instant, sleep, timeout},
};
use tower_fence::lease::{Acquire, LeaseAdmin, LeaseId, Leases, Owner, Renew};

use crate::support::{
    eventually,
    lease::{LONG, grant, granted, is_lost, sku, wait, waiters},
    soon,
    store::TestStore,
};

on_every_store_with_a_queue!(
    waiter_is_granted_when_the_lease_expires,
    many_waiters_are_served_in_order_despite_cancellations,
    broken_lease_is_granted_to_the_next_waiter,
    repeated_request_keeps_its_position_and_its_lease,
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
    // After a renewal with a shorter TTL, the waiters use the new expiry.
    let waiting = wait(&one, LONG).await;
    two.renew(&sku(), &second.id, Renew::new(S::SHORT))
        .await
        .unwrap();
    let third = granted(waiting).await;
    // If a waiter with a shorter TTL is granted the lease, the expiry for the waiter behind it
    // moves as well.
    let (short, last) = (wait(&two, S::SHORT).await, wait(&one, LONG).await);
    one.release(&sku(), &third.id).await.unwrap();
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
    assert!(!one.break_lease(&sku(), None).await.unwrap());
    let first = grant(&one, &sku(), LONG).await;
    let waiting = wait(&two, LONG).await;
    assert!(two.break_lease(&sku(), None).await.unwrap());
    let second = granted(waiting).await;
    assert!(second.token > first.token);
    is_lost(one.renew(&sku(), &first.id, Renew::new(LONG)).await);
    // Breaking a lease ends its lock delay as well.
    assert!(one.break_lease(&sku(), None).await.unwrap());
    let delayed = Acquire::new(S::SHORT).lock_delay(LONG);
    let third = one.acquire(&sku(), delayed).await.unwrap();
    eventually("the lease ends", async || {
        one.inspect(&sku()).await.unwrap().is_none()
    })
    .await;
    assert!(one.break_lease(&sku(), None).await.unwrap());
    assert!(grant(&two, &sku(), LONG).await.token > third.token);
}

/// A client gives up its wait and retries with the same lease id, at this issuer or at another one.
/// When the first request ends, the second one keeps its position and its lease.
async fn repeated_request_keeps_its_position_and_its_lease<S: TestStore>() {
    let (one, two, _db) = S::fresh().await;
    for other in [&one, &two] {
        let first = grant(&one, &sku(), LONG).await;
        let id = LeaseId::random();
        let ask = |leases: &S::Leases| {
            let (leases, id) = (leases.clone(), id.clone());
            let request = Acquire::new(LONG).wait(LONG).lease_id(id);
            tokio::spawn(async move { leases.acquire(&sku(), request).await })
        };
        let given_up = ask(&one);
        eventually("the waiter is in the queue", async || {
            waiters(&one).await >= 1
        })
        .await;
        let again = ask(other);
        sleep(S::SHORT).await;
        given_up.abort();
        sleep(S::SHORT).await;
        assert_eq!(
            waiters(&one).await,
            1,
            "the second request has lost its position"
        );
        one.release(&sku(), &first.id).await.unwrap();
        let lease = granted(again).await;

        one.release(&sku(), &lease.id).await.unwrap();

        // Here the first request ends after the second one was granted.
        let first = grant(&one, &sku(), LONG).await;
        let given_up = ask(&one);
        eventually("the waiter is in the queue", async || {
            waiters(&one).await >= 1
        })
        .await;
        let again = ask(other);
        sleep(S::SHORT).await;
        one.release(&sku(), &first.id).await.unwrap();
        let lease = granted(again).await;
        given_up.abort();
        sleep(S::SHORT).await;
        let held = one
            .inspect(&sku())
            .await
            .unwrap()
            .expect("the lease is lost");
        assert_eq!(held.token, lease.token);
        one.release(&sku(), &id).await.unwrap();
    }
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
        let waits = |leases: &S::Leases, owner: Option<Owner>| {
            let mut request = Acquire::new(LONG).wait(LONG).lease_id(id.clone());
            request.owner = owner;
            let leases = leases.clone();
            tokio::spawn(async move { leases.acquire(&sku(), request).await })
        };
        let first = waits(&one, owner("worker-7"));
        eventually("the waiter is in the queue", async || {
            waiters(&one).await >= 1
        })
        .await;
        let second = waits(&two, repeated);
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
