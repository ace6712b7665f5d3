//! [`Transaction`]: a transaction that is safe to drop at any time.
//!
//! 1. BEGIN, COMMIT and each statement of the fence have timeouts, whatever the database does.
//! 2. If the transaction is dropped, a task rolls it back, and then returns the connection to the
//!    pool. If a statement keeps running, the connection is closed, and the server cancels the
//!    statement.
//! 3. COMMIT is either confirmed, or its outcome is reported as unknown.

use std::time::Duration;

use sqlx::Connection;
use tokio::time::{Instant, timeout};

use super::{
    breaks_connection,
    clean_up::{CleanUp, GRACE, Phase},
    response,
};
use crate::fence::{
    conn::{self, CheckedOut, Connections, Origin},
    error::CommitError,
    fault::{Failure, Fault, is_unprepared},
    local::Permit,
    settings::Limits,
    sql::{Begin, Committed, On, ReservedKey, TransactionId, TransactionManager, Transactions},
};

/// Transaction on a connection of the fence. It may be dropped at any time.
pub(crate) struct Transaction<DB: Transactions> {
    checked_out: Option<CheckedOut<DB>>,
    connections: Connections<DB>,
    phase: Phase,
    pub(in crate::fence) limits: Limits,
    /// Whether the transaction began before its request, together with the COMMIT of the previous
    /// transaction on this connection.
    pub(in crate::fence) began_early: bool,
    /// The id of the transaction on the server, if a token was admitted in the transaction.
    pub(in crate::fence) id: Option<TransactionId>,
    /// The idempotency key that the transaction has reserved, until the response is stored.
    pub(in crate::fence) reserved_key: Option<Box<ReservedKey>>,
    /// Whether a hook of the application has used the connection. The hook may have changed the
    /// role.
    pub(in crate::fence) hooked: bool,
    /// Whether a borrower has used the connection for a statement.
    pub(crate) used: bool,
    /// SQLite's `busy_timeout` before BEGIN changed it. It is restored before the connection
    /// returns to the pool.
    busy_timeout_ms: Option<i64>,
    /// The permit of the queue in which the transactions of SQLite wait.
    pub(in crate::fence) turn: Option<Permit>,
    /// The time at which the transaction acquired the last of its row locks. The hold timeout is
    /// measured from this time.
    pub(in crate::fence) held_since: Instant,
}

impl<DB: Transactions> Transaction<DB> {
    /// Takes a connection and opens a transaction on it.
    pub(in crate::fence) async fn begin(
        connections: &Connections<DB>,
        limits: Limits,
        begin: Begin,
    ) -> Result<Self, Failure> {
        let checked_out = connections.check_out(limits).await?;
        let untested = checked_out.origin != Origin::Tested;
        let mut transaction = Self::new(checked_out, connections, limits);
        match transaction.open(begin).await {
            // The connection was closed after its last use, which BEGIN detects as well as a ping
            // does. If sqlx miscounts the responses on the connection, only BEGIN detects it.
            Err(failure)
                if failure.fault.is_gone()
                    && (untested || matches!(*failure.cause, sqlx::Error::BeginFailed)) =>
            {
                transaction.discard();
            }
            opened => return opened.map(|()| transaction),
        }
        Self::begin_tested(connections, limits, begin).await
    }

    /// Opens a transaction on a connection that the pool has tested.
    pub(in crate::fence) async fn begin_tested(
        connections: &Connections<DB>,
        limits: Limits,
        begin: Begin,
    ) -> Result<Self, Failure> {
        let tested = connections.check_out_tested(limits).await?;
        let mut transaction = Self::new(tested, connections, limits);
        transaction.open(begin).await?;
        Ok(transaction)
    }

    fn new(checked_out: CheckedOut<DB>, connections: &Connections<DB>, limits: Limits) -> Self {
        Self {
            checked_out: Some(checked_out),
            connections: connections.clone(),
            phase: Phase::Clean,
            limits,
            began_early: false,
            id: None,
            reserved_key: None,
            hooked: false,
            used: false,
            busy_timeout_ms: None,
            turn: None,
            held_since: Instant::now(),
        }
    }

