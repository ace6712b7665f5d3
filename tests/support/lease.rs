//! Helpers for tests that use a lease store.

use std::{error::Error, time::Duration};

use sqlx::Sqlite;
use tokio::{sync::Mutex, task::JoinHandle, time::timeout};
use tower_fence::{
    Resource,
    lease::{Acquire, Lease, LeaseAdmin, LeaseError, Leases, Renew},
};

pub use crate::fence::sku;
use crate::{SOON, database::Fresh, eventually};

pub const LONG: Duration = Duration::from_secs(60);
// A lease with this TTL does not expire while a test waits for its release.
const _: () = assert!(LONG.as_secs() >= 3 * SOON.as_secs());
pub const SHORT: Duration = Duration::from_millis(200);

pub async fn grant<L: Leases>(leases: &L, resource: &Resource, ttl: Duration) -> Lease {
    leases.acquire(resource, Acquire::new(ttl)).await.unwrap()
}

pub async fn renew_for<L: Leases>(leases: &L, lease: &Lease, ttl: Duration) -> Lease {
    let renewed = leases.renew(&lease.resource, &lease.id, Renew::new(ttl));
    renewed.await.unwrap()
}

/// Makes each kind of call for `sku-1` once. Runs `before` before each of them except the first.
pub async fn make_each_call<L: Leases + LeaseAdmin>(leases: &L, before: impl AsyncFn()) {
    let lease = grant(leases, &sku(), LONG).await;
    before().await;
    renew_for(leases, &lease, LONG).await;
    before().await;
    leases.release(&sku(), &lease.id).await.unwrap();
    before().await;
    let lease = grant(leases, &sku(), LONG).await;
    before().await;
    assert_eq!(leases.list(9, None).await.unwrap().leases.len(), 1);
    before().await;
    assert!(leases.break_lease(&sku(), None).await.unwrap());
    before().await;
    assert_eq!(leases.inspect(&sku()).await.unwrap(), None);
    before().await;
    is_lost(leases.renew(&sku(), &lease.id, Renew::new(LONG)).await);
}

/// Acquires and releases `sku-1`. Returns the lease that was held.
pub async fn grant_and_release<L: Leases>(leases: &L) -> Lease {
    let lease = grant(leases, &sku(), LONG).await;
    leases.release(&sku(), &lease.id).await.unwrap();
    lease
}

#[track_caller]
pub fn is_held<T: std::fmt::Debug>(outcome: Result<T, LeaseError>) -> Duration {
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
    assert_matches!(outcome, Err(LeaseError::Lost { resource }) if resource == sku());
}

#[track_caller]
pub fn is_unavailable<T: std::fmt::Debug>(outcome: Result<T, LeaseError>) {
    assert_matches!(outcome, Err(LeaseError::Unavailable(_)));
}

#[track_caller]
pub fn is_misconfigured<T>(outcome: Result<T, LeaseError>) {
    assert_matches!(outcome.err(), Some(LeaseError::Misconfigured(_)));
}

/// Acquires `sku-1` as soon as the lease is free.
pub async fn next_grant<L: Leases>(leases: &L, ttl: Duration) -> Lease {
    let lease = Mutex::new(None);
    eventually("the lease is free", async || {
        let granted = leases.acquire(&sku(), Acquire::new(ttl)).await;
        *lease.lock().await = granted.ok();
        lease.lock().await.is_some()
    })
    .await;
    lease.into_inner().unwrap()
}

/// Returns the number of waiters.
pub async fn waiters<L: Leases>(leases: &L) -> u64 {
    waiters_on(leases, &sku()).await
}

async fn waiters_on<L: Leases>(leases: &L, resource: &Resource) -> u64 {
    let held = leases.inspect(resource).await.unwrap();
    held.map_or(0, |held| held.waiters)
}

/// Spawns an acquisition with this request, and returns immediately.
pub fn spawn_acquire<L: Leases + Clone>(
    leases: &L,
    resource: &Resource,
    request: Acquire,
) -> JoinHandle<Result<Lease, LeaseError>> {
    let (leases, resource) = (leases.clone(), resource.clone());
    tokio::spawn(async move { leases.acquire(&resource, request).await })
}

/// Spawns an acquisition that waits, and returns when it is in the queue.
pub async fn wait<L: Leases + Clone>(
    leases: &L,
    ttl: Duration,
) -> JoinHandle<Result<Lease, LeaseError>> {
    join(leases, Acquire::new(ttl).wait(LONG)).await
}

/// Spawns an acquisition with this request, and returns when it is in the queue or already
/// finished.
pub async fn join<L: Leases + Clone>(
    leases: &L,
    request: Acquire,
) -> JoinHandle<Result<Lease, LeaseError>> {
    join_on(leases, &sku(), request).await
}

/// Like [`join`], for this resource.
pub async fn join_on<L: Leases + Clone>(
    leases: &L,
    resource: &Resource,
    request: Acquire,
) -> JoinHandle<Result<Lease, LeaseError>> {
    let before = waiters_on(leases, resource).await;
    let waiting = spawn_acquire(leases, resource, request);
    eventually!(
        "the waiter is in the queue",
        waiting.is_finished() || waiters_on(leases, resource).await > before
    );
    waiting
}

pub async fn granted(waiting: JoinHandle<Result<Lease, LeaseError>>) -> Lease {
    granted_within(20, waiting).await
}

/// Like [`granted`], with this timeout in seconds.
pub async fn granted_within(seconds: u64, waiting: JoinHandle<Result<Lease, LeaseError>>) -> Lease {
    let granted = timeout(Duration::from_secs(seconds), waiting).await;
    let granted = granted.expect("the waiter was not granted the lease in time");
    granted.unwrap().unwrap()
}

/// Returns the names on all pages of a list, sorted.
pub async fn listed<L: LeaseAdmin>(leases: &L, limit: usize) -> Vec<String> {
    let (mut listed, mut cursor) = (vec![], None::<String>);
    loop {
        let page = leases.list(limit, cursor.as_deref()).await.unwrap();
        assert!(page.leases.len() <= limit);
        listed.extend(page.leases.iter().map(|(name, _)| name.to_string()));
        cursor = page.cursor;
        if cursor.is_none() {
            listed.sort_unstable();
            return listed;
        }
    }
}

/// Checks that a renewal keeps the token.
pub async fn keeps_its_token<L: Leases>(leases: &L, lease: &Lease) {
    let renewed = renew_for(leases, lease, LONG).await;
    assert_eq!(renewed.token, lease.token);
}

/// Returns all messages of an error and its causes.
pub fn messages_of(error: &LeaseError) -> String {
    let mut messages = format!("{error:?}");
    let mut cause: Option<&dyn Error> = Some(error);
    while let Some(error) = cause {
        messages += &format!("\n{error}");
        cause = error.source();
    }
    messages
}

/// Returns the highest epoch in the database.
pub async fn highest_epoch(db: &Fresh<Sqlite>) -> i64 {
    db.number("SELECT coalesce(max(epoch), 0) FROM tower_fence.epochs")
        .await
}
