//! [`KeyId`]: the name of a key, which is no secret.

use std::{fmt, str::FromStr, sync::Arc};

/// The name of a [`TokenKey`](crate::TokenKey), in each token that it has signed: 1 to 64 characters of
/// `A-Z a-z 0-9 - _ .`. Cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct KeyId(Arc<str>);

impl KeyId {
    /// The greatest length of a name, in bytes.
    pub const MAX_BYTES: usize = 64;

    /// Checks that `id` can name a key.
    ///
    /// # Errors
    ///
    /// [`InvalidKeyId`] when it cannot.
    pub fn new(id: impl AsRef<str>) -> Result<Self, InvalidKeyId> {
        let id = id.as_ref();
        let in_alphabet = |c: u8| c.is_ascii_alphanumeric() || matches!(c, b'-' | b'_' | b'.');
        if !(1..=Self::MAX_BYTES).contains(&id.len()) || !id.bytes().all(in_alphabet) {
            return Err(InvalidKeyId);
        }
        Ok(Self(id.into()))
    }

    /// The name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl AsRef<str> for KeyId {
    fn as_ref(&self) -> &str {
        self.as_str()
    }
}

impl FromStr for KeyId {
    type Err = InvalidKeyId;

    fn from_str(id: &str) -> Result<Self, Self::Err> {
        Self::new(id)
    }
}

impl fmt::Display for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A text that is no [`KeyId`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a key id has 1 to 64 characters of A-Z a-z 0-9 - _ .")]
#[non_exhaustive]
pub struct InvalidKeyId;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn its_bounds_are_in_and_their_neighbours_are_out() {
        for id in ["k", "k1", "2026-11.issuer_a", &"Z".repeat(64)] {
            assert_eq!(KeyId::new(id).unwrap().as_str(), id);
        }
        for id in [
            "",
            "a b",
            "é",
            "a\"",
            "a;b",
            "a:b",
            "a\n",
            &"Z".repeat(65),
            &"Z".repeat(10_000),
        ] {
            assert_eq!(KeyId::new(id), Err(InvalidKeyId), "{id}");
        }
    }
}
