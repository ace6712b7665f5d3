//! Connections whose transaction or statement was dropped, and what happens to them.

use std::time::Duration;

use tokio::time::timeout;

use crate::fence::{
    conn::{CheckedOut, Connections},
    settings::Limits,
    sql::{TransactionManager, Transactions},
};

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

/// Connection whose transaction or statement was dropped.
pub(super) struct CleanUp<DB: Transactions> {
    pub(super) checked_out: CheckedOut<DB>,
    pub(super) limits: Limits,
    pub(super) phase: Phase,
    /// SQLite's `busy_timeout` before BEGIN changed it.
    pub(super) busy_timeout_ms: Option<i64>,
}

impl<DB: Transactions> CleanUp<DB> {
    /// Passes the connection on, returns it to the pool, or closes it. If the transaction or
    /// statement has not ended, a task cleans up first.
    pub(super) fn dispose(mut self, connections: &Connections<DB>) {
        match self.phase {
            Phase::Clean => connections.check_in(self.checked_out, self.limits),
            // Dropping the connection returns it to the pool.
            Phase::Committed => {}
            Phase::Broken => self.checked_out.close_on_drop(),
            Phase::Beginning | Phase::Open => {
                if let Some(runtime) = self.checked_out.runtime() {
                    runtime.spawn(self.run());
                }
            }
        }
    }

    /// Sends the rollbacks that are queued on the connection, waits for the responses, and returns
    /// the connection to the pool.
    async fn run(mut self) {
        let conn = &mut self.checked_out;
        // BEGIN may have been sent although sqlx has not counted it.
        let beginning = self.phase == Phase::Beginning;
        let rolled_back = roll_back::<DB>(conn, beginning, self.busy_timeout_ms);
        let mut outcome = timeout(GRACE, rolled_back).await;
        // A server detects the closed connection and cancels the statement. SQLite has no server,
        // so wait for the statement here. The pool would wait for it without a timeout.
        if outcome.is_err() && !DB::HAS_SERVER {
            let rolled_back = roll_back::<DB>(conn, beginning, self.busy_timeout_ms);
            outcome = timeout(self.limits.statement_timeout(), rolled_back).await;
        }
        // On SQLite, if the handler has ended the transaction with an SQL statement, the rollback
        // fails, and the depth in sqlx remains above 0.
        let depth = DB::TransactionManager::get_transaction_depth(conn);
        if !matches!(outcome, Ok(Ok(()))) || depth > 0 {
            conn.close_on_drop();
        }
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
