//! Attempts at a token, and their order.

use std::{
    cmp::Ordering,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::{SystemTime, UNIX_EPOCH},
};

use tower_fence::Token;

/// Attempt at a token. If there are two attempts under one lease id, the nodes keep the newer one.
/// That is the attempt with the higher number or, if the numbers are equal, the one whose ticket is
/// greater when compared as text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Attempt {
    pub(crate) number: u64,
    /// The request that makes the attempt.
    pub(crate) ticket: i64,
}

impl Attempt {
    /// Returns an attempt that is newer than every attempt of a request that has ended.
    pub(crate) const fn last_of(ticket: i64) -> Self {
        let number = LARGEST;
        Self { number, ticket }
    }
}

impl Ord for Attempt {
    fn cmp(&self, other: &Self) -> Ordering {
        let by_number = self.number.cmp(&other.number);
        by_number.then_with(|| self.ticket.to_string().cmp(&other.ticket.to_string()))
    }
}

impl PartialOrd for Attempt {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// Token, and the attempt to which it was granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Grant {
    pub(crate) token: Token,
    pub(crate) attempt: Attempt,
}

/// Source of numbers for the attempts of a process. A number is at least the current time in ms, so
/// that a repeated request has a newer attempt in most cases, even in another process. If a clock
/// is wrong, a node replies with the higher number that it has stored, and the next attempt is
/// above that number.
#[derive(Default)]
pub(crate) struct Attempts {
    last: AtomicU64,
}

/// Largest number of an attempt. Lua compares numbers up to 2^53 without rounding.
const LARGEST: u64 = (1 << 52) - 1;

impl Attempts {
    /// Returns the next attempt of a request, with a number that no other attempt of this process
    /// has.
    pub(crate) fn next(&self, ticket: i64) -> Attempt {
        let time = SystemTime::now().duration_since(UNIX_EPOCH);
        let ms = time.map_or(0, |time| time.as_millis());
        let ms = u64::try_from(ms).unwrap_or(0);
        let next = |last: u64| Some(ms.max(last.saturating_add(1)).min(LARGEST));
        let last = self.last.fetch_update(Relaxed, Relaxed, next);
        let number = last.ok().and_then(next).unwrap_or(LARGEST);
        Attempt { number, ticket }
    }

    /// Records the number of an attempt that a node has reported. The next attempt is above it.
    pub(crate) fn saw(&self, number: u64) {
        self.last.fetch_max(number, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tickets_are_ordered_as_the_scripts_order_them() {
        let attempt = |number, ticket| Attempt { number, ticket };
        assert!(attempt(7, 9) > attempt(7, 10));
        assert!(attempt(8, 10) > attempt(7, 9));
    }

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
