//! The lease stores, one suite over all of them.

use std::{collections::HashMap, sync::Arc, time::Duration};

use futures_util::future::join_all;
use tokio::{
    sync::Mutex,
    task::JoinHandle,
    time::{Instant, sleep, timeout},
};
use tower_fence::{
    Resource, Token,
    lease::{Acquire, Lease, LeaseError, LeaseId, Leases, Operate, Owner, Renew},
};

use crate::support::{
    eventually,
    store::{TestStore, on_every_store},
};

on_every_store!(
    a_grant_excludes_others_until_it_is_released,
    a_lease_ends_by_itself_and_the_next_token_is_higher,
    asking_again_with_the_same_id_returns_the_same_grant,
    only_the_lease_id_renews_and_releases,
    a_late_release_or_renewal_does_not_touch_the_successor,
    renewal_starts_the_time_anew_and_keeps_the_token,
    inspection_tells_the_holder_but_not_the_id,
    of_many_at_once_exactly_one_is_granted,
    tokens_go_up_in_the_order_of_the_grants,
    resources_do_not_know_each_other,
    a_waiter_is_granted_when_the_lease_is_released,
    a_waiter_is_granted_when_the_lease_ends_by_itself,
    a_wait_that_runs_out_leaves_the_line,
    waiters_are_served_in_the_order_in_which_they_came,
    a_newcomer_does_not_overtake,
    a_waiter_that_goes_away_is_skipped,
    a_waiter_that_goes_away_gives_back_what_it_was_granted,
    a_thousand_waiters_are_served_in_order_though_half_of_them_go_away,
    a_lock_delay_keeps_the_resource_closed_after_an_end_by_time_only,
    a_renewal_may_take_a_new_token,
    a_broken_lease_goes_to_the_next_in_line,
    a_repeated_request_keeps_its_place_and_its_lease,
    a_shorter_lease_is_known_to_whoever_is_first_now,
    every_held_lease_is_on_a_page,
);

const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(100);

pub fn sku() -> Resource {
    Resource::new("sku-1").unwrap()
}

pub async fn grant<L: Leases>(leases: &L, resource: &Resource, ttl: Duration) -> Lease {
    leases.acquire(resource, Acquire::new(ttl)).await.unwrap()
}

#[track_caller]
fn is_held<T: std::fmt::Debug>(outcome: Result<T, LeaseError>) -> Duration {
    match outcome {
        Err(LeaseError::Held {
            resource,
            retry_after,
        }) if resource == sku() => retry_after,
        other => panic!("{other:?}"),
    }
}

#[track_caller]
pub fn is_lost<T: std::fmt::Debug>(outcome: Result<T, LeaseError>) {
    match outcome {
        Err(LeaseError::Lost { resource }) if resource == sku() => {}
        other => panic!("{other:?}"),
    }
}

/// Acquires as soon as the lease is free.
async fn next_grant<L: Leases>(leases: &L, ttl: Duration) -> Lease {
    let lease = Mutex::new(None);
    eventually("the lease is free", async || {
        let granted = leases.acquire(&sku(), Acquire::new(ttl)).await;
        *lease.lock().await = granted.ok();
        lease.lock().await.is_some()
    })
    .await;
    lease.into_inner().unwrap()
}

async fn a_grant_excludes_others_until_it_is_released<S: TestStore>() {
    let (one, two, _db) = S::fresh().await;
    let first = grant(&one, &sku(), LONG).await;
    assert_eq!((&first.resource, first.ttl), (&sku(), LONG));
    for leases in [&one, &two] {
        let retry_after = is_held(leases.acquire(&sku(), Acquire::new(LONG)).await);
        assert!(
            retry_after <= LONG && retry_after > LONG / 2,
            "{retry_after:?}"
        );
    }
    two.release(&sku(), &first.id).await.unwrap();
    let second = grant(&one, &sku(), LONG).await;
    assert!(second.token > first.token);
    assert_ne!(second.id, first.id);
}

async fn a_lease_ends_by_itself_and_the_next_token_is_higher<S: TestStore>() {
    let (one, two, _db) = S::fresh().await;
    let first = grant(&one, &sku(), SHORT).await;
    is_held(two.acquire(&sku(), Acquire::new(SHORT)).await);
    let second = next_grant(&two, LONG).await;
    assert!(second.token > first.token);
    is_lost(one.renew(&sku(), &first.id, Renew::new(LONG)).await);
}

