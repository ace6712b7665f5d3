//! [`Session`]: the connection of a transaction, or of a statement that commits by itself. When the
//! transaction or statement has been dropped, the session decides what happens to the connection.

use std::time::Duration;

use tokio::time::timeout;

use crate::fence::{
    conn::{CheckedOut, Connections, Origin},
    fault::{Failure, Fault},
    settings::Limits,
    sql::{On, TransactionManager, Transactions},
};

/// Timeout for the response to the test of a connection that may be broken.
const TEST_TIMEOUT: Duration = Duration::from_secs(1);

/// Time for which an interrupted statement may continue before its connection is closed.
pub(super) const GRACE: Duration = Duration::from_millis(500);

/// State of a transaction or statement, which decides what happens to its connection.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Phase {
    /// The connection can be used again. BEGIN has not been sent, the statement has ended, or the
    /// next transaction has begun together with COMMIT.
    Clean,
    /// BEGIN may have been sent.
    Beginning,
    /// The transaction is open, or the statement was sent and no response has arrived.
    Open,
    /// The transaction is committed, and no further one has begun. Unlike a `Clean` connection, its
    /// connection returns to the pool, because on Postgres a rollback is queued on it.
    Committed,
    /// The connection must not be used again.
    Broken,
}

/// Connection for one transaction, or for one statement that commits by itself.
pub(in crate::fence) struct Session<DB: Transactions> {
    checked_out: Option<CheckedOut<DB>>,
    pub(super) connections: Connections<DB>,
    pub(super) limits: Limits,
    pub(super) phase: Phase,
    /// SQLite's `busy_timeout` before BEGIN changed it. It is restored before the connection
    /// returns to the pool.
    pub(super) busy_timeout_ms: Option<i64>,
}

impl<DB: Transactions> Session<DB> {
    pub(super) fn new(
        checked_out: CheckedOut<DB>,
        connections: &Connections<DB>,
        limits: Limits,
    ) -> Self {
        Self {
            checked_out: Some(checked_out),
            connections: connections.clone(),
            limits,
            phase: Phase::Clean,
            busy_timeout_ms: None,
        }
    }

    /// Takes a connection for a statement that commits by itself, and tests it unless the fence
    /// itself has just used it. On a closed connection, the outcome of the statement would be
    /// unknown. If the application had left a transaction open on the connection, the statement
    /// would not be committed. The test detects both cases.
    ///
    /// The test also configures the session so that the server detects a client that disconnects,
    /// because a single statement cannot do this for itself. Therefore the test also runs on a
    /// reused connection that has not been tested before.
    pub(in crate::fence) async fn standalone(
        connections: &Connections<DB>,
        limits: Limits,
    ) -> Result<Self, Failure> {
        let mut checked_out = connections.check_out(limits).await?;
        checked_out.end_early_transaction();
        let is_ready = checked_out.origin == Origin::Kept && checked_out.is_prepared;
        let test_timeout = limits.answer_timeout.min(TEST_TIMEOUT);
        if !is_ready && prepare(&mut checked_out, test_timeout).await.is_err() {
            // The connection cannot be used, so use one that the pool has tested.
            checked_out.close_on_drop();
            // Release the permit of this connection first. It may be the only permit of the pool.
            drop(checked_out);
            checked_out = connections.check_out_tested(limits).await?;
            if let Err(failure) = prepare(&mut checked_out, limits.answer_timeout).await {
                connections.close_idle();
                checked_out.close_on_drop();
                return Err(failure);
            }
        }
        Ok(Self::new(checked_out, connections, limits))
    }

