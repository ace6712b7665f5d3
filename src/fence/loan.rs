//! [`Loan`]: a transaction between the layer, which ends it, and the handler, which may borrow it.

use std::{
    mem,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use super::{
    admitted::AllAdmitted,
    database::{AdvisoryLock, FenceDatabase},
    error::{AdmitError, CommitError},
    queue::Turn,
    session::Session,
    tx::FencedTx,
};

/// One transaction on loan. Clones are the same loan.
pub(crate) struct Loan<DB: FenceDatabase> {
    state: Arc<Mutex<State<DB>>>,
    named: AllAdmitted,
    claimed: bool,
}

struct State<DB: FenceDatabase> {
    slot: Slot<DB>,
    /// They end with the request, not with a transaction that a handler lets escape.
    turns: Vec<Turn>,
    /// The lock by which the transaction is found on the server, where it has begun.
    lock: Option<AdvisoryLock>,
}

impl<DB: FenceDatabase> Clone for Loan<DB> {
    fn clone(&self) -> Self {
        Self {
            state: Arc::clone(&self.state),
            named: self.named.clone(),
            ..*self
        }
    }
}

enum Slot<DB: FenceDatabase> {
    /// Nothing was admitted yet: the handler says when.
    Pending,
    /// The handler begins the transaction.
    Beginning,
    /// What the handler wanted to write was not admitted.
    Refused(AdmitError),
    /// The handler's single statement was admitted, and found nothing to write.
    Empty(Session<DB>),
    Home(Session<DB>),
    Lent,
    /// The handler commits by itself, or runs a statement that does.
    Committing,
    Settled(Result<(), CommitError>),
    Closed,
}

/// How a loan stood when it was closed.
pub(crate) enum Closed<DB: FenceDatabase> {
    /// Nothing was ever admitted.
    Unused,
    /// What the handler wanted to write was not admitted.
    Refused(AdmitError),
    /// The handler's single statement was admitted, and found nothing to write: whatever the
    /// handler answers, there is nothing to commit.
    Empty(FencedTx<DB>),
    /// It was back, or had never been taken.
    Home(FencedTx<DB>),
    /// The handler had committed by itself, or had tried to.
    Settled(Result<(), CommitError>),
    /// It was still out, in a transaction that is found on the server by this lock. It can no longer
    /// commit.
    Escaped(Option<AdvisoryLock>),
    /// It was still out, and committing.
    EscapedCommitting,
}

impl<DB: FenceDatabase> Loan<DB> {
    /// A transaction that has begun.
    pub(crate) fn new(mut tx: FencedTx<DB>) -> Self {
        let named = tx.all_admitted().clone();
        let turns = mem::take(&mut tx.turns);
        let session = tx.take_session();
        let claimed = session.as_ref();
        let claimed = claimed.is_some_and(|session| session.claimed.is_some());
        let lock = session.as_ref().and_then(|session| session.lock);
        let slot = session.map_or(Slot::Closed, Slot::Home);
        Self::with(slot, turns, lock, named, claimed)
    }

    /// One that the handler may begin.
    pub(crate) fn pending(named: AllAdmitted) -> Self {
        Self::with(Slot::Pending, Vec::new(), None, named, false)
    }

    fn with(
        slot: Slot<DB>,
        turns: Vec<Turn>,
        lock: Option<AdvisoryLock>,
        named: AllAdmitted,
        claimed: bool,
    ) -> Self {
        let state = State { slot, turns, lock };
        Self {
            state: Arc::new(Mutex::new(state)),
            named,
            claimed,
        }
    }

    /// Lends the transaction, unless it is out already or over.
    pub(crate) fn take(&self) -> Option<FencedTx<DB>> {
        let mut state = self.lock();
        match mem::replace(&mut state.slot, Slot::Lent) {
            Slot::Home(session) => Some(FencedTx::new(session, self.named.clone(), self.clone())),
            other => {
                state.slot = other;
                None
            }
        }
    }

    /// Whether nothing was admitted yet.
    pub(crate) fn is_pending(&self) -> bool {
        matches!(self.lock().slot, Slot::Pending)
    }

    /// Ends the loan, and with it the turns, once they are dropped. From now on nothing that is
    /// still out can commit.
    pub(crate) fn close(&self) -> (Closed<DB>, Vec<Turn>) {
        let mut state = self.lock();
        let closed = match mem::replace(&mut state.slot, Slot::Closed) {
            Slot::Pending | Slot::Beginning => Closed::Unused,
            Slot::Refused(error) => Closed::Refused(error),
            Slot::Empty(session) => Closed::Empty(FencedTx::new(session, self.named.clone(), None)),
            Slot::Home(session) => Closed::Home(FencedTx::new(session, self.named.clone(), None)),
            Slot::Settled(outcome) => Closed::Settled(outcome),
            Slot::Committing => Closed::EscapedCommitting,
            Slot::Lent | Slot::Closed => Closed::Escaped(state.lock),
        };
        (closed, mem::take(&mut state.turns))
    }

    /// Whether the response must be stored at COMMIT.
    pub(crate) const fn has_claimed(&self) -> bool {
        self.claimed
    }

    /// What was admitted, or is to be.
    pub(crate) const fn named(&self) -> &AllAdmitted {
        &self.named
    }

    /// Says that the handler begins the transaction; false when it has been used, or closed.
    pub(crate) fn start_begin(&self) -> bool {
        self.go_on(|slot| matches!(slot, Slot::Pending), Slot::Beginning)
    }

    /// Lends what the handler has begun, unless the loan was closed meanwhile.
    pub(crate) fn begun(&self, mut tx: FencedTx<DB>) -> Option<FencedTx<DB>> {
        let turns = mem::take(&mut tx.turns);
        let session = tx.take_session()?;
        let mut state = self.lock();
        if !matches!(state.slot, Slot::Beginning) {
            return None;
        }
        state.slot = Slot::Lent;
        state.turns = turns;
        state.lock = session.lock;
        Some(FencedTx::new(session, self.named.clone(), self.clone()))
    }

    /// Takes the transaction of a single statement that was admitted and found nothing to write.
    pub(crate) fn wrote_nothing(&self, mut tx: FencedTx<DB>) {
        let turns = mem::take(&mut tx.turns);
        let mut state = self.lock();
        if matches!(state.slot, Slot::Committing)
            && let Some(session) = tx.take_session()
        {
            state.turns = turns;
            state.lock = session.lock;
            state.slot = Slot::Empty(session);
        }
    }

    /// Says that nothing was admitted, and why.
    pub(crate) fn refuse(&self, error: AdmitError) {
        self.go_on(
            |slot| matches!(slot, Slot::Beginning | Slot::Committing),
            Slot::Refused(error),
        );
    }

    /// Says that the handler runs a statement that is its own COMMIT; false when the loan has been
    /// used, or closed.
    pub(crate) fn start_write(&self) -> bool {
        self.go_on(|slot| matches!(slot, Slot::Pending), Slot::Committing)
    }

    /// Says that the borrower commits by itself; false when the loan was closed meanwhile.
    pub(super) fn start_commit(&self) -> bool {
        self.go_on(|slot| matches!(slot, Slot::Lent), Slot::Committing)
    }

    /// Says how the borrower's commit ended.
    pub(crate) fn settle(&self, outcome: Result<(), CommitError>) {
        self.go_on(
            |slot| matches!(slot, Slot::Committing),
            Slot::Settled(outcome),
        );
    }

    /// Takes the session back from the borrower.
    pub(super) fn give_back(&self, session: Session<DB>) {
        let mut state = self.lock();
        if matches!(state.slot, Slot::Lent) {
            state.slot = Slot::Home(session);
        } else {
            drop(state);
            // The layer may be about to end this connection's server process; in the pool it
            // would be somebody else's by then.
            session.discard();
        }
    }

    fn go_on(&self, from: impl FnOnce(&Slot<DB>) -> bool, to: Slot<DB>) -> bool {
        let mut state = self.lock();
        let goes_on = from(&state.slot);
        if goes_on {
            state.slot = to;
        }
        goes_on
    }

    fn lock(&self) -> MutexGuard<'_, State<DB>> {
        // Nothing panics while the lock is held.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
