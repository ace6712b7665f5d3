//! Checks of waiting requests.

use std::time::Duration;

use tokio::{
    task::yield_now,
    time::{Instant, sleep},
};

use super::{
    Subject,
    steps::{LONG, SOON, chosen, eventually, grant, granted, is_held, is_lost, sku, wait, waiters},
};
use crate::lease::{Acquire, LeaseAdmin, Leases, Owner, Renew};

pub(super) async fn waiter_is_granted_on_release<S: Subject>(subject: &S) {
    let (one, two) = subject.fresh().await;
    let mut last = grant(&one, LONG).await;
    for leases in [&two, &one, &two] {
        let waiting = wait(leases, Acquire::new(LONG).wait(LONG), S::QUEUE).await;
        one.release(&sku(), &last.id).await.expect("a release");
        let lease = granted(waiting).await;
        assert!(lease.token > last.token);
        let held = one.inspect(&sku()).await.expect("the store answers");
        let held = held.expect("the waiter has the lease");
        assert_eq!((held.token, held.waiters), (lease.token, 0));
        assert!(
            held.ttl > LONG / 2,
            "the lease must last its whole TTL: {held:?}"
        );
        last = lease;
    }
}

pub(super) async fn waiter_is_granted_on_expiry<S: Subject>(subject: &S) {
    let (one, two) = subject.fresh().await;
    let began = Instant::now();
    let first = grant(&one, S::SHORT).await;
    let waiting = wait(&two, Acquire::new(LONG).wait(LONG), S::QUEUE).await;
    let second = granted(waiting).await;
    // The store may measure whole milliseconds, with another clock.
    let elapsed = began.elapsed() + Duration::from_millis(5);
    assert!(elapsed >= first.ttl, "granted before the lease expired");
    assert!(second.token > first.token);
    if S::QUEUE {
        // The waiter behind one with a shorter TTL is granted the lease when that TTL ends.
        let short = wait(&two, Acquire::new(S::SHORT).wait(LONG), true).await;
        let last = wait(&one, Acquire::new(LONG).wait(LONG), true).await;
        one.release(&sku(), &second.id).await.expect("a release");
        granted(short).await;
        granted(last).await;
    }
}

pub(super) async fn waiter_is_granted_when_the_lease_is_broken<S: Subject>(subject: &S) {
    let (one, two) = subject.fresh().await;
    let first = grant(&one, LONG).await;
    let waiting = wait(&two, Acquire::new(LONG).wait(LONG), S::QUEUE).await;
    let ended = two.break_lease(&sku(), None).await;
    assert!(ended.expect("a break"), "the lease is held");
    assert!(granted(waiting).await.token > first.token);
    is_lost(one.renew(&sku(), &first.id, Renew::new(LONG)).await);
}

pub(super) async fn wait_ends_at_its_timeout<S: Subject>(subject: &S) {
    let (one, two) = subject.fresh().await;
    let lease = grant(&one, LONG).await;
    let began = Instant::now();
    let request = Acquire::new(LONG).wait(S::SHORT);
    let retry_after = is_held(two.acquire(&sku(), request).await);
    assert!(began.elapsed() >= S::SHORT && retry_after > LONG / 2);
    assert!(
        began.elapsed() < S::SHORT + SOON,
        "the wait must end soon after its timeout"
    );
    // A store that forwards requests to another one, such as `HttpLeases`, always sends a lease id.
    // The other store then keeps the position for a moment, in case the client retries.
    eventually("the request has left the queue", async || {
        waiters(&one).await == 0
    })
    .await;
    one.release(&sku(), &lease.id).await.expect("a release");
    let held = one.inspect(&sku()).await.expect("the store answers");
    assert_eq!(held, None);
}

