//! What a process remembers of epochs, beside its store: whose they are, and how far each partition
//! has counted.
//!
//! 1. A store that goes back (a clock that was copied, an old snapshot) is not followed below what
//!    this process has seen.
//! 2. A source of epochs that goes back (a failover, a restored backup) is told what it forgot:
//!    before the first grant under an epoch is answered, and again each minute while there are
//!    grants.
//! 3. One request at a time asks the source, for each partition. Whoever waited for one that failed
//!    fails with it.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{sync, time::Instant};

use super::LeaseError;
use crate::epochs::{Epoch, EpochError, Epochs};

/// How often a source is told of an epoch that it should know.
const REMINDER: Duration = Duration::from_secs(60);

pub(super) struct Memory {
    epochs: Arc<dyn Epochs>,
    #[cfg(feature = "redis")]
    source: Source,
    partitions: Box<[Partition]>,
}

/// Whose epochs these are, from the first time on that it was asked.
#[cfg(feature = "redis")]
#[derive(Default)]
struct Source {
    id: std::sync::OnceLock<crate::epochs::SourceId>,
    turns: Turns,
}

#[derive(Default)]
struct Partition {
    seen: Mutex<Seen>,
    turns: Turns,
}

#[derive(Clone, Copy, Default)]
struct Seen {
    /// The clock that was seen last, an epoch (0: none) and a number.
    clock: (i64, i64),
    /// The epoch that the source knows, and when that was made sure.
    told: Option<(i64, Instant)>,
}

/// Whether the source knows an epoch.
enum Told {
    Recently,
    LongAgo,
    Never,
}

impl Memory {
    pub(super) fn new(epochs: Arc<dyn Epochs>) -> Arc<Self> {
        Arc::new(Self {
            epochs,
            #[cfg(feature = "redis")]
            source: Source::default(),
            partitions: (0..=u8::MAX).map(|_| Partition::default()).collect(),
        })
    }

    /// Whose epochs these are, where that is known.
    #[cfg(feature = "redis")]
    pub(super) fn source(&self) -> Option<&crate::epochs::SourceId> {
        self.source.id.get()
    }

    /// Makes sure that it is known whose epochs these are.
    #[cfg(feature = "redis")]
    pub(super) async fn learn_source(&self) -> Result<(), LeaseError> {
        if self.source().is_some() {
            return Ok(());
        }
        let turn = self.source.turns.take().await?;
        if self.source().is_none() {
            match self.epochs.source_id().await {
                Ok(id) => drop(self.source.id.set(id)),
                Err(error) => return Err(turn.failed(LeaseError::unavailable(error))),
            }
        }
        Ok(())
    }

    /// The highest epoch and number that this process has seen of a partition.
    #[cfg(feature = "redis")]
    pub(super) fn highest(&self, partition: u8) -> (i64, i64) {
        self.seen(partition).clock
    }

