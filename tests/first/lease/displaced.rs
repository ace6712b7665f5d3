//! Requests that end in a store in which positions do not expire.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::{sync::watch, time::sleep};
use tower_fence::{
    Resource, Token,
    announce::LeaseDigest,
    lease::{
        Acquire, Backend, Driver, Held, LeaseError, LeaseId, Leases, ListError, Page,
        backend::{Counters, End, Reply, Seen, Step, Waits},
    },
};

use crate::support::lease::{LONG, is_held, sku};

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

    fn leave(&self, lease: &LeaseDigest, ticket: i64) {
        self.with(|positions| positions.retain(|one| *one != (lease.clone(), ticket)));
    }
}

/// A store that delays the step with which the first request joins the queue. If it is exhausted,
/// it reports this to the requests in the queue.
#[derive(Default)]
struct Delaying {
    positions: Positions,
    first: Mutex<Option<watch::Receiver<bool>>>,
    is_exhausted: bool,
}

impl Backend for Delaying {
    async fn step(&self, _: &Resource, step: Step<'_>, _: Seen<'_>) -> Result<Reply, LeaseError> {
        let left = LONG;
        match step {
            Step::Acquire(_, Waits::Yes { queued: true, .. }) if self.is_exhausted => {
                Ok(Reply::Exhausted(Token::MAX.get()))
            }
            Step::Acquire(ask, Waits::Yes { .. }) => {
                let delay = self.first.lock().unwrap().take();
                if let Some(mut arrives) = delay {
                    arrives.wait_for(|arrives| *arrives).await.unwrap();
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

    async fn inspect(&self, _: &Resource, _: Seen<'_>) -> Result<Option<Held>, LeaseError> {
        Ok(None)
    }

    async fn page(&self, _: usize, _: Option<&str>, _: Counters<'_>) -> Result<Page, ListError> {
        Ok(Page::new(vec![], None))
    }
}

#[tokio::test(start_paused = true)]
async fn late_step_of_a_displaced_request_leaves_no_position() {
    const LATER: Duration = Duration::from_secs(10);
    let (arrives, arrived) = watch::channel(false);
    let positions = Positions::default();
    let leases = Driver::over(Delaying {
        positions: positions.clone(),
        first: Mutex::new(Some(arrived)),
        is_exhausted: false,
    });
    let id = LeaseId::random();
    let acquire = || {
        let (leases, request) = (
            leases.clone(),
            Acquire::new(LONG).lease_id(id.clone()).wait(LONG),
        );
        tokio::spawn(async move { leases.acquire(&sku(), request).await })
    };
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
    assert!(
        matches!(refused, Err(LeaseError::Exhausted { .. })),
        "{refused:?}"
    );
    sleep(Duration::from_secs(10)).await;
    assert_eq!(positions.with(|positions| positions.len()), 0);
}
