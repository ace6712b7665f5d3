//! What a process remembers of epochs, beside its store: whose they are, and how far each partition
//! has counted.
//!
//! 1. A store that goes back (a clock that was copied, an old snapshot) is not followed below what
//!    this process has seen.
//! 2. A source of epochs that goes back (a failover, a restored backup) is told what it forgot:
//!    before the first grant under an epoch is answered, and again each minute while there are
//!    grants.
//! 3. A source that answers that an epoch is over (all its tokens are dead, as after a failover of the
//!    database) is believed: the store begins a new one.
//! 4. One request at a time asks the source, for each partition. A request that waited for one that failed
//!    fails with it.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

use super::{
    LeaseError,
    single_flight::{Flight, SingleFlight},
};
use crate::{
    chain::Chain,
    epochs::{Epoch, EpochError, Epochs},
};

/// How often a source is told of an epoch that it should know.
const REMINDER_INTERVAL: Duration = Duration::from_secs(60);

pub(super) struct KnownCounters {
    epochs: Arc<dyn Epochs>,
    source: Source,
    partitions: Box<[Partition]>,
}

/// Whose epochs these are, from the first time on that it was asked.
#[derive(Default)]
struct Source {
    id: std::sync::OnceLock<crate::epochs::SourceId>,
    flight: SingleFlight,
}

#[derive(Default)]
struct Partition {
    seen: Mutex<Seen>,
    flight: SingleFlight,
}

#[derive(Clone, Copy, Default)]
struct Seen {
    /// The clock that was seen last, an epoch (0: none) and a number.
    clock: (i64, i64),
    /// The epoch that the source knows, and when that was made sure.
    told: Option<(i64, Instant)>,
    /// When the source was asked last on behalf of a renewal.
    asked: Option<Instant>,
}

/// When the source was last told of an epoch.
enum Reminder {
    Recent,
    Due,
    Never,
}

impl KnownCounters {
    pub(super) fn new(epochs: Arc<dyn Epochs>) -> Arc<Self> {
        Arc::new(Self {
            epochs,
            source: Source::default(),
            partitions: (0..=u8::MAX).map(|_| Partition::default()).collect(),
        })
    }

    /// Whose epochs these are, where that is known.
    pub(super) fn source(&self) -> Option<&crate::epochs::SourceId> {
        self.source.id.get()
    }

    /// Makes sure that it is known whose epochs these are.
    pub(super) async fn learn_source(&self) -> Result<(), LeaseError> {
        if self.source().is_some() {
            return Ok(());
        }
        let flight = self.source.flight.begin().await?;
        if self.source().is_none() {
            match self.epochs.source_id().await {
                Ok(id) => drop(self.source.id.set(id)),
                Err(error) => return Err(flight.fail(LeaseError::from(error))),
            }
        }
        Ok(())
    }

    /// The highest epoch and number that this process has seen of a partition.
    pub(super) fn highest(&self, partition: u8) -> (i64, i64) {
        self.seen(partition).clock
    }

