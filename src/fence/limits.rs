//! The time limits of a fence, and their defaults.

use std::time::Duration;

use tokio::time::Instant;

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

/// The end of a wait that begins now. One that never ends, ends in 30 years.
pub(super) fn deadline(within: Duration) -> Instant {
    const FAR: Duration = Duration::from_secs(30 * 365 * 24 * 60 * 60);
    Instant::now() + within.min(FAR)
}
