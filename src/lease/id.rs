//! The validated texts of the lock side: [`LeaseId`], a secret, and [`Owner`], which is not.

use std::{fmt, ops::RangeInclusive, str::FromStr};

/// The secret that proves who holds a lease: 22 to 64 characters of `A-Z a-z 0-9 - _`.
///
/// Never listed and never logged: `Debug` hides it, and there is no `Display`, since a `Display` ends
/// up in logs and messages. [`LeaseId::expose`] gives the text, and `FromStr` reads it back.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct LeaseId(String);

impl LeaseId {
    /// How many characters an id has.
    pub(crate) const LENGTH: RangeInclusive<usize> = 22..=64;

    /// A new id of 128 random bits, as 32 hexadecimal digits.
    #[must_use]
    pub fn random() -> Self {
        Self(format!("{:032x}", rand::random::<u128>()))
    }

    /// Checks that `id` has the form of a lease id.
    ///
    /// # Errors
    ///
    /// [`InvalidLeaseId`] when it has not.
    pub fn new(id: impl Into<String>) -> Result<Self, InvalidLeaseId> {
        let id = id.into();
        let in_alphabet = |c: u8| c.is_ascii_alphanumeric() || c == b'-' || c == b'_';
        if !Self::LENGTH.contains(&id.len()) || !id.bytes().all(in_alphabet) {
            return Err(InvalidLeaseId);
        }
        Ok(Self(id))
    }

    /// The secret text, for the one who sends it on.
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

/// A text that is no [`LeaseId`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a lease id has 22 to 64 characters of A-Z a-z 0-9 - _")]
#[non_exhaustive]
pub struct InvalidLeaseId;

/// Who holds a lease, for operators: at most 255 bytes of UTF-8 without control characters.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Owner(String);

impl Owner {
    /// The greatest length of a text, in bytes.
    pub const MAX_BYTES: usize = 255;

    /// Checks that `text` can name an owner.
    ///
    /// # Errors
    ///
    /// [`InvalidOwner`] when it is longer than 255 bytes or has a control character.
    pub fn new(text: impl Into<String>) -> Result<Self, InvalidOwner> {
        let text = text.into();
        if text.len() > Self::MAX_BYTES || text.chars().any(char::is_control) {
            return Err(InvalidOwner);
        }
        Ok(Self(text))
    }

    /// The text.
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

/// A text that is no [`Owner`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an owner has at most 255 bytes and no control characters")]
#[non_exhaustive]
pub struct InvalidOwner;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_id_has_its_form() {
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
