//! Grants that are announced to the fence before their holders receive them.

use std::{
    error::Error,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use sqlx::{Postgres, Sqlite};
use tokio::{sync::Semaphore, time::timeout};
use tower_fence::{
    AdmitError, Fence, Resource, Token, TokenKey, TokenKeys, TokenUse,
    announce::{Announce, AnnounceError, AnnounceFuture, LeaseDigest},
    lease::{
        Acquire, Announced, Held, Lease, LeaseAdmin, LeaseError, LeaseId, Leases, MemoryLeases,
        Renew, Signed,
    },
};

use crate::support::{
    announced::{NEIGHBOUR, forged},
    database::{TestDatabase, WAITING_FOR_LOCK, on_both_databases},
    eventually,
    fence::{begin, write},
    lease::{LONG, grant, grant_and_release, is_held, is_lost, is_unavailable, sku, spawn_acquire},
    redis::{COUNTER, LEASE, RedisServer, connect, connect_shared, dump, fresh_prefix, restore},
    soon,
};

on_both_databases!(
    renewal_after_another_writer_is_lost,
    another_issuer_reports_a_superseded_lease,
    next_foreign_token_supersedes_a_renewal,
    renewal_does_not_wait_for_the_write_of_its_holder,
);

#[tokio::test]
async fn grant_supersedes_older_tokens_before_it_is_answered() {
    let db = Sqlite::fresh(2).await;
    let (fence, store) = (db.fence(), MemoryLeases::new(db.fence()));
    let first = grant_and_release(&store).await;
    // Because the second grant was not announced, a write with the older token is still admitted.
    let second = grant(&store, &sku(), LONG).await;
    let tx = fence.begin(&sku(), first.token, TokenUse::Reusable).await;
    drop(tx.unwrap());
    store.release(&sku(), &second.id).await.unwrap();

    let leases = store.announced_to(fence.clone());
    let third = grant(&leases, &sku(), LONG).await;
    let refused = write(&fence, second.token.get()).await;
    assert_matches!(refused, Err(AdmitError::Stale(_)));
    write(&fence, third.token.get()).await.unwrap();
    leases.release(&sku(), &third.id).await.unwrap();
    assert!(leases.inspect(&sku()).await.unwrap().is_none());
}

#[tokio::test]
async fn repeated_request_after_use_returns_a_new_token() {
    let db = Sqlite::fresh(2).await;
    let fence = db.fence();
    let leases = MemoryLeases::new(db.fence()).announced_to(fence.clone());
    let id = LeaseId::random();
    let sku = sku();
    let ask = || leases.acquire(&sku, Acquire::new(LONG).lease_id(id.clone()));
    let (first, again) = (ask().await.unwrap(), ask().await.unwrap());
    assert_eq!(first.token, again.token);
    write(&fence, first.token.get()).await.unwrap();
    let third = ask().await.unwrap();
    assert!(third.token > first.token);
    assert_eq!(ask().await.unwrap().token, third.token);
    write(&fence, third.token.get()).await.unwrap();
}

#[tokio::test]
async fn grant_that_cannot_be_announced_is_released() {
    let db = Sqlite::fresh(2).await;
    let store = MemoryLeases::new(db.fence());
    let away = Sqlite::fresh(1).await;
    let leases = store.clone().announced_to(away.fence());
    away.fence().pool().close().await;
    let refused = leases.acquire(&sku(), Acquire::new(LONG)).await;
    let Err(LeaseError::Unavailable(cause)) = refused else {
        panic!("{refused:?}");
    };
    // The cause is the reason why the grant could not be announced, and contains the error of the
    // database.
    let announcing = cause.downcast_ref::<AnnounceError>().unwrap();
    assert_matches!(announcing, AnnounceError::Unreachable(_));
    assert!(announcing.source().is_some());
    assert!(store.inspect(&sku()).await.unwrap().is_none());
    assert!(leases.list(10, None).await.unwrap().leases.is_empty());
}

#[tokio::test]
async fn write_with_the_token_before_renewal_is_refused() {
    let db = Sqlite::fresh(2).await;
    let (fence, store) = (db.fence(), MemoryLeases::new(db.fence()));
    let leases = store.clone().announced_to(fence.clone());
    let lease = grant(&leases, &sku(), LONG).await;
    let renewal = Renew::new(LONG).with_new_token();
    let renewed = leases.renew(&sku(), &lease.id, renewal).await.unwrap();
    // The holder reads at this point. Its earlier requests may still be in progress.
    let delayed = write(&fence, lease.token.get()).await;
    assert_matches!(delayed, Err(AdmitError::Stale(_)));
    write(&fence, renewed.token.get()).await.unwrap();

    // After the fence was raised above the lease's token, the holder's earlier reads may be out of
    // date, so a renewal with a new token is refused.
    fence.raise(&sku(), forged()).await.unwrap();
    is_lost(leases.renew(&sku(), &lease.id, renewal).await);
    assert!(store.inspect(&sku()).await.unwrap().is_none());
}

/// A renewal with a new token reports that the lease is lost if another lease was announced or
/// another token was used, even if the new token is the highest.
async fn renewal_after_another_writer_is_lost<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let fence = db.fence();
    let store = MemoryLeases::new(fence.clone());
    let leases = store.clone().announced_to(fence.clone());
    let neighbour = Resource::new(NEIGHBOUR).unwrap();
    let renewal = Renew::new(LONG).with_new_token();
    for is_announced in [true, false] {
        let lease = grant(&leases, &sku(), LONG).await;
        write(&fence, lease.token.get()).await.unwrap();
        let renewed = leases.renew(&sku(), &lease.id, renewal).await.unwrap();
        // The token of another issuer, or a forged token.
        let foreign = Token::new(renewed.token.get() + 1).unwrap();
        if is_announced {
            let another = LeaseDigest::of("another");
            let announced = fence.announce(&sku(), foreign, &another, false).await;
            announced.unwrap();
        } else {
            write(&fence, foreign.get()).await.unwrap();
        }
        for _ in 0..2 {
            let other = grant(&leases, &neighbour, LONG).await;
            leases.release(&neighbour, &other.id).await.unwrap();
        }
        is_lost(leases.renew(&sku(), &lease.id, renewal).await);
        assert!(store.inspect(&sku()).await.unwrap().is_none());
        let next = grant(&leases, &sku(), LONG).await;
        write(&fence, next.token.get()).await.unwrap();
        leases.release(&sku(), &next.id).await.unwrap();
    }
}

