//! Check-out and check-in of the pool's connections.
//!
//! 1. By default, each operation acquires a connection from the pool, in the task that needs it,
//!    and returns the connection afterwards ([`direct`]). The pool's hooks run for each operation.
//! 2. On Postgres, the application can choose reuse. Then connections are passed from write to
//!    write ([`reuse`]).

mod direct;
mod reuse;

use std::{
    ops::{Deref, DerefMut},
    sync::Arc,
    time::Duration,
};

use derive_where::derive_where;
use sqlx::{Pool, pool::PoolConnection};
use tokio::{runtime::Handle, time::Instant};

pub(super) use self::direct::with_address;
use self::{direct::Direct, reuse::Reuse};
use super::{
    fault::Failure,
    settings::Limits,
    sql::{Names, TransactionManager, Transactions},
};

/// Maximum age of an early transaction when a request takes it. An early transaction begins before
/// its request, together with the COMMIT of the previous transaction on the connection.
const MAX_AGE: Duration = Duration::from_millis(5);

/// Returns whether an early transaction is recent enough for a request. `sent` is the time at which
/// the process sent the BEGIN of that transaction. The age is measured from this time, because the
/// client does not know when the server executed the BEGIN.
pub(super) fn is_recent(sent: Instant) -> bool {
    sent.elapsed() <= MAX_AGE
}

/// Source of a fence's connections, which clones share.
#[derive_where(Clone)]
pub(super) struct Connections<DB: Transactions> {
    direct: Arc<Direct<DB>>,
    reuse: Option<Arc<Reuse<DB>>>,
    pub(super) names: Arc<Names>,
}

/// Connection that was taken from the pool. When this value is dropped, the connection returns to
/// the pool. If it is dropped outside of any runtime, sqlx would panic, so the connection is
/// dropped in the runtime in which it was checked out.
pub(super) struct CheckedOut<DB: Transactions> {
    conn: Option<PoolConnection<DB>>,
    runtime: Handle,
    pub(super) origin: Origin,
    /// When the process sent the BEGIN of the early transaction on the connection. Only reused
    /// connections have an early transaction.
    pub(super) early: Option<Instant>,
    /// Whether the session has been prepared for statements that commit by themselves.
    pub(super) is_prepared: bool,
    /// The time at which the connection was checked out.
    since: Instant,
}

/// State of a connection when it is checked out.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Origin {
    /// A write of this fence has just used the connection.
    Kept,
    /// The connection was idle and has not been tested.
    Idle,
    /// The pool has just tested or opened the connection.
    Tested,
}

impl<DB: Transactions> Connections<DB> {
    /// Creates a source of connections over a pool. Reuse saves round trips to a server. SQLite
    /// has no server.
    pub(super) fn new(pool: Pool<DB>, reuse: bool, names: Names) -> Self {
        let direct = Arc::new(Direct::new(pool));
        Self {
            reuse: (reuse && DB::HAS_SERVER).then(|| Reuse::new(Arc::clone(&direct))),
            direct,
            names: Arc::new(names),
        }
    }

    pub(super) fn pool(&self) -> &Pool<DB> {
        &self.direct.pool
    }

    /// Returns whether each COMMIT also begins the next transaction on the connection.
    pub(super) fn begins_next(&self, limits: Limits) -> bool {
        // With a pooler, an open transaction would keep a server connection from other clients.
        // With a distributed fence, such a transaction cannot be used, because only the worker
        // knows the time of the last write to a resource.
        self.reuse.is_some() && !limits.transaction_pooling && !self.names.is_distributed()
    }

    /// Takes an available connection, or waits for one.
    pub(super) async fn check_out(&self, limits: Limits) -> Result<CheckedOut<DB>, Failure> {
        if let Some(reuse) = &self.reuse {
            return reuse.take(limits).await;
        }
        let mut checked_out = self.check_out_tested(limits).await?;
        if !self.pool().options().get_test_before_acquire() {
            checked_out.origin = Origin::Idle;
        }
        Ok(checked_out)
    }

    /// Acquires a connection from the pool, which tests it unless the pool's options disable that.
    pub(super) async fn check_out_tested(&self, limits: Limits) -> Result<CheckedOut<DB>, Failure> {
        let conn = self.direct.acquire(limits.pool_timeout).await?;
        Ok(CheckedOut::new(conn, Origin::Tested))
    }

    /// Takes back a connection that has no open transaction except an early one.
    pub(super) fn check_in(&self, checked_out: CheckedOut<DB>, limits: Limits) {
        match &self.reuse {
            Some(reuse) => reuse.keep(checked_out, limits),
            // Dropping the connection returns it to the pool.
            None => drop(checked_out),
        }
    }

    /// Closes the idle connections of the pool after one session turned out to be unusable.
    pub(super) fn close_idle(&self) {
        self.direct.close_idle();
    }
}

impl<DB: Transactions> CheckedOut<DB> {
    fn new(conn: PoolConnection<DB>, origin: Origin) -> Self {
        Self {
            conn: Some(conn),
            runtime: Handle::current(),
            origin,
            early: None,
            is_prepared: false,
            since: Instant::now(),
        }
    }

    /// Ends the early transaction, if there is one. The rollback is sent with the next message.
    pub(super) fn end_early_transaction(&mut self) {
        if self.early.take().is_some() {
            DB::TransactionManager::start_rollback(self);
        }
    }

    /// Returns the current runtime or, outside of any runtime, the runtime in which the connection
    /// was checked out.
    pub(super) fn runtime(&self) -> Handle {
        Handle::try_current().unwrap_or_else(|_| self.runtime.clone())
    }
}

/// Only `drop` takes the connection.
const HELD: &str = "the connection is held until it is dropped";

impl<DB: Transactions> Deref for CheckedOut<DB> {
    type Target = PoolConnection<DB>;

    fn deref(&self) -> &Self::Target {
        self.conn.as_ref().expect(HELD)
    }
}

impl<DB: Transactions> DerefMut for CheckedOut<DB> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        self.conn.as_mut().expect(HELD)
    }
}

impl<DB: Transactions> Drop for CheckedOut<DB> {
    fn drop(&mut self) {
        self.end_early_transaction();
        let is_outside = Handle::try_current().is_err();
        let _entered = is_outside.then(|| self.runtime.enter());
        drop(self.conn.take());
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_early_transaction_serves_for_five_milliseconds() {
        let sent = Instant::now();
        assert!(is_recent(sent));
        advance(Duration::from_millis(5)).await;
        assert!(is_recent(sent));
        advance(Duration::from_millis(1)).await;
        assert!(!is_recent(sent), "the early transaction is too old");
    }
}
