//! [`FencedTx`]: a transaction in which the token was admitted.

use std::{
    fmt, mem,
    ops::{Deref, DerefMut},
    time::Duration,
};

use super::{slot::Slot, transaction::Transaction};
use crate::fence::{
    claims::{Admitted, Claims},
    error::{CommitError, WriteError},
    local::Permit,
    sql::{FenceDatabase, Statement},
};

/// Transaction in which one or more tokens were admitted.
///
/// The transaction holds the row locks of the tokens' resources. It derefs to the database's
/// connection. Every statement on the connection is committed together with the admission, or not
/// at all. `begin()` on the connection opens a nested transaction (a savepoint).
///
/// If `begin()` on the connection fails, or its future is dropped before it has completed, sqlx
/// rolls back the enclosing transaction. The next mutable use of the connection through this value
/// then panics, and [`commit`](Self::commit) returns [`CommitError::Unfinished`]. Hold no reference
/// to the connection across a call to `begin()`, and on SQLite, run no statement after such a
/// `begin()` or after a failed statement: it may [commit by
/// itself](crate::guide::guarantees#what-is-not-guaranteed).
///
/// How the transaction ends depends on its origin:
///
/// - [`Fence::begin`](crate::Fence::begin) returns a transaction that the caller owns, and ends
///   with [`commit`](Self::commit). If the transaction is dropped, it is rolled back.
/// - The extractor in a handler behind `FenceLayer` borrows the transaction from the layer. If the
///   transaction is dropped, it returns to the layer, which commits it if the handler succeeds. A
///   handler may also commit the transaction itself, for example in order to act after the write is
///   confirmed.
///
/// # Cancel safety
///
/// If the transaction is dropped, even while a statement is running, no open transaction and no
/// lock remain. The connection returns to the pool after the server has rolled back. If the
/// transaction is dropped outside of any Tokio runtime, the rollback runs in the runtime in which
/// the connection was acquired. If nothing drives this runtime, Postgres ends the transaction after
/// the [`hold_timeout`](crate::FenceBuilder::hold_timeout).
///
/// If only the future of a statement is dropped, for example by a timeout in the handler, the
/// statement still runs to its end, and is committed with the transaction. COPY is an exception: if
/// it is dropped or fails at its start, sqlx may assign later responses to the wrong statements. In
/// that case, [`commit`](Self::commit) returns [`CommitError::OutcomeUnknown`].
#[must_use = "dropped, the transaction is rolled back or returns to the layer"]
pub struct FencedTx<DB: FenceDatabase> {
    transaction: Option<Transaction<DB>>,
    slot: Option<Slot<DB>>,
    admitted: Admitted,
    /// The permits of the queues. When they are dropped with the transaction, waiting writes of
    /// this process continue.
    permits: Vec<Permit>,
}

impl<DB: FenceDatabase> FencedTx<DB> {
    /// Wraps a transaction in which `claims` were admitted, and which the caller owns.
    pub(in crate::fence) const fn new(
        transaction: Transaction<DB>,
        claims: Claims,
        permits: Vec<Permit>,
    ) -> Self {
        Self {
            transaction: Some(transaction),
            slot: None,
            admitted: Admitted::new(claims),
            permits,
        }
    }

    /// Wraps a transaction that was taken from a slot.
    fn lent(transaction: Transaction<DB>, slot: &Slot<DB>) -> Self {
        Self {
            transaction: Some(transaction),
            slot: Some(slot.clone()),
            admitted: slot.admitted(),
            permits: Vec::new(),
        }
    }

    /// Borrows the transaction of a slot, unless it is already lent or has ended.
    pub(crate) fn borrow(slot: &Slot<DB>) -> Option<Self> {
        Some(Self::lent(slot.lend()?, slot))
    }

    /// Turns this transaction into a transaction that is borrowed from `slot`. Returns `None` if
    /// the slot was closed in the meantime.
    pub(crate) fn begun_for(self, slot: &Slot<DB>) -> Option<Self> {
        let (_, transaction, permits) = self.into_parts();
        let is_open = slot.finish_begin(&transaction, permits);
        is_open.then(|| Self::lent(transaction, slot))
    }

    /// Puts this transaction into a slot, for the layer to lend.
    pub(crate) fn into_slot(self) -> Slot<DB> {
        let (claims, transaction, permits) = self.into_parts();
        Slot::new(transaction, claims, permits)
    }

    /// Passes this transaction, whose single statement has written nothing, to the slot of its
    /// request.
    pub(crate) fn wrote_nothing_for(self, slot: &Slot<DB>) {
        let (_, transaction, permits) = self.into_parts();
        slot.wrote_nothing(transaction, permits);
    }

    pub(in crate::fence) fn into_parts(mut self) -> (Claims, Transaction<DB>, Vec<Permit>) {
        let permits = mem::take(&mut self.permits);
        (self.admitted.claims().clone(), self.take(), permits)
    }

