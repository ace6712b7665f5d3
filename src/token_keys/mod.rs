//! Signed tokens: the issuer signs each token with a secret key, and the layer verifies it.
//!
//! A fencing token is a number, and a higher number supersedes all lower ones. Without signatures,
//! a client that may write to a resource can block it by sending an arbitrarily high number. With
//! keys:
//!
//! 1. The issuer responds with `42;resource="sku-1";key="k1";mac=:…:`, where `mac` is an
//!    HMAC-SHA-256 over the resource and the token. [`spec`](crate::spec#signed-tokens) defines the
//!    signed bytes.
//! 2. Holders send this value unchanged, and need no key.
//! 3. The layer refuses every token without a valid signature, with 403 `forged-token`, before it
//!    queries the database.
//!
//! A signature proves *which issuer granted which token*, [not which client sends
//! it](crate::guide::signed_tokens#the-sender-of-a-token).
//!
//! | tokens are signed or verified by | with |
//! |---|---|
//! | the issuer | [`Issuer::sign_with`](crate::issuer::Issuer::sign_with) |
//! | a store in the process of its holder | [`Signed`](crate::lease::Signed) |
//! | the layer | [`FenceLayer::verify_with`](crate::FenceLayer::verify_with) |
//! | code without HTTP | [`TokenKeys::verify`], [`TokenKeys::sign`] |
//!
//! # Example
//!
//! ```
//! use tower_fence::{Resource, Token, TokenKeys, header::FencingToken};
//!
//! // In production, read the keys from a file; `openssl rand -hex 32` generates a secret.
//! let keys: TokenKeys =
//!     "k1:00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff".parse()?;
//! let signed = keys.sign(&Resource::new("sku-1")?, Token::new(42)?);
//! let field = signed.to_string();
//! assert_eq!(field, r#"42;resource="sku-1";key="k1";mac=:qxH5kBkyfBE/DwHwkHnF4A==:"#);
//!
//! let read: FencingToken = field.parse()?;
//! assert_eq!(keys.verify(&read)?.as_str(), "sku-1");
//! let higher: FencingToken = field.replace("42", "43").parse()?;
//! assert!(keys.verify(&higher).is_err());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Rotation
//!
//! All keys of [`TokenKeys`] verify, and the first key signs. [`TokenKeys`] is a handle:
//! [`replace`](TokenKeys::replace) changes the keys of the handle and of all its clones in the
//! process, without a restart. To rotate the key of several processes:
//!
//! 1. Add the new key, under a new id, to all processes: `k1:… k2:…`. They then also verify with
//!    it.
//! 2. Make the new key the first key of the issuers, so that they sign with it: `k2:… k1:…`. From
//!    then on, each renewal of a lease returns a token that the new key has signed.
//! 3. Remove the old key when no client needs a token that the old key has signed: `k2:…`. Wait at
//!    least as long as the longest lease lasts. If clients use idempotency keys, also wait until
//!    the records of those keys have expired. Otherwise a retry with an old token is refused, and
//!    the client gets the stored response only if it retries with the same idempotency key under a
//!    new lease.
//!
//! The metric `tower_fence_unknown_token_keys_total` counts refused tokens whose key is unknown. If
//! it rises during a rotation, a process has not completed step 1, or step 3 was done too early.

mod error;
mod key;
mod keys;
mod text;

pub use self::{
    error::{Forged, InvalidTokenKeys, TokenKeysError},
    key::TokenKey,
    keys::TokenKeys,
};
pub use crate::key_id::{InvalidKeyId, KeyId};
