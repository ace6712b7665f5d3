//! What a peer sends: one function for each thing that is read of it, which panics where a promise is broken.
//!
//! 1. Whatever the bytes, they are a value or one error of the documented type.
//! 2. A value that was read is read back from what is written of it.
//! 3. No secret is in an error, or in what `Debug` shows.
//!
//! The targets of `crates/verification/fuzz` call them with what a fuzzer finds, the tests below with random input.

mod issuer;
mod stores;
#[cfg(test)]
mod tests;

use std::fmt::Debug;

pub use self::{
    issuer::{issuer_answer, issuer_body},
    stores::{cursor, redis_answer},
};
use crate::{
    header::{self, FencingToken},
    idempotency::IdempotencyKey,
    token_keys::{SignedToken, TokenKeys},
};

/// The lines of a field: those of the text.
fn lines(bytes: &[u8]) -> Vec<&[u8]> {
    bytes.split(|byte| *byte == b'\n').collect()
}

/// The field `Fencing-Token`, one member of it, and a signed one.
pub fn header(bytes: &[u8]) {
    if let Ok(tokens) = header::parse(lines(bytes)) {
        assert_eq!(header::parse([header::format(&tokens)]).unwrap(), tokens);
        for token in tokens {
            // Each member alone, and signed where it has all that belongs to a signature.
            assert_eq!(token.to_string().parse::<FencingToken>().unwrap(), token);
            if let Ok(signed) = SignedToken::try_from(token.clone()) {
                assert_eq!(signed.to_string().parse::<SignedToken>().unwrap(), signed);
                assert_eq!(FencingToken::from(signed), token);
            }
        }
    }
}

/// The field `Idempotency-Key`.
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

/// The text of keys for tokens, from a file or the environment.
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
    // The id of a key, which is shown, has 64 characters at most.
    assert!(!secrets.any(|secret| secret.len() > 64 && shown.contains(secret)));
}

/// Fails where a text has a secret. What looks like a lease id is one, wherever it stands.
fn assert_hidden(secrets: &[String], shown: &impl Debug) {
    let shown = format!("{shown:?}");
    for secret in secrets {
        assert!(!shown.contains(secret), "{shown}");
    }
}
