//! Tokens that nobody can make up: the issuer signs them with a key that clients do not have, and the resource side
//! verifies that, before anything is asked of the database.
//!
//! A fencing token is a number, and the highest one outranks all others: who may send one to a resource can close it with a
//! number out of the blue. With keys,
//!
//! 1. the issuer answers `42;resource="sku-1";key="k1";mac=:…:`, where `mac` is an HMAC-SHA-256 over the resource and
//!    the token ([`spec`](crate::spec#signed-tokens) says of which bytes);
//! 2. holders send that along as it is, and need no key;
//! 3. the layer refuses what was not signed so, with 403 `forged-token`.
//!
//! It proves *who has issued what*, and not who sends it: whoever has seen a signed token can send it, until it is
//! stale. The [guide](crate::guide::signed_tokens) says how a message signature (RFC 9421) covers the field.
//!
//! | where | how |
//! |---|---|
//! | the issuer | [`Issuer::sign_with`](crate::issuer::Issuer::sign_with) |
//! | a store in the process of its holder | [`Signed`](crate::lease::Signed) |
//! | the layer | [`FenceLayer::verify_with`](crate::FenceLayer::verify_with) |
//! | without HTTP | [`SignedToken::verify`](crate::SignedToken::verify), [`TokenKeys::sign`] |
//!
//! # Example
//!
//! ```
//! use tower_fence::{Resource, SignedToken, Token, TokenKey, TokenKeys};
//!
//! // `openssl rand -hex 32`, for example; from a file or the environment where this is no example.
//! let keys: TokenKeys = "k1:00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff".parse()?;
//! let signed = keys.sign(&Resource::new("sku-1")?, Token::new(42)?);
//! let field = signed.to_string();
//! assert_eq!(field, r#"42;resource="sku-1";key="k1";mac=:qxH5kBkyfBE/DwHwkHnF4A==:"#);
//!
//! let read: SignedToken = field.parse()?;
//! read.verify(&keys)?;
//! let higher: SignedToken = field.replace("42", "43").parse()?;
//! assert!(higher.verify(&keys).is_err());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Rotation
//!
//! Any number of keys verify, and one of them signs. [`TokenKeys`] is a handle: [`replace`](TokenKeys::replace) gives
//! it, and all clones of it in the process, other keys, without a restart. Over several processes:
//!
//! 1. Everybody verifies with the new key as well: `k1:… k2:…`.
//! 2. The issuers sign with it: `k2:… k1:…`. A lease that is renewed has the new signature from then on.
//! 3. When the last token under the old key is of no use any more, it goes: `k2:…`. That is after the longest lease; and
//!    where there are idempotency keys, better after their time, or a repetition with such a token is
//!    refused instead of answered: its client then comes back with the same key under a new lease, and gets the stored
//!    answer.
//!
//! A signed token whose key nobody knows is counted apart (`tower_fence_unknown_token_keys_total`): it means that
//! the first step was not done everywhere, or the third one too early.

mod error;
mod key;
mod keys;
mod signed;
mod text;

pub use self::{
    error::{InvalidTokenKeys, TokenKeysError},
    key::TokenKey,
    keys::TokenKeys,
    signed::{Forged, InvalidSignedToken, SignedToken},
};
pub use crate::key_id::{InvalidKeyId, KeyId};
