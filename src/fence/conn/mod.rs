//! Connections of the pool: check out and check in.
//!
//! 1. Each use takes a connection from the pool and gives it back, in the task that needs it
//!    ([`direct`]): the pool's hooks see all of them.
//! 2. Where the application has chosen so, connections go from write to write instead ([`reuse`]).

mod direct;
mod reuse;

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::Relaxed},
};

use sqlx::{Pool, pool::PoolConnection};
use tokio::time::Instant;

pub(super) use self::reuse::EarlyTransaction;
use self::{direct::Direct, reuse::Reuse};
use super::{
    fault::Failure,
    settings::Limits,
    sql::{Backend, TransactionManager},
};

/// Where a fence has its connections from. Clones share all of it.
pub(super) struct Connections<DB: Backend> {
    direct: Arc<Direct<DB>>,
    reuse: Option<Reuse<DB>>,
    /// Whether a pooler in between gives each transaction a server of its own.
    pub(super) transaction_pooling: bool,
    /// Whether transactions write on the workers of a Citus cluster.
    is_distributed: Arc<AtomicBool>,
}

/// A connection that was taken out of the pool, and goes back when it is dropped.
pub(super) struct CheckedOut<DB: Backend> {
    pub(super) conn: PoolConnection<DB>,
    pub(super) origin: Origin,
    /// The transaction in which it is already: only where connections are reused.
    pub(super) early: Option<Box<EarlyTransaction>>,
    /// Whether its session is set up for statements that commit by themselves.
    pub(super) is_alone: bool,
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
    pub(super) fn new(pool: Pool<DB>, reuse: bool, transaction_pooling: bool) -> Self {
        let direct = Arc::new(Direct::new(pool));
        Self {
            reuse: reuse.then(|| Reuse::new(Arc::clone(&direct))),
            direct,
            transaction_pooling,
            is_distributed: Arc::default(),
        }
    }

    /// Whether transactions write on other servers, which commit before the one that this is connected to.
    pub(super) fn is_distributed(&self) -> bool {
        self.is_distributed.load(Relaxed)
    }

    pub(super) fn set_distributed(&self, is_distributed: bool) {
        self.is_distributed.store(is_distributed, Relaxed);
    }

    pub(super) fn pool(&self) -> &Pool<DB> {
        &self.direct.pool
    }

    /// Whether the next transaction begins with the COMMIT of the one before.
    pub(super) fn begins_next(&self) -> bool {
        // With a pooler in between, an open transaction keeps a server from other clients. The time of the last
        // write to a resource, which must not be after the beginning, is on a worker.
        self.reuse.is_some() && !self.transaction_pooling && !self.is_distributed()
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
        let conn = self.direct.acquire(limits.pool_timeout).await?;
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

    /// Closes the idle connections of the pool, after one of its sessions has turned out to be of no use.
    pub(super) fn close_idle(&self) {
        self.direct.close_idle();
    }
}

impl<DB: Backend> Clone for Connections<DB> {
    fn clone(&self) -> Self {
        Self {
            direct: Arc::clone(&self.direct),
            reuse: self.reuse.clone(),
            transaction_pooling: self.transaction_pooling,
            is_distributed: Arc::clone(&self.is_distributed),
        }
    }
}

impl<DB: Backend> CheckedOut<DB> {
    fn new(conn: PoolConnection<DB>, origin: Origin) -> Self {
        Self {
            conn,
            origin,
            early: None,
            is_alone: false,
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
    async fn an_early_transaction_serves_for_five_milliseconds() {
        let early = EarlyTransaction::new(Instant::now());
        assert!(early.serves());
        advance(Duration::from_millis(5)).await;
        assert!(early.serves());
        advance(Duration::from_millis(1)).await;
        assert!(!early.serves(), "it is too old");
    }
}
