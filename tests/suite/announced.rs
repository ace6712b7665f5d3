//! Grants that are announced to the fence before their holders hear of them.

use std::time::Duration;

use sqlx::{Postgres, Sqlite};
use tokio::time::{sleep, timeout};
use tower_fence::{
    AdmitError, Resource, Token, TokenUse,
    lease::{Acquire, EmbeddedLeases, LeaseError, LeaseId, Leases, Operate, RedisLeases},
};

use crate::{
    leases::{grant, sku},
    support::{
        database::TestDatabase,
        eventually,
        redis::{fresh_prefix, shared_url},
    },
};

const LONG: Duration = Duration::from_secs(60);

#[tokio::test]
async fn a_grant_outranks_older_tokens_before_it_is_answered() {
    let db = Sqlite::fresh(2).await;
    let (fence, store) = (db.fence(), EmbeddedLeases::new(db.fence()));
    let first = grant(&store, &sku(), LONG).await;
    store.release(&sku(), &first.id).await.unwrap();
    // Without a word, the older token still writes.
    let second = grant(&store, &sku(), LONG).await;
    let tx = fence.begin(&sku(), first.token, TokenUse::Reusable).await;
    drop(tx.unwrap());
    store.release(&sku(), &second.id).await.unwrap();

    let leases = store.announced_to(fence.clone());
    let third = grant(&leases, &sku(), LONG).await;
    let refused = fence.begin(&sku(), second.token, TokenUse::SingleUse).await;
    assert!(matches!(refused, Err(AdmitError::Stale(_))));
    let tx = fence.begin(&sku(), third.token, TokenUse::SingleUse).await;
    tx.unwrap().commit().await.unwrap();
    leases.release(&sku(), &third.id).await.unwrap();
    assert!(leases.inspect(&sku()).await.unwrap().is_none());
}

#[tokio::test]
async fn asking_again_is_answered_even_after_the_token_was_used() {
    let db = Sqlite::fresh(2).await;
    let fence = db.fence();
    let leases = EmbeddedLeases::new(db.fence()).announced_to(fence.clone());
    let id = LeaseId::random();
    let sku = sku();
    let ask = || leases.acquire(&sku, Acquire::new(LONG).lease_id(id.clone()));
    let (first, again) = (ask().await.unwrap(), ask().await.unwrap());
    assert_eq!(first.token, again.token);
    let tx = fence.begin(&sku, first.token, TokenUse::SingleUse).await;
    tx.unwrap().commit().await.unwrap();
    assert_eq!(ask().await.unwrap().token, first.token);
}

#[tokio::test]
async fn a_grant_that_cannot_be_announced_is_given_back() {
    let db = Sqlite::fresh(2).await;
    let store = EmbeddedLeases::new(db.fence());
    let away = Sqlite::fresh(1).await;
    let leases = store.clone().announced_to(away.fence());
    away.fence().pool().close().await;
    let refused = leases.acquire(&sku(), Acquire::new(LONG)).await;
    assert!(
        matches!(refused, Err(LeaseError::Unavailable(_))),
        "{refused:?}"
    );
    assert!(store.inspect(&sku()).await.unwrap().is_none());

    // A fence that has seen a newer token: this store is not the one that counts.
    let fence = db.fence();
    let high = Token::new(900_000_000_000_000).unwrap();
    fence.raise(&sku(), high).await.unwrap();
    let leases = store.clone().announced_to(fence);
    let refused = leases.acquire(&sku(), Acquire::new(LONG)).await;
    let Err(LeaseError::Unavailable(cause)) = refused else {
        panic!("{refused:?}");
    };
    assert!(cause.to_string().contains("899999999999999"), "{cause}");
    assert!(store.inspect(&sku()).await.unwrap().is_none());
    assert!(leases.list(10, None).await.unwrap().leases.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_grant_waits_for_a_write_in_flight() {
    let db = Postgres::fresh(4).await;
    let fence = db.fence();
    let epochs = Sqlite::fresh(2).await;
    let builder = RedisLeases::builder(epochs.fence()).key_prefix(fresh_prefix());
    let store = builder.connect(&shared_url()).await.unwrap();
    let leases = store.clone().announced_to(fence.clone());
    let first = grant(&leases, &sku(), LONG).await;
    let tx = fence.begin(&sku(), first.token, TokenUse::SingleUse).await;
    let tx = tx.unwrap();
    leases.release(&sku(), &first.id).await.unwrap();
    let mut waiting = tokio::spawn({
        let leases = leases.clone();
        async move { leases.acquire(&sku(), Acquire::new(LONG)).await }
    });
    timeout(Duration::from_millis(300), &mut waiting)
        .await
        .expect_err("it did not wait");
    tx.commit().await.unwrap();
    let second = waiting.await.unwrap().unwrap();
    assert!(second.token > first.token);
    leases.release(&sku(), &second.id).await.unwrap();

    // A write that takes longer than the limit, and a lease that is shorter than the wait.
    for (lock_wait, ttl) in [
        (Duration::from_millis(200), LONG),
        (Duration::from_secs(5), Duration::from_millis(100)),
    ] {
        let lease = grant(&leases, &sku(), LONG).await;
        let tx = fence.begin(&sku(), lease.token, TokenUse::SingleUse).await;
        let tx = tx.unwrap();
        leases.release(&sku(), &lease.id).await.unwrap();
        let hasty = store
            .clone()
            .announced_to(fence.clone().lock_wait(lock_wait));
        let asking = tokio::spawn(async move { hasty.acquire(&sku(), Acquire::new(ttl)).await });
        sleep(Duration::from_millis(400)).await;
        tx.commit().await.unwrap();
        let refused = asking.await.unwrap();
        assert!(
            matches!(refused, Err(LeaseError::Unavailable(_))),
            "{refused:?}"
        );
        assert!(store.inspect(&sku()).await.unwrap().is_none());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_goes_away_during_the_announcement_leaves_no_lease() {
    let db = Postgres::fresh(4).await;
    let fence = db.fence();
    let store = EmbeddedLeases::new(db.fence());
    let leases = store.clone().announced_to(fence.clone());
    let resource = Resource::new("sku-1").unwrap();
    let first = grant(&store, &resource, LONG).await;
    let tx = fence
        .begin(&resource, first.token, TokenUse::SingleUse)
        .await;
    let tx = tx.unwrap();
    store.release(&resource, &first.id).await.unwrap();
    // Nor with an id of its own choice: whoever has it could renew what was never announced.
    for request in [
        Acquire::new(LONG),
        Acquire::new(LONG).lease_id(LeaseId::random()),
    ] {
        let asking = leases.acquire(&resource, request);
        timeout(Duration::from_millis(300), asking)
            .await
            .unwrap_err();
        eventually("the lease is free", async || {
            store.inspect(&resource).await.unwrap().is_none()
        })
        .await;
    }
    tx.commit().await.unwrap();
}
