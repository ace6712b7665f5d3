//! State of the epochs in a process: their source, and the highest token of each partition.
//!
//! 1. If a store's counter was set back (because it was restored from a copy or a snapshot), the
//!    process does not accept tokens below the highest one that it has seen.
//! 2. If a source of epochs has lost epochs (after a failover, or a restored backup), the process
//!    re-reports them. The process does so before it returns the first grant under an epoch, and at
//!    most once per minute while it grants or renews leases.
//! 3. If a source replies that an epoch has ended (all its tokens are stale, for example after a
//!    failover of the database), the store begins a new epoch.
//! 4. For each partition, one request at a time contacts the source. If this request fails, the
//!    requests that wait for it fail with the same error.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

use super::{
    LeaseError,
    single_flight::{Flight, OnceFlight, SingleFlight},
};
use crate::{
    chain::Chain,
    epochs::{Epoch, EpochError, Epochs, SourceId},
};

/// Minimum interval at which an epoch is re-reported to its source.
const REPORT_INTERVAL: Duration = Duration::from_secs(60);

/// Source of epochs, and the state of each partition that this process has seen.
pub(super) struct KnownCounters {
    epochs: Arc<dyn Epochs>,
    source: OnceFlight<SourceId>,
    partitions: Box<[Partition]>,
}

#[derive(Default)]
struct Partition {
    state: Mutex<State>,
    flight: SingleFlight,
}

#[derive(Clone, Copy, Default)]
struct State {
    /// The highest epoch (0 if none) and number that this process has seen. Each grant and each
    /// renewal raises it, and so does the end of an epoch.
    highest: (i64, i64),
    /// The highest epoch that the source has confirmed, or 0 if it has confirmed none. A new epoch
    /// sets it, and so does a report that a grant waits for. [`doubt`](KnownCounters::doubt) resets
    /// both this epoch and `reported_at`.
    confirmed: i64,
    /// When the last report to the source was answered or, in the background, when it began.
    reported_at: Option<Instant>,
    /// The lowest valid epoch, or 0 if it is unknown. Each reply to a report raises it.
    lowest: i64,
}

impl State {
    /// Returns whether a report is due. If it is, it counts as sent.
    fn claim_report(&mut self) -> bool {
        let recent = |at: Instant| at.elapsed() < REPORT_INTERVAL;
        let is_due = !self.reported_at.is_some_and(recent);
        if is_due {
            self.reported_at = Some(Instant::now());
        }
        is_due
    }
}

/// Whether an epoch must be reported to its source.
enum Report {
    /// The last report is less than [`REPORT_INTERVAL`] old, so no report is needed.
    Recent,
    /// A report in the background is enough.
    Due,
    /// The source has not confirmed the epoch, so the grant waits for a report.
    Never,
}

impl KnownCounters {
    pub(super) fn new(epochs: Arc<dyn Epochs>) -> Arc<Self> {
        Arc::new(Self {
            epochs,
            source: OnceFlight::default(),
            partitions: (0..=u8::MAX).map(|_| Partition::default()).collect(),
        })
    }

    /// Returns the source of the epochs, if it is known.
    pub(super) fn source(&self) -> Option<&SourceId> {
        self.source.get()
    }

    /// Reads the id of the source of the epochs, unless it is known.
    pub(super) async fn learn_source(&self) -> Result<(), LeaseError> {
        let source_id = || async { Ok(self.epochs.source_id().await?) };
        self.source.determine(source_id).await
    }

    /// Returns the highest epoch and number that this process has seen in a partition.
    pub(super) fn highest(&self, partition: u8) -> (i64, i64) {
        self.state(partition).highest
    }

    /// Returns whether all tokens that this process has seen in a partition belong to ended epochs.
    pub(super) fn has_ended(&self, partition: u8) -> bool {
        let state = self.state(partition);
        state.highest.0 < state.lowest
    }

