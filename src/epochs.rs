//! Where the two sides meet: the lock side needs numbers that survive the loss of its store, the
//! resource side has a database.
//!
//! A token of this crate's issuers is `epoch * 1_000_000_000 + n`. A new epoch begins whenever the
//! lease store has lost its history; [`Epochs`] hands them out, and `Fence` implements it.

use std::{error::Error, fmt, pin::Pin};

use crate::token::Token;

/// A source of epochs that never repeats and never goes back.
///
/// An implementation must have made the epoch durable before it answers: tokens are only as
/// monotonic as their epochs.
pub trait Epochs: Send + Sync {
    /// Takes the next epoch of a partition: higher than every epoch this partition was given
    /// before, and not below `at_least`.
    ///
    /// # Errors
    ///
    /// [`EpochError`] when the source cannot be reached, or has no epoch left. No epoch, no grant.
    fn next_epoch(&self, partition: u8, at_least: Epoch) -> EpochFuture<'_>;
}

/// What [`Epochs::next_epoch`] returns.
pub type EpochFuture<'a> = Pin<Box<dyn Future<Output = Result<Epoch, EpochError>> + Send + 'a>>;

/// The high digits of a token: an integer from 1 to 999 999.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Epoch(i64);

impl Epoch {
    /// The first epoch.
    pub const FIRST: Self = Self(1);

    /// How many tokens there are in an epoch: its numbers go from 1 to one less than this.
    pub const SIZE: i64 = 1_000_000_000;

    const LAST: i64 = Token::MAX.get() / Self::SIZE;

    /// Checks that `value` is in range.
    ///
    /// # Errors
    ///
    /// [`EpochError::Exhausted`] when it is above 999 999. A value below 1 counts as the first.
    pub fn new(value: i64) -> Result<Self, EpochError> {
        if value > Self::LAST {
            return Err(EpochError::Exhausted);
        }
        Ok(Self(value.max(1)))
    }

    /// The integer.
    #[must_use]
    pub const fn get(self) -> i64 {
        self.0
    }

    /// The token with number `n` of this epoch, for `n` from 1 to [`Epoch::SIZE`]` - 1`.
    #[must_use]
    pub fn token(self, n: i64) -> Option<Token> {
        if !(1..Self::SIZE).contains(&n) {
            return None;
        }
        Token::new(self.0 * Self::SIZE + n).ok()
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Why no epoch was to be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EpochError {
    /// All 999 999 epochs of the partition are used up.
    #[error("the partition has no epoch left")]
    Exhausted,
    /// The source could not be asked.
    #[error("the source of epochs could not be reached")]
    Unreachable(#[source] Box<dyn Error + Send + Sync>),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_token_of_the_last_epoch_is_the_last_token() {
        let last = Epoch::new(999_999).unwrap();
        assert_eq!(last.token(Epoch::SIZE - 1), Some(Token::MAX));
        assert_eq!(last.token(Epoch::SIZE), None);
        assert_eq!(last.token(0), None);
        assert!(matches!(Epoch::new(1_000_000), Err(EpochError::Exhausted)));
    }

    #[test]
    fn a_later_epoch_outranks_every_token_of_an_earlier_one() {
        let (first, second) = (Epoch::FIRST, Epoch::new(2).unwrap());
        assert!(second.token(1) > first.token(Epoch::SIZE - 1));
    }
}
