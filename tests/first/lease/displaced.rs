//! Requests that end in a store in which positions do not expire.

use std::{
    fmt,
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::{sync::watch, task::JoinHandle, time::sleep};
use tower_fence::{
    Resource, Token,
    announce::LeaseDigest,
    lease::{
        Acquire, Backend, Driver, Held, Lease, LeaseError, LeaseId, Leases, Page,
        backend::{Counters, End, Granted, Reply, Seen, Step, Waits},
    },
};

use crate::support::{
    eventually,
    lease::{LONG, grant, is_held, is_lost, is_unavailable, sku, spawn_acquire},
    store::{Memory, TestStore},
};

/// The queue of a lease that is always held. Each position has a lease id and the ticket of its
/// request.
#[derive(Clone, Default)]
struct Positions(Arc<Mutex<Vec<(LeaseDigest, i64)>>>);

impl Positions {
    fn with<T>(&self, change: impl FnOnce(&mut Vec<(LeaseDigest, i64)>) -> T) -> T {
        change(&mut self.0.lock().unwrap())
    }

    /// Gives the position under this lease id to a request. Returns whether there was none.
    fn join(&self, lease: &LeaseDigest, ticket: i64) -> bool {
        self.with(|positions| {
            let found = positions.iter_mut().find(|(id, _)| id == lease);
            let joined = found.is_none();
            match found {
                Some((_, found)) => *found = ticket,
                None => positions.push((lease.clone(), ticket)),
            }
            joined
        })
    }

    /// Returns whether another request has the position under this lease id.
    fn is_displaced(&self, lease: &LeaseDigest, ticket: i64) -> bool {
        let is_other = |(id, found): &(LeaseDigest, i64)| id == lease && *found != ticket;
        self.with(|positions| positions.iter().any(is_other))
    }

    fn leave(&self, lease: &LeaseDigest, ticket: i64) {
        self.with(|positions| positions.retain(|one| *one != (lease.clone(), ticket)));
    }
}

/// A store that delays the step with which the first request joins the queue, or loses it after the
/// delay. If the store is exhausted, it reports this to the requests in the queue.
#[derive(Default)]
struct Delaying {
    positions: Positions,
    first: Mutex<Option<watch::Receiver<bool>>>,
    loses_first: bool,
    is_exhausted: bool,
}

impl Backend for Delaying {
    async fn step(&self, _: &Resource, step: Step<'_>, _: Seen<'_>) -> Result<Reply, LeaseError> {
        let left = LONG;
        match step {
            Step::Acquire(_, Waits::Yes { queued: true, .. }) if self.is_exhausted => {
                Ok(Reply::Exhausted(Token::MAX.get()))
            }
            Step::Acquire(ask, Waits::Yes { queued: true, .. })
                if self.positions.is_displaced(&ask.lease, ask.ticket) =>
            {
                Ok(Reply::Displaced)
            }
            Step::Acquire(ask, Waits::Yes { .. }) => {
                let delay = self.first.lock().unwrap().take();
                if let Some(mut arrives) = delay {
                    arrives.wait_for(|arrives| *arrives).await.unwrap();
                    if self.loses_first {
                        return Err(LeaseError::unavailable(fmt::Error));
                    }
                }
                let joined = self.positions.join(&ask.lease, ask.ticket);
                Ok(Reply::Queued { left, joined })
            }
            Step::Acquire(ask, _) => {
                self.positions.leave(&ask.lease, ask.ticket);
                Ok(Reply::Held { left })
            }
            Step::End(End::Abandon { lease, ticket }) => {
                self.positions.leave(lease, *ticket);
                Ok(Reply::Lost)
            }
            _ => Ok(Reply::Lost),
        }
    }

    shows_no_lease!();
}

/// Returns a driver whose store delays the first join until the sender sends `true`, and the
/// positions in the store.
fn delaying(loses_first: bool) -> (Driver<Delaying>, Positions, watch::Sender<bool>) {
    let (arrives, arrived) = watch::channel(false);
    let positions = Positions::default();
    let store = Delaying {
        positions: positions.clone(),
        first: Mutex::new(Some(arrived)),
        loses_first,
        ..Delaying::default()
    };
    (Driver::over(store), positions, arrives)
}

/// Starts a request that waits under this lease id.
fn waiting<B: Backend>(leases: &Driver<B>, id: &LeaseId) -> JoinHandle<Result<Lease, LeaseError>> {
    let request = Acquire::new(LONG).lease_id(id.clone()).wait(LONG);
    spawn_acquire(leases, &sku(), request)
}

#[tokio::test(start_paused = true)]
async fn late_step_of_a_displaced_request_leaves_no_position() {
    const LATER: Duration = Duration::from_secs(10);
    let (leases, positions, arrives) = delaying(false);
    let id = LeaseId::random();
    let acquire = || waiting(&leases, &id);
    let count = || positions.with(|positions| positions.len());

    let first = acquire();
    sleep(LATER / 100).await;
    let second = acquire();
    sleep(LATER / 100).await;
    assert_eq!(count(), 1, "the second request is not in the queue");
    second.abort();
    sleep(LATER).await;
    assert_eq!(count(), 0, "an abandoned position is kept");

    arrives.send_replace(true);
    is_held(first.await.unwrap());
    assert_eq!(count(), 1, "the late step did not join the queue");
    sleep(LATER).await;
    assert_eq!(
        count(),
        0,
        "the position of a request that has ended is kept"
    );
}

/// The late step of the displaced request joins the queue, or is lost.
#[tokio::test(start_paused = true)]
async fn displacing_request_has_its_position_after_a_late_step() {
    const LATER: Duration = Duration::from_secs(2);
    for (loses_first, is_dropped) in [(false, true), (false, false), (true, true)] {
        let (leases, positions, arrives) = delaying(loses_first);
        let id = LeaseId::random();
        let first = waiting(&leases, &id);
        sleep(LATER / 100).await;
        if is_dropped {
            first.abort();
        }
        let second = waiting(&leases, &id);
        sleep(LATER / 100).await;
        let of_second = positions.with(|positions| positions.clone());
        assert_eq!(of_second.len(), 1, "the second request is not in the queue");
        arrives.send_replace(true);
        for _ in 0..5 {
            sleep(LATER).await;
            assert_eq!(positions.with(|positions| positions.clone()), of_second);
        }
        assert!(!second.is_finished());
    }
}

#[tokio::test(start_paused = true)]
async fn waiter_refused_by_an_exhausted_store_leaves_no_position() {
    let positions = Positions::default();
    let leases = Driver::over(Delaying {
        positions: positions.clone(),
        is_exhausted: true,
        ..Delaying::default()
    });
    // At the end of the wait, a request with a chosen lease id keeps its position.
    let request = Acquire::new(LONG).lease_id(LeaseId::random()).wait(LONG);
    let refused = leases.acquire(&sku(), request).await;
    assert_matches!(refused, Err(LeaseError::Exhausted { .. }));
    sleep(Duration::from_secs(10)).await;
    assert_eq!(positions.with(|positions| positions.len()), 0);
}

/// The requests of a lease that is held at first. The grant is delayed, and the first steps after
/// the end of a wait conflict with other requests.
#[derive(Clone, Default)]
struct Late {
    /// The ticket of the request that holds the lease.
    holder: Arc<Mutex<Option<i64>>>,
    grants: Arc<Mutex<Option<watch::Receiver<bool>>>>,
    conflicts: Arc<Mutex<u32>>,
    /// The duration of a step that joins the queue.
    join_time: Duration,
}

impl Backend for Late {
    async fn step(&self, _: &Resource, step: Step<'_>, _: Seen<'_>) -> Result<Reply, LeaseError> {
        let left = LONG;
        Ok(match step {
            Step::Acquire(ask, Waits::Yes { queued: true, .. }) => {
                let grants = self.grants.lock().unwrap().clone();
                if let Some(mut arrives) = grants {
                    arrives.wait_for(|arrives| *arrives).await.unwrap();
                    *self.holder.lock().unwrap() = Some(ask.ticket);
                    return Ok(Reply::Granted(Granted::new(Token::new(1).unwrap(), LONG)));
                }
                let mut conflicts = self.conflicts.lock().unwrap();
                if *conflicts > 0 {
                    *conflicts -= 1;
                    return Ok(Reply::Again);
                }
                let joined = false;
                Reply::Queued { left, joined }
            }
            Step::Acquire(_, Waits::Yes { .. }) => {
                sleep(self.join_time).await;
                Reply::Queued { left, joined: true }
            }
            Step::End(End::Abandon { ticket, .. }) => {
                let mut holder = self.holder.lock().unwrap();
                holder.take_if(|holder| holder == ticket);
                Reply::Ended
            }
            Step::Acquire(..) => Reply::Held { left },
            _ => Reply::Lost,
        })
    }

    shows_no_lease!();
}

#[tokio::test(start_paused = true)]
async fn conflict_at_the_end_of_a_wait_is_retried() {
    let store = Late::default();
    *store.conflicts.lock().unwrap() = 3;
    // The request sends no further step before the end of this wait.
    let wait = Duration::from_secs(5);
    let request = Acquire::new(LONG).lease_id(LeaseId::random()).wait(wait);
    is_held(Driver::over(store).acquire(&sku(), request).await);
}

/// The request must not join the queue again, because it could displace a retry of its client.
#[tokio::test(start_paused = true)]
async fn position_is_kept_although_its_reply_is_late() {
    const SOON: Duration = Duration::from_millis(100);
    let (_arrives, arrived) = watch::channel(true);
    let store = Late {
        join_time: 2 * SOON,
        ..Late::default()
    };
    *store.grants.lock().unwrap() = Some(arrived);
    let leases = Driver::over(store.clone());
    let request = Acquire::new(LONG).lease_id(LeaseId::random()).wait(SOON);
    is_held(leases.acquire(&sku(), request).await);
    sleep(SOON).await;
    let holder = *store.holder.lock().unwrap();
    assert!(holder.is_some(), "the request has left the queue");
}

/// The step that joins the queue fails after the end of the wait. In the meantime, the client
/// retries at another issuer.
#[tokio::test(start_paused = true)]
async fn kept_request_does_not_displace_the_retry_of_its_client() {
    const SOON: Duration = Duration::from_millis(100);
    let (leases, positions, arrives) = delaying(true);
    let id = LeaseId::random();
    let request = Acquire::new(LONG).lease_id(id.clone()).wait(SOON);
    let first = spawn_acquire(&leases, &sku(), request);
    sleep(2 * SOON).await;
    positions.join(&LeaseDigest::of(id.expose()), 1);
    let of_retry = positions.with(|positions| positions.clone());
    arrives.send_replace(true);
    is_unavailable(first.await.unwrap());
    for _ in 0..50 {
        sleep(SOON).await;
        assert_eq!(positions.with(|positions| positions.clone()), of_retry);
    }
}

/// Otherwise the next request would wait behind a request that has already been answered.
#[tokio::test(start_paused = true)]
async fn request_has_left_the_queue_when_it_is_answered() {
    const SOON: Duration = Duration::from_millis(100);
    let (leases, positions, arrives) = delaying(false);
    let later = async {
        sleep(2 * SOON).await;
        arrives.send(true).unwrap();
    };
    let resource = sku();
    let request = leases.acquire(&resource, Acquire::new(LONG).wait(SOON));
    let (refused, ()) = tokio::join!(request, later);
    is_held(refused);
    assert_eq!(positions.with(|positions| positions.len()), 0);
}

/// The client releases its lease id while the store grants the lease to a request that the client
/// has given up.
#[tokio::test(start_paused = true)]
async fn late_grant_after_a_release_is_undone() {
    const SOON: Duration = Duration::from_millis(100);
    let (arrives, arrived) = watch::channel(false);
    let store = Late::default();
    let leases = Driver::over(store.clone());
    let id = LeaseId::random();
    let request = Acquire::new(LONG).lease_id(id.clone()).wait(SOON);
    is_held(leases.acquire(&sku(), request).await);
    *store.grants.lock().unwrap() = Some(arrived);
    // The position is kept, and the request retries.
    sleep(SOON).await;
    is_lost(leases.release(&sku(), &id).await);
    arrives.send_replace(true);
    sleep(SOON).await;
    assert_eq!(*store.holder.lock().unwrap(), None);
}

/// The client's wait is over. Its position is kept for three seconds, in case the client retries.
#[tokio::test]
async fn release_ends_the_grant_of_a_kept_request() {
    let (one, two, _db) = Memory::fresh().await;
    let first = grant(&one, &sku(), LONG).await;
    let id = LeaseId::random();
    let request = Acquire::new(LONG).lease_id(id.clone()).wait(Memory::SHORT);
    is_held(two.acquire(&sku(), request).await);
    one.release(&sku(), &first.id).await.unwrap();
    eventually!(
        "the kept request is granted the lease",
        one.inspect(&sku()).await.unwrap().is_some()
    );
    two.release(&sku(), &id).await.unwrap();
    assert_eq!(one.inspect(&sku()).await.unwrap(), None);
}
