//! The transaction of a request, which the layer lends to its handler.
//!
//! The handler may drop what it was lent, keep it for too long, or commit it. The layer closes the
//! slot when the handler has ended, and learns how things stand; from then on nothing that is still
//! out can commit.

use std::{
    mem,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

use super::transaction::Transaction;
use crate::fence::{
    claims::{AllAdmitted, Claims},
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
    content: Content<DB>,
    /// They end with the request, not with a transaction that a handler lets escape.
    permits: Vec<Permit>,
    /// The number of the transaction on the server, once it has begun.
    id: Option<TransactionId>,
}

enum Content<DB: FenceDatabase> {
    /// Nothing was admitted yet: the handler says when.
    Pending,
    /// The handler begins the transaction.
    Beginning,
    /// What the handler wanted to write was not admitted.
    Refused(AdmitError),
    /// The handler's single statement was admitted, and found nothing to write.
    Empty(Transaction<DB>),
    Home(Transaction<DB>),
    Lent,
    /// The handler commits by itself, or runs a statement that does.
    Committing,
    Settled(Result<(), CommitError>),
    Closed,
}

/// What was in a slot when it was closed.
pub(crate) enum SlotEnd<DB: FenceDatabase> {
    /// Nothing was ever admitted.
    Unused,
    /// What the handler wanted to write was not admitted.
    Refused(AdmitError),
    /// The handler's single statement was admitted, and found nothing to write: whatever the
    /// handler answers, there is nothing to commit.
    Empty(Transaction<DB>),
    /// It was back, or had never been taken.
    Home(Transaction<DB>),
    /// The handler had committed by itself, or had tried to.
    Settled(Result<(), CommitError>),
    /// It was still out, and has this number on the server. It can no longer commit.
    Escaped(Option<TransactionId>),
    /// It was still out, and committing.
    EscapedCommitting,
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
        let content = transaction.map_or(Content::Closed, Content::Home);
        let state = State {
            content,
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
            content: Content::Pending,
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
        matches!(self.lock().content, Content::Pending)
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
    pub(crate) fn admitted(&self) -> AllAdmitted {
        AllAdmitted::of(&self.claims)
    }

    /// Lends the transaction, unless it is out already or over.
    pub(super) fn lend(&self) -> Option<Transaction<DB>> {
        let mut state = self.lock();
        match mem::replace(&mut state.content, Content::Lent) {
            Content::Home(transaction) => Some(transaction),
            other => {
                state.content = other;
                None
            }
        }
    }

    /// Takes the transaction back from the borrower.
    pub(super) fn give_back(&self, transaction: Transaction<DB>) {
        let mut state = self.lock();
        if matches!(state.content, Content::Lent) {
            state.content = Content::Home(transaction);
        } else {
            drop(state);
            // The layer may be ending its session on the server; in the pool that would be another
            // request's by then.
            transaction.discard();
        }
    }

    /// Says that the handler begins the transaction; false when it has been used, or closed.
    pub(crate) fn start_begin(&self) -> bool {
        self.replace(
            |content| matches!(content, Content::Pending),
            Content::Beginning,
        )
    }

    /// Says that the handler has begun `transaction`, and keeps it; false when the slot was closed
    /// meanwhile.
    pub(super) fn begun(&self, transaction: &Transaction<DB>, permits: Vec<Permit>) -> bool {
        let mut state = self.lock();
        let is_open = matches!(state.content, Content::Beginning);
        if is_open {
            state.content = Content::Lent;
            state.permits = permits;
            state.id = transaction.id;
        }
        is_open
    }

    /// Says that the handler runs a statement that is its own COMMIT; false when the slot has been
    /// used, or closed.
    pub(crate) fn start_write(&self) -> bool {
        self.replace(
            |content| matches!(content, Content::Pending),
            Content::Committing,
        )
    }

    /// Says that the transaction which the handler has begun runs a statement and commits by itself; false when the
    /// slot was closed meanwhile.
    pub(crate) fn start_write_begun(&self) -> bool {
        self.replace(
            |content| matches!(content, Content::Beginning),
            Content::Committing,
        )
    }

    /// Takes the transaction of a single statement that was admitted and found nothing to write.
    pub(super) fn wrote_nothing(&self, transaction: Transaction<DB>, permits: Vec<Permit>) {
        let mut state = self.lock();
        if matches!(state.content, Content::Committing) {
            state.permits = permits;
            state.content = Content::Empty(transaction);
        }
    }

    /// Says that nothing was admitted, and why.
    pub(crate) fn refuse(&self, error: AdmitError) {
        self.replace(
            |content| matches!(content, Content::Beginning | Content::Committing),
            Content::Refused(error),
        );
    }

    /// Says that the borrower commits by itself; false when the slot was closed meanwhile.
    pub(super) fn start_commit(&self) -> bool {
        self.replace(
            |content| matches!(content, Content::Lent),
            Content::Committing,
        )
    }

    /// Says how the borrower's commit ended.
    pub(crate) fn settle(&self, outcome: Result<(), CommitError>) {
        self.replace(
            |content| matches!(content, Content::Committing),
            Content::Settled(outcome),
        );
    }

    /// Closes the slot, and hands over the permits, which end when they are dropped. From now on
    /// nothing that is still out can commit.
    pub(crate) fn close(&self) -> (SlotEnd<DB>, Vec<Permit>) {
        let mut state = self.lock();
        let end = match mem::replace(&mut state.content, Content::Closed) {
            Content::Pending | Content::Beginning => SlotEnd::Unused,
            Content::Refused(error) => SlotEnd::Refused(error),
            Content::Empty(transaction) => SlotEnd::Empty(transaction),
            Content::Home(transaction) => SlotEnd::Home(transaction),
            Content::Settled(outcome) => SlotEnd::Settled(outcome),
            Content::Committing => SlotEnd::EscapedCommitting,
            Content::Lent | Content::Closed => SlotEnd::Escaped(state.id),
        };
        (end, mem::take(&mut state.permits))
    }

    fn replace(&self, from: impl FnOnce(&Content<DB>) -> bool, to: Content<DB>) -> bool {
        let mut state = self.lock();
        let fits = from(&state.content);
        if fits {
            state.content = to;
        }
        fits
    }

    fn lock(&self) -> MutexGuard<'_, State<DB>> {
        // Nothing panics while the lock is held.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
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
