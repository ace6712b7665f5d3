//! A pool connection in a transaction that cannot leak.
//!
//! Whatever is dropped, and wherever: the connection goes back to the pool outside any
//! transaction, or it is closed.

use std::{io::ErrorKind, sync::Arc, time::Duration};

use sqlx_core::{connection::Connection, transaction::TransactionManager};
use tokio::time::{Instant, timeout};

use super::{
    Limits,
    conn::{Begun, CheckedOut, Connections, Origin},
    database::{AdvisoryLock, Backend, Committed, Fault},
    error::{AdmitError, CommitError, WriteError, no_answer},
    records::Claimed,
};

pub(super) struct Session<DB: Backend> {
    checked_out: Option<CheckedOut<DB>>,
    connections: Connections<DB>,
    phase: Phase,
    limits: Limits,
    /// Whether its transaction began ahead: with the end of the one before on this connection.
    pub(super) ahead: bool,
    /// The lock by which its transaction is found on the server, once an admission was sent.
    pub(super) lock: Option<AdvisoryLock>,
    /// The record that this transaction has claimed, and that waits for its response.
    pub(super) claimed: Option<Box<Claimed>>,
    /// Whether a borrower of the transaction has had its connection for a statement.
    pub(super) used: bool,
}

#[derive(Clone, Copy, PartialEq)]
enum Phase {
    /// BEGIN may have been sent.
    Beginning,
    /// In a transaction.
    Open,
    /// Outside of any transaction of its own. The connection may be reused.
    Done,
    /// The same, but that it goes back to the pool.
    Clean,
    /// Not to be used again.
    Broken,
}

impl<DB: Backend> Session<DB> {
    /// Takes a connection and opens a transaction on it.
    pub(super) async fn begin(
        connections: &Connections<DB>,
        limits: Limits,
    ) -> Result<Self, AdmitError> {
        Self::begin_for_key(connections, limits, None).await
    }

    /// As [`begin`](Self::begin), with a limit of its own for the first wait for a lock.
    pub(super) async fn begin_for_key(
        connections: &Connections<DB>,
        limits: Limits,
        key_wait: Option<Duration>,
    ) -> Result<Self, AdmitError> {
        let checked_out = connections.check_out(limits).await?;
        let untested = checked_out.origin != Origin::Tested;
        let mut session = Self::new(checked_out, connections, limits);
        match session.open(key_wait).await {
            // It had died since it was used last. BEGIN is as good a test as a ping.
            Err(AdmitError::Unavailable(error)) if untested && is_gone::<DB>(&error) => {
                session.discard();
            }
            opened => return opened.map(|()| session),
        }
        Self::begin_tested(connections, limits, key_wait).await
    }

    /// Opens a transaction on a connection that the pool has tested.
    pub(super) async fn begin_tested(
        connections: &Connections<DB>,
        limits: Limits,
        key_wait: Option<Duration>,
    ) -> Result<Self, AdmitError> {
        let tested = connections.check_out_tested(limits).await?;
        let mut session = Self::new(tested, connections, limits);
        session.open(key_wait).await?;
        Ok(session)
    }

    /// Takes a connection for a statement that is a transaction of its own. Where that failed for
    /// a connection that had died, nobody could know its outcome; so one that was not in use a
    /// moment ago is tested.
    pub(super) async fn ready(
        connections: &Connections<DB>,
        limits: Limits,
    ) -> Result<Self, AdmitError> {
        let mut checked_out = connections.check_out(limits).await?;
        checked_out.end_begun();
        if checked_out.origin == Origin::Idle && !checked_out.lives().await {
            checked_out.conn.close_on_drop();
            checked_out = connections.check_out_tested(limits).await?;
        }
        Ok(Self::new(checked_out, connections, limits))
    }

    /// The lock that an admission of this session takes. From now on it may have it.
    pub(super) fn lock(&mut self) -> AdvisoryLock {
        *self.lock.get_or_insert_with(AdvisoryLock::random)
    }

    fn new(checked_out: CheckedOut<DB>, connections: &Connections<DB>, limits: Limits) -> Self {
        Self {
            checked_out: Some(checked_out),
            connections: connections.clone(),
            phase: Phase::Done,
            limits,
            ahead: false,
            lock: None,
            claimed: None,
            used: false,
        }
    }

    /// Rolls back what there is and opens a new transaction on the same connection.
    pub(super) async fn restart(&mut self) -> Result<(), AdmitError> {
        self.claimed = None;
        self.open(None).await
    }

