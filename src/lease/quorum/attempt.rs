//! Attempts at a grant, told from each other and put in an order.

use std::time::{SystemTime, UNIX_EPOCH};

/// One attempt at a grant. Of two attempts under one lease id the newer one counts: the one with the higher number, and
/// among those the one with the higher nonce.
///
/// The number begins with the time, so that the attempt of a repeated request mostly is the newer one at once. Where a
/// clock is wrong, a node answers which number it has seen, and the next attempt has a higher one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Attempt {
    pub(super) number: u64,
    /// What no other attempt has, here or elsewhere.
    pub(super) nonce: u64,
}

/// What Lua compares without rounding.
const BITS: u32 = 52;

impl Attempt {
    pub(super) fn now() -> Self {
        let time = SystemTime::now().duration_since(UNIX_EPOCH);
        let ms = time.map_or(0, |time| time.as_millis());
        Self::above(u64::try_from(ms).unwrap_or(0))
    }

    /// An attempt that is newer than any with this number.
    pub(super) fn above(number: u64) -> Self {
        let largest = (1 << BITS) - 1;
        Self {
            number: number.saturating_add(1).min(largest),
            nonce: rand::random_range(0..=largest),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attempt_is_above_the_number_that_was_seen_and_never_more_than_lua_compares() {
        const LARGEST: u64 = (1 << 52) - 1;
        let last = Attempt::above(u64::MAX);
        assert_eq!(last.number, LARGEST);
        assert!(last.nonce <= LARGEST);
        assert_eq!(Attempt::above(LARGEST - 1).number, LARGEST);
        assert_eq!(Attempt::above(7).number, 8);
        assert!(Attempt::now().number > 1_700_000_000_000);
    }
}