    /// Rolls back, and opens a new transaction on the same connection, with these timeouts.
    pub(in crate::fence) async fn restart(&mut self, limits: Limits) -> Result<(), Failure> {
        self.reserved_key = None;
        self.limits = limits;
        self.open(Begin::WithLimits).await
    }

    /// Takes over the early transaction of the connection if it can be used. Otherwise rolls back
    /// the open transaction, if there is one, and sends BEGIN.
    async fn open(&mut self, begin: Begin) -> Result<(), Failure> {
        if self.phase == Phase::Broken {
            return Err(Failure::silent());
        }
        let early = self.checked_out.as_mut().expect(HELD).early.take();
        // An early transaction has no timeouts until an admission sets them.
        self.began_early = begin == Begin::ForAdmission && early.is_some_and(conn::is_recent);
        if self.began_early {
            self.phase = Phase::Open;
            return Ok(());
        }
        self.roll_back(0);
        // A ping sends the rollback of a transaction that is restarted, and waits for the response.
        if self.phase == Phase::Open
            && !matches!(
                timeout(GRACE, self.connection_mut().ping()).await,
                Ok(Ok(()))
            )
        {
            self.phase = Phase::Broken;
            return Err(Failure::silent());
        }
        self.phase = Phase::Beginning;
        let within = self.limits.statement_timeout();
        let opening = async {
            if self.busy_timeout_ms.is_none() {
                self.busy_timeout_ms = DB::read_busy_timeout(self.connection_mut()).await?;
            }
            let limits = self.limits;
            DB::begin(self.connection_mut(), limits, begin).await
        };
        let opened = response(within, opening).await;
        match &opened {
            Ok(()) => self.phase = Phase::Open,
            Err(failure) if breaks_connection(failure, &self.connections) => {
                self.phase = Phase::Broken;
                if failure.fault == Fault::Silent {
                    self.connections.close_idle();
                }
            }
            Err(_) => {}
        }
        opened
    }

