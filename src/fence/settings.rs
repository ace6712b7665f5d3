//! Timeouts of a fence and of its transactions, with their defaults.

use std::time::Duration;

use super::claims::Claims;

/// Maximum time that a call waits for a lock before it waits in a queue of the process instead.
pub(super) const FIRST_LOCK_TIMEOUT: Duration = Duration::from_millis(50);
/// Additional time for a statement that may change many rows.
const LONG_STATEMENT: Duration = Duration::from_secs(600);

/// Timeouts and other settings of a fence, and the properties of one of its transactions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    // Settings of the fence, which `FenceBuilder` describes.
    pub(crate) pool_timeout: Duration,
    pub(crate) lock_timeout: Duration,
    pub(crate) hold_timeout: Duration,
    pub(crate) answer_timeout: Duration,
    /// Whether a pooler assigns a server connection to each transaction.
    pub(super) transaction_pooling: bool,
    // Properties of one transaction.
    /// The timeout of the wait for an idempotency key, if the transaction reserves one as its
    /// first lock.
    pub(super) key_timeout: Option<Duration>,
    /// Whether a statement may change many rows. Such a statement gets ten additional minutes.
    pub(super) is_long: bool,
    /// The number of row locks that a transaction takes. The lock timeout applies to each of them.
    pub(super) locks: u32,
    /// Whether COMMIT waits for the WAL flush, whatever the session's settings are.
    pub(super) durable: bool,
}

impl Limits {
    /// Returns the timeout of a statement of the fence, including the wait for the row lock.
    pub(super) const fn statement_timeout(self) -> Duration {
        self.lock_timeout.saturating_add(self.answer_timeout)
    }

    /// Returns the timeout of a statement of the application, which may use the whole hold timeout,
    /// or of a statement of the fence that may change many rows.
    pub(super) const fn write_timeout(self) -> Duration {
        self.statement_timeout().saturating_add(self.work_timeout())
    }

    /// Returns the maximum duration of a statement, without its waits for locks.
    pub(super) const fn work_timeout(self) -> Duration {
        match self.is_long {
            true => self.hold_timeout.saturating_add(LONG_STATEMENT),
            false => self.hold_timeout,
        }
    }

    /// Returns the timeouts of a transaction whose statements may change many rows.
    pub(super) const fn long(self) -> Self {
        Self {
            is_long: true,
            ..self
        }
    }

    /// Returns the timeouts of a transaction that takes the row locks for these claims.
    pub(super) fn locking(self, claims: &Claims) -> Self {
        Self {
            locks: u32::try_from(claims.iter().count()).unwrap_or(u32::MAX),
            ..self
        }
    }

    /// Returns the maximum duration of a transaction in which no other timeout passes. The duration
    /// is the sum of these timeouts: the reservation of an idempotency key, one admission for each
    /// lock, the hook and the handler, and COMMIT.
    pub(super) const fn transaction_timeout(self) -> Duration {
        let reservation = match self.key_timeout {
            Some(key_timeout) => key_timeout.saturating_add(self.answer_timeout),
            None => Duration::ZERO,
        };
        reservation
            .saturating_add(self.statement_timeout().saturating_mul(self.locks))
            .saturating_add(self.work_timeout())
            .saturating_add(self.answer_timeout)
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            pool_timeout: Duration::from_secs(5),
            lock_timeout: Duration::from_secs(5),
            hold_timeout: Duration::from_secs(10),
            answer_timeout: Duration::from_secs(5),
            transaction_pooling: false,
            key_timeout: None,
            is_long: false,
            locks: 1,
            durable: false,
        }
    }
}

/// Returns a duration in whole milliseconds, the unit of the settings of the databases. The result
/// is at least 1, because 0 disables a timeout in Postgres.
pub(in crate::fence) fn millis(limit: Duration) -> String {
    limit.as_millis().clamp(1, i32::MAX as u128).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transaction_may_take_the_sum_of_its_timeouts() {
        let secs = Duration::from_secs;
        let limits = Limits {
            pool_timeout: secs(100_000),
            lock_timeout: secs(1_000),
            hold_timeout: secs(100),
            answer_timeout: secs(1),
            ..Limits::default()
        };
        let several = Limits { locks: 3, ..limits };
        for (limits, key_timeout, whole) in [
            // The terms are the admission, the hook and the handler, and COMMIT.
            (limits, None, 1_001 + 100 + 1),
            (several, None, 3 * 1_001 + 100 + 1),
            (limits, Some(secs(10_000)), 10_001 + 1_001 + 100 + 1),
            (several, Some(secs(0)), 1 + 3 * 1_001 + 100 + 1),
        ] {
            let limits = Limits {
                key_timeout,
                ..limits
            };
            assert_eq!(limits.transaction_timeout(), secs(whole));
        }
        // A long statement does not extend the timeout of an idle transaction.
        let long = limits.long();
        assert_eq!(
            (long.hold_timeout, long.work_timeout()),
            (secs(100), secs(700))
        );
        assert_eq!(long.transaction_timeout(), secs(1_001 + 700 + 1));
        let longest = Limits {
            lock_timeout: Duration::MAX,
            ..several
        };
        assert_eq!(longest.transaction_timeout(), Duration::MAX);
    }

    #[test]
    fn timeout_is_never_rounded_to_zero() {
        for (limit, whole) in [
            (Duration::ZERO, "1"),
            (Duration::from_micros(2_900), "2"),
            (Duration::MAX, "2147483647"),
        ] {
            assert_eq!(millis(limit), whole);
        }
    }
}