    /// Waits until no other request asks the source for this partition. The answer of the one before
    /// may have made this one unnecessary.
    pub(super) async fn flight(&self, partition: u8) -> Result<Flight<'_>, LeaseError> {
        self.partitions[usize::from(partition)].flight.begin().await
    }

    /// Takes an epoch above `last`.
    pub(super) async fn next_epoch(&self, partition: u8, last: i64) -> Result<Epoch, LeaseError> {
        let at_least = Epoch::new(last.saturating_add(1)).map_err(LeaseError::from)?;
        let epoch = self.epochs.next_epoch(partition, at_least).await;
        let epoch = epoch.map_err(LeaseError::from)?;
        if epoch < at_least {
            // The source does not keep its word, and would be asked for ever.
            return Err(LeaseError::from(EpochError::Exhausted));
        }
        self.note_told(partition, epoch);
        Ok(epoch)
    }

    /// Notes how far a partition has counted.
    pub(super) fn record(&self, partition: u8, epoch: Epoch, n: i64) {
        let mut seen = self.seen(partition);
        seen.clock = seen.clock.max((epoch.get(), n));
    }

    /// Notes how far a partition has counted, and makes sure that the source knows the epoch. False where
    /// that is over, so that the grant is worth nothing.
    pub(super) async fn record_grant(
        self: &Arc<Self>,
        partition: u8,
        epoch: Epoch,
        n: i64,
    ) -> Result<bool, LeaseError> {
        self.record(partition, epoch, n);
        match self.reminder(partition, epoch) {
            Reminder::Recent => {}
            Reminder::Due => self.remind(partition, epoch),
            Reminder::Never => {
                let flight = self.flight(partition).await?;
                if matches!(self.reminder(partition, epoch), Reminder::Never) {
                    match self.epochs.report_epoch(partition, epoch).await {
                        Ok(alive) => {
                            self.note_told(partition, epoch);
                            return Ok(self.note_alive(partition, epoch, alive));
                        }
                        Err(error) => return Err(flight.fail(LeaseError::from(error))),
                    }
                }
            }
        }
        Ok(true)
    }

    /// Notes how far a partition has counted, where a lease was renewed that keeps its token. That needs no source; but
    /// the source is asked in the background, each minute, whether the epoch is over.
    pub(super) fn record_renewal(self: &Arc<Self>, partition: u8, epoch: Epoch, n: i64) {
        self.record(partition, epoch, n);
        let recent = |at: Instant| at.elapsed() < REMINDER_INTERVAL;
        let mut seen = self.seen(partition);
        if seen.asked.is_some_and(recent) || seen.told.is_some_and(|(_, at)| recent(at)) {
            return;
        }
        seen.asked = Some(Instant::now());
        drop(seen);
        self.remind(partition, epoch);
    }

    /// Brings an epoch back, in the background.
    fn remind(self: &Arc<Self>, partition: u8, epoch: Epoch) {
        let memory = Arc::clone(self);
        tokio::spawn(async move {
            match memory.epochs.report_epoch(partition, epoch).await {
                Ok(alive) => _ = memory.note_alive(partition, epoch, alive),
                Err(error) => tracing::warn!(
                    partition, %epoch, error = %Chain(&error),
                    "could not bring an epoch back"
                ),
            }
        });
    }

    /// Notes which epoch is the lowest that counts. False where this one does not: the clock that counts in
    /// it is one that has gone back, from now on.
    fn note_alive(&self, partition: u8, epoch: Epoch, alive: Epoch) -> bool {
        if alive <= epoch {
            return true;
        }
        tracing::warn!(partition, %epoch, %alive, "all tokens of this epoch are dead; beginning another one");
        let mut seen = self.seen(partition);
        seen.clock = seen.clock.max((alive.get() - 1, Epoch::SIZE - 1));
        false
    }

    /// Has the source asked again with the next grant: there is a sign that this epoch may be over.
    pub(super) fn doubt(&self, partition: u8) {
        self.seen(partition).told = None;
    }

    /// When the source was last told of this epoch. Of several callers one is answered that a
    /// reminder is due, and sends it.
    fn reminder(&self, partition: u8, epoch: Epoch) -> Reminder {
        match &mut self.seen(partition).told {
            Some((known, at)) if *known >= epoch.get() => {
                if at.elapsed() < REMINDER_INTERVAL {
                    return Reminder::Recent;
                }
                *at = Instant::now();
                Reminder::Due
            }
            _ => Reminder::Never,
        }
    }

    fn note_told(&self, partition: u8, epoch: Epoch) {
        let told = &mut self.seen(partition).told;
        let known = told.map_or(0, |(known, _)| known);
        *told = Some((known.max(epoch.get()), Instant::now()));
    }

    fn seen(&self, partition: u8) -> MutexGuard<'_, Seen> {
        // Nothing panics while the lock is held.
        self.partitions[usize::from(partition)]
            .seen
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
    use crate::epochs::{EpochFuture, SourceId};

    /// A source that may forget, and be out of reach.
    #[derive(Clone, Default)]
    struct Forgetful {
        epoch: Arc<AtomicI64>,
        asked: Arc<AtomicI64>,
        down: Arc<AtomicBool>,
    }

    impl Forgetful {
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

    impl Epochs for Forgetful {
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
    async fn a_source_that_forgot_is_told_again_each_minute() {
        let source = Forgetful::default();
        let memory = KnownCounters::new(Arc::new(source.clone()));
        memory.record_grant(7, epoch(3), 1).await.unwrap();
        assert_eq!(source.epoch.load(SeqCst), 3);
        for again in 1..=3 {
            source.epoch.store(0, SeqCst);
            advance(REMINDER_INTERVAL / 2).await;
            memory.record_grant(7, epoch(3), 2).await.unwrap();
            assert_eq!(source.asked.load(SeqCst), again, "it was told just now");
            advance(REMINDER_INTERVAL / 2).await;
            memory.record_grant(7, epoch(3), 3).await.unwrap();
            memory.record_grant(7, epoch(3), 4).await.unwrap();
            sleep(Duration::from_secs(2)).await;
            assert_eq!(source.epoch.load(SeqCst), 3);
            assert_eq!(source.asked.load(SeqCst), again + 1);
        }
        // A failure in the background costs no grant; one at the first contact does.
        source.down.store(true, SeqCst);
        advance(REMINDER_INTERVAL).await;
        memory.record_grant(7, epoch(3), 5).await.unwrap();
        memory.record_grant(8, epoch(3), 5).await.unwrap_err();
        memory.record_grant(7, epoch(4), 1).await.unwrap_err();
    }

    /// A source on which all tokens below this epoch are dead.
    struct Alive(i64);

    impl Epochs for Alive {
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
    async fn epochs_whose_tokens_are_dead_count_as_used_up_to_their_end() {
        let memory = KnownCounters::new(Arc::new(Alive(5)));
        assert!(!memory.record_grant(7, epoch(3), 1).await.unwrap());
        assert_eq!(memory.highest(7), (4, Epoch::SIZE - 1));
        assert!(memory.record_grant(7, epoch(5), 1).await.unwrap());
        assert_eq!(memory.highest(7), (5, 1));
    }

    #[tokio::test(start_paused = true)]
    async fn where_there_is_doubt_the_next_grant_asks_the_source() {
        let source = Forgetful::default();
        let memory = KnownCounters::new(Arc::new(source.clone()));
        memory.record_grant(7, epoch(3), 1).await.unwrap();
        memory.record_grant(7, epoch(3), 2).await.unwrap();
        assert_eq!(source.asked.load(SeqCst), 1);
        memory.doubt(7);
        memory.record_grant(7, epoch(3), 3).await.unwrap();
        assert_eq!(source.asked.load(SeqCst), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn a_renewal_reminds_the_source_each_minute_and_needs_no_answer() {
        let source = Forgetful::default();
        let memory = KnownCounters::new(Arc::new(source.clone()));
        let asked = async || {
            // In the background.
            sleep(Duration::from_secs(2)).await;
            source.asked.load(SeqCst)
        };
        memory.record_renewal(7, epoch(3), 1);
        assert_eq!(memory.highest(7), (3, 1));
        memory.record_renewal(7, epoch(3), 2);
        assert_eq!((asked().await, memory.highest(7)), (1, (3, 2)));
        advance(REMINDER_INTERVAL).await;
        memory.record_renewal(7, epoch(3), 3);
        assert_eq!(asked().await, 2);
        // A grant has just told it.
        advance(REMINDER_INTERVAL).await;
        memory.record_grant(7, epoch(3), 4).await.unwrap();
        memory.record_renewal(7, epoch(3), 4);
        assert_eq!(asked().await, 3);
    }

    #[tokio::test(start_paused = true)]
    async fn whoever_waited_for_an_attempt_that_failed_fails_with_it() {
        let source = Forgetful::default();
        source.down.store(true, SeqCst);
        let memory = KnownCounters::new(Arc::new(source.clone()));
        let began = Instant::now();
        let asking = (0..100).map(|n| memory.record_grant(7, epoch(1), n));
        let outcomes = join_all(asking).await;
        assert!(outcomes.iter().all(Result::is_err));
        assert_eq!(source.asked.load(SeqCst), 1);
        assert!(began.elapsed() < Duration::from_secs(2));
        // The next one tries again.
        source.down.store(false, SeqCst);
        memory.record_grant(7, epoch(1), 1).await.unwrap();
    }
}