    /// Runs the statement that commits by itself. If the response does not arrive `within` this
    /// time, the connection is closed, and the outcome is unknown. It is also unknown if the future
    /// is dropped.
    pub(in crate::fence) async fn commit_alone<T>(
        mut self,
        within: Duration,
        statement: impl AsyncFnOnce(On<'_, DB>) -> sqlx::Result<T>,
    ) -> Result<T, Failure> {
        self.phase = Phase::Open;
        let outcome = self.run(within, statement).await;
        if self.phase == Phase::Open {
            self.phase = Phase::Clean;
        }
        outcome
    }

    pub(super) fn conn(&self) -> &CheckedOut<DB> {
        self.checked_out.as_ref().expect(HELD)
    }

    pub(super) fn conn_mut(&mut self) -> &mut CheckedOut<DB> {
        self.checked_out.as_mut().expect(HELD)
    }

    pub(super) async fn run<T>(
        &mut self,
        within: Duration,
        statements: impl AsyncFnOnce(On<'_, DB>) -> sqlx::Result<T>,
    ) -> Result<T, Failure> {
        let conn: &mut DB::Connection = self.checked_out.as_mut().expect(HELD);
        let on = On::new(conn, &self.connections.names);
        let outcome = response(within, statements(on)).await;
        outcome.inspect_err(|failure| self.note(failure))
    }

    /// Records that a statement failed. If the failure breaks the connection, the connection is
    /// closed when the session is dropped, and the server cancels the statement. If the session
    /// cannot write, the idle connections of the pool are closed as well, except on SQLite, where
    /// each connection to a replaced file is closed when it fails.
    pub(super) fn note(&mut self, failure: &Failure) {
        if failure.cannot_write() {
            self.connections.close_idle();
        }
        if failure.fault.is_gone() || failure.fault == Fault::Silent {
            self.phase = Phase::Broken;
        }
    }

    /// Queues one rollback for each open level, and at least `least` rollbacks. The next use of the
    /// connection sends them.
    pub(super) fn roll_back(&mut self, least: usize) {
        let conn = self.conn_mut();
        // Read the depth once, because SQLite's worker lowers it later, on its own thread.
        let depth = DB::TransactionManager::get_transaction_depth(conn);
        for _ in 0..depth.max(least) {
            DB::TransactionManager::start_rollback(conn);
        }
    }
}

/// Waits for the response to a statement. If no response arrives in time, returns a failure with
/// [`Fault::Silent`].
pub(super) async fn response<T>(
    within: Duration,
    statement: impl Future<Output = sqlx::Result<T>>,
) -> Result<T, Failure> {
    match timeout(within, statement).await {
        Ok(response) => response.map_err(Failure::from),
        Err(_) => Err(Failure::silent()),
    }
}

/// Ends the transaction that is open on the connection, if there is one, and prepares the session
/// for statements that commit by themselves.
async fn prepare<DB: Transactions>(
    checked_out: &mut CheckedOut<DB>,
    within: Duration,
) -> Result<(), Failure> {
    response(within, DB::leave_transaction(checked_out)).await?;
    checked_out.is_prepared = true;
    Ok(())
}

/// Only `drop` takes the connection.
const HELD: &str = "the connection is held until the session is dropped";

/// Passes the connection on, returns it to the pool, or closes it. If the transaction or statement
/// has not ended, a task cleans up first.
impl<DB: Transactions> Drop for Session<DB> {
    fn drop(&mut self) {
        if self.phase == Phase::Open {
            // If a COMMIT was executed but its reply was not received, sqlx's worker for SQLite
            // ignores the next rollback. Queue a rollback here even if no level is open, so that
            // the worker does not ignore a later one.
            self.roll_back(1);
        }
        let Some(mut checked_out) = self.checked_out.take() else {
            return;
        };
        match self.phase {
            Phase::Clean => self.connections.check_in(checked_out, self.limits),
            // Dropping the connection returns it to the pool.
            Phase::Committed => {}
            Phase::Broken => checked_out.close_on_drop(),
            Phase::Beginning | Phase::Open => {
                // BEGIN may have been sent although sqlx has not counted it.
                let beginning = self.phase == Phase::Beginning;
                let (limits, ms) = (self.limits, self.busy_timeout_ms);
                let runtime = checked_out.runtime();
                runtime.spawn(clean_up(checked_out, limits, beginning, ms));
            }
        }
    }
}

/// Sends the rollbacks that are queued on the connection, waits for the responses, and returns the
/// connection to the pool.
async fn clean_up<DB: Transactions>(
    mut conn: CheckedOut<DB>,
    limits: Limits,
    beginning: bool,
    busy_timeout_ms: Option<i64>,
) {
    let rolled_back = roll_back::<DB>(&mut conn, beginning, busy_timeout_ms);
    let mut outcome = timeout(GRACE, rolled_back).await;
    // A server detects the closed connection and cancels the statement. SQLite has no server, so
    // wait for the statement here. The pool would wait for it without a timeout.
    if outcome.is_err() && !DB::HAS_SERVER {
        let rolled_back = roll_back::<DB>(&mut conn, beginning, busy_timeout_ms);
        outcome = timeout(limits.statement_timeout(), rolled_back).await;
    }
    // On SQLite, if the handler has ended the transaction with an SQL statement, the rollback
    // fails, and the depth in sqlx remains above 0.
    let depth = DB::TransactionManager::get_transaction_depth(&conn);
    if !matches!(outcome, Ok(Ok(()))) || depth > 0 {
        conn.close_on_drop();
    }
}

/// Sends the queued rollbacks, and restores SQLite's `busy_timeout`.
async fn roll_back<DB: Transactions>(
    conn: &mut DB::Connection,
    beginning: bool,
    busy_timeout_ms: Option<i64>,
) -> sqlx::Result<()> {
    DB::finish_rollback(conn, beginning).await?;
    match busy_timeout_ms {
        Some(ms) => DB::restore_busy_timeout(conn, ms).await,
        None => Ok(()),
    }
}
