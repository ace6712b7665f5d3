//! The settings of a fence, most of them time limits, and their defaults.

use std::time::Duration;

use tokio::time::Instant;

use super::{
    Fence,
    database::{FenceDatabase, TransactionLimits},
};

/// The settings of a fence, most of them time limits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) pool_wait: Duration,
    pub(crate) lock_wait: Duration,
    pub(crate) hold: Duration,
    pub(crate) answer_wait: Duration,
    /// Whether the pool checks a connection at each use.
    pub(crate) pool_checks: bool,
}

impl Limits {
    /// How long a statement of the fence may take, the wait for the row lock included.
    pub(super) const fn statement(self) -> Duration {
        self.lock_wait.saturating_add(self.answer_wait)
    }

    /// What bounds a transaction.
    pub(super) const fn transaction(self, key_wait: Option<Duration>) -> TransactionLimits {
        TransactionLimits {
            lock_wait: self.lock_wait,
            hold: self.hold,
            key_wait,
        }
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            pool_wait: Duration::from_secs(5),
            lock_wait: Duration::from_secs(5),
            hold: Duration::from_secs(10),
            answer_wait: Duration::from_secs(5),
            pool_checks: false,
        }
    }
}

impl<DB: FenceDatabase> Fence<DB> {
    /// How long to wait for a connection of the pool. Default: 5 s.
    ///
    /// The pool's own `acquire_timeout` applies as well; the shorter of the two decides.
    #[must_use]
    pub const fn pool_wait(mut self, limit: Duration) -> Self {
        self.limits.pool_wait = limit;
        self
    }

    /// How long to wait for those of this process that write to the same resource, then for the row
    /// lock, and each statement of the transaction for any other lock. Default: 5 s each. At least
    /// 1 ms.
    #[must_use]
    pub const fn lock_wait(mut self, limit: Duration) -> Self {
        self.limits.lock_wait = limit;
        self
    }

    /// How long a transaction may hold the row lock. Default: 10 s. At least 1 ms.
    ///
    /// `FenceLayer` ends a handler that takes longer. On Postgres the server sees to it as well,
    /// so that a process that is frozen loses its transaction: it ends one that is idle for a second
    /// longer than this, and a statement that takes longer than this and
    /// [`lock_wait`](Self::lock_wait) together; from Postgres 17 on, any transaction that takes longer
    /// than both together.
    #[must_use]
    pub const fn hold_limit(mut self, limit: Duration) -> Self {
        self.limits.hold = limit;
        self
    }

    /// How long to wait for the database's answer to BEGIN, COMMIT or a statement of the fence,
    /// beyond the wait for locks. Default: 5 s.
    #[must_use]
    pub const fn answer_wait(mut self, limit: Duration) -> Self {
        self.limits.answer_wait = limit;
        self
    }

    /// Whether each transaction takes its connection from the pool and gives it back, with all that
    /// the pool does then: `test_before_acquire`, `before_acquire`, `after_release`. Default: no.
    ///
    /// These are round trips. Without them an idle connection is taken untested, since BEGIN is as
    /// good a test as a ping: where it turns out to be dead, another one is taken. When its write is
    /// done, it goes to the next in line of this fence, or is kept for one for twenty milliseconds;
    /// the pool sees it again after a second at most. While others of the application may be waiting
    /// for a connection, the pool gets one back every ten milliseconds. Say yes where the pool's
    /// hooks must see each use, as one that resets the state of a session.
    ///
    /// On Postgres the next transaction begins with the COMMIT of the one before on the same
    /// connection, which saves another round trip. `now()` in a write may so be up to a millisecond
    /// older than its request. It is never older than that of the last write to the same resource,
    /// unless it waited for that one's lock.
    #[must_use]
    pub const fn pool_checks(mut self, yes: bool) -> Self {
        self.limits.pool_checks = yes;
        self
    }

    pub(crate) const fn limits(&self) -> Limits {
        self.limits
    }
}

/// The end of a wait that begins now. One that never ends, ends in 30 years.
pub(super) fn deadline(within: Duration) -> Instant {
    const FAR: Duration = Duration::from_secs(30 * 365 * 24 * 60 * 60);
    Instant::now() + within.min(FAR)
}