/// A renewal without a new token at an issuer that has not announced the token itself.
async fn another_issuer_reports_a_superseded_lease<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let fence = db.fence();
    let store = MemoryLeases::new(fence.clone());
    let [one, two] = [(); 2].map(|()| store.clone().announced_to(fence.clone()));
    for by_failover in [false, true] {
        let lease = grant(&one, &sku(), LONG).await;
        if by_failover {
            fence.after_failover().await.unwrap();
        } else {
            write(&fence, lease.token.get() + 5).await.unwrap();
        }
        is_lost(two.renew(&sku(), &lease.id, Renew::new(LONG)).await);
        assert!(store.inspect(&sku()).await.unwrap().is_none());
    }
}

/// A renewal without a new token, at an issuer that has not announced the token itself. The fence
/// may be in another process, or in the process that writes.
async fn renewal_does_not_wait_for_the_write_of_its_holder<DB: TestDatabase>() {
    let db = DB::fresh(3).await;
    let fence = db.fence();
    let store = MemoryLeases::new(fence.clone());
    for issuer in [db.fence(), fence.clone()] {
        let lease = grant(&store.clone().announced_to(fence.clone()), &sku(), LONG).await;
        let tx = begin(&fence, lease.token.get()).await;
        let other = store.clone().announced_to(issuer);
        let renewed = other.renew(&sku(), &lease.id, Renew::new(LONG)).await;
        assert_eq!(renewed.unwrap().token, lease.token);
        tx.commit().await.unwrap();
        other.release(&sku(), &lease.id).await.unwrap();
    }
}