async fn asking_again_with_the_same_id_returns_the_same_grant<S: TestStore>() {
    let (one, two, _db) = S::fresh().await;
    let first = grant(&one, &sku(), SHORT).await;
    let again = Acquire::new(LONG).lease_id(first.id.clone());
    let again = two.acquire(&sku(), again).await.unwrap();
    assert_eq!(
        (again.token, again.id, again.ttl),
        (first.token, first.id, LONG)
    );
    sleep(2 * SHORT).await;
    is_held(one.acquire(&sku(), Acquire::new(LONG)).await);
}

async fn only_the_lease_id_renews_and_releases<S: TestStore>() {
    let (one, two, _db) = S::fresh().await;
    let stranger = LeaseId::random();
    is_lost(one.renew(&sku(), &stranger, Renew::new(LONG)).await);
    is_lost(one.release(&sku(), &stranger).await);
    let lease = grant(&one, &sku(), LONG).await;
    is_lost(two.renew(&sku(), &stranger, Renew::new(LONG)).await);
    is_lost(two.release(&sku(), &stranger).await);
    is_held(two.acquire(&sku(), Acquire::new(LONG)).await);
    one.release(&sku(), &lease.id).await.unwrap();
    is_lost(one.release(&sku(), &lease.id).await);
    is_lost(one.renew(&sku(), &lease.id, Renew::new(LONG)).await);
}

async fn a_late_release_or_renewal_does_not_touch_the_successor<S: TestStore>() {
    let (one, two, _db) = S::fresh().await;
    let first = grant(&one, &sku(), SHORT).await;
    let second = next_grant(&two, LONG).await;
    is_lost(one.release(&sku(), &first.id).await);
    is_lost(one.renew(&sku(), &first.id, Renew::new(SHORT)).await);
    let held = one.inspect(&sku()).await.unwrap().unwrap();
    assert_eq!(held.token, second.token);
    assert!(held.ttl > LONG / 2, "{held:?}");
    two.release(&sku(), &second.id).await.unwrap();
}

async fn renewal_starts_the_time_anew_and_keeps_the_token<S: TestStore>() {
    let (one, two, _db) = S::fresh().await;
    let lease = grant(&one, &sku(), SHORT).await;
    let renewed = two
        .renew(&sku(), &lease.id, Renew::new(LONG))
        .await
        .unwrap();
    assert_eq!(
        (renewed.token, renewed.ttl, &renewed.id),
        (lease.token, LONG, &lease.id)
    );
    sleep(2 * SHORT).await;
    is_held(two.acquire(&sku(), Acquire::new(LONG)).await);
    // Shorter works as well.
    one.renew(&sku(), &lease.id, Renew::new(SHORT))
        .await
        .unwrap();
    let next = next_grant(&two, LONG).await;
    assert!(next.token > lease.token);
}

async fn inspection_tells_the_holder_but_not_the_id<S: TestStore>() {
    let (one, two, _db) = S::fresh().await;
    assert_eq!(one.inspect(&sku()).await.unwrap(), None);
    for owner in [None, Some("worker-7"), Some("a:b:c é \"'{}")] {
        let owner = owner.map(|owner| Owner::new(owner).unwrap());
        let mut request = Acquire::new(LONG);
        request.owner.clone_from(&owner);
        let lease = one.acquire(&sku(), request).await.unwrap();
        let held = two.inspect(&sku()).await.unwrap().unwrap();
        assert_eq!((held.token, &held.owner), (lease.token, &owner));
        assert!(held.ttl <= LONG && held.ttl > LONG / 2);
        assert!(!format!("{held:?}").contains(lease.id.expose()));
        one.release(&sku(), &lease.id).await.unwrap();
    }
    grant(&one, &sku(), SHORT).await;
    eventually("the lease ends", async || {
        one.inspect(&sku()).await.unwrap().is_none()
    })
    .await;
}

async fn of_many_at_once_exactly_one_is_granted<S: TestStore>() {
    let (one, two, _db) = S::fresh().await;
    let asking = (0..64).map(|n| {
        let leases = [&one, &two][n % 2];
        async move { leases.acquire(&sku(), Acquire::new(LONG)).await }
    });
    let (granted, refused): (Vec<_>, Vec<_>) =
        join_all(asking).await.into_iter().partition(Result::is_ok);
    assert_eq!((granted.len(), refused.len()), (1, 63));
    for refusal in refused {
        is_held(refusal);
    }
}

