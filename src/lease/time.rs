//! Lengths of time, as stores and the wire count them: in whole milliseconds, rounded up.

#![allow(dead_code, reason = "the features decide which of these are used")]

use std::time::Duration;

use tokio::time::Instant;

/// More than any clock has to count.
const CENTURY: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);

/// Whole milliseconds, rounded up, at most a century. Zero stays zero.
pub(crate) fn whole_ms(time: Duration) -> u64 {
    let ms = time.min(CENTURY).as_nanos().div_ceil(1_000_000);
    u64::try_from(ms).unwrap_or(u64::MAX)
}

/// As [`whole_ms`], and at least 1: a lease that is granted lasts for a moment.
pub(crate) fn at_least_1_ms(time: Duration) -> u64 {
    whole_ms(time).max(1)
}

/// What a peer says in milliseconds, at most a century: a time that can be added to any.
pub(crate) fn of_ms(ms: u64) -> Duration {
    Duration::from_millis(ms).min(CENTURY)
}

/// This long from now, at most a century.
pub(crate) fn after(time: Duration) -> Instant {
    let now = Instant::now();
    now.checked_add(time.min(CENTURY)).unwrap_or(now)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_rounded_up_and_never_overflows() {
        for (time, whole, at_least_1) in [
            (Duration::ZERO, 0, 1),
            (Duration::from_nanos(1), 1, 1),
            (Duration::from_micros(1_001), 2, 2),
        ] {
            assert_eq!((whole_ms(time), at_least_1_ms(time)), (whole, at_least_1));
        }
        assert_eq!(u128::from(whole_ms(Duration::MAX)), CENTURY.as_millis());
        assert_eq!(
            (of_ms(u64::MAX), of_ms(1)),
            (CENTURY, Duration::from_millis(1))
        );
    }
}
