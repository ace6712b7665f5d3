//! [`TokenKey`]: a secret that computes and verifies the MACs of tokens.

use std::{fmt, sync::Arc};

use hmac::{Hmac, KeyInit, Mac};
use rand::{RngExt, rand_core::UnwrapErr, rngs::SysRng};
use sha2::Sha256;
use zeroize::Zeroizing;

use super::error::InvalidTokenKeys;
use crate::{
    key_id::KeyId,
    token::{Resource, Token},
};

/// Length of a MAC, in bytes. A MAC is the first half of an HMAC-SHA-256, which is the minimum
/// length that RFC 2104 recommends. An attacker without the key cannot test a guess offline. Each
/// guess takes a request, and one guess in 2^128 is accepted.
pub(super) const MAC_BYTES: usize = 16;

/// Prefix of every signed message. With this prefix, a MAC that was computed for another purpose,
/// or for a later version of the message, is never a valid MAC of a token.
const DOMAIN: &[u8] = b"tower-fence token v1";

/// Secret with an id, which signs and verifies tokens.
///
/// The secret is wiped from memory when the last clone of the key is dropped. `Debug` shows only
/// the id.
#[derive(Clone)]
pub struct TokenKey {
    id: KeyId,
    /// The state of the HMAC after it has processed the secret, and before the first byte of a
    /// message. Moves of the key copy only the pointer, so no copy of the state stays in memory.
    mac: Arc<Hmac<Sha256>>,
}

impl TokenKey {
    /// Minimum length of a secret, in bytes.
    pub const MIN_BYTES: usize = 32;

    /// Creates a key with this id and this secret.
    ///
    /// The secret must be random. Use 32 bytes from the random number generator of the operating
    /// system. Wipe the passed bytes yourself, because this function does not.
    ///
    /// # Errors
    ///
    /// - [`InvalidTokenKeys::Id`] if `id` is not a valid [`KeyId`].
    /// - [`InvalidTokenKeys::Short`] if the secret has fewer bytes than
    ///   [`MIN_BYTES`](Self::MIN_BYTES).
    pub fn new(id: impl AsRef<str>, secret: impl AsRef<[u8]>) -> Result<Self, InvalidTokenKeys> {
        let (id, secret) = (KeyId::new(id)?, secret.as_ref());
        let bytes = secret.len();
        if bytes < Self::MIN_BYTES {
            return Err(InvalidTokenKeys::Short { bytes });
        }
        // HMAC accepts a secret of any length, so this call does not fail.
        let mac = Hmac::new_from_slice(secret).map_err(|_| InvalidTokenKeys::Short { bytes })?;
        Ok(Self {
            id,
            mac: Arc::new(mac),
        })
    }

    /// Creates a random key, for tests, or for an issuer and a fence in one process.
    ///
    /// The key is lost when the process ends.
    ///
    /// # Errors
    ///
    /// Returns [`InvalidTokenKeys::Id`] if `id` is not a valid [`KeyId`].
    pub fn random(id: impl AsRef<str>) -> Result<Self, InvalidTokenKeys> {
        let secret = Zeroizing::new(UnwrapErr(SysRng).random::<[u8; 32]>());
        Self::new(id, secret.as_slice())
    }

    /// Returns the id of the key.
    #[must_use]
    pub const fn id(&self) -> &KeyId {
        &self.id
    }

    /// Feeds the message to the HMAC. Each text is preceded by its length, and each number has 8
    /// bytes, in big-endian order.
    fn over(&self, audience: &str, resource: &Resource, token: Token) -> Hmac<Sha256> {
        let mut mac = Hmac::clone(&self.mac);
        mac.update(DOMAIN);
        for text in [self.id.as_str(), audience, resource.as_str()] {
            mac.update(&(text.len() as u64).to_be_bytes());
            mac.update(text.as_bytes());
        }
        mac.update(&token.get().to_be_bytes());
        mac
    }

    pub(super) fn sign(
        &self,
        audience: &str,
        resource: &Resource,
        token: Token,
    ) -> [u8; MAC_BYTES] {
        let whole = self.over(audience, resource, token).finalize().into_bytes();
        let mut mac = [0; MAC_BYTES];
        mac.copy_from_slice(&whole[..MAC_BYTES]);
        mac
    }

    /// Returns whether `mac` is the MAC of this token. The time that the check takes does not
    /// depend on `mac`.
    pub(super) fn verifies(
        &self,
        audience: &str,
        resource: &Resource,
        token: Token,
        // The array type fixes the length. `verify_truncated_left` also accepts shorter prefixes,
        // which are easier to guess.
        mac: &[u8; MAC_BYTES],
    ) -> bool {
        let expected = self.over(audience, resource, token);
        expected.verify_truncated_left(mac).is_ok()
    }
}

impl fmt::Debug for TokenKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("TokenKey").field(&self.id.as_str()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks that the state of the HMAC is wiped when a key is dropped. Otherwise this test does
    /// not compile.
    #[test]
    fn key_material_is_wiped() {
        fn wiped<T: zeroize::ZeroizeOnDrop>() {}
        wiped::<sha2::Sha256>();
        assert!(std::mem::needs_drop::<Hmac<Sha256>>());
    }

    #[test]
    fn a_secret_has_32_bytes_at_least() {
        assert!(TokenKey::new("k1", [7; 32]).is_ok() && TokenKey::new("k1", [7; 4_096]).is_ok());
        for bytes in [0, 16, 31] {
            let refused = TokenKey::new("k1", vec![7; bytes]).unwrap_err();
            assert_eq!(refused, InvalidTokenKeys::Short { bytes });
        }
        let unnamed = TokenKey::random("a b").unwrap_err();
        assert!(matches!(unnamed, InvalidTokenKeys::Id(_)));
    }
}
