//! Epochs, which are the high digits of tokens. A database stores them, so they survive the loss of
//! a lease store.
//!
//! A token of this crate's issuers is `epoch * 1_000_000_000 + n`. Whenever the lease store has
//! lost its data, a new epoch begins. A source of [`Epochs`] assigns the epochs. `Fence` is such a
//! source.

use std::{error::Error, fmt, pin::Pin, sync::Arc};

use crc::{CRC_32_ISO_HDLC, Crc};

use crate::token::{Resource, Token};

/// Source of epochs that never repeat and never decrease.
///
/// An implementation must make each epoch durable before it returns the epoch, whatever the
/// settings of its connection are. Otherwise an epoch could be assigned twice, and a token could be
/// granted twice.
pub trait Epochs: Send + Sync {
    /// Returns the next epoch of a partition. The epoch is higher than every epoch that this source
    /// has assigned in the partition before, and not below `at_least`.
    ///
    /// # Errors
    ///
    /// Returns an [`EpochError`] if the source is unreachable or has no epoch left. Without an
    /// epoch, the lease store grants no lease.
    fn next_epoch(&self, partition: u8, at_least: Epoch) -> EpochFuture<'_>;

    /// Re-reports an epoch in which a lease store grants tokens.
    ///
    /// From then on, the source assigns only higher epochs in this partition. If the source has all
    /// its data, the report changes nothing. If the source has lost the epoch (in a failover, or
    /// because a backup was restored), the report restores it.
    ///
    /// Returns the lowest epoch whose tokens may be granted. This is `seen`, unless all tokens of
    /// `seen` are stale according to the source. If the returned epoch is higher than `seen`, the
    /// store must begin a new epoch.
    ///
    /// # Errors
    ///
    /// Returns an [`EpochError`] if the source is unreachable.
    fn report_epoch(&self, partition: u8, seen: Epoch) -> EpochFuture<'_>;

    /// Returns the identity of this source. The epochs of two sources cannot be compared. Therefore
    /// a lease store refuses to use a token counter whose epoch comes from another source.
    ///
    /// # Errors
    ///
    /// Returns an [`EpochError`] if the source is unreachable.
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

/// Future returned by the methods of [`Epochs`].
pub type EpochFuture<'a, T = Epoch> =
    Pin<Box<dyn Future<Output = Result<T, EpochError>> + Send + 'a>>;

/// Identity of a source of epochs: 1 to 64 characters of `A-Z a-z 0-9 - _`.
///
/// A source generates a random id when the source is created. The id is not a secret.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SourceId(String);

impl SourceId {
    /// Creates a source id from text.
    ///
    /// # Errors
    ///
    /// Returns [`InvalidSourceId`] if the text does not have the form of a source id.
    pub fn new(id: impl Into<String>) -> Result<Self, InvalidSourceId> {
        let id = id.into();
        let in_alphabet = |c: u8| c.is_ascii_alphanumeric() || c == b'-' || c == b'_';
        if !(1..=64).contains(&id.len()) || !id.bytes().all(in_alphabet) {
            return Err(InvalidSourceId);
        }
        Ok(Self(id))
    }

    /// Returns the id as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for SourceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Error returned for text that is not a valid [`SourceId`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the id of an epoch source must be 1 to 64 characters of A-Z a-z 0-9 - _")]
#[non_exhaustive]
pub struct InvalidSourceId;

/// Returns the partition of a resource, one of 256.
///
/// The partition is the low byte of the CRC-32 (IEEE 802.3) of the resource's name. Each partition
/// has its own token counter, with its own epochs. The result of this function is the same in all
/// versions. Otherwise a resource could move to a partition whose token counter is below the
/// earlier tokens of the resource.
#[must_use]
pub fn partition_of(resource: &Resource) -> u8 {
    partition_of_name(resource.as_str())
}

pub(crate) fn partition_of_name(name: &str) -> u8 {
    static CRC_32: Crc<u32> = Crc::<u32>::new(&CRC_32_ISO_HDLC);
    CRC_32.checksum(name.as_bytes()).to_le_bytes()[0]
}

/// High digits of a token, as an integer from 1 to 999 999.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Epoch(i64);

impl Epoch {
    /// First epoch.
    pub const FIRST: Self = Self(1);

    /// Distance between the first numbers of two consecutive epochs. The tokens of an epoch have
    /// the numbers 1 to `SIZE - 1`.
    pub const SIZE: i64 = 1_000_000_000;

    const LAST: i64 = Token::MAX.get() / Self::SIZE;

    /// Creates an epoch. A value below 1 is treated as 1.
    ///
    /// # Errors
    ///
    /// Returns [`EpochError::Exhausted`] if `value` is above 999 999.
    pub fn new(value: i64) -> Result<Self, EpochError> {
        if value > Self::LAST {
            return Err(EpochError::Exhausted);
        }
        Ok(Self(value.max(1)))
    }

    /// Returns the integer.
    #[must_use]
    pub const fn get(self) -> i64 {
        self.0
    }

    /// Returns the epoch of a token. Returns `None` for a token below the first epoch, which comes
    /// from another issuer.
    #[must_use]
    pub fn of(token: Token) -> Option<Self> {
        let epoch = token.get() / Self::SIZE;
        (epoch > 0).then_some(Self(epoch))
    }

    /// Returns the token with number `n` of this epoch, for `n` from 1 to [`Epoch::SIZE`]` - 1`.
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

/// Error returned when a source provides no epoch.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EpochError {
    /// All 999 999 epochs of the partition have been assigned.
    #[error("the partition has no epoch left")]
    Exhausted,
    /// The source is unreachable.
    #[error("the source of epochs is unreachable")]
    Unreachable(#[source] Box<dyn Error + Send + Sync>),
    /// The source is not set up correctly, for example because a table or a privilege is missing. A
    /// retry does not help.
    #[error("the source of epochs is misconfigured")]
    Misconfigured(#[source] Box<dyn Error + Send + Sync>),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn epochs_and_their_sources_are_written_as_they_are_read() {
        let source = SourceId::new("shop-1").unwrap();
        assert_eq!(source.to_string(), "shop-1");
        assert_eq!(Epoch::new(999_999).unwrap().to_string(), "999999");
        assert!(matches!(Epoch::new(1_000_000), Err(EpochError::Exhausted)));
    }
}

/// Source of epochs for the tests of lease stores.
#[cfg(test)]
pub(crate) mod testing {
    use super::*;

    /// Source that assigns the requested epoch.
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
