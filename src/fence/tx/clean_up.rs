//! The end of what was dropped in the middle.

use std::time::Duration;

use sqlx::Connection;
use tokio::time::timeout;

use crate::fence::{
    conn::CheckedOut,
    settings::Limits,
    sql::{Backend, TransactionManager},
};

/// How long a statement that was cut off may go on before its connection is closed.
pub(super) const GRACE: Duration = Duration::from_millis(500);

/// A connection that is in the middle of something, and what is known of that.
pub(super) struct CleanUp<DB: Backend> {
    pub(super) checked_out: CheckedOut<DB>,
    pub(super) limits: Limits,
    /// What BEGIN has changed on the connection.
    pub(super) pool_lock_wait: Option<i64>,
    /// Whether BEGIN may have been sent without sqlx having counted it.
    pub(super) beginning: bool,
}

impl<DB: Backend> CleanUp<DB> {
    /// Ends it in a task: the rollbacks that are queued on the connection are sent and answered, and
    /// then the pool has it back.
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
        // A server notices that the connection is closed, and ends the statement. SQLite has to be
        // waited for: the pool would do so without a limit.
        if outcome.is_err() && !DB::HAS_SERVER {
            let settled = settle::<DB>(conn, self.pool_lock_wait);
            outcome = timeout(self.limits.statement(), settled).await;
        }
        // SQLite: if the handler had ended the transaction by hand, the rollback failed and was not
        // counted.
        let depth = DB::TransactionManager::get_transaction_depth(conn);
        if !matches!(outcome, Ok(Ok(()))) || depth > 0 {
            conn.close_on_drop();
        }
    }
}

/// Sends the queued rollbacks, and restores what BEGIN has changed.
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
