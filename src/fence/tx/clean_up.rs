//! Clean-up of connections whose transaction or statement was dropped before its end.

use std::time::Duration;

use tokio::time::timeout;

use crate::fence::{
    conn::CheckedOut,
    settings::Limits,
    sql::{TransactionManager, Transactions},
};

/// Time for which an interrupted statement may continue before its connection is closed.
pub(super) const GRACE: Duration = Duration::from_millis(500);

/// Connection whose transaction or statement was dropped before its end.
pub(super) struct CleanUp<DB: Transactions> {
    pub(super) checked_out: CheckedOut<DB>,
    pub(super) limits: Limits,
    /// SQLite's `busy_timeout` before BEGIN changed it.
    pub(super) busy_timeout_ms: Option<i64>,
    /// Whether BEGIN may have been sent although sqlx has not counted it.
    pub(super) beginning: bool,
}

impl<DB: Transactions> CleanUp<DB> {
    /// Cleans up in a task: sends the rollbacks that are queued on the connection, waits for the
    /// responses, and returns the connection to the pool.
    pub(super) fn spawn(self) {
        if let Some(runtime) = self.checked_out.runtime() {
            runtime.spawn(self.run());
        }
    }

    async fn run(mut self) {
        let conn = &mut self.checked_out;
        let rolled_back = roll_back::<DB>(conn, self.beginning, self.busy_timeout_ms);
        let mut outcome = timeout(GRACE, rolled_back).await;
        // A server detects the closed connection and cancels the statement. SQLite has no server,
        // so wait for the statement here. The pool would wait for it without a timeout.
        if outcome.is_err() && !DB::HAS_SERVER {
            let rolled_back = roll_back::<DB>(conn, self.beginning, self.busy_timeout_ms);
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
