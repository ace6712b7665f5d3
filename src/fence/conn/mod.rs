//! Connections of the pool: check out, check in, and the end of a session that is out of reach.
//!
//! 1. Each use takes a connection from the pool and gives it back, in the task that needs it
//!    ([`direct`]): the pool's hooks see all of them.
//! 2. Where the application has chosen so, connections go from write to write instead ([`reuse`]).

mod direct;
mod reuse;
mod terminate;

use std::sync::Arc;

use sqlx::{Pool, pool::PoolConnection};
use tokio::time::Instant;

pub(super) use self::reuse::EarlyTransaction;
use self::{direct::Direct, reuse::Reuse, terminate::Terminations};
use super::{
    fault::Failure,
    settings::{Limits, TransactionLimits},
    sql::{AdvisoryLock, Backend, TransactionManager},
};

/// Where a fence has its connections from. Clones share all of it.
pub(super) struct Connections<DB: Backend> {
    direct: Arc<Direct<DB>>,
    reuse: Option<Reuse<DB>>,
    /// Whether a pooler in between gives each transaction a server of its own.
    pub(super) transaction_pooling: bool,
    terminations: Arc<Terminations<DB>>,
}

/// A connection that was taken out of the pool, and goes back when it is dropped.
pub(super) struct CheckedOut<DB: Backend> {
    pub(super) conn: PoolConnection<DB>,
    pub(super) origin: Origin,
    /// The transaction in which it is already: only where connections are reused.
    pub(super) early: Option<Box<EarlyTransaction>>,
    since: Instant,
}

/// What is known of a connection that was checked out.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Origin {
    /// It was used a moment ago.
    Kept,
    /// It was used at some time.
    Idle,
    /// The pool has just tested or opened it.
    Tested,
}

impl<DB: Backend> Connections<DB> {
    pub(super) fn new(pool: Pool<DB>) -> Self {
        Self {
            direct: Arc::new(Direct::new(pool)),
            reuse: None,
            transaction_pooling: false,
            terminations: Arc::new(Terminations::new()),
        }
    }

    /// The same, with connections that go from write to write or without.
    pub(super) fn reusing(mut self, yes: bool) -> Self {
        self.reuse = yes.then(|| {
            let reuse = self.reuse.take();
            reuse.unwrap_or_else(|| Reuse::new(Arc::clone(&self.direct)))
        });
        self
    }

    pub(super) fn pool(&self) -> &Pool<DB> {
        &self.direct.pool
    }

    /// The limits of a next transaction, where that is to begin with the COMMIT of the one before.
    pub(super) fn next_transaction(&self, limits: Limits) -> Option<TransactionLimits> {
        // With a pooler in between, an open transaction keeps a server from others.
        let begins = self.reuse.is_some() && !self.transaction_pooling;
        // Mostly it is for one resource; a write to several begins one of its own.
        begins.then(|| Limits { locks: 1, ..limits }.transaction(None))
    }

    /// Takes a connection that is at hand, or waits for one.
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

    /// Takes a connection by the pool's own way, which tests it unless it was told not to.
    pub(super) async fn check_out_tested(&self, limits: Limits) -> Result<CheckedOut<DB>, Failure> {
        let conn = self.direct.acquire(limits.pool_wait).await?;
        Ok(CheckedOut::new(conn, Origin::Tested))
    }

    /// Gives a connection back. It is outside of any transaction, or in one that has begun for a next request.
    pub(super) fn check_in(&self, checked_out: CheckedOut<DB>, limits: Limits) {
        match &self.reuse {
            Some(reuse) => reuse.keep(checked_out, limits),
            // To the pool.
            None => drop(checked_out),
        }
    }

    /// Ends the session whose transaction has this lock, from outside. Without a server (SQLite), the
    /// statement or the task that holds the transaction has to end by itself.
    pub(super) async fn terminate(&self, lock: Option<AdvisoryLock>, limits: Limits) {
        if let Some(lock) = lock
            && DB::HAS_SERVER
        {
            let within = limits.answer_wait;
            self.terminations.terminate(self.pool(), lock, within).await;
        }
    }

    /// Closes the idle connections of the pool, after one of its sessions has turned out to be of no use.
    pub(super) fn close_idle(&self) {
        self.direct.close_idle();
    }

    /// Ends no session from now on: the server knows no way.
    pub(super) fn leave_sessions(&self) {
        self.terminations.leave_all();
    }

    /// Whether a statement that is out of reach can be ended, or else ends by itself.
    pub(super) fn ends_sessions(&self) -> bool {
        self.terminations.ends_any()
    }
}

impl<DB: Backend> Clone for Connections<DB> {
    fn clone(&self) -> Self {
        Self {
            direct: Arc::clone(&self.direct),
            reuse: self.reuse.clone(),
            transaction_pooling: self.transaction_pooling,
            terminations: Arc::clone(&self.terminations),
        }
    }
}

impl<DB: Backend> CheckedOut<DB> {
    fn new(conn: PoolConnection<DB>, origin: Origin) -> Self {
        Self {
            conn,
            origin,
            early: None,
            since: Instant::now(),
        }
    }

    /// Rolls back the transaction that nobody wants, with the next message.
    pub(super) fn end_early_transaction(&mut self) {
        if self.early.take().is_some() {
            DB::TransactionManager::start_rollback(&mut self.conn);
        }
    }
}

/// Nobody gets it from the pool in a transaction.
impl<DB: Backend> Drop for CheckedOut<DB> {
    fn drop(&mut self) {
        self.end_early_transaction();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::advance;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_early_transaction_serves_who_has_its_limits_and_comes_in_time() {
        let limits = Limits::default().transaction(None);
        let early = EarlyTransaction::new(limits, Instant::now());
        let others = Limits {
            hold: Duration::from_secs(1),
            ..Limits::default()
        };
        assert!(early.serves(limits));
        assert!(!early.serves(others.transaction(None)));
        assert!(!early.serves(Limits::default().transaction(Some(Duration::ZERO))));
        advance(Duration::from_millis(5)).await;
        assert!(early.serves(limits));
        advance(Duration::from_millis(1)).await;
        assert!(!early.serves(limits), "it is too old");
    }
}