    /// Waits until no other request contacts the source for this partition. The previous request
    /// may have made this one unnecessary.
    pub(super) async fn flight(&self, partition: u8) -> Result<Flight<'_>, LeaseError> {
        self.partitions[usize::from(partition)].flight.begin().await
    }

    /// Takes an epoch above `last` from the source.
    pub(super) async fn next_epoch(&self, partition: u8, last: i64) -> Result<Epoch, LeaseError> {
        let at_least = Epoch::new(last.saturating_add(1))?;
        let epoch = self.epochs.next_epoch(partition, at_least).await?;
        if epoch < at_least {
            // The source violates its contract. Without this check, the driver would request epochs
            // in an endless loop.
            return Err(EpochError::Exhausted.into());
        }
        self.note_confirmed(partition, epoch);
        Ok(epoch)
    }

    /// Records the highest token of a partition.
    fn record(&self, partition: u8, epoch: Epoch, n: i64) {
        let mut state = self.state(partition);
        state.highest = state.highest.max((epoch.get(), n));
    }

    /// Records the highest token of a partition, and makes sure that the source has recorded the
    /// epoch. Returns false if the epoch has ended, which makes the grant invalid.
    pub(super) async fn record_grant(
        self: &Arc<Self>,
        partition: u8,
        epoch: Epoch,
        n: i64,
    ) -> Result<bool, LeaseError> {
        self.record(partition, epoch, n);
        match self.claim_report(partition, epoch) {
            Report::Recent => {}
            Report::Due => self.report_in_background(partition, epoch),
            Report::Never => {
                let flight = self.flight(partition).await?;
                if matches!(self.claim_report(partition, epoch), Report::Never) {
                    match self.epochs.report_epoch(partition, epoch).await {
                        Ok(lowest) => {
                            self.note_confirmed(partition, epoch);
                            self.note_lowest_valid(partition, epoch, lowest);
                        }
                        Err(error) => return Err(flight.fail(LeaseError::from(error))),
                    }
                }
            }
        }
        // Another request may have learned that the epoch has ended.
        Ok(epoch.get() >= self.state(partition).lowest)
    }

    /// Records the highest token of a partition after a renewal that keeps its token. This method
    /// does not wait for the source. If the source has not been contacted for a minute, a
    /// background task asks the source whether the epoch has ended.
    pub(super) fn record_renewal(self: &Arc<Self>, partition: u8, epoch: Epoch, n: i64) {
        self.record(partition, epoch, n);
        if self.state(partition).claim_report() {
            self.report_in_background(partition, epoch);
        }
    }

    /// Re-reports an epoch in the background. A failure is only logged.
    fn report_in_background(self: &Arc<Self>, partition: u8, epoch: Epoch) {
        let counters = Arc::clone(self);
        tokio::spawn(async move {
            match counters.epochs.report_epoch(partition, epoch).await {
                Ok(lowest) => counters.note_lowest_valid(partition, epoch, lowest),
                Err(error) => tracing::warn!(
                    partition, %epoch, error = Chain(&error).to_string(),
                    "could not report an epoch to its source"
                ),
            }
        });
    }

    /// Records that `lowest` is the lowest valid epoch. If `epoch` is lower, the next step finds
    /// that its counter is lower than the recorded state, and replaces the counter.
    fn note_lowest_valid(&self, partition: u8, epoch: Epoch, lowest: Epoch) {
        let mut state = self.state(partition);
        state.lowest = state.lowest.max(lowest.get());
        if lowest > epoch {
            tracing::warn!(
                partition, %epoch, lowest_valid = %lowest,
                "all tokens of this epoch are stale, for example after a failover of the database; \
                 beginning another epoch"
            );
            state.highest = state.highest.max((lowest.get() - 1, Epoch::SIZE - 1));
        }
    }

    /// Makes the next grant report the epoch again, because the epoch may have ended.
    pub(super) fn doubt(&self, partition: u8) {
        let mut state = self.state(partition);
        (state.confirmed, state.reported_at) = (0, None);
    }

    /// Returns which report of this epoch the caller must send to the source. `Due` counts as sent:
    /// of several concurrent callers, only one gets it.
    fn claim_report(&self, partition: u8, epoch: Epoch) -> Report {
        let mut state = self.state(partition);
        if state.confirmed < epoch.get() {
            return Report::Never;
        }
        match state.claim_report() {
            true => Report::Due,
            false => Report::Recent,
        }
    }

    fn note_confirmed(&self, partition: u8, epoch: Epoch) {
        let mut state = self.state(partition);
        state.confirmed = state.confirmed.max(epoch.get());
        state.reported_at = Some(Instant::now());
    }

    fn state(&self, partition: u8) -> MutexGuard<'_, State> {
        // No code panics while it holds the lock.
        self.partitions[usize::from(partition)]
            .state
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicI64, Ordering::SeqCst};

    use futures_util::future::join_all;
    use tokio::time::{advance, sleep};

    use super::*;
    use crate::epochs::EpochFuture;

    /// Source that can lose epochs and become unreachable.
    #[derive(Clone, Default)]
    struct LossySource {
        epoch: Arc<AtomicI64>,
        asked: Arc<AtomicI64>,
        down: Arc<AtomicBool>,
    }

    impl LossySource {
        fn answer<T: Send + 'static>(
            &self,
            answer: impl FnOnce(&Self) -> T + Send + 'static,
        ) -> EpochFuture<'static, T> {
            let source = self.clone();
            Box::pin(async move {
                source.asked.fetch_add(1, SeqCst);
                sleep(Duration::from_secs(1)).await;
                if source.down.load(SeqCst) {
                    return Err(EpochError::Unreachable("down".into()));
                }
                Ok(answer(&source))
            })
        }
    }

    impl Epochs for LossySource {
        fn next_epoch(&self, _: u8, at_least: Epoch) -> EpochFuture<'_> {
            self.answer(move |source| {
                let next = (source.epoch.load(SeqCst) + 1).max(at_least.get());
                source.epoch.store(next, SeqCst);
                Epoch::new(next).unwrap()
            })
        }

        fn report_epoch(&self, _: u8, seen: Epoch) -> EpochFuture<'_> {
            self.answer(move |source| {
                source.epoch.fetch_max(seen.get(), SeqCst);
                seen
            })
        }

        fn source_id(&self) -> EpochFuture<'_, SourceId> {
            self.answer(|_| SourceId::new("source").unwrap())
        }
    }

    fn epoch(number: i64) -> Epoch {
        Epoch::new(number).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn forgotten_epoch_is_re_reported_each_minute() {
        let source = LossySource::default();
        let counters = KnownCounters::new(Arc::new(source.clone()));
        counters.record_grant(7, epoch(3), 1).await.unwrap();
        assert_eq!(source.epoch.load(SeqCst), 3);
        for again in 1..=3 {
            source.epoch.store(0, SeqCst);
            advance(REPORT_INTERVAL / 2).await;
            counters.record_grant(7, epoch(3), 2).await.unwrap();
            assert_eq!(
                source.asked.load(SeqCst),
                again,
                "the epoch was reported less than a minute ago"
            );
            advance(REPORT_INTERVAL / 2).await;
            counters.record_grant(7, epoch(3), 3).await.unwrap();
            counters.record_grant(7, epoch(3), 4).await.unwrap();
            sleep(Duration::from_secs(2)).await;
            assert_eq!(source.epoch.load(SeqCst), 3);
            assert_eq!(source.asked.load(SeqCst), again + 1);
        }
        // A failed report in the background does not make a grant fail. A failed first report does.
        source.down.store(true, SeqCst);
        advance(REPORT_INTERVAL).await;
        counters.record_grant(7, epoch(3), 5).await.unwrap();
        counters.record_grant(8, epoch(3), 5).await.unwrap_err();
        counters.record_grant(7, epoch(4), 1).await.unwrap_err();
    }

    /// Source for which all tokens below this epoch are stale.
    struct LowestValid(i64);

    impl Epochs for LowestValid {
        fn next_epoch(&self, _: u8, at_least: Epoch) -> EpochFuture<'_> {
            Box::pin(async move { Ok(at_least) })
        }

        fn report_epoch(&self, _: u8, _: Epoch) -> EpochFuture<'_> {
            Box::pin(async { Ok(epoch(self.0)) })
        }

        fn source_id(&self) -> EpochFuture<'_, SourceId> {
            Box::pin(async { Ok(SourceId::new("source").unwrap()) })
        }
    }

    #[tokio::test]
    async fn epochs_with_stale_tokens_count_as_fully_used() {
        let counters = KnownCounters::new(Arc::new(LowestValid(5)));
        let grants = (1..3).map(|n| counters.record_grant(7, epoch(3), n));
        for is_valid in join_all(grants).await {
            assert!(!is_valid.unwrap());
        }
        assert_eq!(counters.highest(7), (4, Epoch::SIZE - 1));
        assert!(counters.has_ended(7));
        assert!(counters.record_grant(7, epoch(5), 1).await.unwrap());
        assert_eq!(counters.highest(7), (5, 1));
        assert!(!counters.has_ended(7));
    }

    #[tokio::test(start_paused = true)]
    async fn next_grant_after_a_doubt_asks_the_source() {
        let source = LossySource::default();
        let counters = KnownCounters::new(Arc::new(source.clone()));
        counters.record_grant(7, epoch(3), 1).await.unwrap();
        counters.record_grant(7, epoch(3), 2).await.unwrap();
        assert_eq!(source.asked.load(SeqCst), 1);
        counters.doubt(7);
        counters.record_grant(7, epoch(3), 3).await.unwrap();
        assert_eq!(source.asked.load(SeqCst), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn renewal_re_reports_the_epoch_each_minute_without_waiting() {
        let source = LossySource::default();
        let counters = KnownCounters::new(Arc::new(source.clone()));
        let asked = async || {
            // The report runs in the background.
            sleep(Duration::from_secs(2)).await;
            source.asked.load(SeqCst)
        };
        counters.record_renewal(7, epoch(3), 1);
        assert_eq!(counters.highest(7), (3, 1));
        counters.record_renewal(7, epoch(3), 2);
        assert_eq!((asked().await, counters.highest(7)), (1, (3, 2)));
        advance(REPORT_INTERVAL).await;
        counters.record_renewal(7, epoch(3), 3);
        assert_eq!(asked().await, 2);
        // A grant reported the epoch just before this renewal.
        advance(REPORT_INTERVAL).await;
        counters.record_grant(7, epoch(3), 4).await.unwrap();
        counters.record_renewal(7, epoch(3), 4);
        assert_eq!(asked().await, 3);
    }

    #[tokio::test(start_paused = true)]
    async fn waiters_for_a_failed_attempt_fail_with_it() {
        let source = LossySource::default();
        source.down.store(true, SeqCst);
        let counters = KnownCounters::new(Arc::new(source.clone()));
        let began = Instant::now();
        let asking = (0..100).map(|n| counters.record_grant(7, epoch(1), n));
        let outcomes = join_all(asking).await;
        assert!(outcomes.iter().all(Result::is_err));
        assert_eq!(source.asked.load(SeqCst), 1);
        assert!(began.elapsed() < Duration::from_secs(2));
        // The next request tries again.
        source.down.store(false, SeqCst);
        counters.record_grant(7, epoch(1), 1).await.unwrap();
    }
}
