//! Errors of parsing and reading keys, and the reasons why a token counts as forged. The texts
//! never quote the input, because the input contains secrets.

use std::{io, path::PathBuf};

use crate::key_id::{InvalidKeyId, KeyId};

/// Error returned for text or a list that is not a valid set of [`TokenKeys`](super::TokenKeys).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidTokenKeys {
    /// The set contains no key.
    #[error("no token key is given: at least one is needed")]
    None,
    /// Two keys have the same id.
    #[error("two token keys have the id {0}")]
    SameId(KeyId),
    /// An entry has no colon after its id, or the text is not UTF-8.
    #[error("a token key must be `ID:SECRET`, with the secret in hexadecimal digits")]
    NoId,
    /// The id of an entry is invalid.
    #[error(transparent)]
    Id(#[from] InvalidKeyId),
    /// A secret contains characters other than pairs of hexadecimal digits.
    #[error("the secret of a token key must consist of pairs of hexadecimal digits")]
    NotHexadecimal,
    /// A secret is shorter than [`TokenKey::MIN_BYTES`](super::TokenKey::MIN_BYTES).
    #[error("the secret of a token key must have at least 32 bytes, not {bytes}")]
    Short {
        /// The length of the secret, in bytes.
        bytes: usize,
    },
}

/// Error returned when [`TokenKeys`](super::TokenKeys) cannot be read from a file or the
/// environment.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenKeysError {
    /// The text is not a valid set of keys.
    #[error(transparent)]
    Invalid(#[from] InvalidTokenKeys),
    /// The file cannot be read.
    #[error("cannot read the token keys in {}", .0.display())]
    File(PathBuf, #[source] io::Error),
    /// Both environment variables are set.
    #[error("{0} and {0}_FILE are both set: set only one of them")]
    Twice(String),
}

/// Reason why a token counts as forged.
///
/// The reason is meant for the log. The layer does not send it to clients.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Forged {
    /// The token has neither a key id nor a MAC.
    #[error("the token is not signed")]
    Unsigned,
    /// The resource, the key id or the MAC is missing, or the MAC does not have 16 bytes.
    #[error("the signature is incomplete")]
    Incomplete,
    /// The key is unknown, because the token is forged or a key rotation is incomplete.
    #[error("the key {0} is unknown")]
    UnknownKey(KeyId),
    /// The key did not sign this token for this resource and this audience.
    #[error("this token was not signed with the key {0}")]
    WrongMac(KeyId),
}