/// After a raise to the token that follows the announced one, or a reusable write under it,
/// `max_token` is the announced token, as after a single-use write by the holder.
async fn next_foreign_token_supersedes_a_renewal<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let fence = db.fence();
    let store = MemoryLeases::new(fence.clone());
    let [one, two] = [(); 2].map(|()| store.clone().announced_to(fence.clone()));
    for case in 0..8 {
        let [is_used, raises, new_token] = [1, 2, 4].map(|bit| case & bit != 0);
        let lease = grant(&one, &sku(), LONG).await;
        if is_used {
            write(&fence, lease.token.get()).await.unwrap();
        }
        let foreign = Token::new(lease.token.get() + 1).unwrap();
        if raises {
            fence.raise(&sku(), foreign).await.unwrap();
        } else {
            let tx = fence.begin(&sku(), foreign, TokenUse::Reusable).await;
            tx.unwrap().commit().await.unwrap();
        }
        let max_token = fence.inspect(&sku()).await.unwrap();
        assert_eq!(max_token, Some(lease.token.get()));
        let renewal = match new_token {
            true => Renew::new(LONG).with_new_token(),
            false => Renew::new(LONG),
        };
        is_lost(two.renew(&sku(), &lease.id, renewal).await);
        assert!(store.inspect(&sku()).await.unwrap().is_none());
    }
}

/// Store that signs tokens, as a remote issuer does, and whose answer to the first renewal arrives
/// late.
#[derive(Clone)]
struct Late {
    store: Signed<MemoryLeases>,
    renewals: Arc<AtomicUsize>,
    answers: Arc<Semaphore>,
}

impl Leases for Late {
    async fn acquire(&self, resource: &Resource, request: Acquire) -> Result<Lease, LeaseError> {
        self.store.acquire(resource, request).await
    }

    async fn renew(
        &self,
        resource: &Resource,
        id: &LeaseId,
        request: Renew,
    ) -> Result<Lease, LeaseError> {
        let renewed = self.store.renew(resource, id, request).await;
        if self.renewals.fetch_add(1, Relaxed) == 0 {
            let _answer = self.answers.acquire().await.unwrap();
        }
        renewed
    }

    async fn release(&self, resource: &Resource, id: &LeaseId) -> Result<(), LeaseError> {
        self.store.release(resource, id).await
    }

    async fn inspect(&self, resource: &Resource) -> Result<Option<Held>, LeaseError> {
        self.store.inspect(resource).await
    }
}

/// While the answer to a renewal is on its way, the lease gets a new token: from the same issuer,
/// or from another one.
#[tokio::test]
async fn overtaken_renewal_continues_under_a_current_token() {
    for case in 0..4 {
        let [is_same_issuer, new_token] = [1, 2].map(|bit| case & bit != 0);
        let db = Sqlite::fresh(2).await;
        let fence = db.fence();
        let keys = TokenKeys::new([TokenKey::random("k1").unwrap()]).unwrap();
        let late = Late {
            store: Signed::new(MemoryLeases::new(db.fence()), keys),
            renewals: Arc::default(),
            answers: Arc::new(Semaphore::new(0)),
        };
        let slow = Announced::new(late.clone(), fence.clone());
        let other = match is_same_issuer {
            true => slow.clone(),
            false => Announced::new(late.clone(), fence.clone()),
        };
        let lease = grant(&other, &sku(), LONG).await;
        let (with_new_token, id) = (Renew::new(LONG).with_new_token(), lease.id.clone());
        let request = match new_token {
            true => with_new_token,
            false => Renew::new(LONG),
        };
        let renewal = tokio::spawn(async move { slow.renew(&sku(), &id, request).await });
        eventually!("a renewal is in progress", late.renewals.load(Relaxed) == 1);
        let overtaking = other.renew(&sku(), &lease.id, with_new_token).await;
        let overtaking = overtaking.unwrap().token;
        late.answers.add_permits(1);
        let renewed = renewal.await.unwrap().unwrap();
        assert_eq!(renewed.fencing_token().token, renewed.token);
        let renewed = renewed.token;
        // Two renewals with a new token never return the same one.
        assert!(
            renewed > overtaking || (renewed == overtaking && !new_token),
            "{renewed} after {overtaking}"
        );
        write(&fence, renewed.get()).await.unwrap();
        other.release(&sku(), &lease.id).await.unwrap();
    }
}

#[tokio::test]
async fn new_token_that_cannot_be_announced_is_not_granted() {
    let db = Sqlite::fresh(2).await;
    let store = MemoryLeases::new(db.fence());
    let away = Sqlite::fresh(1).await;
    let leases = store.clone().announced_to(away.fence());
    let lease = grant(&leases, &sku(), LONG).await;
    away.fence().pool().close().await;
    let renewal = Renew::new(LONG).with_new_token();
    is_unavailable(leases.renew(&sku(), &lease.id, renewal).await);
    // The next renewal does not change the token in the store, and does not return it either.
    is_unavailable(leases.renew(&sku(), &lease.id, Renew::new(LONG)).await);
    // The lease is still held, and another issuer can announce it.
    let other = store.announced_to(db.fence());
    let renewed = other.renew(&sku(), &lease.id, Renew::new(LONG)).await;
    let renewed = renewed.unwrap().token;
    assert!(renewed > lease.token);
    let max_token = db.fence().inspect(&sku()).await.unwrap();
    assert_eq!(max_token, Some(renewed.get() - 1));
}

