//! Steps that several checks share.

use std::time::Duration;

use tokio::{
    task::JoinHandle,
    time::{sleep, timeout},
};

use crate::{
    lease::{Acquire, Lease, LeaseError, LeaseId, Leases, driver::LONGEST_SLEEP},
    token::Resource,
};

/// Duration that does not elapse during a check.
pub(super) const LONG: Duration = Duration::from_secs(60);
/// Timeout for events that need no further call. It is shorter than the time after which the first
/// waiting request retries without a notification, so that a missing notification is found.
pub(super) const SOON: Duration = Duration::from_secs(8);
const _: () = assert!(SOON.as_secs() < LONGEST_SLEEP.as_secs());

pub(super) fn resource(name: &str) -> Resource {
    Resource::new(name).expect("a name")
}

pub(super) fn sku() -> Resource {
    resource("sku-1")
}

pub(super) async fn grant<L: Leases>(leases: &L, ttl: Duration) -> Lease {
    let granted = leases.acquire(&sku(), Acquire::new(ttl)).await;
    granted.expect("the resource is free")
}

#[track_caller]
pub(super) fn is_held<T: std::fmt::Debug>(outcome: Result<T, LeaseError>) -> Duration {
    match outcome {
        Err(LeaseError::Held { retry_after, .. }) => retry_after,
        other => panic!("the resource is held, so the result must be `Held`, not {other:?}"),
    }
}

#[track_caller]
pub(super) fn is_lost<T: std::fmt::Debug>(outcome: Result<T, LeaseError>) {
    assert!(
        matches!(outcome, Err(LeaseError::Lost { .. })),
        "the lease is not held under this id, so the result must be `Lost`, not {outcome:?}"
    );
}

/// Waits until a condition holds.
pub(super) async fn eventually(what: &str, holds: impl AsyncFn() -> bool) {
    let waiting = async {
        while !holds().await {
            sleep(Duration::from_millis(10)).await;
        }
    };
    let happened = timeout(SOON, waiting).await;
    assert!(
        happened.is_ok(),
        "this did not happen within {SOON:?}: {what}"
    );
}

/// Acquires the resource as soon as it is free.
pub(super) async fn next_grant<L: Leases>(leases: &L) -> Lease {
    let request = Acquire::new(LONG).wait(SOON);
    let granted = leases.acquire(&sku(), request).await;
    granted.unwrap_or_else(|error| {
        panic!("a waiting request must be granted when the lease ends, within {SOON:?}, but got {error:?}")
    })
}

pub(super) async fn waiters<L: Leases>(leases: &L) -> u64 {
    let held = leases.inspect(&sku()).await.expect("the store answers");
    held.map_or(0, |held| held.waiters)
}

pub(super) type Waiting = JoinHandle<Result<Lease, LeaseError>>;

/// Starts a waiting request in a separate task. If the store has a queue, returns after the request
/// has joined it.
pub(super) async fn wait<L: Leases + Clone>(leases: &L, request: Acquire, queue: bool) -> Waiting {
    let before = waiters(leases).await;
    let waiting = tokio::spawn({
        let leases = leases.clone();
        async move { leases.acquire(&sku(), request).await }
    });
    if queue {
        // A store without a queue sets `Subject::QUEUE` to false.
        eventually(
            "the request is in the queue (see `Subject::QUEUE`)",
            async || waiting.is_finished() || waiters(leases).await > before,
        )
        .await;
    }
    waiting
}

pub(super) async fn granted(waiting: Waiting) -> Lease {
    let granted = timeout(SOON, waiting).await.expect(
        "a waiting request must be granted when it is first in the queue and the lease ends",
    );
    granted
        .expect("the request does not panic")
        .expect("the request is granted")
}

pub(super) async fn is_free<L: Leases>(leases: &L) -> bool {
    let held = leases.inspect(&sku()).await.expect("the store answers");
    held.is_none()
}

/// Returns a request with a lease id that its client has chosen, so that the client may retry.
pub(super) fn chosen() -> Acquire {
    Acquire::new(LONG).wait(LONG).lease_id(LeaseId::random())
}
