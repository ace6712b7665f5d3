//! A transaction that records its outcome.

use std::{
    marker::PhantomData,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use super::clock::{Instant, sleep};

/// The outcome of the transaction of one request.
#[derive(Debug, Default)]
pub struct Fate {
    pub commits: AtomicUsize,
    /// Whether its connection was returned to the pool.
    pub is_in_pool: AtomicBool,
}

/// The id of a transaction on its server.
#[derive(Clone, Copy, Debug)]
pub struct TransactionId;

pub struct Transaction<DB> {
    pub reserved_key: Option<()>,
    pub id: Option<TransactionId>,
    pub held_since: Instant,
    pub used: bool,
    fate: Option<Arc<Fate>>,
    database: PhantomData<fn() -> DB>,
}

impl<DB> Transaction<DB> {
    pub fn begin(fate: &Arc<Fate>) -> Self {
        Self {
            reserved_key: None,
            id: Some(TransactionId),
            held_since: Instant::now(),
            used: false,
            fate: Some(fate.clone()),
            database: PhantomData,
        }
    }

    pub async fn commit(self) {
        let fate = self.fate.clone().expect("the transaction is open");
        fate.commits.fetch_add(1, SeqCst);
        sleep(Duration::from_millis(1)).await;
    }

    /// Closes the connection of the transaction.
    pub fn discard(mut self) {
        self.fate = None;
    }
}

impl<DB> Drop for Transaction<DB> {
    fn drop(&mut self) {
        if let Some(fate) = self.fate.take() {
            fate.is_in_pool.store(true, SeqCst);
        }
    }
}
