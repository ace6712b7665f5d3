//! The queue of waiters: one suite for all lease stores that have a queue. It contains what the
//! public suite ([`conformance`](super::conformance)) does not test.

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::Mutex,
    time::{Instant, sleep, timeout},
};
use tower_fence::{
    Token,
    lease::{Acquire, LeaseId, Leases, Renew},
};

use crate::support::{
    lease::{LONG, grant, granted, is_held, is_lost, renew_for, sku, wait, waiters},
    soon,
    store::TestStore,
};

on_every_store_with_a_queue!(
    many_waiters_are_served_in_order_despite_cancellations,
    new_first_waiter_notices_a_shortened_lease,
    only_waiter_notices_a_shortened_lease,
    release_at_another_issuer_ends_a_kept_position,
    lease_of_a_kept_position_awaits_its_client,
);

async fn many_waiters_are_served_in_order_despite_cancellations<S: TestStore>() {
    const MANY: usize = 300;
    /// A time that a busy machine does not exceed.
    const WAIT: Duration = LONG.saturating_mul(5);
    /// If a hand-off takes longer, waiters may lose their positions, and join the queue again.
    const TURN: Duration = Duration::from_secs(1);
    let (one, two, _db) = S::fresh().await;
    let first = grant(&one, &sku(), WAIT).await;
    let served = Arc::new(Mutex::new(vec![]));
    let mut line = vec![];
    for n in 0..MANY {
        let (leases, served) = ([&one, &two][n % 2].clone(), served.clone());
        line.push(tokio::spawn(async move {
            let lease = leases
                .acquire(&sku(), Acquire::new(LONG).wait(WAIT))
                .await
                .unwrap();
            served.lock().await.push((n, lease.token, Instant::now()));
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
    let mut last_at = Instant::now();
    for (_, waiting) in stay {
        timeout(WAIT, waiting)
            .await
            .expect("the waiter was never granted the lease")
            .unwrap();
    }
    let served = served.lock().await;
    assert!(served.is_sorted_by_key(|(_, token, _)| *token));
    let is_fast = |(.., at): &&(usize, Token, Instant)| {
        let before = std::mem::replace(&mut last_at, *at);
        *at - before < TURN
    };
    let order = served.iter().take_while(is_fast).map(|(n, ..)| *n);
    let order: Vec<_> = order.filter(|n| n % 4 <= 1).collect();
    assert_eq!(order, staying[..order.len()]);
    let all = served.iter().filter(|(n, ..)| n % 4 <= 1);
    assert_eq!(all.count(), staying.len());
    soon!(
        "the lease is free",
        one.inspect(&sku()).await.unwrap().is_none()
    );
}

async fn new_first_waiter_notices_a_shortened_lease<S: TestStore>() {
    let (one, two, _db) = S::fresh().await;
    let first = grant(&one, &sku(), LONG).await;
    let leaves = wait(&two, LONG).await;
    let stays = wait(&one, LONG).await;
    renew_for(&one, &first, Duration::from_secs(2)).await;
    leaves.abort();
    granted(stays).await;
}

async fn only_waiter_notices_a_shortened_lease<S: TestStore>() {
    let (one, two, _db) = S::fresh().await;
    for renews in [true, false] {
        let first = grant(&one, &sku(), LONG).await;
        let waiting = wait(&two, LONG).await;
        let ttl = Duration::from_secs(2);
        let shorter = match renews {
            true => one.renew(&sku(), &first.id, Renew::new(ttl)).await,
            false => {
                let again = Acquire::new(ttl).lease_id(first.id);
                one.acquire(&sku(), again).await
            }
        };
        assert_eq!(shorter.unwrap().token, first.token);
        // Every waiter polls after ten seconds, which is much later.
        let served = timeout(Duration::from_secs(6), waiting).await;
        let served = served.expect("the waiter was not served").unwrap().unwrap();
        two.release(&sku(), &served.id).await.unwrap();
    }
}

/// A client gives up, and its release reaches another issuer, for example behind a load balancer.
async fn release_at_another_issuer_ends_a_kept_position<S: TestStore>() {
    let (one, two, _db) = S::fresh().await;
    for _ in 0..5 {
        let first = grant(&one, &sku(), LONG).await;
        let id = LeaseId::random();
        let request = Acquire::new(LONG).lease_id(id.clone()).wait(S::SHORT);
        is_held(one.acquire(&sku(), request).await);
        let given_up_at = Instant::now();
        let behind = wait(&two, LONG).await;
        is_lost(two.release(&sku(), &id).await);
        one.release(&sku(), &first.id).await.unwrap();
        let behind = granted(behind).await;
        // Without the release, the lease would be kept for the first client until three seconds
        // have passed. A busy machine may need several attempts.
        if given_up_at.elapsed() < Duration::from_millis(2_950) {
            return;
        }
        two.release(&sku(), &behind.id).await.unwrap();
    }
    panic!("the lease is kept for the first client");
}

/// A client's wait times out, and the lease is granted to its kept position.
async fn lease_of_a_kept_position_awaits_its_client<S: TestStore>() {
    let (one, two, _db) = S::fresh().await;
    let first = grant(&one, &sku(), LONG).await;
    let request = Acquire::new(LONG).lease_id(LeaseId::random());
    is_held(one.acquire(&sku(), request.clone().wait(S::SHORT)).await);
    let behind = wait(&two, LONG).await;
    one.release(&sku(), &first.id).await.unwrap();
    soon("the lease is granted to the kept position", async || {
        let held = one.inspect(&sku()).await.unwrap();
        held.is_some_and(|held| held.token > first.token)
    })
    .await;
    // The notification that the position has left the queue may arrive after the grant.
    sleep(Duration::from_millis(200)).await;
    let lease = one.acquire(&sku(), request).await.unwrap();
    assert!(!behind.is_finished());
    one.release(&sku(), &lease.id).await.unwrap();
    granted(behind).await;
}
