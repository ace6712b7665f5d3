//! Fuzz targets: one function for each input that comes from a peer.
//!
//! A function panics if one of these promises is broken:
//!
//! 1. Parsing any bytes returns a value, or an error of the documented type.
//! 2. A parsed value that is formatted and parsed again is the same value.
//! 3. No error and no `Debug` output contains a secret.
//!
//! The targets of `crates/verification/fuzz` call these functions with the input of a fuzzer. The
//! unit tests call them with random input.

mod issuer;
#[cfg(test)]
mod tests;

use std::fmt::Debug;

pub use self::issuer::{issuer_answer, issuer_body};
pub use crate::lease::fuzz::redis_answer;
use crate::{
    header::{self, FencingToken},
    idempotency::IdempotencyKey,
    token_keys::TokenKeys,
};

/// Splits the input into the values of a header field, one per line.
fn lines(bytes: &[u8]) -> Vec<&[u8]> {
    bytes.split(|byte| *byte == b'\n').collect()
}

/// Parses the field `Fencing-Token`.
///
/// Each member is also parsed alone.
pub fn header(bytes: &[u8]) {
    if let Ok(tokens) = header::parse(lines(bytes)) {
        assert_eq!(header::parse([header::format(&tokens)]).unwrap(), tokens);
        for token in tokens {
            assert_eq!(token.to_string().parse::<FencingToken>().unwrap(), token);
        }
    }
}

/// Parses the field `Idempotency-Key`.
pub fn idempotency_key(bytes: &[u8]) {
    if let Ok(Some(key)) = IdempotencyKey::parse(lines(bytes)) {
        assert!((1..=IdempotencyKey::MAX_BYTES).contains(&key.as_str().len()));
        assert_eq!(
            IdempotencyKey::parse([key.to_string()]),
            Ok(Some(key.clone()))
        );
        assert_eq!(IdempotencyKey::new(key.as_str()), Ok(key));
    }
}

/// Parses token keys, as they are read from a file or from the environment.
pub fn token_keys(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    let shown = match text.parse::<TokenKeys>() {
        Ok(keys) => {
            let entries = text.split_whitespace().map(|entry| entry.split_once(':'));
            let written: Vec<_> = entries.map(|entry| entry.unwrap().0.to_owned()).collect();
            let read: Vec<_> = keys.ids().iter().map(|id| id.as_str().to_owned()).collect();
            assert_eq!(read, written);
            format!("{keys:?}")
        }
        Err(error) => format!("{error} {error:?}"),
    };
    let secrets = text
        .split_whitespace()
        .filter_map(|entry| entry.split_once(':'));
    let mut secrets = secrets.map(|(_, secret)| secret);
    // A secret of up to 64 characters may be equal to a key id, which `Debug` shows.
    assert!(!secrets.any(|secret| secret.len() > 64 && shown.contains(secret)));
}

/// Panics if the `Debug` output contains one of the secrets.
fn assert_hidden(secrets: &[String], shown: &impl Debug) {
    let shown = format!("{shown:?}");
    for secret in secrets {
        assert!(!shown.contains(secret), "{shown}");
    }
}
