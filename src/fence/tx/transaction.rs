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

use super::session::{GRACE, Phase, Session, response};
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
    /// The first field, so that it is dropped first: the rollback starts before `turn` is released.
    session: Session<DB>,
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
    /// The permit of the queue in which the transactions of SQLite wait.
    pub(in crate::fence) turn: Option<Permit>,
    /// The time at which the transaction acquired the last of its row locks. The hold timeout is
    /// measured from this time.
    pub(in crate::fence) held_since: Instant,
}

impl<DB: Transactions> Transaction<DB> {
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
            session: Session::new(checked_out, connections, limits),
            began_early: false,
            id: None,
            reserved_key: None,
            hooked: false,
            used: false,
            turn: None,
            held_since: Instant::now(),
        }
    }

    pub(in crate::fence) const fn limits(&self) -> Limits {
        self.session.limits
    }

    /// Rolls back, and opens a new transaction on the same connection, with these timeouts.
    pub(in crate::fence) async fn restart(&mut self, limits: Limits) -> Result<(), Failure> {
        self.reserved_key = None;
        self.session.limits = limits;
        self.open(Begin::WithLimits).await
    }

    /// Takes over the early transaction of the connection if it can be used. Otherwise rolls back
    /// the open transaction, if there is one, and sends BEGIN.
    async fn open(&mut self, begin: Begin) -> Result<(), Failure> {
        let session = &mut self.session;
        if session.phase == Phase::Broken {
            return Err(Failure::silent());
        }
        let early = session.conn_mut().early.take();
        // An early transaction has no timeouts until an admission sets them.
        self.began_early = begin == Begin::ForAdmission && early.is_some_and(conn::is_recent);
        if self.began_early {
            session.phase = Phase::Open;
            return Ok(());
        }
        session.roll_back(0);
        // A ping sends the rollback of a transaction that is restarted, and waits for the response.
        if session.phase == Phase::Open
            && !matches!(timeout(GRACE, session.conn_mut().ping()).await, Ok(Ok(())))
        {
            session.phase = Phase::Broken;
            return Err(Failure::silent());
        }
        session.phase = Phase::Beginning;
        let limits = session.limits;
        let opening = async {
            if session.busy_timeout_ms.is_none() {
                session.busy_timeout_ms = DB::read_busy_timeout(session.conn_mut()).await?;
            }
            DB::begin(session.conn_mut(), limits, begin).await
        };
        let opened = response(limits.statement_timeout(), opening).await;
        match &opened {
            Ok(()) => session.phase = Phase::Open,
            Err(failure) => {
                session.note(failure);
                if failure.fault == Fault::Silent {
                    session.connections.close_idle();
                }
            }
        }
        opened
    }

    /// Runs statements of the fence, within the timeout of a statement that takes a row lock.
    pub(in crate::fence) async fn run<T>(
        &mut self,
        statements: impl AsyncFnOnce(On<'_, DB>) -> sqlx::Result<T>,
    ) -> Result<T, Failure> {
        let within = self.limits().statement_timeout();
        self.run_within(within, statements).await
    }

    /// Runs the statements that reserve an idempotency key and admit a token. The timeout includes
    /// both lock timeouts.
    pub(in crate::fence) async fn reserve<T>(
        &mut self,
        statements: impl AsyncFnOnce(On<'_, DB>) -> sqlx::Result<T>,
    ) -> Result<T, Failure> {
        let limits = self.limits();
        let key_timeout = limits.key_timeout.unwrap_or_default();
        let within = limits.statement_timeout().saturating_add(key_timeout);
        self.run_within(within, statements).await
    }

    /// Runs a statement of the application, or statements of the fence that may change many rows.
    /// The timeout is the sum of `lock_timeout`, `hold_timeout` and `answer_timeout`, and ten
    /// minutes more if the transaction is long.
    pub(in crate::fence) async fn write<T>(
        &mut self,
        statement: impl AsyncFnOnce(On<'_, DB>) -> sqlx::Result<T>,
    ) -> Result<T, Failure> {
        let within = self.limits().write_timeout();
        self.run_within(within, statement).await
    }

    /// Runs statements. If one of them is no longer prepared, it can be repeated on another
    /// connection.
    async fn run_within<T>(
        &mut self,
        within: Duration,
        statements: impl AsyncFnOnce(On<'_, DB>) -> sqlx::Result<T>,
    ) -> Result<T, Failure> {
        let outcome = self.session.run(within, statements).await;
        outcome.map_err(|failure| match is_unprepared(&failure.cause) {
            true => {
                self.session.phase = Phase::Broken;
                failure.with_fault(Fault::Collision)
            }
            false => failure,
        })
    }

    /// Returns whether the transaction is open and has no open nested transaction.
    pub(in crate::fence) async fn is_outermost(&mut self) -> bool {
        if !DB::HAS_SERVER {
            // sqlx counts a rollback on SQLite only when the thread of the connection executes it.
            let within = self.limits().answer_timeout;
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
        let limits = self.limits();
        // On SQLite, COMMIT waits for readers, for at most the lock timeout.
        let within = match DB::HAS_SERVER {
            true => limits.answer_timeout,
            false => limits.statement_timeout(),
        };
        let begin_next = self.session.connections.begins_next(limits);
        if !self.is_outermost().await {
            return Err(CommitError::Unfinished);
        }
        let sent = Instant::now();
        let session = &mut self.session;
        match response(within, DB::commit(session.conn_mut(), begin_next)).await {
            Ok(Committed::Clean) => session.phase = restore_busy_timeout(session).await,
            Ok(Committed::Broken) => session.phase = Phase::Broken,
            Ok(Committed::Begun) => {
                session.phase = Phase::Clean;
                session.conn_mut().early = Some(sent);
            }
            Err(failure) => {
                let failure = match session.connections.names.is_distributed() {
                    true => failure.at_distributed_commit(),
                    false => failure,
                };
                let error = CommitError::at_commit(failure);
                if matches!(error, CommitError::OutcomeUnknown(_)) {
                    session.phase = Phase::Broken;
                }
                return Err(error);
            }
        }
        Ok(())
    }

    /// Rolls back by closing the connection.
    pub(in crate::fence) fn discard(mut self) {
        self.session.phase = Phase::Broken;
    }

    pub(in crate::fence) fn connection(&self) -> &DB::Connection {
        self.session.conn()
    }

    pub(in crate::fence) fn connection_mut(&mut self) -> &mut DB::Connection {
        self.session.conn_mut()
    }
}

/// Restores SQLite's `busy_timeout` after COMMIT, and returns the next phase.
async fn restore_busy_timeout<DB: Transactions>(session: &mut Session<DB>) -> Phase {
    let Some(ms) = session.busy_timeout_ms else {
        return Phase::Committed;
    };
    let within = session.limits.answer_timeout;
    let restore = DB::restore_busy_timeout(session.conn_mut(), ms);
    match timeout(within, restore).await {
        Ok(Ok(())) => Phase::Committed,
        _ => Phase::Broken,
    }
}
