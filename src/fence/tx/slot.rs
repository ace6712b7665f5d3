//! [`Slot`]: the transaction of a request, which the layer lends to its handler.
//!
//! The handler may drop the lent transaction, keep it for too long, or commit it. When the handler
//! has ended, the layer closes the slot. After that, a transaction that is still lent cannot be
//! committed.

use std::{
    mem,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use derive_where::derive_where;
use tokio::time::Instant;

use super::transaction::Transaction;
use crate::fence::{
    claims::{Admitted, Claims},
    error::{AdmitError, CommitError},
    local::Permit,
    sql::{FenceDatabase, TransactionId},
};

/// Slot for one transaction. Clones refer to the same slot.
#[derive_where(Clone)]
pub(crate) struct Slot<DB: FenceDatabase> {
    contents: Arc<Mutex<Contents<DB>>>,
    claims: Claims,
    /// Whether the transaction has reserved an idempotency key.
    has_key: bool,
    /// The time at which the hold timeout started.
    held_since: Instant,
}

/// Contents of a slot.
pub(crate) struct Contents<DB: FenceDatabase> {
    pub(crate) place: Place<Transaction<DB>>,
    /// The permits of the transaction. When they are dropped, waiting writes of this process
    /// continue. The slot keeps them until the end of the request, even if a handler keeps the
    /// transaction.
    pub(crate) permits: Vec<Permit>,
    /// The id of the transaction on the server, if the transaction has begun.
    pub(crate) id: Option<TransactionId>,
}

/// State of a request's transaction.
pub(crate) enum Place<T> {
    /// There is no transaction yet. No token has been admitted, and the handler decides when to
    /// begin the transaction.
    Pending,
    /// The handler is beginning the transaction.
    Beginning,
    /// There is no transaction, because the handler's write was not admitted.
    Refused(AdmitError),
    /// The layer has the transaction. The handler's single statement was admitted in it and wrote
    /// nothing. Whatever the handler responds, there is nothing to commit.
    Empty(T),
    /// The layer has the transaction.
    WithLayer {
        transaction: T,
        /// Whether the handler has used the connection for a statement.
        used: bool,
    },
    /// The handler has the transaction, or has passed it on.
    Lent,
    /// The handler is committing, or runs a statement that commits by itself.
    Committing,
    /// The handler has committed, or has tried to.
    Settled(Result<(), CommitError>),
    /// The layer has closed the slot. A transaction that is still lent can no longer be committed.
    Closed,
}

impl<DB: FenceDatabase> Slot<DB> {
    /// Creates a slot with a transaction in which `claims` were admitted.
    pub(super) fn new(transaction: Transaction<DB>, claims: Claims, permits: Vec<Permit>) -> Self {
        let has_key = transaction.reserved_key.is_some();
        let held_since = transaction.held_since;
        let contents = Contents {
            id: transaction.id,
            place: with_layer(transaction),
            permits,
        };
        Self {
            contents: Arc::new(Mutex::new(contents)),
            claims,
            has_key,
            held_since,
        }
    }

    /// Creates a slot for a transaction that the handler will begin.
    pub(crate) fn pending(claims: Claims) -> Self {
        let contents = Contents {
            place: Place::Pending,
            permits: Vec::new(),
            id: None,
        };
        Self {
            contents: Arc::new(Mutex::new(contents)),
            claims,
            has_key: false,
            held_since: Instant::now(),
        }
    }

    /// Returns the start of the hold timeout: the time at which the row locks were taken or, for a
    /// pending slot, the time at which the slot was created.
    pub(crate) const fn held_since(&self) -> Instant {
        self.held_since
    }

    /// Returns whether no token has been admitted yet.
    pub(crate) fn is_pending(&self) -> bool {
        matches!(self.lock().place, Place::Pending)
    }

    /// Returns whether the response must be stored with the COMMIT.
    pub(crate) const fn has_key(&self) -> bool {
        self.has_key
    }

    pub(crate) const fn claims(&self) -> &Claims {
        &self.claims
    }

    /// Returns the admitted claims of a slot whose transaction has begun.
    pub(crate) fn admitted(&self) -> Admitted {
        Admitted::new(self.claims.clone())
    }

    /// Lends the transaction, unless it is already lent or has ended.
    pub(super) fn lend(&self) -> Option<Transaction<DB>> {
        let mut state = self.lock();
        match mem::replace(&mut state.place, Place::Lent) {
            Place::WithLayer { transaction, .. } => Some(transaction),
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
            state.place = with_layer(transaction);
        } else {
            drop(state);
            // The layer may be terminating this session on the server. If the connection returned
            // to the pool, another request could already be using the session.
            transaction.discard();
        }
    }

    /// Records that the handler is beginning the transaction. Returns false if the slot has already
    /// been used or closed.
    pub(crate) fn start_begin(&self) -> bool {
        self.replace(|place| matches!(place, Place::Pending), Place::Beginning)
    }

    /// Records that the handler has begun `transaction` and keeps it. Returns false if the slot was
    /// closed in the meantime.
    pub(super) fn finish_begin(&self, transaction: &Transaction<DB>, permits: Vec<Permit>) -> bool {
        let mut state = self.lock();
        let is_open = matches!(state.place, Place::Beginning);
        if is_open {
            state.place = Place::Lent;
            state.permits = permits;
            state.id = transaction.id;
        }
        is_open
    }

    /// Records that a statement of the handler runs and is committed, by itself or in the
    /// transaction that the handler has begun. Returns false if the slot was closed in the
    /// meantime.
    pub(crate) fn start_write(&self) -> bool {
        self.replace(|place| matches!(place, Place::Beginning), Place::Committing)
    }

    /// Stores the transaction of a single-statement write that was admitted and wrote nothing.
    pub(super) fn wrote_nothing(&self, transaction: Transaction<DB>, permits: Vec<Permit>) {
        let mut state = self.lock();
        if matches!(state.place, Place::Committing) {
            state.permits = permits;
            state.place = Place::Empty(transaction);
        }
    }

    /// Records the reason why the claims were not admitted.
    pub(crate) fn refuse(&self, error: AdmitError) {
        self.replace(
            |place| matches!(place, Place::Beginning | Place::Committing),
            Place::Refused(error),
        );
    }

    /// Records that the borrower is committing. Returns false if the slot was closed in the
    /// meantime.
    pub(super) fn start_commit(&self) -> bool {
        self.replace(|place| matches!(place, Place::Lent), Place::Committing)
    }

    /// Records the outcome of the borrower's commit. After a success, waiting writes of this
    /// process continue.
    pub(crate) fn settle(&self, outcome: Result<(), CommitError>) {
        let is_committed = outcome.is_ok();
        self.replace(
            |place| matches!(place, Place::Committing),
            Place::Settled(outcome),
        );
        if is_committed {
            // The lock is released before the permits are dropped.
            let permits = mem::take(&mut self.lock().permits);
            drop(permits);
        }
    }

    /// Closes the slot, and returns its contents. After that, a transaction that is still lent
    /// cannot be committed.
    pub(crate) fn close(&self) -> Contents<DB> {
        let mut state = self.lock();
        Contents {
            place: mem::replace(&mut state.place, Place::Closed),
            id: state.id,
            permits: mem::take(&mut state.permits),
        }
    }

    /// Replaces the state if `from` accepts the current one. Returns whether it was replaced.
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

    fn lock(&self) -> MutexGuard<'_, Contents<DB>> {
        // No code panics while it holds the lock.
        self.contents.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the state in which the layer has the transaction.
fn with_layer<DB: FenceDatabase>(transaction: Transaction<DB>) -> Place<Transaction<DB>> {
    Place::WithLayer {
        used: transaction.used,
        transaction,
    }
}