    /// The same where a part of the wait for locks has gone by.
    pub(super) async fn restart_after(&mut self, waited: Duration) -> Result<(), AdmitError> {
        self.limits.lock_wait = self.limits.lock_wait.saturating_sub(waited);
        self.restart().await
    }

    async fn open(&mut self, key_wait: Option<Duration>) -> Result<(), AdmitError> {
        let limits = self.limits.transaction(key_wait);
        let checked_out = self.checked_out.as_mut().expect(HELD);
        let begun = checked_out.begun.take();
        self.ahead = begun.is_some_and(|begun| begun.serves(limits));
        if self.ahead {
            self.phase = Phase::Open;
            return Ok(());
        }
        self.roll_back();
        if self.phase == Phase::Open
            && !matches!(
                timeout(GRACE, self.connection_mut().ping()).await,
                Ok(Ok(()))
            )
        {
            self.phase = Phase::Broken;
            self.connections.terminate(self.lock, self.limits).await;
            return Err(AdmitError::Unavailable(Arc::new(no_answer())));
        }
        self.lock = None;
        self.phase = Phase::Beginning;
        let within = self.limits.statement();
        match timeout(within, DB::begin(self.connection_mut(), limits)).await {
            Ok(Ok(())) => {
                self.phase = Phase::Open;
                Ok(())
            }
            Ok(Err(error)) => Err(refusal::<DB>(error)),
            Err(_) => {
                self.phase = Phase::Broken;
                Err(AdmitError::Unavailable(Arc::new(no_answer())))
            }
        }
    }

    /// Runs statements of the fence on the connection, within the time of a row lock.
    pub(super) async fn run<T>(
        &mut self,
        statements: impl AsyncFnOnce(&mut DB::Connection) -> sqlx::Result<T>,
    ) -> Result<T, AdmitError> {
        let within = self.limits.statement();
        self.run_within(within, statements).await
    }

    /// Runs statements of the fence on the connection, within a time of their own.
    pub(super) async fn run_within<T>(
        &mut self,
        within: Duration,
        statements: impl AsyncFnOnce(&mut DB::Connection) -> sqlx::Result<T>,
    ) -> Result<T, AdmitError> {
        match timeout(within, statements(self.connection_mut())).await {
            Ok(outcome) => outcome.map_err(refusal::<DB>),
            Err(_) => {
                self.give_up();
                Err(AdmitError::Unavailable(Arc::new(no_answer())))
            }
        }
    }

    /// Runs a statement that is a transaction of its own, within the time that an open transaction
    /// would have.
    pub(super) async fn run_alone<T>(
        &mut self,
        statement: impl AsyncFnOnce(&mut DB::Connection) -> sqlx::Result<T>,
    ) -> Result<T, WriteError> {
        let within = self.limits.statement().saturating_add(self.limits.hold);
        // Dropped now, it must be seen through.
        self.phase = Phase::Open;
        match timeout(within, statement(self.connection_mut())).await {
            Ok(outcome) => {
                self.phase = match &outcome {
                    Err(error) if is_gone::<DB>(error) => Phase::Broken,
                    _ => Phase::Done,
                };
                outcome.map_err(WriteError::of_alone::<DB>)
            }
            Err(_) => {
                self.give_up();
                Err(CommitError::OutcomeUnknown(Arc::new(no_answer())).into())
            }
        }
    }

    /// Ends what has not answered: whatever it has locked must not stay so until its statement ends.
    fn give_up(&mut self) {
        self.phase = Phase::Broken;
        let (connections, limits) = (self.connections.clone(), self.limits);
        let lock = self.lock;
        tokio::spawn(async move { connections.terminate(lock, limits).await });
    }

    /// Commits. `Ok` means that the writes are there.
    pub(super) async fn commit(mut self) -> Result<(), CommitError> {
        let answer_wait = self.limits.answer_wait;
        let begin_ahead = self.connections.begin_ahead();
        let next = begin_ahead.then(|| self.limits.transaction(None));
        let sent = Instant::now();
        let conn = self.connection_mut();
        if DB::TransactionManager::get_transaction_depth(conn) != 1 {
            return Err(CommitError::Unfinished);
        }
        let Ok(outcome) = timeout(answer_wait, DB::commit(conn, next)).await else {
            self.phase = Phase::Broken;
            return Err(CommitError::OutcomeUnknown(Arc::new(no_answer())));
        };
        match outcome {
            Ok(committed) => {
                self.phase = match committed {
                    Committed::Clean => Phase::Clean,
                    Committed::Begun => Phase::Done,
                    Committed::Broken => Phase::Broken,
                };
                if let (Committed::Begun, Some(limits), Some(checked_out)) =
                    (committed, next, &mut self.checked_out)
                {
                    checked_out.begun = Some(Box::new(Begun::new(limits, sent)));
                }
                Ok(())
            }
            Err(error) => Err(match DB::fault(&error) {
                Fault::Contention => CommitError::Busy(Arc::new(error)),
                Fault::Refused => CommitError::Aborted(Arc::new(error)),
                Fault::Lost => {
                    self.phase = Phase::Broken;
                    CommitError::OutcomeUnknown(Arc::new(error))
                }
            }),
        }
    }

