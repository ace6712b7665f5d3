//! Where the two sides meet: the lock side needs numbers that survive the loss of its store, the
//! resource side has a database.
//!
//! A token of this crate's issuers is `epoch * 1_000_000_000 + n`. A new epoch begins whenever the
//! lease store has lost its history; [`Epochs`] hands them out, and `Fence` implements it.

use std::{error::Error, fmt, pin::Pin, str::FromStr, sync::Arc};

use crc::{CRC_32_ISO_HDLC, Crc};

use crate::token::{Resource, Token};

/// A source of epochs that never repeats and never goes back.
///
/// An implementation must have made durable what it answers, whatever its connection is set to:
/// tokens are only as monotonic as their epochs.
pub trait Epochs: Send + Sync {
    /// Takes the next epoch of a partition: higher than every epoch this partition was given
    /// before, and not below `at_least`.
    ///
    /// # Errors
    ///
    /// [`EpochError`] when the source cannot be reached, or has no epoch left. No epoch, no grant.
    fn next_epoch(&self, partition: u8, at_least: Epoch) -> EpochFuture<'_>;

    /// Brings back an epoch that a lease store counts in: from now on only higher ones are handed
    /// out for this partition. It costs a source nothing that has not forgotten any, and saves one
    /// that has (a failover, a restored backup).
    ///
    /// Returns the lowest epoch whose tokens count: `seen`, unless the source knows that they are all
    /// dead. Where that is higher, the store has to begin a new one.
    ///
    /// # Errors
    ///
    /// [`EpochError`] when the source cannot be reached.
    fn report_epoch(&self, partition: u8, seen: Epoch) -> EpochFuture<'_>;

    /// Which source this is. Epochs of two sources say nothing about each other, so a lease store
    /// refuses a clock that belongs to another one.
    ///
    /// # Errors
    ///
    /// [`EpochError`] when the source cannot be reached.
    fn source_id(&self) -> EpochFuture<'_, SourceId>;
}

impl<E: Epochs + ?Sized> Epochs for Arc<E> {
    fn next_epoch(&self, partition: u8, at_least: Epoch) -> EpochFuture<'_> {
        (**self).next_epoch(partition, at_least)
    }

    fn report_epoch(&self, partition: u8, seen: Epoch) -> EpochFuture<'_> {
        (**self).report_epoch(partition, seen)
    }

    fn source_id(&self) -> EpochFuture<'_, SourceId> {
        (**self).source_id()
    }
}

/// What the methods of [`Epochs`] return.
pub type EpochFuture<'a, T = Epoch> =
    Pin<Box<dyn Future<Output = Result<T, EpochError>> + Send + 'a>>;

/// The name of a source of epochs, drawn at random when the source was made: 1 to 64 characters of
/// `A-Z a-z 0-9 - _`. No secret.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SourceId(String);

impl SourceId {
    /// Checks that `id` has the form of a source's name.
    ///
    /// # Errors
    ///
    /// [`InvalidSourceId`] when it has not.
    pub fn new(id: impl Into<String>) -> Result<Self, InvalidSourceId> {
        let id = id.into();
        let in_alphabet = |c: u8| c.is_ascii_alphanumeric() || c == b'-' || c == b'_';
        if !(1..=64).contains(&id.len()) || !id.bytes().all(in_alphabet) {
            return Err(InvalidSourceId);
        }
        Ok(Self(id))
    }

    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for SourceId {
    type Err = InvalidSourceId;

    fn from_str(id: &str) -> Result<Self, Self::Err> {
        Self::new(id)
    }
}

impl fmt::Display for SourceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A text that is no [`SourceId`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the name of a source of epochs has 1 to 64 characters of A-Z a-z 0-9 - _")]
#[non_exhaustive]
pub struct InvalidSourceId;

/// The partition of a resource, one of 256: the low byte of the CRC-32 (IEEE 802.3) of its name. Each partition has
/// a token counter, with epochs of its own.
///
/// This never changes between versions, or a resource would meet a counter that knows nothing of its earlier tokens.
#[must_use]
pub fn partition_of(resource: &Resource) -> u8 {
    partition_of_name(resource.as_str())
}

/// The low byte of the CRC-32 (IEEE 802.3) of the name.
pub(crate) fn partition_of_name(name: &str) -> u8 {
    static CRC_32: Crc<u32> = Crc::<u32>::new(&CRC_32_ISO_HDLC);
    CRC_32.checksum(name.as_bytes()).to_le_bytes()[0]
}

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

    /// The epoch of a token; `None` for a token below the first epoch, as other issuers make them.
    #[must_use]
    pub fn of(token: Token) -> Option<Self> {
        let epoch = token.get() / Self::SIZE;
        (epoch > 0).then_some(Self(epoch))
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
    /// The source is not set up: a table or a right is missing, for example. It does not pass by
    /// itself.
    #[error("the source of epochs is misconfigured")]
    Misconfigured(#[source] Box<dyn Error + Send + Sync>),
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
    fn partitions_never_change() {
        // From `zlib.crc32(name) & 255` of Python.
        let partitions = [
            ("sku-1", 0x6e),
            ("sku-2", 0xd4),
            ("123456789", 0x26),
            ("é", 0x3e),
        ];
        for (name, expected) in partitions {
            assert_eq!(
                partition_of(&Resource::new(name).unwrap()),
                expected,
                "{name}"
            );
        }
    }

    #[test]
    fn a_token_tells_its_epoch() {
        assert_eq!(Epoch::of(Token::new(Epoch::SIZE - 1).unwrap()), None);
        assert_eq!(
            Epoch::of(Token::new(Epoch::SIZE).unwrap()),
            Some(Epoch::FIRST)
        );
        assert_eq!(Epoch::of(Token::MAX), Some(Epoch::new(999_999).unwrap()));
    }

    #[test]
    fn a_later_epoch_outranks_every_token_of_an_earlier_one() {
        let (first, second) = (Epoch::FIRST, Epoch::new(2).unwrap());
        assert!(second.token(1) > first.token(Epoch::SIZE - 1));
    }

    #[test]
    fn epochs_and_their_sources_are_written_as_they_are_read() {
        let source = SourceId::new("shop-1").unwrap();
        assert_eq!(source.to_string(), "shop-1");
        assert_eq!(Epoch::new(999_999).unwrap().to_string(), "999999");
    }
}

/// For the tests of stores.
#[cfg(test)]
pub(crate) mod testing {
    use super::*;

    /// A source that hands out what it is asked for.
    pub(crate) struct FirstEpoch;

    impl Epochs for FirstEpoch {
        fn next_epoch(&self, _: u8, at_least: Epoch) -> EpochFuture<'_> {
            Box::pin(async move { Ok(at_least) })
        }

        fn report_epoch(&self, _: u8, seen: Epoch) -> EpochFuture<'_> {
            Box::pin(async move { Ok(seen) })
        }

        fn source_id(&self) -> EpochFuture<'_, SourceId> {
            Box::pin(async { Ok(SourceId::new("source").unwrap()) })
        }
    }
}
