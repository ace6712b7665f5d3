//! Checks of grants, renewals, releases and expiry.

use std::time::{Duration, SystemTime};

use futures_util::future::join_all;
use tokio::time::sleep;

use super::{
    Subject,
    steps::{LONG, SOON, eventually, grant, is_free, is_held, is_lost, next_grant, resource, sku},
};
use crate::{
    lease::{Acquire, Lease, LeaseAdmin, LeaseError, LeaseId, Leases, Owner, Renew},
    token::Token,
};

pub(super) async fn grant_excludes_others_until_it_is_released<S: Subject>(subject: &S) {
    let (one, two) = subject.fresh().await;
    let first = grant(&one, LONG).await;
    assert_eq!(first.resource, sku());
    assert!(first.ttl <= LONG * 2 && first.ttl > LONG / 2, "{first:?}");
    for leases in [&one, &two] {
        let retry_after = is_held(leases.acquire(&sku(), Acquire::new(LONG)).await);
        let plausible = LONG / 2..=2 * LONG;
        assert!(plausible.contains(&retry_after), "{retry_after:?}");
        let held = leases.inspect(&sku()).await.expect("the store answers");
        let held = held.expect("the lease is held");
        assert_eq!(held.token, first.token);
        assert!(plausible.contains(&held.ttl), "{held:?}");
    }
    two.release(&sku(), &first.id).await.expect("a release");
    let second = grant(&one, LONG).await;
    assert!(second.token > first.token);
    assert_ne!(second.id, first.id);
}

pub(super) async fn expired_lease_is_followed_by_a_higher_token<S: Subject>(subject: &S) {
    let (one, two) = subject.fresh().await;
    // This lease is released, so its lock delay does not apply, not even after the next lease.
    let delayed = Acquire::new(LONG).lock_delay(LONG);
    let earlier = one.acquire(&sku(), delayed).await.expect("a grant");
    one.release(&sku(), &earlier.id).await.expect("a release");
    let first = grant(&one, S::SHORT).await;
    is_held(two.acquire(&sku(), Acquire::new(S::SHORT)).await);
    let second = next_grant(&two).await;
    assert!(second.token > first.token);
    is_lost(one.renew(&sku(), &first.id, Renew::new(LONG)).await);
}

pub(super) async fn request_is_idempotent_by_lease_id<S: Subject>(subject: &S) {
    let (one, two) = subject.fresh().await;
    let repeat = async |first: &Lease, ttl| {
        let again = Acquire::new(ttl).lease_id(first.id.clone());
        let again = two.acquire(&first.resource, again).await;
        let again = again.expect("a repetition");
        assert_eq!((again.token, &again.id), (first.token, &first.id));
    };
    let other = resource("sku-2");
    let longer = one.acquire(&other, Acquire::new(S::SHORT)).await;
    repeat(&longer.expect("a grant"), LONG).await;
    let delayed = Acquire::new(LONG).lock_delay(LONG);
    let shorter = one.acquire(&sku(), delayed).await.expect("a grant");
    repeat(&shorter, S::SHORT).await;
    sleep(2 * S::SHORT).await;
    is_held(one.acquire(&other, Acquire::new(LONG)).await);
    eventually("the lease ends", async || is_free(&one).await).await;
    let next = Acquire::new(LONG).wait(SOON).lease_id(shorter.id);
    let next = two.acquire(&sku(), next).await;
    let next = next.expect("the last request under this id had no lock delay");
    assert!(next.token > shorter.token);
}

pub(super) async fn only_the_lease_id_renews_and_releases<S: Subject>(subject: &S) {
    let (one, two) = subject.fresh().await;
    let stranger = LeaseId::random();
    is_lost(one.renew(&sku(), &stranger, Renew::new(LONG)).await);
    is_lost(one.release(&sku(), &stranger).await);
    let lease = grant(&one, LONG).await;
    is_lost(two.renew(&sku(), &stranger, Renew::new(LONG)).await);
    is_lost(two.release(&sku(), &stranger).await);
    is_held(two.acquire(&sku(), Acquire::new(LONG)).await);
    one.release(&sku(), &lease.id).await.expect("a release");
    is_lost(one.release(&sku(), &lease.id).await);
    is_lost(one.renew(&sku(), &lease.id, Renew::new(LONG)).await);
}

