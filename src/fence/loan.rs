//! [`Loan`]: a transaction between the layer, which ends it, and the handler, which may borrow it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{
    admitted::AllAdmitted, database::FenceDatabase, error::CommitError, session::Session,
    tx::FencedTx,
};

/// One transaction on loan. Clones are the same loan.
pub(crate) struct Loan<DB: FenceDatabase> {
    slot: Arc<Mutex<Slot<DB>>>,
    admitted: AllAdmitted,
    server_process: i32,
    claimed: bool,
}

impl<DB: FenceDatabase> Clone for Loan<DB> {
    fn clone(&self) -> Self {
        Self {
            slot: Arc::clone(&self.slot),
            admitted: self.admitted.clone(),
            ..*self
        }
    }
}

enum Slot<DB: FenceDatabase> {
    Home(Session<DB>),
    Lent,
    Committing,
    Settled(Result<(), CommitError>),
    Closed,
}

/// How a loan stood when it was closed.
pub(crate) enum Closed<DB: FenceDatabase> {
    /// It was back, or had never been taken.
    Home(FencedTx<DB>),
    /// The handler had committed by itself, or had tried to.
    Settled(Result<(), CommitError>),
    /// It was still out, with the row lock in the hands of this server process (0 where there is
    /// none). It can no longer commit.
    Escaped(i32),
    /// It was still out, and committing.
    EscapedCommitting,
}

impl<DB: FenceDatabase> Loan<DB> {
    pub(crate) fn new(mut tx: FencedTx<DB>) -> Self {
        let session = tx.take_session();
        Self {
            server_process: session.as_ref().map_or(0, |session| session.server_process),
            claimed: session
                .as_ref()
                .is_some_and(|session| session.claimed.is_some()),
            slot: Arc::new(Mutex::new(session.map_or(Slot::Closed, Slot::Home))),
            admitted: tx.all_admitted().clone(),
        }
    }

    /// Lends the transaction, unless it is out already or over.
    pub(crate) fn take(&self) -> Option<FencedTx<DB>> {
        let mut slot = self.lock();
        match std::mem::replace(&mut *slot, Slot::Lent) {
            Slot::Home(session) => {
                Some(FencedTx::new(session, self.admitted.clone(), self.clone()))
            }
            other => {
                *slot = other;
                None
            }
        }
    }

    /// Ends the loan. From now on nothing that is still out can commit.
    pub(crate) fn close(&self) -> Closed<DB> {
        match std::mem::replace(&mut *self.lock(), Slot::Closed) {
            Slot::Home(session) => {
                Closed::Home(FencedTx::new(session, self.admitted.clone(), None))
            }
            Slot::Settled(outcome) => Closed::Settled(outcome),
            Slot::Committing => Closed::EscapedCommitting,
            Slot::Lent | Slot::Closed => Closed::Escaped(self.server_process),
        }
    }

    /// Whether the response must be stored at COMMIT.
    pub(crate) const fn has_claimed(&self) -> bool {
        self.claimed
    }

    /// What was admitted.
    pub(crate) const fn admitted(&self) -> &AllAdmitted {
        &self.admitted
    }

    /// Says that the borrower commits by itself; false when the loan was closed meanwhile.
    pub(super) fn start_commit(&self) -> bool {
        let mut slot = self.lock();
        let lent = matches!(*slot, Slot::Lent);
        if lent {
            *slot = Slot::Committing;
        }
        lent
    }

    /// Says how the borrower's commit ended.
    pub(super) fn settle(&self, outcome: Result<(), CommitError>) {
        let mut slot = self.lock();
        if matches!(*slot, Slot::Committing) {
            *slot = Slot::Settled(outcome);
        }
    }

    /// Takes the session back from the borrower.
    pub(super) fn give_back(&self, session: Session<DB>) {
        let mut slot = self.lock();
        if matches!(*slot, Slot::Lent) {
            *slot = Slot::Home(session);
        } else {
            // The layer may be about to end this connection's server process; in the pool it
            // would be somebody else's by then.
            session.discard();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Slot<DB>> {
        // Nothing panics while the lock is held.
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
