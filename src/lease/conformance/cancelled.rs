//! Checks of dropped requests.

use std::{
    future::poll_fn,
    pin::{Pin, pin},
    task::{Context, Poll},
    time::Duration,
};

use tokio::{task::yield_now, time::sleep};

use super::{
    Subject,
    steps::{LONG, eventually, granted, is_free, next_grant, resource, sku, wait},
};
use crate::lease::{Acquire, LeaseError, LeaseId, Leases, Renew};

/// Maximum number of polls after which a request is dropped.
const POINTS: usize = 200;
/// Time in which a dropped request is undone.
const SETTLED: Duration = Duration::from_millis(100);

/// Polls a future at most `polls` times. Returns `None` if it is not ready by then.
async fn polled<T>(polls: usize, mut future: Pin<&mut impl Future<Output = T>>) -> Option<T> {
    let mut polled = 0;
    poll_fn(|cx: &mut Context<'_>| {
        polled += 1;
        match future.as_mut().poll(cx) {
            Poll::Ready(outcome) => Poll::Ready(Some(outcome)),
            Poll::Pending if polled == polls => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}

/// Drops a request after each number of polls, starting with one.
pub(super) async fn request_dropped_at_any_point_leaves_nothing<S: Subject>(subject: &S) {
    let (one, two) = subject.fresh().await;
    for polls in 1..=POINTS {
        let acquired = {
            let resource = sku();
            let acquiring = pin!(one.acquire(&resource, Acquire::new(LONG)));
            polled(polls, acquiring).await
        };
        match acquired {
            Some(Ok(lease)) => {
                one.release(&sku(), &lease.id).await.expect("a release");
                return;
            }
            // The grant of a request that was dropped earlier may complete late. It is then undone.
            Some(Err(LeaseError::Held { .. })) | None => {}
            Some(Err(error)) => panic!("{error}"),
        }
        yield_now().await;
        eventually("the dropped request leaves nothing behind", async || {
            let asked = two.acquire(&sku(), Acquire::new(LONG)).await;
            match asked {
                Ok(lease) => two.release(&sku(), &lease.id).await.is_ok(),
                Err(_) => false,
            }
        })
        .await;
    }
    panic!("the request was polled {POINTS} times, and is still not granted");
}

/// Drops a repeated request. The lease was granted to the first request, so it must be kept.
pub(super) async fn dropped_repetition_spares_the_lease<S: Subject>(subject: &S) {
    let (one, two) = subject.fresh().await;
    let request = Acquire::new(LONG).lease_id(LeaseId::random());
    let lease = one.acquire(&sku(), request.clone()).await.expect("a grant");
    for polls in 1..=POINTS {
        let resource = sku();
        let again = polled(polls, pin!(two.acquire(&resource, request.clone()))).await;
        // A background task undoes a dropped request.
        sleep(SETTLED).await;
        let kept = one.renew(&sku(), &lease.id, Renew::new(LONG)).await;
        assert!(
            kept.is_ok(),
            "a dropped repetition has ended the lease: {kept:?}"
        );
        if let Some(again) = again {
            again.expect("the lease that is held under this id");
            return;
        }
    }
    panic!("the repetition was polled {POINTS} times, and is still not granted");
}

/// Drops the first of two requests under one lease id. The lease was granted to the second request,
/// too, so it must be kept.
pub(super) async fn dropped_request_spares_the_lease_of_its_repetition<S: Subject>(subject: &S) {
    let (one, two) = subject.fresh().await;
    for polls in 1..=POINTS {
        let request = Acquire::new(LONG).lease_id(LeaseId::random());
        // Each round has its own resource, because a request may still be undone during the next
        // round.
        let resource = resource(&format!("sku-{polls}"));
        let first = polled(polls, pin!(one.acquire(&resource, request.clone()))).await;
        let again = two.acquire(&resource, request).await;
        let again = again.expect("a grant");
        sleep(SETTLED).await;
        let kept = two.renew(&resource, &again.id, Renew::new(LONG)).await;
        assert!(
            kept.is_ok(),
            "a dropped request has ended the lease of its repetition: {kept:?}"
        );
        if let Some(first) = first {
            first.expect("a grant");
            return;
        }
    }
    panic!("the request was polled {POINTS} times, and is still not granted");
}

pub(super) async fn waiter_that_goes_away_is_passed_over<S: Subject>(subject: &S) {
    let (one, two) = subject.fresh().await;
    for _ in 0..5 {
        let first = next_grant(&one).await;
        // Each request has its own lease id.
        let request = || Acquire::new(LONG).wait(LONG);
        let gone = wait(&two, request(), S::QUEUE).await;
        let stays = wait(&one, request(), S::QUEUE).await;
        one.release(&sku(), &first.id).await.expect("a release");
        // The lease may already have been granted, even if the request has not returned it yet.
        gone.abort();
        if let Ok(Ok(lease)) = gone.await {
            two.release(&sku(), &lease.id).await.expect("a release");
        }
        let lease = granted(stays).await;
        one.release(&sku(), &lease.id).await.expect("a release");
        eventually("the resource is free", async || is_free(&one).await).await;
    }
}
