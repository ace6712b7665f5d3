//! The end of what was dropped in the middle.

use std::time::Duration;

use sqlx::Connection;
use tokio::time::timeout;

use crate::fence::{
    conn::{CheckedOut, Connections},
    settings::Limits,
    sql::{AdvisoryLock, Backend, TransactionManager},
};

/// How long a statement that was cut off may go on before its session is ended.
pub(super) const GRACE: Duration = Duration::from_secs(1);

/// A connection that is in the middle of something, and what is known of that.
pub(super) struct CleanUp<DB: Backend> {
    pub(super) checked_out: CheckedOut<DB>,
    pub(super) connections: Connections<DB>,
    pub(super) limits: Limits,
    /// The lock by which its transaction is found on the server, where it may have one.
    pub(super) lock: Option<AdvisoryLock>,
    /// What BEGIN has changed on the connection.
    pub(super) pool_lock_wait: Option<i64>,
    /// Whether BEGIN may have been sent without sqlx having counted it.
    pub(super) beginning: bool,
}

impl<DB: Backend> CleanUp<DB> {
    /// Ends it in a task: the rollbacks that are queued on the connection are seen through, and then
    /// the pool has it back.
    pub(super) fn spawn(self) {
        // Without a runtime there is no pool either: the connection is dropped, and closed.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(self.run());
        }
    }

    async fn run(mut self) {
        let conn = &mut self.checked_out.conn;
        let rolled_back = async {
            if self.beginning {
                DB::abandon_begin(conn).await?;
            }
            settle::<DB>(conn, self.pool_lock_wait).await
        };
        let mut outcome = timeout(GRACE, rolled_back).await;
        // Where no session can be ended, the connection is closed at once.
        if outcome.is_err() && self.connections.ends_sessions() {
            // A statement is still under way. With the row lock, it must not keep others waiting;
            // without, it waits for that lock, no longer than for its limit. The pool would wait for
            // its answer without a limit.
            self.connections.terminate(self.lock, self.limits).await;
            let settled = settle::<DB>(conn, self.pool_lock_wait);
            outcome = timeout(self.limits.statement(), settled).await;
        }
        // SQLite: where the handler had ended the transaction by hand, the rollback failed and was
        // not counted.
        let depth = DB::TransactionManager::get_transaction_depth(conn);
        if !matches!(outcome, Ok(Ok(()))) || depth > 0 {
            conn.close_on_drop();
        }
    }
}

/// Sees the queued rollbacks through, and puts back what BEGIN has changed.
async fn settle<DB: Backend>(
    conn: &mut DB::Connection,
    pool_lock_wait: Option<i64>,
) -> sqlx::Result<()> {
    conn.ping().await?;
    match pool_lock_wait {
        Some(ms) => DB::restore_lock_wait(conn, ms).await,
        None => Ok(()),
    }
}