pub(super) async fn late_release_or_renewal_spares_the_successor<S: Subject>(subject: &S) {
    let (one, two) = subject.fresh().await;
    let first = grant(&one, S::SHORT).await;
    let second = next_grant(&two).await;
    is_lost(one.release(&sku(), &first.id).await);
    is_lost(one.renew(&sku(), &first.id, Renew::new(S::SHORT)).await);
    let held = one.inspect(&sku()).await.expect("the store answers");
    let held = held.expect("the successor has the lease");
    assert_eq!(held.token, second.token);
    assert!(held.ttl > LONG / 2, "{held:?}");
}

pub(super) async fn renewal_starts_the_time_anew_and_keeps_the_token<S: Subject>(subject: &S) {
    let (one, two) = subject.fresh().await;
    let lease = grant(&one, S::SHORT).await;
    let renewed = two.renew(&sku(), &lease.id, Renew::new(LONG)).await;
    let renewed = renewed.expect("a renewal");
    assert_eq!((renewed.token, &renewed.id), (lease.token, &lease.id));
    sleep(2 * S::SHORT).await;
    is_held(two.acquire(&sku(), Acquire::new(LONG)).await);
    let shorter = one.renew(&sku(), &lease.id, Renew::new(S::SHORT)).await;
    shorter.expect("a renewal");
    assert!(next_grant(&two).await.token > lease.token);
}

pub(super) async fn renewal_may_take_a_new_token<S: Subject>(subject: &S) {
    let (one, two) = subject.fresh().await;
    let lease = grant(&one, LONG).await;
    let request = Renew::new(LONG).with_new_token();
    let second = two
        .renew(&sku(), &lease.id, request)
        .await
        .expect("a renewal");
    assert!(second.token > lease.token);
    let kept = one.renew(&sku(), &lease.id, Renew::new(LONG)).await;
    assert_eq!(kept.expect("a renewal").token, second.token);
    let held = two.inspect(&sku()).await.expect("the store answers");
    assert_eq!(held.expect("the lease is held").token, second.token);
    let ended = two.break_lease(&sku(), Some(lease.token)).await;
    assert!(!ended.expect("a break"), "the lease has another token");
    one.release(&sku(), &lease.id).await.expect("a release");
    assert!(grant(&two, LONG).await.token > second.token);
    is_lost(one.renew(&sku(), &lease.id, request).await);
}

/// Also accepts a store that does not support a lowest token and refuses the request.
pub(super) async fn renewal_may_ask_for_a_lowest_token<S: Subject>(subject: &S) {
    let (one, two) = subject.fresh().await;
    let lease = grant(&one, LONG).await;
    let new_token = async || {
        let renew = Renew::new(LONG).with_new_token();
        let renewed = one.renew(&sku(), &lease.id, renew).await;
        renewed.expect("a renewal").token
    };
    let at_least = async |lowest| {
        let renew = Renew::new(LONG).at_least(lowest);
        match two.renew(&sku(), &lease.id, renew).await {
            Ok(renewed) => Some(renewed.token),
            Err(LeaseError::Invalid { .. }) => None,
            Err(other) => panic!("{other:?}"),
        }
    };
    let second = new_token().await;
    if let Some(kept) = at_least(lease.token).await {
        assert_eq!(kept, second, "the minimum is below the token");
    }
    let lowest = Token::new(second.get() + 1_000).expect("a token");
    if let Some(raised) = at_least(lowest).await {
        assert!(raised >= lowest, "{raised} must be at least {lowest}");
        let next = new_token().await;
        assert!(next > raised, "{next} must be above {raised}");
    }
}

