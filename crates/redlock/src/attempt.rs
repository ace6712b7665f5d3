//! Attempts at a token, told from each other and put in an order.

use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::{SystemTime, UNIX_EPOCH},
};

/// One attempt at a token. Of two attempts under one lease id the newer one counts: the one with
/// the higher number, and between equal numbers the one whose ticket comes later as a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Attempt {
    pub(crate) number: u64,
    /// The request that the attempt belongs to.
    pub(crate) ticket: i64,
}

/// Numbers the attempts of a process. They begin with the time, so that the attempt of a repeated
/// request is newer at once, in most cases. If a clock is wrong, a node answers the number that it
/// has seen, and the next attempt has a higher one.
#[derive(Default)]
pub(crate) struct Attempts {
    last: AtomicU64,
}

/// What Lua compares without rounding.
const LARGEST: u64 = (1 << 52) - 1;

impl Attempts {
    /// The next attempt of a request. No other one of this process has its number.
    pub(crate) fn next(&self, ticket: i64) -> Attempt {
        let time = SystemTime::now().duration_since(UNIX_EPOCH);
        let ms = time.map_or(0, |time| time.as_millis());
        let ms = u64::try_from(ms).unwrap_or(0);
        let next = |last: u64| Some(ms.max(last.saturating_add(1)).min(LARGEST));
        let last = self.last.fetch_update(Relaxed, Relaxed, next);
        let number = last.ok().and_then(next).unwrap_or(LARGEST);
        Attempt { number, ticket }
    }

    /// Notes that there is an attempt with this number. The next one is above it.
    pub(crate) fn saw(&self, number: u64) {
        self.last.fetch_max(number, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attempt_is_above_every_number_that_was_seen() {
        let attempts = Attempts::default();
        let first = attempts.next(7);
        assert!(first.number > 1_700_000_000_000 && first.ticket == 7);
        assert!(attempts.next(7).number > first.number);
        attempts.saw(1 << 50);
        assert_eq!(attempts.next(7).number, (1 << 50) + 1);
        attempts.saw(u64::MAX);
        assert_eq!(attempts.next(7).number, LARGEST);
    }
}
