//! [`KeyId`]: the id of a signing key. It is not a secret.

use std::{fmt, sync::Arc};

/// Id of a [`TokenKey`](crate::TokenKey): 1 to 64 characters of `A-Z a-z 0-9 - _ .`.
///
/// Each token that the key has signed contains the id. A key id is cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct KeyId(Arc<str>);

impl KeyId {
    /// Maximum length of an id, in bytes.
    pub const MAX_BYTES: usize = 64;

    /// Creates a key id from text.
    ///
    /// # Errors
    ///
    /// Returns [`InvalidKeyId`] if the text is not a valid id.
    pub fn new(id: impl AsRef<str>) -> Result<Self, InvalidKeyId> {
        let id = id.as_ref();
        if !(1..=Self::MAX_BYTES).contains(&id.len()) || !id.bytes().all(is_plain) {
            return Err(InvalidKeyId);
        }
        Ok(Self(id.into()))
    }

    /// Returns the id as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Returns whether a byte is one of `A-Z a-z 0-9 - _ .`.
pub(crate) const fn is_plain(c: u8) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, b'-' | b'_' | b'.')
}

impl AsRef<str> for KeyId {
    fn as_ref(&self) -> &str {
        self.as_str()
    }
}

impl fmt::Display for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Error returned for text that is not a valid [`KeyId`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a key id must be 1 to 64 characters of A-Z a-z 0-9 - _ .")]
#[non_exhaustive]
pub struct InvalidKeyId;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn valid_key_ids_are_accepted_and_others_refused() {
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