pub(super) async fn names_that_differ_are_different_resources<S: Subject>(subject: &S) {
    let (one, two) = subject.fresh().await;
    let long = "x".repeat(254);
    let names = [
        "sku",
        "SKU",
        "sku ",
        "sku%20",
        "skü",
        "sku\u{308}",
        "a:b",
        "{a}",
        "}a{",
        "a*",
        &format!("{long}1"),
        &format!("{long}2"),
    ];
    for (n, name) in names.into_iter().enumerate() {
        let (leases, other) = [(&one, &two), (&two, &one)][n % 2];
        let granted = leases.acquire(&resource(name), Acquire::new(LONG)).await;
        let lease =
            granted.unwrap_or_else(|error| panic!("`{name}` is free, but the result is {error:?}"));
        let held = other.inspect(&resource(name)).await;
        let held = held.expect("the store answers");
        assert_eq!(held.expect("the lease is held").token, lease.token);
    }
}

pub(super) async fn owner_that_was_named_first_stays<S: Subject>(subject: &S) {
    let (one, two) = subject.fresh().await;
    let owner = |name: &str| Some(Owner::new(name).expect("an owner"));
    let (first, second) = (owner("a:b:c é \"'{}"), owner("worker-8"));
    // The first request of a lease names an owner, or names none. In the second case, the lease
    // does not get the owner of the previous lease.
    for owners in [
        &[first.clone(), second.clone(), None][..],
        &[None, first, second, None],
    ] {
        let mut request = Acquire::new(LONG).lease_id(LeaseId::random());
        let mut expected = None;
        for (n, named) in owners.iter().enumerate() {
            request.owner.clone_from(named);
            let granted = [&one, &two][n % 2].acquire(&sku(), request.clone()).await;
            granted.expect("a grant or its repetition");
            expected = expected.or_else(|| named.clone());
            let held = one.inspect(&sku()).await.expect("the store answers");
            let held = held.expect("the lease is held");
            assert_eq!(held.owner, expected);
            assert!(!format!("{held:?}").contains(request.lease_id.expose()));
        }
        for renew in [Renew::new(LONG), Renew::new(LONG).with_new_token()] {
            let renewed = one.renew(&sku(), &request.lease_id, renew).await;
            renewed.expect("a renewal");
            let held = two.inspect(&sku()).await.expect("the store answers");
            assert_eq!(held.expect("the lease is held").owner, expected);
        }
        two.release(&sku(), &request.lease_id)
            .await
            .expect("a release");
    }
}

pub(super) async fn time_of_the_grant_stays<S: Subject>(subject: &S) {
    let (one, two) = subject.fresh().await;
    let held = async || {
        let held = one.inspect(&sku()).await.expect("the store answers");
        held.expect("the lease is held").granted_at
    };
    let before = SystemTime::now();
    let first = grant(&one, LONG).await;
    // A store need not record this time.
    let Some(granted_at) = held().await else {
        return;
    };
    // The clock of the store may differ from this one.
    let (earliest, latest) = (before - LONG, SystemTime::now() + LONG);
    assert!((earliest..latest).contains(&granted_at), "{granted_at:?}");
    sleep(Duration::from_millis(1_100)).await;
    let renew = Renew::new(LONG).with_new_token();
    two.renew(&sku(), &first.id, renew)
        .await
        .expect("a renewal");
    assert_eq!(held().await, Some(granted_at));
    let again = Acquire::new(LONG).lease_id(first.id.clone());
    two.acquire(&sku(), again).await.expect("a repetition");
    assert_eq!(held().await, Some(granted_at));
    one.release(&sku(), &first.id).await.expect("a release");
    grant(&two, LONG).await;
    assert!(held().await > Some(granted_at));
}

pub(super) async fn one_of_many_requests_is_granted<S: Subject>(subject: &S) {
    let (one, two) = subject.fresh().await;
    let asking = (0..32).map(|n| {
        let leases = [&one, &two][n % 2];
        async move { leases.acquire(&sku(), Acquire::new(LONG)).await }
    });
    let outcomes = join_all(asking).await;
    let (granted, refused): (Vec<_>, Vec<_>) = outcomes.into_iter().partition(Result::is_ok);
    assert_eq!(granted.len(), 1, "{granted:?}");
    for refusal in refused {
        is_held(refusal);
    }
}