    /// Waits for the turn to take an epoch. It may have become unnecessary meanwhile.
    pub(super) async fn turn(&self, partition: u8) -> Result<Turn<'_>, LeaseError> {
        self.partitions[usize::from(partition)].turns.take().await
    }

    /// Takes an epoch above `last`.
    pub(super) async fn next_epoch(&self, partition: u8, last: i64) -> Result<Epoch, LeaseError> {
        let at_least = Epoch::new(last.saturating_add(1)).map_err(LeaseError::unavailable)?;
        let epoch = self.epochs.next_epoch(partition, at_least).await;
        let epoch = epoch.map_err(LeaseError::unavailable)?;
        if epoch < at_least {
            // The source does not keep its word, and would be asked for ever.
            return Err(LeaseError::unavailable(EpochError::Exhausted));
        }
        self.told(partition, epoch);
        Ok(epoch)
    }

    /// Notes how far a partition has counted.
    pub(super) fn note(&self, partition: u8, epoch: Epoch, n: i64) {
        let mut seen = self.seen(partition);
        seen.clock = seen.clock.max((epoch.get(), n));
    }

    /// Notes how far a partition has counted, and makes sure that the source knows the epoch.
    pub(super) async fn saw(
        self: &Arc<Self>,
        partition: u8,
        epoch: Epoch,
        n: i64,
    ) -> Result<(), LeaseError> {
        self.note(partition, epoch, n);
        match self.is_told(partition, epoch) {
            Told::Recently => {}
            Told::LongAgo => {
                let memory = Arc::clone(self);
                tokio::spawn(async move {
                    if let Err(error) = memory.epochs.bring_back(partition, epoch).await {
                        tracing::warn!(partition, %epoch, %error, "could not bring an epoch back");
                    }
                });
            }
            Told::Never => {
                let turn = self.turn(partition).await?;
                if matches!(self.is_told(partition, epoch), Told::Never) {
                    match self.epochs.bring_back(partition, epoch).await {
                        Ok(()) => self.told(partition, epoch),
                        Err(error) => return Err(turn.failed(LeaseError::unavailable(error))),
                    }
                }
            }
        }
        Ok(())
    }

    /// Whether the source knows an epoch. Only one is answered that it is long ago: who sees to it.
    fn is_told(&self, partition: u8, epoch: Epoch) -> Told {
        match &mut self.seen(partition).told {
            Some((known, at)) if *known >= epoch.get() => {
                if at.elapsed() < REMINDER {
                    return Told::Recently;
                }
                *at = Instant::now();
                Told::LongAgo
            }
            _ => Told::Never,
        }
    }

    fn told(&self, partition: u8, epoch: Epoch) {
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

/// One at a time tries something. Keeps the last failure.
#[derive(Default)]
struct Turns(sync::Mutex<Option<(Instant, LeaseError)>>);

pub(super) struct Turn<'a>(sync::MutexGuard<'a, Option<(Instant, LeaseError)>>);

impl Turns {
    /// Waits for the turn, or for a failure: so nobody waits for longer than one attempt takes.
    async fn take(&self) -> Result<Turn<'_>, LeaseError> {
        let asked_at = Instant::now();
        let last = self.0.lock().await;
        match &*last {
            Some((failed_at, error)) if *failed_at > asked_at => Err(error.clone()),
            _ => Ok(Turn(last)),
        }
    }
}

impl Turn<'_> {
    /// Ends the turn with a failure, which those share who have waited meanwhile.
    pub(super) fn failed(mut self, error: LeaseError) -> LeaseError {
        *self.0 = Some((Instant::now(), error.clone()));
        error
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

        fn bring_back(&self, _: u8, seen: Epoch) -> EpochFuture<'_, ()> {
            self.answer(move |source| _ = source.epoch.fetch_max(seen.get(), SeqCst))
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
        let memory = Memory::new(Arc::new(source.clone()));
        memory.saw(7, epoch(3), 1).await.unwrap();
        assert_eq!(source.epoch.load(SeqCst), 3);
        for again in 1..=3 {
            source.epoch.store(0, SeqCst);
            advance(REMINDER / 2).await;
            memory.saw(7, epoch(3), 2).await.unwrap();
            assert_eq!(source.asked.load(SeqCst), again, "it was told just now");
            advance(REMINDER / 2).await;
            memory.saw(7, epoch(3), 3).await.unwrap();
            memory.saw(7, epoch(3), 4).await.unwrap();
            sleep(Duration::from_secs(2)).await;
            assert_eq!(source.epoch.load(SeqCst), 3);
            assert_eq!(source.asked.load(SeqCst), again + 1);
        }
        // A failure in the background costs no grant; one at the first contact does.
        source.down.store(true, SeqCst);
        advance(REMINDER).await;
        memory.saw(7, epoch(3), 5).await.unwrap();
        memory.saw(8, epoch(3), 5).await.unwrap_err();
        memory.saw(7, epoch(4), 1).await.unwrap_err();
    }

    #[tokio::test(start_paused = true)]
    async fn whoever_waited_for_an_attempt_that_failed_fails_with_it() {
        let source = Forgetful::default();
        source.down.store(true, SeqCst);
        let memory = Memory::new(Arc::new(source.clone()));
        let began = Instant::now();
        let asking = (0..100).map(|n| memory.saw(7, epoch(1), n));
        let outcomes = join_all(asking).await;
        assert!(outcomes.iter().all(Result::is_err));
        assert_eq!(source.asked.load(SeqCst), 1);
        assert!(began.elapsed() < Duration::from_secs(2));
        // The next one tries again.
        source.down.store(false, SeqCst);
        memory.saw(7, epoch(1), 1).await.unwrap();
    }
}