    /// Rolls back by closing the connection: nobody gets it again.
    pub(super) fn discard(mut self) {
        self.phase = Phase::Broken;
    }

    /// Queues the rollback of every open level. The next use of the connection sends it.
    fn roll_back(&mut self) {
        if let Some(CheckedOut { conn, .. }) = &mut self.checked_out {
            // Read once: SQLite's worker lowers the depth later, on its own thread.
            for _ in 0..DB::TransactionManager::get_transaction_depth(conn) {
                DB::TransactionManager::start_rollback(conn);
            }
        }
    }

    pub(super) fn connection(&self) -> &DB::Connection {
        &self.checked_out.as_ref().expect(HELD).conn
    }

    pub(super) fn connection_mut(&mut self) -> &mut DB::Connection {
        &mut self.checked_out.as_mut().expect(HELD).conn
    }
}

/// Only `drop` takes the connection.
const HELD: &str = "the connection is held until the session is gone";

impl<DB: Backend> Drop for Session<DB> {
    fn drop(&mut self) {
        let phase = self.phase;
        if phase == Phase::Open {
            self.roll_back();
        }
        let Some(mut checked_out) = self.checked_out.take() else {
            return;
        };
        match phase {
            Phase::Done => self.connections.check_in(checked_out, self.limits),
            Phase::Clean => {}
            Phase::Broken => checked_out.conn.close_on_drop(),
            Phase::Beginning | Phase::Open => {
                let clean_up = clean_up(
                    checked_out,
                    phase,
                    self.connections.clone(),
                    self.limits,
                    self.lock,
                );
                // Without a runtime there is no pool either: the connection is dropped, and closed.
                if let Ok(runtime) = tokio::runtime::Handle::try_current() {
                    runtime.spawn(clean_up);
                }
            }
        }
    }
}

/// How long a statement that was cut off may go on before its server process is ended.
const GRACE: Duration = Duration::from_secs(1);

/// Sees a rollback through that is queued on a connection, and gives it back to the pool.
async fn clean_up<DB: Backend>(
    mut checked_out: CheckedOut<DB>,
    phase: Phase,
    connections: Connections<DB>,
    limits: Limits,
    lock: Option<AdvisoryLock>,
) {
    let conn = &mut checked_out.conn;
    let rolled_back = async {
        if phase == Phase::Beginning {
            DB::abandon_begin(conn).await?;
        }
        conn.ping().await
    };
    let mut outcome = timeout(GRACE, rolled_back).await;
    if outcome.is_err() {
        // A statement is still under way. With the row lock, it must not keep others waiting;
        // without, it waits for that lock, no longer than for its limit. The pool would wait for
        // its answer without a limit.
        connections.terminate(lock, limits).await;
        outcome = timeout(limits.statement(), conn.ping()).await;
    }
    // SQLite: where the handler had ended the transaction by hand, the rollback failed and was not
    // counted.
    let depth = DB::TransactionManager::get_transaction_depth(conn);
    if !matches!(outcome, Ok(Ok(()))) || depth > 0 {
        conn.close_on_drop();
    }
}

/// Whether the connection is gone. Where it was only silent, waiting for another one would take as
/// long again.
pub(super) fn is_gone<DB: Backend>(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Io(io) => io.kind() != ErrorKind::TimedOut,
        // idle_in_transaction_session_timeout, transaction_timeout
        sqlx::Error::Database(cause)
            if matches!(cause.code().as_deref(), Some("25P03" | "25P04")) =>
        {
            true
        }
        error => matches!(DB::fault(error), Fault::Lost),
    }
}

/// What a failed statement of the fence means to the one who wanted to write.
pub(super) fn refusal<DB: Backend>(error: sqlx::Error) -> AdmitError {
    match DB::fault(&error) {
        Fault::Contention => AdmitError::Busy(Arc::new(error)),
        Fault::Refused | Fault::Lost => AdmitError::Unavailable(Arc::new(error)),
    }
}