pub(super) async fn lock_delay_follows_expiry_and_not_release<S: Subject>(subject: &S) {
    let (one, two) = subject.fresh().await;
    let lease = grant(&one, LONG).await;
    // The last request under a lease id sets the lock delay.
    let delayed = Acquire::new(S::SHORT).lock_delay(LONG);
    let delayed = delayed.lease_id(lease.id.clone());
    two.acquire(&sku(), delayed).await.expect("a repetition");
    eventually("the lease ends", async || is_free(&one).await).await;
    is_lost(one.renew(&sku(), &lease.id, Renew::new(LONG)).await);
    is_lost(one.release(&sku(), &lease.id).await);
    let page = two.list(9, None).await.expect("a page");
    assert!(page.leases.is_empty(), "{page:?}");
    let other = Token::new(lease.token.get() + 1).expect("a token");
    let ended = one.break_lease(&sku(), Some(other)).await;
    assert!(!ended.expect("a break"), "the lease has another token");
    let retry_after = is_held(two.acquire(&sku(), Acquire::new(LONG)).await);
    assert!(retry_after > LONG / 2, "{retry_after:?}");
    let ended = one.break_lease(&sku(), Some(lease.token)).await;
    assert!(ended.expect("a break"), "the lease is in its lock delay");
    let delayed = Acquire::new(LONG).lock_delay(LONG);
    let next = one.acquire(&sku(), delayed).await.expect("a grant");
    assert!(next.token > lease.token);
    let retry_after = is_held(two.acquire(&sku(), Acquire::new(LONG)).await);
    assert!(
        retry_after > LONG + LONG / 2,
        "the lock delay is missing: {retry_after:?}"
    );
    one.release(&sku(), &next.id).await.expect("a release");
    grant(&two, LONG).await;
}

pub(super) async fn lock_delay_outlasts_renewal_and_blocks_its_own_lease_id<S: Subject>(
    subject: &S,
) {
    let (one, two) = subject.fresh().await;
    let delayed = Acquire::new(LONG).lock_delay(LONG);
    let lease = one.acquire(&sku(), delayed).await.expect("a grant");
    for shorter in [Renew::new(S::SHORT).with_new_token(), Renew::new(S::SHORT)] {
        let shorter = two.renew(&sku(), &lease.id, shorter).await;
        shorter.expect("a renewal");
    }
    eventually("the lease ends", async || is_free(&one).await).await;
    is_held(two.acquire(&sku(), Acquire::new(LONG)).await);
    // The lease has expired, so a request under its id does not get it back.
    let again = Acquire::new(LONG).lease_id(lease.id);
    is_held(one.acquire(&sku(), again).await);
    assert!(one.break_lease(&sku(), None).await.expect("a break"));
    grant(&two, LONG).await;
}

pub(super) async fn break_ends_the_lease_that_was_seen<S: Subject>(subject: &S) {
    let (one, two) = subject.fresh().await;
    let ended = two.break_lease(&sku(), None).await;
    assert!(!ended.expect("a break"), "the resource is free");
    let first = grant(&one, LONG).await;
    assert!(
        two.break_lease(&sku(), Some(first.token))
            .await
            .expect("a break")
    );
    let second = grant(&one, LONG).await;
    assert!(second.token > first.token);
    let ended = two.break_lease(&sku(), Some(first.token)).await;
    assert!(
        !ended.expect("a break"),
        "the current lease has another token"
    );
    assert!(!is_free(&one).await);
    assert!(two.break_lease(&sku(), None).await.expect("a break"));
    let ended = two.break_lease(&sku(), None).await;
    assert!(!ended.expect("a break"), "the lease has already ended");
    is_lost(one.release(&sku(), &second.id).await);
    let third = grant(&two, LONG).await;
    two.release(&sku(), &third.id).await.expect("a release");
    let ended = one.break_lease(&sku(), None).await;
    assert!(!ended.expect("a break"), "the lease was released");
}

pub(super) async fn tokens_increase_after_data_loss<S: Subject>(subject: &S) {
    let (one, two) = subject.fresh().await;
    let mut last = grant(&one, S::SHORT).await.token;
    for leases in [&one, &two] {
        if !subject.lose_data(leases).await {
            return;
        }
        let next = next_grant(leases).await;
        assert!(next.token > last, "{} must be above {last}", next.token);
        last = next.token;
        // The lease may be lost by now.
        let _ = leases.release(&sku(), &next.id).await;
    }
}