async fn tokens_go_up_in_the_order_of_the_grants<S: TestStore>() {
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
            // Under the lease, so in the order of the grants.
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

async fn resources_do_not_know_each_other<S: TestStore>() {
    let (one, two, _db) = S::fresh().await;
    for name in [
        "a",
        "b",
        "A",
        "a:b",
        "{a}",
        "}a{",
        "é",
        "a b",
        "a*",
        &"x".repeat(255),
    ] {
        let resource = Resource::new(name).unwrap();
        let lease = grant(&one, &resource, LONG).await;
        assert_eq!(
            two.inspect(&resource).await.unwrap().unwrap().token,
            lease.token
        );
    }
}

/// How many wait in line.
async fn waiters<L: Leases>(leases: &L) -> u64 {
    leases
        .inspect(&sku())
        .await
        .unwrap()
        .map_or(0, |held| held.waiters)
}

/// Joins the line in a task of its own, and returns when it is in line.
async fn wait<L: Leases + Clone>(
    leases: &L,
    ttl: Duration,
) -> JoinHandle<Result<Lease, LeaseError>> {
    let before = waiters(leases).await;
    let waiting = tokio::spawn({
        let leases = leases.clone();
        async move { leases.acquire(&sku(), Acquire::new(ttl).wait(LONG)).await }
    });
    eventually("it is in line", async || waiters(leases).await > before).await;
    waiting
}

async fn granted(waiting: JoinHandle<Result<Lease, LeaseError>>) -> Lease {
    let granted = timeout(Duration::from_secs(5), waiting);
    granted
        .await
        .expect("it was never granted")
        .unwrap()
        .unwrap()
}

async fn a_waiter_is_granted_when_the_lease_is_released<S: TestStore>() {
    let (one, two, _db) = S::fresh().await;
    let mut last = grant(&one, &sku(), LONG).await;
    for leases in [&two, &one, &two] {
        let waiting = wait(leases, LONG).await;
        one.release(&sku(), &last.id).await.unwrap();
        let lease = granted(waiting).await;
        assert!(lease.token > last.token);
        let held = one.inspect(&sku()).await.unwrap().unwrap();
        assert_eq!((held.token, held.waiters), (lease.token, 0));
        assert!(held.ttl > LONG / 2, "the whole time: {held:?}");
        last = lease;
    }
}

async fn a_waiter_is_granted_when_the_lease_ends_by_itself<S: TestStore>() {
    let (one, two, _db) = S::fresh().await;
    let ttl = Duration::from_millis(400);
    let first = grant(&one, &sku(), ttl).await;
    let granted_at = Instant::now();
    let waiting = wait(&two, LONG).await;
    let second = granted(waiting).await;
    assert!(
        granted_at.elapsed() >= ttl - Duration::from_millis(5),
        "before the end"
    );
    assert!(second.token > first.token);
    // A renewal to a shorter time moves the end for those who wait.
    let waiting = wait(&one, LONG).await;
    two.renew(&sku(), &second.id, Renew::new(SHORT))
        .await
        .unwrap();
    let third = granted(waiting).await;
    // So does a holder with a shorter time that comes in between.
    let (short, last) = (wait(&two, SHORT).await, wait(&one, LONG).await);
    one.release(&sku(), &third.id).await.unwrap();
    granted(short).await;
    granted(last).await;
}

async fn a_wait_that_runs_out_leaves_the_line<S: TestStore>() {
    let (one, two, _db) = S::fresh().await;
    let lease = grant(&one, &sku(), LONG).await;
    let request = Acquire::new(LONG).wait(SHORT);
    let asked_at = Instant::now();
    let retry_after = is_held(two.acquire(&sku(), request).await);
    assert!(asked_at.elapsed() >= SHORT && retry_after > LONG / 2);
    assert_eq!(waiters(&one).await, 0);
    one.release(&sku(), &lease.id).await.unwrap();
    assert_eq!(one.inspect(&sku()).await.unwrap(), None);
}

async fn waiters_are_served_in_the_order_in_which_they_came<S: TestStore>() {
    let (one, two, _db) = S::fresh().await;
    let mut last = grant(&one, &sku(), LONG).await;
    let mut line = vec![];
    for n in 0..10 {
        line.push(wait([&one, &two][n % 2], LONG).await);
    }
    for waiting in line {
        one.release(&sku(), &last.id).await.unwrap();
        let lease = granted(waiting).await;
        assert!(lease.token > last.token);
        last = lease;
    }
}

async fn a_newcomer_does_not_overtake<S: TestStore>() {
    let (one, two, _db) = S::fresh().await;
    let first = grant(&one, &sku(), LONG).await;
    let waiting = wait(&two, LONG).await;
    // With each release the turn is taken already; whoever comes next finds it held.
    one.release(&sku(), &first.id).await.unwrap();
    is_held(one.acquire(&sku(), Acquire::new(LONG)).await);
    let second = granted(waiting).await;
    is_held(one.acquire(&sku(), Acquire::new(LONG)).await);
    two.release(&sku(), &second.id).await.unwrap();
    grant(&one, &sku(), LONG).await;
}

async fn a_waiter_that_goes_away_is_skipped<S: TestStore>() {
    let (one, two, _db) = S::fresh().await;
    let first = grant(&one, &sku(), LONG).await;
    let gone = wait(&two, LONG).await;
    let stays = wait(&one, LONG).await;
    gone.abort();
    eventually("it has left the line", async || waiters(&one).await == 1).await;
    one.release(&sku(), &first.id).await.unwrap();
    granted(stays).await;
}

async fn a_waiter_that_goes_away_gives_back_what_it_was_granted<S: TestStore>() {
    let (one, two, _db) = S::fresh().await;
    for _ in 0..20 {
        let first = grant(&one, &sku(), LONG).await;
        let gone = wait(&two, LONG).await;
        let stays = wait(&one, LONG).await;
        one.release(&sku(), &first.id).await.unwrap();
        // It may have been granted already, and may know it or not.
        gone.abort();
        if let Ok(Ok(lease)) = gone.await {
            two.release(&sku(), &lease.id).await.unwrap();
        }
        let stays = granted(stays).await;
        one.release(&sku(), &stays.id).await.unwrap();
    }
}

async fn a_thousand_waiters_are_served_in_order_though_half_of_them_go_away<S: TestStore>() {
    let (one, two, _db) = S::fresh().await;
    let first = grant(&one, &sku(), LONG).await;
    let served = Arc::new(Mutex::new(vec![]));
    let mut line = vec![];
    for n in 0..1_000 {
        let (leases, served) = ([&one, &two][n % 2].clone(), served.clone());
        line.push(tokio::spawn(async move {
            let lease = leases
                .acquire(&sku(), Acquire::new(LONG).wait(LONG))
                .await
                .unwrap();
            served.lock().await.push((n, lease.token));
            leases.release(&sku(), &lease.id).await.unwrap();
        }));
        // One after the other, so that their order is known.
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
            .expect("it was never granted")
            .unwrap();
    }
    let served = served.lock().await;
    let order: Vec<_> = served.iter().map(|(n, _)| *n).collect();
    let order: Vec<_> = order.into_iter().filter(|n| n % 4 <= 1).collect();
    assert_eq!(order, staying);
    assert!(served.is_sorted_by_key(|(_, token)| *token));
    eventually("nobody holds it", async || {
        one.inspect(&sku()).await.unwrap().is_none()
    })
    .await;
}

async fn a_lock_delay_keeps_the_resource_closed_after_an_end_by_time_only<S: TestStore>() {
    let (one, two, _db) = S::fresh().await;
    let delayed = || Acquire::new(SHORT).lock_delay(5 * SHORT);
    let lease = one.acquire(&sku(), delayed()).await.unwrap();
    one.release(&sku(), &lease.id).await.unwrap();
    let lease = one.acquire(&sku(), delayed()).await.unwrap();
    let granted_at = Instant::now();
    eventually("the lease ends", async || {
        one.inspect(&sku()).await.unwrap().is_none()
    })
    .await;
    // Nobody holds it, and nobody can have it, not even its last holder.
    is_lost(one.renew(&sku(), &lease.id, Renew::new(LONG)).await);
    is_lost(one.release(&sku(), &lease.id).await);
    let retry_after = is_held(two.acquire(&sku(), Acquire::new(LONG)).await);
    assert!(retry_after <= 5 * SHORT, "{retry_after:?}");
    two.acquire(&sku(), Acquire::new(LONG).wait(LONG))
        .await
        .unwrap();
    assert!(granted_at.elapsed() >= 6 * SHORT - Duration::from_millis(5));
}

async fn a_renewal_may_take_a_new_token<S: TestStore>() {
    let (one, two, _db) = S::fresh().await;
    let lease = grant(&one, &sku(), LONG).await;
    let renewed = two
        .renew(&sku(), &lease.id, Renew::new(LONG).with_new_token())
        .await
        .unwrap();
    assert!(renewed.token > lease.token);
    let kept = one
        .renew(&sku(), &lease.id, Renew::new(LONG))
        .await
        .unwrap();
    assert_eq!(kept.token, renewed.token);
    assert_eq!(
        one.inspect(&sku()).await.unwrap().unwrap().token,
        renewed.token
    );
    one.release(&sku(), &lease.id).await.unwrap();
    assert!(grant(&one, &sku(), LONG).await.token > renewed.token);
    is_lost(
        one.renew(&sku(), &lease.id, Renew::new(LONG).with_new_token())
            .await,
    );
}

async fn a_broken_lease_goes_to_the_next_in_line<S: TestStore>() {
    let (one, two, _db) = S::fresh().await;
    assert!(!one.break_lease(&sku()).await.unwrap());
    let first = grant(&one, &sku(), LONG).await;
    let waiting = wait(&two, LONG).await;
    assert!(two.break_lease(&sku()).await.unwrap());
    let second = granted(waiting).await;
    assert!(second.token > first.token);
    is_lost(one.renew(&sku(), &first.id, Renew::new(LONG)).await);
    // Force ends a lock delay as well.
    assert!(one.break_lease(&sku()).await.unwrap());
    let delayed = Acquire::new(SHORT).lock_delay(LONG);
    let third = one.acquire(&sku(), delayed).await.unwrap();
    eventually("the lease ends", async || {
        one.inspect(&sku()).await.unwrap().is_none()
    })
    .await;
    assert!(one.break_lease(&sku()).await.unwrap());
    assert!(grant(&two, &sku(), LONG).await.token > third.token);
}

async fn every_held_lease_is_on_a_page<S: TestStore>() {
    let (one, two, _db) = S::fresh().await;
    let all = async |limit: usize| {
        let (mut listed, mut cursor) = (HashMap::new(), None);
        loop {
            let page = two.list(limit, cursor.as_deref()).await.unwrap();
            assert!(page.leases.len() <= limit);
            let tokens = page.leases.into_iter();
            listed.extend(tokens.map(|(resource, held)| (resource, held.token)));
            cursor = page.cursor;
            if cursor.is_none() {
                return listed;
            }
        }
    };
    assert_eq!(all(10).await, HashMap::new());
    let mut expected = HashMap::new();
    for n in 0..60 {
        let resource = Resource::new(format!("sku-{n}}}:lease:*")).unwrap();
        let lease = grant(&one, &resource, LONG).await;
        if n % 3 == 0 {
            one.release(&resource, &lease.id).await.unwrap();
        } else {
            expected.insert(resource, lease.token);
        }
    }
    // The keys of a line are no leases, whatever the name.
    let tricky = Resource::new("x}:lease:sku-1").unwrap();
    expected.insert(tricky.clone(), grant(&one, &tricky, LONG).await.token);
    let waiting = tokio::spawn({
        let (one, tricky) = (one.clone(), tricky.clone());
        async move { one.acquire(&tricky, Acquire::new(LONG).wait(LONG)).await }
    });
    eventually("it is in line", async || {
        one.inspect(&tricky).await.unwrap().unwrap().waiters == 1
    })
    .await;
    for limit in [1, 7, 1_000] {
        assert_eq!(all(limit).await, expected, "with {limit} on a page");
    }
    waiting.abort();
    // No number panics, however great.
    let _ = one.list(1, Some("18446744073709551615-0-")).await;
    for cursor in ["", "x", "1", "-", ":", "300:a", "99999999999999999999-0-"] {
        one.list(1, Some(cursor)).await.unwrap_err();
    }
}

/// A client that gave up waiting and asks again with the same id, here or elsewhere: the end of its
/// first request takes nothing from the second.
async fn a_repeated_request_keeps_its_place_and_its_lease<S: TestStore>() {
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
        eventually("it is in line", async || waiters(&one).await >= 1).await;
        let again = ask(other);
        sleep(SHORT).await;
        given_up.abort();
        sleep(SHORT).await;
        assert_eq!(
            waiters(&one).await,
            1,
            "the second request has lost its place"
        );
        one.release(&sku(), &first.id).await.unwrap();
        let lease = granted(again).await;

        one.release(&sku(), &lease.id).await.unwrap();

        // The same where the first request ends after the second one was granted.
        let first = grant(&one, &sku(), LONG).await;
        let given_up = ask(&one);
        eventually("it is in line", async || waiters(&one).await >= 1).await;
        let again = ask(other);
        sleep(SHORT).await;
        one.release(&sku(), &first.id).await.unwrap();
        let lease = granted(again).await;
        given_up.abort();
        sleep(SHORT).await;
        let held = one
            .inspect(&sku())
            .await
            .unwrap()
            .expect("the lease is lost");
        assert_eq!(held.token, lease.token);
        one.release(&sku(), &id).await.unwrap();
    }
}

async fn a_shorter_lease_is_known_to_whoever_is_first_now<S: TestStore>() {
    let (one, two, _db) = S::fresh().await;
    let first = grant(&one, &sku(), LONG).await;
    let leaves = wait(&two, LONG).await;
    let stays = wait(&one, LONG).await;
    one.renew(&sku(), &first.id, Renew::new(10 * SHORT))
        .await
        .unwrap();
    leaves.abort();
    granted(stays).await;
}