#[tokio::test]
async fn another_issuer_renews_a_lease_whose_token_was_used() {
    let db = Sqlite::fresh(2).await;
    let (fence, store) = (db.fence(), MemoryLeases::new(db.fence()));
    let one = store.clone().announced_to(fence.clone());
    let two = store.announced_to(fence.clone());
    let lease = grant(&one, &sku(), LONG).await;
    write(&fence, lease.token.get()).await.unwrap();
    for issuer in [&two, &one] {
        let renewed = issuer.renew(&sku(), &lease.id, Renew::new(LONG)).await;
        assert_eq!(renewed.unwrap().token, lease.token);
    }
}

#[tokio::test]
async fn failed_request_keeps_the_lease_of_its_repetition() {
    let (db, away) = (Sqlite::fresh(2).await, Sqlite::fresh(1).await);
    let store = MemoryLeases::new(db.fence());
    let cut_off = store.clone().announced_to(away.fence());
    let leases = store.announced_to(db.fence());
    away.fence().pool().close().await;
    let request = Acquire::new(LONG).lease_id(LeaseId::random());
    let lease = leases.acquire(&sku(), request.clone()).await.unwrap();
    is_unavailable(cut_off.acquire(&sku(), request).await);
    let renewed = leases.renew(&sku(), &lease.id, Renew::new(LONG)).await;
    assert_eq!(renewed.unwrap().token, lease.token);
}

/// Redis is restored to a state in which another client held the lease.
#[tokio::test]
async fn lease_from_an_old_snapshot_is_lost_to_its_successor() {
    let (server, db) = (RedisServer::start(&[]).await, Sqlite::fresh(2).await);
    let fence = db.fence();
    let leases = connect(&server, &db).await.announced_to(fence.clone());
    let old = grant(&leases, &sku(), LONG).await;
    let snapshot = dump(&server, &[COUNTER, LEASE]).await;
    leases.release(&sku(), &old.id).await.unwrap();
    let successor = grant(&leases, &sku(), LONG).await;
    restore(&server, &snapshot).await;

    // Another issuer, which has no cached state, trusts that counter. The fence does not.
    let forgetful = connect(&server, &db).await.announced_to(fence.clone());
    is_lost(forgetful.renew(&sku(), &old.id, Renew::new(LONG)).await);
    let refused = write(&fence, old.token.get()).await;
    assert_matches!(refused, Err(AdmitError::Stale(_)));
    let again = Acquire::new(LONG).lease_id(old.id.clone());
    let again = forgetful.acquire(&sku(), again).await.unwrap();
    assert!(again.token > successor.token);
    let tx = fence.begin(&sku(), again.token, TokenUse::Reusable).await;
    tx.unwrap().commit().await.unwrap();
    let late = write(&fence, successor.token.get()).await;
    assert_matches!(late, Err(AdmitError::Stale(_)));

    // The first issuer has the later state cached.
    restore(&server, &snapshot).await;
    is_lost(leases.renew(&sku(), &old.id, Renew::new(LONG)).await);
}

/// A fence that delays announcements.
struct Slow(Fence<Sqlite>, Arc<Semaphore>);

