//! The lease stores, one suite over both.

use std::{collections::HashMap, time::Duration};

use futures_util::future::join_all;
use sqlx::Sqlite;
use tokio::{sync::Mutex, time::sleep};
use tower_fence::{
    Resource, Token,
    lease::{Acquire, EmbeddedLeases, Lease, LeaseError, LeaseId, Leases, Owner, RedisLeases},
};

use crate::support::{
    database::{Fresh, TestDatabase},
    eventually,
    redis::{fresh_prefix, shared_url},
};

/// A store that the suites run over.
pub trait TestStore: Leases + Clone {
    /// A store of its own, seen from two issuers; and the database of its epochs.
    fn fresh() -> impl Future<Output = (Self, Self, Fresh<Sqlite>)> + Send;
}

impl TestStore for EmbeddedLeases {
    async fn fresh() -> (Self, Self, Fresh<Sqlite>) {
        let db = Sqlite::fresh(4).await;
        let leases = Self::new(db.fence());
        (leases.clone(), leases, db)
    }
}

impl TestStore for RedisLeases {
    async fn fresh() -> (Self, Self, Fresh<Sqlite>) {
        let db = Sqlite::fresh(4).await;
        let prefix = fresh_prefix();
        let connect = || async {
            let builder = Self::builder(db.fence()).key_prefix(&prefix);
            builder.connect(&shared_url()).await.unwrap()
        };
        let (one, two) = (connect().await, connect().await);
        (one, two, db)
    }
}

/// Runs each of these functions, generic over the store, as one test per store.
macro_rules! on_both_stores {
    ($($name:ident),* $(,)?) => {
        mod on_redis {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                super::$name::<tower_fence::lease::RedisLeases>().await;
            })*
        }
        mod embedded {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                super::$name::<tower_fence::lease::EmbeddedLeases>().await;
            })*
        }
    };
}

pub(crate) use on_both_stores;

on_both_stores!(
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

async fn a_grant_excludes_others_until_it_is_released<L: TestStore>() {
    let (one, two, _db) = L::fresh().await;
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

async fn a_lease_ends_by_itself_and_the_next_token_is_higher<L: TestStore>() {
    let (one, two, _db) = L::fresh().await;
    let first = grant(&one, &sku(), SHORT).await;
    is_held(two.acquire(&sku(), Acquire::new(SHORT)).await);
    let second = next_grant(&two, LONG).await;
    assert!(second.token > first.token);
    is_lost(one.renew(&sku(), &first.id, LONG).await);
}

async fn asking_again_with_the_same_id_returns_the_same_grant<L: TestStore>() {
    let (one, two, _db) = L::fresh().await;
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

async fn only_the_lease_id_renews_and_releases<L: TestStore>() {
    let (one, two, _db) = L::fresh().await;
    let stranger = LeaseId::random();
    is_lost(one.renew(&sku(), &stranger, LONG).await);
    is_lost(one.release(&sku(), &stranger).await);
    let lease = grant(&one, &sku(), LONG).await;
    is_lost(two.renew(&sku(), &stranger, LONG).await);
    is_lost(two.release(&sku(), &stranger).await);
    is_held(two.acquire(&sku(), Acquire::new(LONG)).await);
    one.release(&sku(), &lease.id).await.unwrap();
    is_lost(one.release(&sku(), &lease.id).await);
    is_lost(one.renew(&sku(), &lease.id, LONG).await);
}

async fn a_late_release_or_renewal_does_not_touch_the_successor<L: TestStore>() {
    let (one, two, _db) = L::fresh().await;
    let first = grant(&one, &sku(), SHORT).await;
    let second = next_grant(&two, LONG).await;
    is_lost(one.release(&sku(), &first.id).await);
    is_lost(one.renew(&sku(), &first.id, SHORT).await);
    let held = one.inspect(&sku()).await.unwrap().unwrap();
    assert_eq!(held.token, second.token);
    assert!(held.ttl > LONG / 2, "{held:?}");
    two.release(&sku(), &second.id).await.unwrap();
}

async fn renewal_starts_the_time_anew_and_keeps_the_token<L: TestStore>() {
    let (one, two, _db) = L::fresh().await;
    let lease = grant(&one, &sku(), SHORT).await;
    let renewed = two.renew(&sku(), &lease.id, LONG).await.unwrap();
    assert_eq!(
        (renewed.token, renewed.ttl, &renewed.id),
        (lease.token, LONG, &lease.id)
    );
    sleep(2 * SHORT).await;
    is_held(two.acquire(&sku(), Acquire::new(LONG)).await);
    // Shorter works as well.
    one.renew(&sku(), &lease.id, SHORT).await.unwrap();
    let next = next_grant(&two, LONG).await;
    assert!(next.token > lease.token);
}

async fn inspection_tells_the_holder_but_not_the_id<L: TestStore>() {
    let (one, two, _db) = L::fresh().await;
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

async fn of_many_at_once_exactly_one_is_granted<L: TestStore>() {
    let (one, two, _db) = L::fresh().await;
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

async fn tokens_go_up_in_the_order_of_the_grants<L: TestStore>() {
    let (one, two, _db) = L::fresh().await;
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

async fn resources_do_not_know_each_other<L: TestStore>() {
    let (one, two, _db) = L::fresh().await;
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
