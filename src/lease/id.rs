//! Validated strings: [`LeaseId`], which is a secret, and [`Owner`], which is not.

use std::{fmt, ops::RangeInclusive, str::FromStr};

use rand::{RngExt, rand_core::UnwrapErr, rngs::SysRng};

/// Secret that identifies the holder of a lease: 22 to 64 characters of `A-Z a-z 0-9 - _`.
///
/// A lease id is never listed or logged. `Debug` hides it, and there is no `Display`, so that it
/// cannot appear in logs and messages by accident. [`LeaseId::expose`] returns the text, and
/// `FromStr` parses it.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct LeaseId(String);

impl LeaseId {
    /// Number of characters of an id.
    pub(crate) const LENGTH: RangeInclusive<usize> = 22..=64;

    /// Creates a random id of 128 bits, as 32 hexadecimal digits.
    ///
    /// The id comes from the generator of the operating system. Therefore processes that were
    /// forked, or restored from one snapshot of a machine, get different ids.
    #[must_use]
    pub fn random() -> Self {
        Self(format!("{:032x}", UnwrapErr(SysRng).random::<u128>()))
    }

    /// Creates a lease id from text.
    ///
    /// # Errors
    ///
    /// Returns [`InvalidLeaseId`] if `id` does not have 22 to 64 characters of `A-Z a-z 0-9 - _`.
    pub fn new(id: impl Into<String>) -> Result<Self, InvalidLeaseId> {
        let id = id.into();
        let in_alphabet = |c: u8| c.is_ascii_alphanumeric() || c == b'-' || c == b'_';
        if !Self::LENGTH.contains(&id.len()) || !id.bytes().all(in_alphabet) {
            return Err(InvalidLeaseId);
        }
        Ok(Self(id))
    }

    /// Returns the secret text, for sending it to an issuer.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl FromStr for LeaseId {
    type Err = InvalidLeaseId;

    fn from_str(id: &str) -> Result<Self, Self::Err> {
        Self::new(id)
    }
}

impl fmt::Debug for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LeaseId(…)")
    }
}

/// Error returned for text that is not a valid [`LeaseId`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("lease id must be 22 to 64 characters of A-Z a-z 0-9 - _")]
#[non_exhaustive]
pub struct InvalidLeaseId;

/// Owner label of a lease, for operators: at most 255 bytes of UTF-8 without control characters.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Owner(String);

impl Owner {
    /// Maximum length of a label, in bytes.
    pub const MAX_BYTES: usize = 255;

    /// Creates an owner label from text.
    ///
    /// # Errors
    ///
    /// Returns [`InvalidOwner`] if `text` is longer than 255 bytes or contains a control character.
    pub fn new(text: impl Into<String>) -> Result<Self, InvalidOwner> {
        let text = text.into();
        if text.len() > Self::MAX_BYTES || text.chars().any(char::is_control) {
            return Err(InvalidOwner);
        }
        Ok(Self(text))
    }

    /// Returns the text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Owner {
    type Err = InvalidOwner;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::new(text)
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Error returned for text that is not a valid [`Owner`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("owner must be at most 255 bytes without control characters")]
#[non_exhaustive]
pub struct InvalidOwner;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn malformed_lease_ids_are_refused() {
        for id in [
            "a".repeat(22),
            "Z-_9".repeat(16),
            LeaseId::random().expose().into(),
        ] {
            assert!(LeaseId::new(id).is_ok());
        }
        for id in [
            "a".repeat(21),
            "a".repeat(65),
            "é".repeat(22),
            "a b".repeat(10),
        ] {
            assert_eq!(LeaseId::new(id), Err(InvalidLeaseId));
        }
    }

    #[test]
    fn random_ids_differ_and_are_not_shown() {
        let (one, two) = (LeaseId::random(), LeaseId::random());
        assert_ne!(one, two);
        assert!(!format!("{one:?}").contains(one.expose()));
    }

    #[test]
    fn an_owner_is_bounded_in_bytes() {
        assert!(Owner::new("").is_ok() && Owner::new("x".repeat(255)).is_ok());
        assert_eq!(Owner::new("é".repeat(128)), Err(InvalidOwner));
        assert_eq!(Owner::new("a\nb"), Err(InvalidOwner));
        assert_eq!(Owner::new("worker-7").unwrap().to_string(), "worker-7");
    }
}
