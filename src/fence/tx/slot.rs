//! The transaction of a request, which the layer lends to its handler.
//!
//! The handler may drop what it was lent, keep it for too long, or commit it. The layer closes the
//! slot when the handler has ended; from then on nothing that is still out can commit.

use std::{
    mem,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

use super::transaction::Transaction;
use crate::fence::{
    claims::{Admitted, Claims},
    error::{AdmitError, CommitError},
    local::Permit,
    sql::{FenceDatabase, TransactionId},
};

/// The place of one transaction. Clones are the same place.
pub(crate) struct Slot<DB: FenceDatabase> {
    state: Arc<Mutex<State<DB>>>,
    claims: Claims,
    has_key: bool,
    held_since: Instant,
}

struct State<DB: FenceDatabase> {
    place: Place<Transaction<DB>>,
    /// They end with the request, not with a transaction that a handler lets escape.
    permits: Vec<Permit>,
    /// The number of the transaction on the server, once it has begun.
    id: Option<TransactionId>,
}

/// Where the transaction of a request is.
pub(crate) enum Place<T> {
    /// There is none: nothing was admitted yet, and the handler says when.
    Pending,
    /// The handler begins it.
    Beginning,
    /// There is none: what the handler wanted to write was not admitted.
    Refused(AdmitError),
    /// The layer has it. The handler's single statement was admitted in it, and found nothing to
    /// write: whatever the handler answers, there is nothing to commit.
    Empty(T),
    /// The layer has it.
    Home {
        transaction: T,
        /// Whether the handler has had its connection for a statement.
        used: bool,
    },
    /// The handler has it, or something that the handler gave it to.
    Lent,
    /// The handler commits by itself, or runs a statement that does.
    Committing,
    /// The handler has committed, or has tried to.
    Settled(Result<(), CommitError>),
    /// The layer has closed the slot: what is still out can no longer commit.
    Closed,
}

/// What was in a slot when it was closed.
pub(crate) struct Closed<DB: FenceDatabase> {
    pub(crate) place: Place<Transaction<DB>>,
    /// The number of the transaction on the server, by which one that is still out is ended.
    pub(crate) id: Option<TransactionId>,
    /// The waiting writes of this process go on when these are dropped.
    pub(crate) permits: Vec<Permit>,
}

impl<DB: FenceDatabase> Slot<DB> {
    /// A slot with a transaction in which `claims` were admitted.
    pub(super) fn new(
        transaction: Option<Transaction<DB>>,
        claims: Claims,
        permits: Vec<Permit>,
    ) -> Self {
        let has_key = transaction
            .as_ref()
            .is_some_and(|transaction| transaction.claimed.is_some());
        let held_since = transaction
            .as_ref()
            .map_or_else(Instant::now, |transaction| transaction.held_since);
        let id = transaction.as_ref().and_then(|transaction| transaction.id);
        let state = State {
            place: transaction.map_or(Place::Closed, home),
            permits,
            id,
        };
        Self {
            state: Arc::new(Mutex::new(state)),
            claims,
            has_key,
            held_since,
        }
    }

    /// One whose transaction the handler begins.
    pub(crate) fn pending(claims: Claims) -> Self {
        let state = State {
            place: Place::Pending,
            permits: Vec::new(),
            id: None,
        };
        Self {
            state: Arc::new(Mutex::new(state)),
            claims,
            has_key: false,
            held_since: Instant::now(),
        }
    }

    /// How much is left of this time since the row locks were taken, or since the handler could have begun.
    pub(crate) fn left_of(&self, hold: Duration) -> Duration {
        hold.saturating_sub(self.held_since.elapsed())
    }

    /// Whether nothing was admitted yet.
    pub(crate) fn is_pending(&self) -> bool {
        matches!(self.lock().place, Place::Pending)
    }

    /// Whether the response must be stored at COMMIT.
    pub(crate) const fn has_key(&self) -> bool {
        self.has_key
    }

    /// What was presented.
    pub(crate) const fn claims(&self) -> &Claims {
        &self.claims
    }

    /// What was admitted, in a slot whose transaction has begun.
    pub(crate) fn admitted(&self) -> Admitted {
        Admitted::new(self.claims.clone())
    }

    /// Lends the transaction, unless it is out already or over.
    pub(super) fn lend(&self) -> Option<Transaction<DB>> {
        let mut state = self.lock();
        match mem::replace(&mut state.place, Place::Lent) {
            Place::Home { transaction, .. } => Some(transaction),
            other => {
                state.place = other;
                None
            }
        }
    }

    /// Takes the transaction back from the borrower.
    pub(super) fn give_back(&self, transaction: Transaction<DB>) {
        let mut state = self.lock();
        if matches!(state.place, Place::Lent) {
            state.place = home(transaction);
        } else {
            drop(state);
            // The layer may be ending its session on the server; in the pool that would be another
            // request's by then.
            transaction.discard();
        }
    }

    /// Says that the handler begins the transaction; false when it has been used, or closed.
    pub(crate) fn start_begin(&self) -> bool {
        self.replace(|place| matches!(place, Place::Pending), Place::Beginning)
    }

    /// Says that the handler has begun `transaction`, and keeps it; false when the slot was closed
    /// meanwhile.
    pub(super) fn begun(&self, transaction: &Transaction<DB>, permits: Vec<Permit>) -> bool {
        let mut state = self.lock();
        let is_open = matches!(state.place, Place::Beginning);
        if is_open {
            state.place = Place::Lent;
            state.permits = permits;
            state.id = transaction.id;
        }
        is_open
    }

    /// Says that the handler runs a statement that is its own COMMIT; false when the slot has been
    /// used, or closed.
    pub(crate) fn start_write(&self) -> bool {
        self.replace(|place| matches!(place, Place::Pending), Place::Committing)
    }

    /// Says that the transaction which the handler has begun runs a statement and commits by itself; false when the
    /// slot was closed meanwhile.
    pub(crate) fn start_write_begun(&self) -> bool {
        self.replace(|place| matches!(place, Place::Beginning), Place::Committing)
    }

    /// Takes the transaction of a single statement that was admitted and found nothing to write.
    pub(super) fn wrote_nothing(&self, transaction: Transaction<DB>, permits: Vec<Permit>) {
        let mut state = self.lock();
        if matches!(state.place, Place::Committing) {
            state.permits = permits;
            state.place = Place::Empty(transaction);
        }
    }

    /// Says that nothing was admitted, and why.
    pub(crate) fn refuse(&self, error: AdmitError) {
        self.replace(
            |place| matches!(place, Place::Beginning | Place::Committing),
            Place::Refused(error),
        );
    }

    /// Says that the borrower commits by itself; false when the slot was closed meanwhile.
    pub(super) fn start_commit(&self) -> bool {
        self.replace(|place| matches!(place, Place::Lent), Place::Committing)
    }

    /// Says how the borrower's commit ended.
    pub(crate) fn settle(&self, outcome: Result<(), CommitError>) {
        self.replace(
            |place| matches!(place, Place::Committing),
            Place::Settled(outcome),
        );
    }

    /// Closes the slot. From now on nothing that is still out can commit.
    pub(crate) fn close(&self) -> Closed<DB> {
        let mut state = self.lock();
        Closed {
            place: mem::replace(&mut state.place, Place::Closed),
            id: state.id,
            permits: mem::take(&mut state.permits),
        }
    }

    fn replace(
        &self,
        from: impl FnOnce(&Place<Transaction<DB>>) -> bool,
        to: Place<Transaction<DB>>,
    ) -> bool {
        let mut state = self.lock();
        let fits = from(&state.place);
        if fits {
            state.place = to;
        }
        fits
    }

    fn lock(&self) -> MutexGuard<'_, State<DB>> {
        // Nothing panics while the lock is held.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn home<DB: FenceDatabase>(transaction: Transaction<DB>) -> Place<Transaction<DB>> {
    Place::Home {
        used: transaction.used,
        transaction,
    }
}

impl<DB: FenceDatabase> Clone for Slot<DB> {
    fn clone(&self) -> Self {
        Self {
            state: Arc::clone(&self.state),
            claims: self.claims.clone(),
            ..*self
        }
    }
}
