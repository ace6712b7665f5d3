//! [`TokenKey`]: one secret, and the MAC that it makes of a token.

use std::fmt;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use zeroize::Zeroizing;

use super::error::InvalidTokenKeys;
use crate::{
    key_id::KeyId,
    token::{Resource, Token},
};

/// How long a MAC is: the first half of HMAC-SHA-256, the least that RFC 2104 asks for. Whoever has no key
/// can only try, one request each, and hits once in 2^128; nothing of it can be tried without asking.
pub(super) const MAC_BYTES: usize = 16;

/// What every signed text begins with, so that a MAC of another use of the key, or of another version of this one, is none.
const DOMAIN: &[u8] = b"tower-fence token v1";

/// A secret that signs tokens and verifies them, under a name. It is wiped from memory when it is dropped, and
/// nothing shows it.
#[derive(Clone)]
pub struct TokenKey {
    id: KeyId,
    /// Has taken the secret, and nothing else yet.
    mac: Hmac<Sha256>,
}

impl TokenKey {
    /// The least length of a secret, in bytes.
    pub const MIN_BYTES: usize = 32;

    /// A key of these bytes, which must be random: 32 of them from the system's generator are good. What is passed is not
    /// wiped here.
    ///
    /// # Errors
    ///
    /// [`InvalidTokenKeys`] when `id` cannot name a key, or when there are fewer than [`MIN_BYTES`](Self::MIN_BYTES).
    pub fn new(id: impl AsRef<str>, secret: impl AsRef<[u8]>) -> Result<Self, InvalidTokenKeys> {
        let (id, secret) = (KeyId::new(id)?, secret.as_ref());
        let bytes = secret.len();
        if bytes < Self::MIN_BYTES {
            return Err(InvalidTokenKeys::Short { bytes });
        }
        // HMAC takes any length.
        let mac = Hmac::new_from_slice(secret).map_err(|_| InvalidTokenKeys::Short { bytes })?;
        Ok(Self { id, mac })
    }

    /// A random key, for issuers and fences of one process, and for tests: with the process, it is gone.
    ///
    /// # Errors
    ///
    /// [`InvalidTokenKeys`] when `id` cannot name a key.
    pub fn random(id: impl AsRef<str>) -> Result<Self, InvalidTokenKeys> {
        let secret = Zeroizing::new(rand::random::<[u8; 32]>());
        Self::new(id, secret.as_slice())
    }

    /// Its name.
    #[must_use]
    pub const fn id(&self) -> &KeyId {
        &self.id
    }

    /// What is signed: each text with its length in front, each number in 8 bytes, the highest first.
    fn over(&self, audience: &str, resource: &Resource, token: Token) -> Hmac<Sha256> {
        let mut mac = self.mac.clone();
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

    /// Takes the same time for every `mac`.
    pub(super) fn verifies(
        &self,
        audience: &str,
        resource: &Resource,
        token: Token,
        // Of this length: a comparison of fewer bytes would be one of any part of it.
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

    /// Compiles only where what a key keeps is wiped when it is dropped.
    #[test]
    fn what_a_key_keeps_is_wiped() {
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
