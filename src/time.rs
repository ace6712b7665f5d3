//! Durations as stores and the wire protocol represent them, in whole milliseconds, rounded up, and
//! the times at which timeouts pass.

#![allow(dead_code, reason = "the features decide which of these are used")]

use std::time::Duration;

use tokio::time::Instant;

/// Maximum of all durations in milliseconds.
const CENTURY: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);

/// Converts a duration to whole milliseconds, rounded up, at most 100 years. Zero stays zero.
pub(crate) fn whole_ms(time: Duration) -> u64 {
    let ms = time.min(CENTURY).as_nanos().div_ceil(1_000_000);
    u64::try_from(ms).unwrap_or(u64::MAX)
}

/// Converts a duration like [`whole_ms`], but to at least 1, so that no lease has a TTL of zero.
pub(crate) fn at_least_1_ms(time: Duration) -> u64 {
    whole_ms(time).max(1)
}

/// Converts milliseconds from a peer to a duration of at most 100 years, so that adding the result
/// to a time does not overflow on a clock that can represent 100 years.
pub(crate) fn of_ms(ms: u64) -> Duration {
    Duration::from_millis(ms).min(CENTURY)
}

/// Returns the time that is `time` from now, but at most 30 years from now, because the clocks of
/// some platforms cannot represent 100 years.
pub(crate) fn after(time: Duration) -> Instant {
    const FAR: Duration = Duration::from_secs(30 * 365 * 24 * 60 * 60);
    Instant::now() + time.min(FAR)
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