    /// Runs statements of the fence, within the timeout of a statement that takes a row lock.
    pub(in crate::fence) async fn run<T>(
        &mut self,
        statements: impl AsyncFnOnce(On<'_, DB>) -> sqlx::Result<T>,
    ) -> Result<T, Failure> {
        let within = self.limits.statement_timeout();
        self.run_within(within, statements).await
    }

    /// Runs the statements that reserve an idempotency key and admit a token. The timeout includes
    /// both lock timeouts.
    pub(in crate::fence) async fn reserve<T>(
        &mut self,
        statements: impl AsyncFnOnce(On<'_, DB>) -> sqlx::Result<T>,
    ) -> Result<T, Failure> {
        let key_timeout = self.limits.key_timeout.unwrap_or_default();
        let within = self.limits.statement_timeout().saturating_add(key_timeout);
        self.run_within(within, statements).await
    }

    /// Runs a statement of the application, or statements of the fence that may change many rows.
    /// The timeout is the sum of `lock_timeout`, `hold_timeout` and `answer_timeout`, and ten
    /// minutes more if the transaction is long.
    pub(in crate::fence) async fn write<T>(
        &mut self,
        statement: impl AsyncFnOnce(On<'_, DB>) -> sqlx::Result<T>,
    ) -> Result<T, Failure> {
        let within = self.limits.write_timeout();
        self.run_within(within, statement).await
    }

    /// Runs statements. After a failure that breaks the connection, the connection is closed when
    /// the transaction is dropped.
    async fn run_within<T>(
        &mut self,
        within: Duration,
        statements: impl AsyncFnOnce(On<'_, DB>) -> sqlx::Result<T>,
    ) -> Result<T, Failure> {
        let conn: &mut DB::Connection = self.checked_out.as_mut().expect(HELD);
        let on = On::new(conn, &self.connections.names);
        let outcome = response(within, statements(on)).await;
        outcome.map_err(|failure| {
            if is_unprepared(&failure.cause) {
                // The statement can be repeated on another connection.
                self.phase = Phase::Broken;
                return failure.with_fault(Fault::Collision);
            }
            if breaks_connection(&failure, &self.connections) {
                self.phase = Phase::Broken;
            }
            failure
        })
    }

    /// Returns whether the transaction is open and has no open nested transaction.
    pub(in crate::fence) async fn is_outermost(&mut self) -> bool {
        if !DB::HAS_SERVER {
            // sqlx counts a rollback on SQLite only when the thread of the connection executes it.
            let within = self.limits.answer_timeout;
            _ = timeout(within, self.connection_mut().ping()).await;
        }
        self.depth() == 1
    }

    /// Returns the number of open transactions that sqlx counts: this one, and the nested ones.
    pub(in crate::fence) fn depth(&self) -> usize {
        DB::TransactionManager::get_transaction_depth(self.connection())
    }

    /// Commits the transaction. `Ok` means that the COMMIT is confirmed.
    pub(crate) async fn commit(mut self) -> Result<(), CommitError> {
        // On SQLite, COMMIT waits for readers, for at most the lock timeout.
        let within = match DB::HAS_SERVER {
            true => self.limits.answer_timeout,
            false => self.limits.statement_timeout(),
        };
        let begin_next = self.connections.begins_next(self.limits);
        if !self.is_outermost().await {
            return Err(CommitError::Unfinished);
        }
        let sent = Instant::now();
        let conn = self.connection_mut();
        match response(within, DB::commit(conn, begin_next)).await {
            Ok(Committed::Clean) => self.phase = self.restore_busy_timeout().await,
            Ok(Committed::Broken) => self.phase = Phase::Broken,
            Ok(Committed::Begun) => {
                self.phase = Phase::Clean;
                self.checked_out.as_mut().expect(HELD).early = Some(sent);
            }
            Err(failure) => {
                let failure = match self.connections.names.is_distributed() {
                    true => failure.at_distributed_commit(),
                    false => failure,
                };
                let error = CommitError::at_commit(failure);
                if matches!(error, CommitError::OutcomeUnknown(_)) {
                    self.phase = Phase::Broken;
                }
                return Err(error);
            }
        }
        Ok(())
    }

    /// Restores SQLite's `busy_timeout` after COMMIT, and returns the next phase.
    async fn restore_busy_timeout(&mut self) -> Phase {
        let Some(ms) = self.busy_timeout_ms else {
            return Phase::Committed;
        };
        let within = self.limits.answer_timeout;
        let restore = DB::restore_busy_timeout(self.connection_mut(), ms);
        match timeout(within, restore).await {
            Ok(Ok(())) => Phase::Committed,
            _ => Phase::Broken,
        }
    }

    /// Rolls back by closing the connection.
    pub(in crate::fence) fn discard(mut self) {
        self.phase = Phase::Broken;
    }

    /// Queues one rollback for each open level, and at least `least` rollbacks. The next use of the
    /// connection sends them.
    fn roll_back(&mut self, least: usize) {
        if let Some(conn) = &mut self.checked_out {
            // Read the depth once, because SQLite's worker lowers it later, on its own thread.
            let depth = DB::TransactionManager::get_transaction_depth(conn);
            for _ in 0..depth.max(least) {
                DB::TransactionManager::start_rollback(conn);
            }
        }
    }

    pub(in crate::fence) fn connection(&self) -> &DB::Connection {
        self.checked_out.as_ref().expect(HELD)
    }

    pub(in crate::fence) fn connection_mut(&mut self) -> &mut DB::Connection {
        self.checked_out.as_mut().expect(HELD)
    }
}

/// Only `drop` takes the connection.
const HELD: &str = "the connection is held until the transaction is dropped";

impl<DB: Transactions> Drop for Transaction<DB> {
    fn drop(&mut self) {
        if self.phase == Phase::Open {
            // If a COMMIT was executed but its reply was not received, sqlx's worker for SQLite
            // ignores the next rollback. Queue a rollback here even if no level is open, so that
            // the worker does not ignore a later one.
            self.roll_back(1);
        }
        if let Some(checked_out) = self.checked_out.take() {
            let clean_up = CleanUp {
                checked_out,
                limits: self.limits,
                phase: self.phase,
                busy_timeout_ms: self.busy_timeout_ms,
            };
            clean_up.dispose(&self.connections);
        }
    }
}
