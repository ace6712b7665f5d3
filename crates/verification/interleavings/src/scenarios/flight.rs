//! Only one request at a time calls the source of epochs. If that request fails, the requests that
//! wait for it fail as well.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::Duration,
};

use super::{all, by_chance, some_ms, tasks};
use crate::{
    epochs::{Epoch, EpochError, EpochFuture, Epochs, SourceId},
    lease::{LeaseError, counters::KnownCounters, single_flight::SingleFlight},
    model::{
        clock::{Instant, sleep},
        step,
        tokio::time::timeout,
    },
};

/// A source that fails with a probability of one half, and detects concurrent calls.
#[derive(Default)]
struct Source {
    asked: AtomicBool,
}

impl Source {
    async fn report_epoch(&self, seen: Epoch) -> Result<Epoch, EpochError> {
        struct Asked<'a>(&'a AtomicBool);
        impl Drop for Asked<'_> {
            fn drop(&mut self) {
                self.0.store(false, SeqCst);
            }
        }
        assert!(!self.asked.swap(true, SeqCst), "two concurrent calls");
        let _asked = Asked(&self.asked);
        step();
        sleep(Duration::from_millis(1)).await;
        if by_chance() {
            return Err(EpochError::Unreachable("away".into()));
        }
        Ok(seen)
    }
}

impl Epochs for Arc<Source> {
    fn next_epoch(&self, _: u8, at_least: Epoch) -> EpochFuture<'_> {
        Box::pin(async move { Ok(at_least) })
    }

    fn report_epoch(&self, _: u8, seen: Epoch) -> EpochFuture<'_> {
        Box::pin(Source::report_epoch(self, seen))
    }

    fn source_id(&self) -> EpochFuture<'_, SourceId> {
        Box::pin(async { Ok(SourceId::new("source").unwrap()) })
    }
}

/// If an attempt fails, the requests that have waited for it make no attempts of their own.
pub async fn waiting_requests_share_one_failed_attempt() {
    let flights = Arc::<SingleFlight>::default();
    let failed_at = Arc::<Mutex<Option<Instant>>>::default();
    let callers = tasks(5, |n| {
        let (flights, failed_at) = (flights.clone(), failed_at.clone());
        async move {
            let asked_at = Instant::now();
            let Ok(flight) = flights.begin().await else {
                return;
            };
            let last = *failed_at.lock().unwrap();
            assert!(last.is_none_or(|last| last <= asked_at));
            let attempt = sleep(Duration::from_millis(1));
            if n == 0 {
                // `flight` is dropped here, so the next attempt may begin.
                drop(timeout(some_ms([0, 1]), attempt).await);
                return;
            }
            attempt.await;
            if by_chance() {
                *failed_at.lock().unwrap() = Some(Instant::now());
                flight.fail(LeaseError::unavailable(std::io::Error::other("away")));
            }
        }
    });
    all(callers).await;
}

/// After a minute, one of the requests reports the epoch to the source again.
pub async fn one_request_re_reports_the_epoch() {
    let source = Arc::<Source>::default();
    let memory = KnownCounters::new(Arc::new(source.clone()));
    while memory.record_grant(7, Epoch::FIRST, 1).await.is_err() {}
    sleep(Duration::from_secs(61)).await;
    let callers = tasks(3, |_| {
        let memory = memory.clone();
        async move { assert!(memory.record_grant(7, Epoch::FIRST, 1).await.unwrap()) }
    });
    all(callers).await;
}
