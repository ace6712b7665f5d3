//! Grants, renewals and expiry: one suite for all lease stores.

use std::{collections::HashMap, time::Duration};

use futures_util::future::join_all;
use tokio::{
    sync::Mutex,
    time::{Instant, sleep},
};
use tower_fence::{
    Resource, Token,
    lease::{Acquire, LeaseAdmin, LeaseId, Leases, Renew},
};

use crate::support::{
    eventually,
    lease::{LONG, grant, grant_and_release, granted, is_held, sku, spawn_acquire, waiters},
    store::TestStore,
};

on_every_store!(
    tokens_increase_in_the_order_of_the_grants,
    resource_is_free_after_its_lock_delay,
    lock_delay_does_not_extend_the_lease,
    repeated_request_keeps_its_lease,
    queue_and_released_lease_are_on_no_page,
    invalid_cursors_are_refused,
);

async fn tokens_increase_in_the_order_of_the_grants<S: TestStore>() {
    let (one, two, _db) = S::fresh().await;
    let grants: Mutex<HashMap<Resource, Vec<Token>>> = Mutex::default();
    let worker = async |n: usize| {
        let leases = [&one, &two][n % 2];
        let resource = Resource::new(format!("sku-{}", n % 3)).unwrap();
        let mut done = 0;
        while done < 25 {
            let Ok(lease) = leases.acquire(&resource, Acquire::new(LONG)).await else {
                sleep(Duration::from_millis(1)).await;
                continue;
            };
            // The token is recorded under the lease, so the list has the order of the grants.
            grants
                .lock()
                .await
                .entry(resource.clone())
                .or_default()
                .push(lease.token);
            leases.release(&resource, &lease.id).await.unwrap();
            done += 1;
        }
    };
    join_all((0..12).map(worker)).await;
    let grants = grants.into_inner();
    assert_eq!(grants.values().map(Vec::len).sum::<usize>(), 12 * 25);
    for (resource, tokens) in grants {
        assert!(tokens.is_sorted_by(|a, b| a < b), "{resource}: {tokens:?}");
    }
}

async fn resource_is_free_after_its_lock_delay<S: TestStore>() {
    let (one, two, _db) = S::fresh().await;
    let delay = 5 * S::SHORT.max(Duration::from_secs(1));
    let asked_at = Instant::now();
    let delayed = Acquire::new(S::SHORT).lock_delay(delay);
    one.acquire(&sku(), delayed).await.unwrap();
    eventually!(
        "the lease ends",
        one.inspect(&sku()).await.unwrap().is_none()
    );
    let retry_after = is_held(two.acquire(&sku(), Acquire::new(LONG)).await);
    assert!(retry_after <= delay, "{retry_after:?}");
    two.acquire(&sku(), Acquire::new(LONG).wait(LONG))
        .await
        .unwrap();
    assert!(asked_at.elapsed() >= S::SHORT + delay - Duration::from_millis(5));
}

/// A client must not assume that it holds the lease during the lock delay.
async fn lock_delay_does_not_extend_the_lease<S: TestStore>() {
    const TTL: Duration = Duration::from_secs(10);
    let (one, two, _db) = S::fresh().await;
    let delayed = Acquire::new(TTL).lock_delay(LONG);
    let lease = one.acquire(&sku(), delayed).await.unwrap();
    assert!(lease.ttl <= TTL, "{lease:?}");
    let held = two.inspect(&sku()).await.unwrap().unwrap();
    assert!(held.ttl <= TTL, "{held:?}");
    for ttl in [TTL, 2 * TTL, TTL] {
        let renewed = one.renew(&sku(), &lease.id, Renew::new(ttl)).await.unwrap();
        assert!(renewed.ttl <= ttl, "{renewed:?}");
    }
}

/// A client gives up its wait and retries with the same lease id, at this issuer or at another one.
/// The first request ends after the second one was granted the lease.
async fn repeated_request_keeps_its_lease<S: TestStore>() {
    let (one, two, _db) = S::fresh().await;
    for other in [&one, &two] {
        let first = grant(&one, &sku(), LONG).await;
        let id = LeaseId::random();
        let ask = |leases: &S::Leases| {
            let request = Acquire::new(LONG).wait(LONG).lease_id(id.clone());
            spawn_acquire(leases, &sku(), request)
        };
        let given_up = ask(&one);
        if S::HAS_LINE {
            eventually!("the waiter is in the queue", waiters(&one).await >= 1);
        } else {
            sleep(S::SHORT).await;
        }
        let again = ask(other);
        sleep(S::SHORT).await;
        one.release(&sku(), &first.id).await.unwrap();
        let lease = granted(again).await;
        given_up.abort();
        let given_up = given_up.await;
        sleep(S::SHORT).await;
        let held = one.inspect(&sku()).await.unwrap();
        let held = held.expect("the lease is lost");
        assert_eq!(held.token, lease.token);
        // At the same issuer, the second request has displaced the first.
        if let Ok(Ok(given_up)) = given_up {
            assert_eq!(given_up.token, lease.token);
        }
        one.release(&sku(), &id).await.unwrap();
    }
}

/// The keys of a queue are not listed as leases, whatever the name of the resource.
async fn queue_and_released_lease_are_on_no_page<S: TestStore>() {
    let (one, two, _db) = S::fresh().await;
    let tricky = Resource::new("x}:lease:sku-1").unwrap();
    let token = grant(&one, &tricky, LONG).await.token;
    let waiters = u64::from(S::HAS_LINE);
    let mut expected = HashMap::from([(tricky.clone(), (token, waiters))]);
    for n in 0..3 {
        let resource = Resource::new(format!("sku-{n}}}:lease:*")).unwrap();
        let lease = grant(&one, &resource, LONG).await;
        expected.insert(resource, (lease.token, 0));
    }
    grant_and_release(&one).await;
    let waiting = spawn_acquire(&one, &tricky, Acquire::new(LONG).wait(LONG));
    eventually("the waiter is in the queue", async || {
        let held = one.inspect(&tricky).await.unwrap().unwrap();
        held.waiters == waiters
    })
    .await;
    for limit in [1, 1_000] {
        let (mut listed, mut cursor) = (HashMap::new(), None);
        loop {
            let page = two.list(limit, cursor.as_deref()).await.unwrap();
            assert!(page.leases.len() <= limit);
            let leases = page.leases.into_iter();
            listed.extend(leases.map(|(name, held)| (name, (held.token, held.waiters))));
            cursor = page.cursor;
            if cursor.is_none() {
                break;
            }
        }
        assert_eq!(listed, expected, "with {limit} on a page");
    }
    waiting.abort();
}

async fn invalid_cursors_are_refused<S: TestStore>() {
    let (one, _, _db) = S::fresh().await;
    grant(&one, &sku(), LONG).await;
    // The store does not panic at a cursor with a huge number.
    let _ = one.list(1, Some("18446744073709551615-0-")).await;
    for cursor in ["", "x", "1", "-", ":", "300:a", "99999999999999999999-0-"] {
        one.list(1, Some(cursor)).await.unwrap_err();
    }
}