    /// Takes the transaction, for a method that consumes this value.
    fn take(&mut self) -> Transaction<DB> {
        self.transaction.take().expect(HELD)
    }

    /// Runs a statement that names the relation `fence`. In this transaction, the relation has its
    /// one row, because the tokens are admitted.
    pub(crate) async fn write(
        &mut self,
        statement: &mut Statement<DB>,
    ) -> Result<Vec<DB::Row>, WriteError> {
        let transaction = self.transaction_mut();
        transaction.used = true;
        let written = transaction.write(async |on| DB::write_admitted(on.conn, statement).await);
        written.await.map_err(WriteError::in_transaction)
    }

    /// Runs a single-statement write in this transaction, and commits the transaction if the
    /// statement has written rows.
    pub(crate) async fn write_and_commit(
        mut self,
        mut statement: Statement<DB>,
    ) -> Result<Written<DB>, WriteError> {
        let rows = self.write(&mut statement).await?;
        self.commit_rows(rows).await
    }

    /// Commits the transaction if the statement has written rows.
    pub(in crate::fence) async fn commit_rows(
        self,
        rows: Vec<DB::Row>,
    ) -> Result<Written<DB>, WriteError> {
        if rows.is_empty() {
            return Ok(Written::Nothing(Box::new(self)));
        }
        self.commit().await?;
        Ok(Written::Rows(rows))
    }

    /// Returns the admitted resources and tokens.
    #[must_use]
    pub const fn admitted(&self) -> &Admitted {
        &self.admitted
    }

    /// Returns the rest of `hold`, measured from the time at which the row locks were taken.
    pub(crate) fn left_of(&self, hold: Duration) -> Duration {
        let transaction = self.transaction.as_ref().expect(HELD);
        hold.saturating_sub(transaction.held_since.elapsed())
    }

    /// Returns the connection, for the application's hook.
    pub(crate) fn connection_mut(&mut self) -> &mut DB::Connection {
        let transaction = self.transaction_mut();
        transaction.hooked = true;
        transaction.connection_mut()
    }

    /// Returns whether the transaction is open and has no open nested transaction.
    pub(crate) async fn is_outermost(&mut self) -> bool {
        self.transaction.as_mut().expect(HELD).is_outermost().await
    }

    /// Returns the transaction for a statement. Panics if sqlx has ended the transaction, because
    /// the statement would commit by itself.
    fn transaction_mut(&mut self) -> &mut Transaction<DB> {
        let transaction = self.transaction.as_mut().expect(HELD);
        assert!(transaction.depth() > 0, "{ENDED}");
        transaction
    }

    /// Commits the admission and all writes of this transaction. `Ok` means that the COMMIT is
    /// confirmed.
    ///
    /// # Errors
    ///
    /// Returns a [`CommitError`]. Only after [`CommitError::OutcomeUnknown`] may the writes have
    /// been committed: the connection was lost during COMMIT, sqlx received the response to an
    /// earlier statement, or the response did not arrive within the
    /// [`answer_timeout`](crate::FenceBuilder::answer_timeout), on SQLite plus the
    /// [`lock_timeout`](crate::FenceBuilder::lock_timeout).
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped during COMMIT, the caller does not learn the outcome. No connection
    /// and no lock leaks.
    pub async fn commit(mut self) -> Result<(), CommitError> {
        let transaction = self.take();
        let Some(slot) = self.slot.take() else {
            return transaction.commit().await;
        };
        if !slot.start_commit() {
            transaction.discard();
            return Err(CommitError::Escaped);
        }
        let outcome = if slot.has_key() {
            drop(transaction);
            Err(CommitError::Unrecorded)
        } else {
            transaction.commit().await
        };
        slot.settle(outcome.clone());
        outcome
    }
}

/// Outcome of a single-statement write.
pub(crate) enum Written<DB: FenceDatabase> {
    /// The statement has written these rows, and they are committed.
    Rows(Vec<DB::Row>),
    /// The token was admitted in this transaction, and the statement has written no rows.
    Nothing(Box<FencedTx<DB>>),
}

impl<DB: FenceDatabase> Deref for FencedTx<DB> {
    type Target = DB::Connection;

    fn deref(&self) -> &Self::Target {
        self.transaction.as_ref().expect(HELD).connection()
    }
}

impl<DB: FenceDatabase> DerefMut for FencedTx<DB> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        let transaction = self.transaction_mut();
        transaction.used = true;
        transaction.connection_mut()
    }
}

/// Only `drop` and methods that consume the value take the transaction.
const HELD: &str = "the transaction is held until it has ended";

const ENDED: &str =
    "the fenced transaction has ended, because a nested `begin` failed or was dropped";

impl<DB: FenceDatabase> Drop for FencedTx<DB> {
    fn drop(&mut self) {
        if let (Some(transaction), Some(slot)) = (self.transaction.take(), self.slot.take()) {
            slot.give_back(transaction);
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
