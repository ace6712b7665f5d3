//! The time limits of a fence and of its transactions, and their defaults.

use std::time::Duration;

use tokio::time::Instant;

use super::claims::Claims;

/// The time limits of a fence.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) pool_timeout: Duration,
    pub(crate) lock_timeout: Duration,
    pub(crate) hold_timeout: Duration,
    pub(crate) answer_timeout: Duration,
    /// How many row locks a transaction takes, each with a wait of its own.
    pub(super) locks: u32,
    /// Whether COMMIT waits for the disk, even if the session does not.
    pub(super) durable: bool,
    /// Whether the session may have prepared statements of another client, as behind a pooler.
    pub(super) shared_session: bool,
}

impl Limits {
    /// How long a statement of the fence may take, the wait for the row lock included.
    pub(super) const fn statement(self) -> Duration {
        self.lock_timeout.saturating_add(self.answer_timeout)
    }

    /// The same, for transactions that take the row locks of these.
    pub(super) fn locking(self, claims: &Claims) -> Self {
        Self {
            locks: u32::try_from(claims.iter().count()).unwrap_or(u32::MAX),
            ..self
        }
    }

    /// What bounds a transaction.
    pub(super) const fn transaction(self, key_timeout: Option<Duration>) -> TransactionLimits {
        TransactionLimits {
            lock_timeout: self.lock_timeout,
            hold_timeout: self.hold_timeout,
            key_timeout,
            whole: self.whole(key_timeout),
            durable: self.durable,
            shared_session: self.shared_session,
        }
    }

    /// The longest that a transaction takes whose waits all stay within their limits: the claim of a key, an admission for
    /// each lock, the hooks and the handler, and COMMIT.
    const fn whole(self, key_timeout: Option<Duration>) -> Duration {
        let claim = match key_timeout {
            Some(key_timeout) => key_timeout.saturating_add(self.answer_timeout),
            None => Duration::ZERO,
        };
        claim
            .saturating_add(self.statement().saturating_mul(self.locks))
            .saturating_add(self.hold_timeout)
            .saturating_add(self.answer_timeout)
    }
}

/// The time limits of a transaction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct TransactionLimits {
    pub(super) lock_timeout: Duration,
    pub(super) hold_timeout: Duration,
    /// How long to wait for the first lock, where that is one of an idempotency key.
    pub(super) key_timeout: Option<Duration>,
    /// How long all of it may take.
    pub(super) whole: Duration,
    /// Whether its COMMIT waits for the disk, even if its session does not.
    pub(super) durable: bool,
    /// Whether the session may have prepared statements of another client, as behind a pooler.
    pub(super) shared_session: bool,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            pool_timeout: Duration::from_secs(5),
            lock_timeout: Duration::from_secs(5),
            hold_timeout: Duration::from_secs(10),
            answer_timeout: Duration::from_secs(5),
            locks: 1,
            durable: false,
            shared_session: false,
        }
    }
}

/// The end of a wait that begins now. One that never ends, ends in 30 years.
pub(super) fn deadline(within: Duration) -> Instant {
    const FAR: Duration = Duration::from_secs(30 * 365 * 24 * 60 * 60);
    Instant::now() + within.min(FAR)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transaction_may_take_the_sum_of_its_waits() {
        let secs = Duration::from_secs;
        let limits = Limits {
            pool_timeout: secs(100_000),
            lock_timeout: secs(1_000),
            hold_timeout: secs(100),
            answer_timeout: secs(1),
            locks: 1,
            durable: false,
            shared_session: false,
        };
        let several = Limits { locks: 3, ..limits };
        for (limits, key_timeout, whole) in [
            // Admission, hooks and handler, COMMIT.
            (limits, None, 1_001 + 100 + 1),
            (several, None, 3 * 1_001 + 100 + 1),
            (limits, Some(secs(10_000)), 10_001 + 1_001 + 100 + 1),
            (several, Some(secs(0)), 1 + 3 * 1_001 + 100 + 1),
        ] {
            assert_eq!(limits.transaction(key_timeout).whole, secs(whole));
        }
        let longest = Limits {
            lock_timeout: Duration::MAX,
            ..several
        };
        assert_eq!(longest.transaction(None).whole, Duration::MAX);
    }
}
