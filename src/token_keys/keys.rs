//! [`TokenKeys`]: the set of keys of a process.

use std::{
    collections::HashSet,
    fmt, hint,
    sync::{Arc, PoisonError, RwLock},
};

use super::{
    error::{Forged, InvalidTokenKeys},
    key::{MAC_BYTES, TokenKey},
};
use crate::{
    key_id::KeyId,
    token::{Resource, Token},
};

/// Keys that sign and verify tokens: the first key signs, and all of them verify.
///
/// This value is a handle. Its clones share the keys, and [`replace`](Self::replace) changes the
/// keys of all clones. The [module](super#rotation) describes how to rotate keys.
///
/// `Debug` shows only the ids of the keys and the audience.
#[derive(Clone)]
pub struct TokenKeys {
    /// Never empty.
    keys: Arc<RwLock<Arc<[TokenKey]>>>,
    audience: Arc<str>,
}

impl TokenKeys {
    /// Creates a set of these keys. The first key signs.
    ///
    /// # Errors
    ///
    /// - [`InvalidTokenKeys::None`] if there is no key.
    /// - [`InvalidTokenKeys::SameId`] if two keys have the same id.
    pub fn new(keys: impl IntoIterator<Item = TokenKey>) -> Result<Self, InvalidTokenKeys> {
        let keys: Arc<[TokenKey]> = keys.into_iter().collect();
        let mut ids = HashSet::new();
        for key in &*keys {
            if !ids.insert(key.id()) {
                return Err(InvalidTokenKeys::SameId(key.id().clone()));
            }
        }
        if keys.is_empty() {
            return Err(InvalidTokenKeys::None);
        }
        Ok(Self {
            keys: Arc::new(RwLock::new(keys)),
            audience: Arc::from(""),
        })
    }

    /// Sets the audience, so that two deployments with the same key do not accept each other's
    /// tokens. Default: empty.
    ///
    /// Set the same audience for issuers and layers, before you clone the handle. Existing clones
    /// keep their audience.
    #[must_use]
    pub fn audience(mut self, audience: impl Into<Arc<str>>) -> Self {
        self.audience = audience.into();
        self
    }

    /// Replaces the keys of this handle and of all its clones with the current keys of `other`.
    ///
    /// Calls in progress use the old keys. The audience does not change.
    ///
    /// ```
    /// use tower_fence::{TokenKey, TokenKeys};
    ///
    /// let (old, new) = (TokenKey::random("k1")?, TokenKey::random("k2")?);
    /// let keys = TokenKeys::new([old.clone()])?;
    /// // Pass clones to the issuer and the layer. Later, at any time:
    /// keys.replace(&TokenKeys::new([new, old])?);
    /// assert_eq!(format!("{keys:?}"), r#"TokenKeys { keys: ["k2", "k1"], audience: "" }"#);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn replace(&self, other: &Self) {
        let keys = other.current();
        // No code panics while it holds the lock, so a poisoned lock cannot occur.
        *self.keys.write().unwrap_or_else(PoisonError::into_inner) = keys;
    }

    /// Returns the ids of the keys, beginning with the id of the signing key.
    #[must_use]
    pub fn ids(&self) -> Vec<KeyId> {
        self.current().iter().map(|key| key.id().clone()).collect()
    }

    fn current(&self) -> Arc<[TokenKey]> {
        Arc::clone(&self.keys.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns the MAC of a token, and the id of the key that computed it.
    pub(super) fn mac(&self, resource: &Resource, token: Token) -> (KeyId, [u8; MAC_BYTES]) {
        let keys = self.current();
        // `new` refuses an empty set.
        let key = &keys[0];
        (key.id().clone(), key.sign(&self.audience, resource, token))
    }

    /// Verifies a MAC. The verification takes the same time for known and unknown keys.
    pub(super) fn verify(
        &self,
        id: &KeyId,
        resource: &Resource,
        token: Token,
        mac: &[u8; MAC_BYTES],
    ) -> Result<(), Forged> {
        let keys = self.current();
        let known = keys.iter().find(|key| key.id() == id);
        let key = known.unwrap_or(&keys[0]);
        let verified = hint::black_box(key.verifies(&self.audience, resource, token, mac));
        match known {
            None => Err(Forged::UnknownKey(id.clone())),
            Some(_) if verified => Ok(()),
            Some(_) => Err(Forged::WrongMac(id.clone())),
        }
    }
}

impl fmt::Debug for TokenKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ids = self.ids();
        let ids: Vec<_> = ids.iter().map(KeyId::as_str).collect();
        f.debug_struct("TokenKeys")
            .field("keys", &ids)
            .field("audience", &self.audience)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(id: &str) -> TokenKey {
        TokenKey::random(id).unwrap()
    }

    #[test]
    fn empty_keys_and_repeated_ids_are_refused() {
        assert!(matches!(TokenKeys::new([]), Err(InvalidTokenKeys::None)));
        let twice = TokenKeys::new([key("k1"), key("k2"), key("k1")]);
        assert!(matches!(twice, Err(InvalidTokenKeys::SameId(id)) if id.as_str() == "k1"));
    }

    #[test]
    fn clones_follow_a_rotation_and_the_audience_stays() {
        let (old, new) = (key("k1"), key("k2"));
        let (sku, token) = (Resource::new("sku-1").unwrap(), Token::MIN);
        let keys = TokenKeys::new([old.clone()]).unwrap().audience("shop");
        let clone = keys.clone();
        let (id, mac) = clone.mac(&sku, token);
        assert_eq!(id.as_str(), "k1");
        keys.replace(&TokenKeys::new([new.clone(), old]).unwrap());
        assert_eq!(clone.verify(&id, &sku, token, &mac), Ok(()));
        let (later, mac_later) = clone.mac(&sku, token);
        assert_eq!(later.as_str(), "k2");
        keys.replace(&TokenKeys::new([new]).unwrap());
        assert_eq!(clone.verify(&later, &sku, token, &mac_later), Ok(()));
        let gone = clone.verify(&id, &sku, token, &mac);
        assert_eq!(gone, Err(Forged::UnknownKey(id)));
        let elsewhere = keys.clone().audience("warehouse");
        let refused = elsewhere.verify(&later, &sku, token, &mac_later);
        assert_eq!(refused, Err(Forged::WrongMac(later.clone())));
    }
}
