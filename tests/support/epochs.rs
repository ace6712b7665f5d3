//! Sources of epochs: one for faults, and one in memory.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicBool, Ordering::SeqCst},
};

use sqlx::Sqlite;
use tower_fence::{
    Fence,
    epochs::{Epoch, EpochError, EpochFuture, Epochs, SourceId},
};

use crate::database::Fresh;

/// A source of epochs that is sometimes unreachable.
#[derive(Clone)]
pub struct Away {
    epochs: Fence<Sqlite>,
    is_away: Arc<AtomicBool>,
}

impl Away {
    pub fn of(db: &Fresh<Sqlite>) -> Self {
        Self {
            epochs: db.fence(),
            is_away: Arc::default(),
        }
    }

    pub fn set(&self, is_away: bool) {
        self.is_away.store(is_away, SeqCst);
    }

    fn or<'a, T: 'a>(&self, answer: EpochFuture<'a, T>) -> EpochFuture<'a, T> {
        match self.is_away.load(SeqCst) {
            true => Box::pin(async { Err(EpochError::Unreachable("it is away".into())) }),
            false => answer,
        }
    }
}

impl Epochs for Away {
    fn next_epoch(&self, partition: u8, at_least: Epoch) -> EpochFuture<'_> {
        self.or(self.epochs.next_epoch(partition, at_least))
    }

    fn report_epoch(&self, partition: u8, seen: Epoch) -> EpochFuture<'_> {
        self.or(self.epochs.report_epoch(partition, seen))
    }

    fn source_id(&self) -> EpochFuture<'_, SourceId> {
        self.or(self.epochs.source_id())
    }
}

/// A source of epochs in memory. It answers immediately, so a test with a paused clock can use it.
#[derive(Default)]
pub struct InMemory {
    last: Mutex<i64>,
}

impl Epochs for InMemory {
    fn next_epoch(&self, _: u8, at_least: Epoch) -> EpochFuture<'_> {
        let mut last = self.last.lock().unwrap();
        *last = at_least.get().max(*last + 1);
        let next = Epoch::new(*last);
        Box::pin(async { next })
    }

    fn report_epoch(&self, _: u8, seen: Epoch) -> EpochFuture<'_> {
        Box::pin(async move { Ok(seen) })
    }

    fn source_id(&self) -> EpochFuture<'_, SourceId> {
        Box::pin(async { Ok(SourceId::new("in-memory").unwrap()) })
    }
}
