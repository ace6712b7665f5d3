//! [`FencedTx`]: a transaction in which the token was admitted.

use std::{
    fmt,
    ops::{Deref, DerefMut},
};

use super::{
    admitted::{Admitted, AllAdmitted},
    database::FenceDatabase,
    error::CommitError,
    loan::Loan,
    queue::Turn,
    session::Session,
};

/// A transaction in which a token was admitted, and which holds the row lock of its resource; or
/// several, of several resources.
///
/// It derefs to the database's connection: everything that is done on it commits together with
/// the fence, or not at all. `begin()` on it gives a nested transaction (a savepoint).
///
/// Where it comes from decides who ends it:
///
/// - [`Fence::begin`](super::Fence::begin) gives it to the caller, who ends it with
///   [`commit`](Self::commit). Dropped, it rolls back.
/// - As an extractor, in a handler under `FenceLayer`, it is on loan: dropped, it goes back to
///   the layer, which commits it when the handler succeeds. A handler may still commit by itself,
///   for example to do something once the write is certain.
///
/// # Cancel safety
///
/// Dropped at any moment, also while a statement is under way, it leaves no open transaction and
/// no lock behind; the connection goes back to the pool once the server has rolled back. It must
/// be dropped within a Tokio runtime.
pub struct FencedTx<
    #[cfg(feature = "postgres")] DB: FenceDatabase = sqlx::Postgres,
    #[cfg(not(feature = "postgres"))] DB: FenceDatabase,
> {
    session: Option<Session<DB>>,
    lender: Option<Loan<DB>>,
    admitted: AllAdmitted,
    /// Others of this process may go on once the transaction has ended.
    pub(super) turns: Vec<Turn>,
}

impl<DB: FenceDatabase> FencedTx<DB> {
    pub(super) fn new(
        session: Session<DB>,
        admitted: AllAdmitted,
        lender: impl Into<Option<Loan<DB>>>,
    ) -> Self {
        Self {
            session: Some(session),
            lender: lender.into(),
            admitted,
            turns: Vec::new(),
        }
    }

    /// Takes the session out; what is left does nothing when it is dropped.
    pub(super) fn take_session(&mut self) -> Option<Session<DB>> {
        self.session.take()
    }

    /// The resource and the token that were admitted; of several, those that were named first.
    #[must_use]
    pub fn admitted(&self) -> &Admitted {
        self.admitted.first()
    }

    /// All resources and tokens that were admitted.
    #[must_use]
    pub const fn all_admitted(&self) -> &AllAdmitted {
        &self.admitted
    }

    /// Whether anybody has had its connection for a statement.
    pub(crate) fn is_used(&self) -> bool {
        self.session.as_ref().is_some_and(|session| session.used)
    }

    /// The connection, for statements that are not the borrower's own.
    pub(crate) fn connection_mut(&mut self) -> &mut DB::Connection {
        self.session.as_mut().expect(HELD).connection_mut()
    }

    /// Commits the fence and everything that was written on this transaction. `Ok` means that
    /// it is there.
    ///
    /// # Errors
    ///
    /// - [`CommitError::Aborted`]: a statement had failed before, or a deferred constraint
    ///   failed now. Nothing was written.
    /// - [`CommitError::Unfinished`]: a nested transaction is still open. Nothing was written.
    /// - [`CommitError::Busy`]: the database could not commit for a lock. Nothing was written.
    /// - [`CommitError::Escaped`]: the response that it was lent for is gone. Nothing was written.
    /// - [`CommitError::Unrecorded`]: the request has an idempotency key, under which the layer
    ///   commits, together with the response. Nothing was written.
    /// - [`CommitError::OutcomeUnknown`]: the connection was lost while COMMIT was under way.
    ///
    /// # Cancel safety
    ///
    /// Dropped while COMMIT is under way, the outcome is unknown to the caller; nothing leaks.
    pub async fn commit(mut self) -> Result<(), CommitError> {
        let Some(session) = self.session.take() else {
            return Err(CommitError::Unfinished);
        };
        let Some(lender) = self.lender.take() else {
            return session.commit().await;
        };
        if !lender.start_commit() {
            session.discard();
            return Err(CommitError::Escaped);
        }
        let outcome = if session.claimed.is_some() {
            drop(session);
            Err(CommitError::Unrecorded)
        } else {
            session.commit().await
        };
        lender.settle(outcome.clone());
        outcome
    }
}

impl<DB: FenceDatabase> Deref for FencedTx<DB> {
    type Target = DB::Connection;

    fn deref(&self) -> &Self::Target {
        self.session.as_ref().expect(HELD).connection()
    }
}

impl<DB: FenceDatabase> DerefMut for FencedTx<DB> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        let session = self.session.as_mut().expect(HELD);
        session.used = true;
        session.connection_mut()
    }
}

/// Only `commit` and `drop` take the session, and both take the transaction with it.
const HELD: &str = "the session is held until the transaction is gone";

impl<DB: FenceDatabase> Drop for FencedTx<DB> {
    fn drop(&mut self) {
        if let (Some(session), Some(lender)) = (self.session.take(), self.lender.take()) {
            lender.give_back(session);
        }
    }
}

impl<DB: FenceDatabase> fmt::Debug for FencedTx<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FencedTx")
            .field("admitted", &self.admitted)
            .finish_non_exhaustive()
    }
}