impl Announce for Slow {
    fn announce<'a>(
        &'a self,
        resource: &'a Resource,
        token: Token,
        lease: &'a LeaseDigest,
        renews: bool,
    ) -> AnnounceFuture<'a> {
        Box::pin(async move {
            self.1.acquire().await.unwrap().forget();
            self.0.announce(resource, token, lease, renews).await
        })
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_leases_with_one_token_one_is_answered() {
    let (server, db) = (RedisServer::start(&[]).await, Sqlite::fresh(4).await);
    let store = connect(&server, &db).await;
    grant_and_release(&store).await;
    let snapshot = dump(&server, &[COUNTER]).await;
    let gate = Arc::new(Semaphore::new(0));
    let slow = store.clone().announced_to(Slow(db.fence(), gate.clone()));
    let first = spawn_acquire(&slow, &sku(), Acquire::new(LONG));
    eventually!(
        "the first lease is granted",
        store.inspect(&sku()).await.unwrap().is_some()
    );
    let doubled = store.inspect(&sku()).await.unwrap().unwrap().token;
    restore(&server, &snapshot).await;
    server.command(&["DEL", LEASE]).await;
    let leases = connect(&server, &db).await.announced_to(db.fence());
    let second = grant(&leases, &sku(), LONG).await;
    assert_eq!(second.token, doubled, "the test needs the same token twice");
    gate.add_permits(10);
    // The first request retries, and finds the second lease.
    is_held(first.await.unwrap());
    // The lease that was returned is the valid one.
    let fence = db.fence();
    write(&fence, second.token.get()).await.unwrap();
    leases.release(&sku(), &second.id).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_grant_waits_for_a_write_in_flight() {
    let db = Postgres::fresh(4).await;
    let fence = db.fence();
    let epochs = Sqlite::fresh(2).await;
    let store = connect_shared(epochs.fence(), &fresh_prefix()).await;
    let leases = store.clone().announced_to(fence.clone());
    let first = grant(&leases, &sku(), LONG).await;
    let tx = begin(&fence, first.token.get()).await;
    leases.release(&sku(), &first.id).await.unwrap();
    let mut waiting = spawn_acquire(&leases, &sku(), Acquire::new(LONG));
    timeout(Duration::from_millis(300), &mut waiting)
        .await
        .expect_err("the request did not wait");
    tx.commit().await.unwrap();
    let second = waiting.await.unwrap().unwrap();
    assert!(second.token > first.token);
    leases.release(&sku(), &second.id).await.unwrap();

    // Either the write takes longer than the lock timeout, or the lease expires before the write
    // ends.
    for (lock_timeout, ttl) in [
        (Duration::from_millis(200), LONG),
        (Duration::from_secs(5), Duration::from_millis(100)),
    ] {
        let lease = grant(&leases, &sku(), LONG).await;
        let tx = begin(&fence, lease.token.get()).await;
        leases.release(&sku(), &lease.id).await.unwrap();
        let hasty = db.fence_with(|fence| fence.lock_timeout(lock_timeout));
        let hasty = store.clone().announced_to(hasty);
        let asking = spawn_acquire(&hasty, &sku(), Acquire::new(ttl));
        eventually!(
            "the announcement waits or has ended",
            asking.is_finished() || db.number(WAITING_FOR_LOCK).await > 0
        );
        eventually!(
            "the lock timeout or the lease has expired",
            asking.is_finished() || store.inspect(&sku()).await.unwrap().is_none()
        );
        tx.commit().await.unwrap();
        is_unavailable(asking.await.unwrap());
        assert!(store.inspect(&sku()).await.unwrap().is_none());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_cancelled_during_the_announcement_leaves_no_lease() {
    let db = Postgres::fresh(4).await;
    let fence = db.fence();
    let store = MemoryLeases::new(db.fence());
    let leases = store.clone().announced_to(fence.clone());
    let (resource, moment) = (sku(), Duration::from_millis(300));
    let first = grant(&store, &resource, LONG).await;
    let tx = begin(&fence, first.token.get()).await;
    store.release(&resource, &first.id).await.unwrap();
    let asking = leases.acquire(&resource, Acquire::new(LONG));
    timeout(moment, asking).await.unwrap_err();
    soon!(
        "the lease is free",
        store.inspect(&resource).await.unwrap().is_none()
    );

    // A client that has chosen its lease id may retry during the whole TTL. The grant is returned
    // only after its announcement, and so only after the pending write has ended.
    let id = LeaseId::random();
    let asking = leases.acquire(&resource, Acquire::new(LONG).lease_id(id.clone()));
    timeout(moment, asking).await.unwrap_err();
    for _ in 0..2 {
        let renewing = leases.renew(&resource, &id, Renew::new(LONG));
        let renewed = timeout(moment, renewing).await;
        renewed.expect_err("an unannounced token was granted");
    }
    tx.commit().await.unwrap();
    let renewed = leases.renew(&resource, &id, Renew::new(LONG)).await;
    let token = renewed.unwrap().token;
    let max_token = fence.inspect(&resource).await.unwrap();
    assert_eq!(max_token, Some(token.get() - 1));
}
