//! Checks of dropped requests.

use std::{
    future::poll_fn,
    pin::pin,
    task::{Context, Poll},
};

use tokio::task::yield_now;

use super::{
    Subject,
    steps::{LONG, eventually, granted, is_free, next_grant, sku, wait},
};
use crate::lease::{Acquire, LeaseError, Leases};

/// Maximum number of polls after which a request is dropped.
const POINTS: usize = 200;

/// Drops a request after each number of polls, starting with one.
pub(super) async fn request_dropped_at_any_point_leaves_nothing<S: Subject>(subject: &S) {
    let (one, two) = subject.fresh().await;
    for polls in 1..=POINTS {
        let acquired = {
            let resource = sku();
            let mut acquiring = pin!(one.acquire(&resource, Acquire::new(LONG)));
            let mut polled = 0;
            poll_fn(|cx: &mut Context<'_>| {
                polled += 1;
                match acquiring.as_mut().poll(cx) {
                    Poll::Ready(acquired) => Poll::Ready(Some(acquired)),
                    Poll::Pending if polled == polls => Poll::Ready(None),
                    Poll::Pending => Poll::Pending,
                }
            })
            .await
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
