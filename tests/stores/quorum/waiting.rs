//! Waiting for a lease on a quorum: without a queue, by polling.

use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::{sleep, timeout};
use tower_fence::lease::{Acquire, LeaseAdmin, LeaseError, LeaseId, Leases, Renew};

use crate::support::{
    lease::{LONG, grant, is_lost, renew_for, sku},
    soon,
    store::{Quorum, TestStore},
};

/// Requests that are cancelled in any phase leave nothing on the nodes: the resource is free
/// immediately, although each request asked for a minute.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cancelled_request_releases_its_grant() {
    let (one, two, _db) = Quorum::fresh().await;
    for n in 0..60 {
        let id = LeaseId::random();
        let mut request = Acquire::new(LONG).wait(LONG);
        if n % 2 == 0 {
            request = request.lease_id(id);
        }
        let limit = Duration::from_micros(150 * n);
        if let Ok(granted) = timeout(limit, one.acquire(&sku(), request)).await {
            one.release(&sku(), &granted.unwrap().id).await.unwrap();
        }
        soon("the lease is free", async || {
            let lease = two.acquire(&sku(), Acquire::new(LONG)).await;
            match lease {
                Ok(lease) => two.release(&sku(), &lease.id).await.is_ok(),
                Err(_) => false,
            }
        })
        .await;
    }
}

/// All requests with one lease id get the same lease, even concurrently and at two processes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_with_one_id_have_the_same_lease() {
    let (one, two, _db) = Quorum::fresh().await;
    for _ in 0..5 {
        let id = LeaseId::random();
        let asking = (0..6).map(async |n| {
            let leases = [&one, &two][n % 2];
            let request = Acquire::new(LONG).wait(LONG).lease_id(id.clone());
            leases.acquire(&sku(), request).await
        });
        let answers = timeout(LONG, join_all(asking)).await.unwrap();
        let held = one.inspect(&sku()).await.unwrap().unwrap();
        let tokens = answers.into_iter().map(|lease| lease.unwrap().token);
        assert_eq!(tokens.max(), Some(held.token));
        two.release(&sku(), &id).await.unwrap();
        is_lost(one.release(&sku(), &id).await);
    }
}

/// A holder that continuously takes new tokens cannot prevent an operator from breaking its lease.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lease_that_changes_during_a_break_is_broken() {
    let (one, two, _db) = Quorum::fresh().await;
    for _ in 0..15 {
        let lease = grant(&one, &sku(), LONG).await;
        let renewing = async {
            loop {
                let renew = Renew::new(LONG).with_new_token();
                if let Err(error) = one.renew(&sku(), &lease.id, renew).await {
                    return error;
                }
            }
        };
        let breaking = async {
            sleep(Duration::from_millis(3)).await;
            while two.break_lease(&sku(), None).await.is_err() {}
        };
        let ended = async { tokio::join!(renewing, breaking) };
        let (error, ()) = timeout(LONG, ended)
            .await
            .expect("the renewal loop does not end");
        assert_matches!(error, LeaseError::Lost { .. } | LeaseError::Unavailable(_));
        two.break_lease(&sku(), None).await.unwrap();
    }
}

#[tokio::test]
async fn ttl_shorter_than_its_safety_margin_is_refused() {
    let (one, _, _db) = Quorum::fresh().await;
    let is_invalid = |outcome: Result<_, LeaseError>| matches!(outcome, Err(LeaseError::Invalid { field, .. }) if field == "ttl_ms");
    let lease = grant(&one, &sku(), LONG).await;
    for ttl in [0, 1, 2].map(Duration::from_millis) {
        assert!(is_invalid(one.acquire(&sku(), Acquire::new(ttl)).await));
        let renewed = one.renew(&sku(), &lease.id, Renew::new(ttl)).await;
        assert!(is_invalid(renewed));
    }
    renew_for(&one, &lease, LONG).await;
}
