//! Why there are no keys. No error quotes what it could not read.

use std::{io, path::PathBuf};

use crate::key_id::{InvalidKeyId, KeyId};

/// Why these are no [`TokenKeys`](super::TokenKeys).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidTokenKeys {
    /// There is no key.
    #[error("there is no key for tokens")]
    None,
    /// Two keys have the same id.
    #[error("two keys for tokens have the id {0}")]
    SameId(KeyId),
    /// An entry has no id.
    #[error("a key for tokens is `ID:SECRET`, the secret in hexadecimal digits")]
    NoId,
    /// An entry has an id that cannot be one.
    #[error(transparent)]
    Id(#[from] InvalidKeyId),
    /// A secret is something else than pairs of hexadecimal digits.
    #[error("the secret of a key for tokens is not in pairs of hexadecimal digits")]
    NotHexadecimal,
    /// A secret is too short to be one.
    #[error("a key for tokens has at least 32 bytes, not {bytes}")]
    Short {
        /// How many it has.
        bytes: usize,
    },
}

/// Why no [`TokenKeys`](super::TokenKeys) were read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenKeysError {
    /// What was read are no keys.
    #[error(transparent)]
    Invalid(#[from] InvalidTokenKeys),
    /// The file cannot be read.
    #[error("the keys for tokens in {} cannot be read", .0.display())]
    File(PathBuf, #[source] io::Error),
    /// Both variables are set.
    #[error("{0} and {0}_FILE are both set: which keys are meant?")]
    Twice(String),
}
