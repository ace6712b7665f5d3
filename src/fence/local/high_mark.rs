//! Cached upper bound of the numbers that a source has issued. A number above the bound is refused
//! only after a lookup.
//!
//! 1. The bound only grows, so a number that is not above the bound needs no lookup.
//! 2. A request with a number above the bound waits for a lookup that begins after the request has
//!    arrived. A number that was issued just before the request is therefore not refused. All
//!    waiting requests share that lookup.
//! 3. After a lookup that failed or did not find the number, the next lookup begins at least one
//!    second later. Many forged tokens therefore cause few lookups. If the request that runs a
//!    lookup is dropped, the lookup counts as unsuccessful, and no request is refused because of
//!    it.

use std::{
    sync::atomic::{AtomicI64, Ordering::Relaxed},
    time::Duration,
};

use derive_where::derive_where;
use tokio::{
    sync::Mutex,
    time::{Instant, sleep_until},
};

/// Minimum time from the start of an unsuccessful lookup to the start of the next lookup.
const BETWEEN_LOOKS: Duration = Duration::from_secs(1);

#[derive_where(Default)]
pub(crate) struct HighMark<E> {
    /// The cached bound, or 0 before the first lookup.
    highest: AtomicI64,
    /// Locked during a lookup.
    last: Mutex<Option<Look<E>>>,
}

struct Look<E> {
    began: Instant,
    /// `None` while the lookup runs. If another request finds `None`, the lookup was dropped.
    outcome: Option<Result<(), E>>,
    /// Whether the lookup failed or did not find the number.
    in_vain: bool,
}

impl<E: Clone> HighMark<E> {
    /// Returns whether a number was issued, according to the cache or to `look`, which returns the
    /// highest issued number.
    pub(crate) async fn has(
        &self,
        number: i64,
        look: impl AsyncFnOnce() -> Result<i64, E>,
    ) -> Result<bool, E> {
        let known = || number <= self.highest.load(Relaxed);
        if known() {
            return Ok(true);
        }
        let arrived = Instant::now();
        let mut last = self.last.lock().await;
        let is_judged = |look: &Look<E>| look.began > arrived && look.outcome.is_some();
        if !known() && !last.as_ref().is_some_and(is_judged) {
            if let Some(before) = last.as_ref().filter(|look| look.in_vain) {
                sleep_until(before.began + BETWEEN_LOOKS).await;
            }
            let this = last.insert(Look {
                began: Instant::now(),
                outcome: None,
                in_vain: true,
            });
            let outcome = look().await.map(|highest| {
                self.highest.fetch_max(highest, Relaxed);
            });
            this.outcome = Some(outcome);
            this.in_vain = !known();
        }
        match &*last {
            _ if known() => Ok(true),
            Some(Look {
                outcome: Some(Err(error)),
                ..
            }) => Err(error.clone()),
            _ => Ok(false),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn many_forged_tokens_cause_few_reads() {
        let mark = Arc::new(HighMark::<()>::default());
        let (looks, highest) = (Arc::new(AtomicI64::new(0)), Arc::new(AtomicI64::new(7)));
        let has = |number| {
            let (mark, looks, highest) = (mark.clone(), looks.clone(), highest.clone());
            tokio::spawn(async move {
                let look = async || {
                    looks.fetch_add(1, Relaxed);
                    Ok(highest.load(Relaxed))
                };
                mark.has(number, look).await.unwrap()
            })
        };
        assert!(has(7).await.unwrap());
        assert!(has(1).await.unwrap());
        assert_eq!(looks.load(Relaxed), 1);
        let began = Instant::now();
        let forged: Vec<_> = (0..1_000).map(|n| has(8 + n)).collect();
        // The source issues one of these numbers while all requests wait for a lookup.
        tokio::time::advance(BETWEEN_LOOKS / 2).await;
        highest.store(8, Relaxed);
        let eighth = has(8);
        let refused = futures_util::future::join_all(forged).await;
        let refused = refused.iter().filter(|has| matches!(has, Ok(false)));
        assert!((999..=1_000).contains(&refused.count()));
        assert!(eighth.await.unwrap());
        assert!(looks.load(Relaxed) <= 4, "{looks:?}");
        assert!(began.elapsed() < 3 * BETWEEN_LOOKS);
    }

    /// Checks that a request with an issued number above the cached bound does not wait. Each new
    /// grant has such a number.
    #[tokio::test(start_paused = true)]
    async fn successful_lookups_do_not_wait() {
        let mark = HighMark::<()>::default();
        let began = Instant::now();
        for number in 1..=100 {
            assert!(mark.has(number, async || Ok(number)).await.unwrap());
        }
        assert_eq!(began.elapsed(), Duration::ZERO);
        assert!(!mark.has(101, async || Ok(100)).await.unwrap());
        assert!(mark.has(101, async || Ok(101)).await.unwrap());
        assert_eq!(began.elapsed(), BETWEEN_LOOKS);
    }

    #[tokio::test(start_paused = true)]
    async fn disconnected_requests_cause_one_read_per_second() {
        let mark = Arc::new(HighMark::<()>::default());
        let looks = Arc::new(AtomicI64::new(0));
        let began = Instant::now();
        for _ in 0..100 {
            let (mark, looks) = (mark.clone(), looks.clone());
            let request = tokio::spawn(async move {
                let look = async || {
                    looks.fetch_add(1, Relaxed);
                    std::future::pending::<Result<i64, ()>>().await
                };
                mark.has(1, look).await
            });
            tokio::time::sleep(BETWEEN_LOOKS / 10).await;
            request.abort();
        }
        assert_eq!(began.elapsed(), 10 * BETWEEN_LOOKS);
        assert!((5..=11).contains(&looks.load(Relaxed)), "{looks:?}");
        // A lookup that was dropped refuses no request.
        assert_eq!(mark.has(1, async || Ok(1)).await, Ok(true));
    }

    #[tokio::test(start_paused = true)]
    async fn failed_read_refuses_no_request_permanently() {
        let mark = HighMark::default();
        assert_eq!(mark.has(1, async || Err("away")).await, Err("away"));
        assert_eq!(mark.has(1, async || Ok(1)).await, Ok(true));
    }
}