pub(super) async fn waiters_are_served_in_order<S: Subject>(subject: &S) {
    let (one, two) = subject.fresh().await;
    let mut last = grant(&one, LONG).await;
    let mut queue = vec![];
    for n in 0..6 {
        let request = Acquire::new(LONG).wait(LONG);
        queue.push(wait([&one, &two][n % 2], request, true).await);
    }
    for waiting in queue {
        one.release(&sku(), &last.id).await.expect("a release");
        let lease = granted(waiting).await;
        assert!(lease.token > last.token);
        last = lease;
    }
}

pub(super) async fn newcomer_does_not_overtake<S: Subject>(subject: &S) {
    let (one, two) = subject.fresh().await;
    let first = grant(&one, LONG).await;
    let waiting = wait(&two, Acquire::new(LONG).wait(LONG), true).await;
    one.release(&sku(), &first.id).await.expect("a release");
    is_held(one.acquire(&sku(), Acquire::new(LONG)).await);
    let second = granted(waiting).await;
    two.release(&sku(), &second.id).await.expect("a release");
    // These newcomers also arrive at the moment of the expiry.
    grant(&one, S::SHORT).await;
    let waiting = wait(&two, Acquire::new(LONG).wait(LONG), true).await;
    while !waiting.is_finished() {
        is_held(one.acquire(&sku(), Acquire::new(LONG)).await);
        yield_now().await;
    }
    granted(waiting).await;
}

pub(super) async fn repeated_request_has_the_position_of_the_first<S: Subject>(subject: &S) {
    let (one, two) = subject.fresh().await;
    let owner = |name: &str| Some(Owner::new(name).expect("an owner"));
    for (other, named) in [(&one, None), (&two, owner("worker-8"))] {
        let first = grant(&one, LONG).await;
        let mut request = chosen();
        request.owner = owner("worker-7");
        let given_up = wait(&one, request.clone(), true).await;
        let behind = wait(&two, Acquire::new(LONG).wait(LONG), true).await;
        request.owner = named;
        let again = wait(other, request, false).await;
        sleep(S::SHORT).await;
        assert_eq!(waiters(&one).await, 2, "a lease id must have one position");
        given_up.abort();
        sleep(S::SHORT).await;
        assert_eq!(
            waiters(&one).await,
            2,
            "the repeated request has lost its position"
        );
        one.release(&sku(), &first.id).await.expect("a release");
        let lease = granted(again).await;
        let held = one.inspect(&sku()).await.expect("the store answers");
        let held = held.expect("the waiter has the lease");
        assert_eq!(held.owner, owner("worker-7"));
        two.release(&sku(), &lease.id).await.expect("a release");
        let behind = granted(behind).await;
        assert!(behind.token > lease.token);
        one.release(&sku(), &behind.id).await.expect("a release");
    }
}

pub(super) async fn position_survives_a_gap<S: Subject>(subject: &S) {
    let (one, two) = subject.fresh().await;
    let first = grant(&one, LONG).await;
    let request = chosen();
    // The first request times out, and the client drops the second one.
    let over = one.acquire(&sku(), request.clone().wait(S::SHORT)).await;
    is_held(over);
    let behind = wait(&two, Acquire::new(LONG).wait(LONG), true).await;
    let dropped = wait(&one, request.clone(), false).await;
    sleep(S::SHORT).await;
    dropped.abort();
    sleep(S::SHORT).await;
    let last = wait(&one, request, false).await;
    sleep(S::SHORT).await;
    one.release(&sku(), &first.id).await.expect("a release");
    let lease = granted(last).await;
    one.release(&sku(), &lease.id).await.expect("a release");
    assert!(granted(behind).await.token > lease.token);
}

pub(super) async fn shorter_renewal_reaches_the_waiters<S: Subject>(subject: &S) {
    let (one, two) = subject.fresh().await;
    let first = grant(&one, LONG).await;
    let waiting = wait(&two, Acquire::new(LONG).wait(LONG), S::QUEUE).await;
    let shorter = one.renew(&sku(), &first.id, Renew::new(S::SHORT)).await;
    shorter.expect("a renewal");
    granted(waiting).await;
}
