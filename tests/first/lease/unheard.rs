//! Requests that wait although their process receives no notifications, or the store fails.

use std::{
    fmt,
    future::pending,
    sync::atomic::{AtomicU32, Ordering::Relaxed},
    time::Duration,
};

use tokio::time::{Instant, sleep};
use tower_fence::{
    Resource,
    lease::{
        Acquire, Backend, Driver, Held, LeaseError, Leases, Page, Turns,
        backend::{Counters, Reply, Seen, Step},
    },
};

use crate::support::{
    lease::{LONG, is_held, is_unavailable, sku},
    log::Log,
};

/// A store that cannot be listened to, and whose lease is always held.
#[derive(Default)]
struct Unheard {
    steps: AtomicU32,
    attempts_to_listen: AtomicU32,
}

impl Backend for Unheard {
    async fn step(&self, _: &Resource, _: Step<'_>, _: Seen<'_>) -> Result<Reply, LeaseError> {
        self.steps.fetch_add(1, Relaxed);
        Ok(Reply::Held { left: LONG })
    }

    shows_no_lease!();

    async fn listen(&self, _: &Turns) -> Result<(), LeaseError> {
        self.attempts_to_listen.fetch_add(1, Relaxed);
        Err(LeaseError::unavailable(fmt::Error))
    }
}

#[tokio::test(start_paused = true)]
async fn waiter_polls_a_few_times_per_second() {
    let (log, _guard) = Log::of_this_thread("warn");
    let wait = Duration::from_secs(60);
    let leases = Driver::over(Unheard::default());
    is_held(leases.acquire(&sku(), Acquire::new(LONG).wait(wait)).await);
    let steps = leases.backend().steps.load(Relaxed);
    assert!((60..600).contains(&steps), "{steps} steps in {wait:?}");
    let attempts = leases.backend().attempts_to_listen.load(Relaxed);
    assert!((10..30).contains(&attempts), "{attempts} attempts");
    let log = log.text();
    let lines = log.matches("cannot receive notifications").count();
    assert!((1..=61).contains(&lines), "{lines} lines: {log}");
}

/// A store whose lease is held, and in which each step takes this time. The store then notifies all
/// requests, and fails for a while.
#[derive(Default)]
struct Failing {
    steps: AtomicU32,
    step_time: Duration,
}

impl Backend for Failing {
    async fn step(&self, _: &Resource, _: Step<'_>, _: Seen<'_>) -> Result<Reply, LeaseError> {
        let number = self.steps.fetch_add(1, Relaxed);
        sleep(self.step_time).await;
        match number {
            2..20 => Err(LeaseError::unavailable(fmt::Error)),
            _ => Ok(Reply::Queued {
                left: LONG,
                joined: false,
            }),
        }
    }

    shows_no_lease!();

    async fn listen(&self, turns: &Turns) -> Result<(), LeaseError> {
        turns.ready(1);
        sleep(Duration::from_secs(1)).await;
        turns.call_all();
        pending().await
    }
}

#[tokio::test(start_paused = true)]
async fn waiter_outlasts_a_failure_of_the_store() {
    let leases = Driver::over(Failing::default());
    let wait = Duration::from_secs(40);
    is_held(leases.acquire(&sku(), Acquire::new(LONG).wait(wait)).await);
    let steps = leases.backend().steps.load(Relaxed);
    assert!((20..30).contains(&steps), "{steps} steps in {wait:?}");
}

/// The first request has its first reply only after its wait. The second request has two replies in
/// time, and then a failure after its wait.
#[tokio::test(start_paused = true)]
async fn reply_after_the_wait_is_the_last() {
    let seconds = Duration::from_secs;
    for (wait, answered_after, is_failure) in [(1, 2, false), (5, 6, true)] {
        let leases = Driver::over(Failing {
            step_time: seconds(2),
            ..Failing::default()
        });
        let began = Instant::now();
        let request = Acquire::new(LONG).wait(seconds(wait));
        let refused = leases.acquire(&sku(), request).await;
        assert_eq!(began.elapsed().as_secs(), answered_after);
        match is_failure {
            true => is_unavailable(refused),
            false => drop(is_held(refused)),
        }
    }
}
