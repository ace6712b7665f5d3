//! The time limits of a fence and of its transactions, and their defaults.

use std::time::Duration;

use tokio::time::Instant;

/// The time limits of a fence.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) pool_wait: Duration,
    pub(crate) lock_wait: Duration,
    pub(crate) hold: Duration,
    pub(crate) answer_wait: Duration,
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

/// The time limits of a transaction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct TransactionLimits {
    pub(super) lock_wait: Duration,
    pub(super) hold: Duration,
    /// How long to wait for the first lock, where that is one of an idempotency key.
    pub(super) key_wait: Option<Duration>,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            pool_wait: Duration::from_secs(5),
            lock_wait: Duration::from_secs(5),
            hold: Duration::from_secs(10),
            answer_wait: Duration::from_secs(5),
        }
    }
}

/// The end of a wait that begins now. One that never ends, ends in 30 years.
pub(super) fn deadline(within: Duration) -> Instant {
    const FAR: Duration = Duration::from_secs(30 * 365 * 24 * 60 * 60);
    Instant::now() + within.min(FAR)
}
