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
    header::FencingToken,
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
    /// keep their audience. An audience cannot be rotated while processes run: a layer refuses all
    /// tokens of another audience.
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

    /// Signs a token that was granted for this resource.
    ///
    /// Only issuers should call this method. A client that can cause the signing of an arbitrary
    /// token can forge tokens.
    #[must_use]
    pub fn sign(&self, resource: &Resource, token: Token) -> FencingToken {
        let keys = self.current();
        // `new` refuses an empty set.
        let key = &keys[0];
        let mac = key.sign(&self.audience, resource, token);
        FencingToken {
            token,
            resource: Some(resource.clone()),
            key: Some(key.id().clone()),
            mac: Some(mac.to_vec().into()),
        }
    }

    /// Verifies that the issuer granted this token, and returns the resource for which it was
    /// granted.
    ///
    /// Verification does not check whether the token is stale, because that is the task of the
    /// fence. The time that verification takes depends neither on the bytes of the MAC nor on
    /// whether the key is known.
    ///
    /// # Errors
    ///
    /// - [`Forged::Unsigned`] if the token has neither a key id nor a MAC.
    /// - [`Forged::Incomplete`] if the resource, the key id or the MAC is missing, or if the MAC
    ///   does not have 16 bytes.
    /// - [`Forged::UnknownKey`] if this set does not contain the key.
    /// - [`Forged::WrongMac`] if the key did not sign this token for this resource and audience.
    ///
    /// # Example
    ///
    /// A consumer of a queue, without HTTP:
    ///
    /// ```
    /// use tower_fence::{Fence, TokenKeys, TokenUse, header::FencingToken};
    ///
    /// async fn consume(
    ///     fence: Fence<sqlx::Postgres>,
    ///     keys: TokenKeys,
    ///     field: &str,
    /// ) -> Result<(), Box<dyn std::error::Error>> {
    ///     let signed: FencingToken = field.parse()?;
    ///     let resource = keys.verify(&signed)?;
    ///     let mut tx = fence.begin(resource, signed.token, TokenUse::SingleUse).await?;
    ///     sqlx::query("UPDATE inventory SET stock = stock - 1").execute(&mut *tx).await?;
    ///     tx.commit().await?;
    ///     Ok(())
    /// }
    /// # let _ = consume;
    /// ```
    pub fn verify<'t>(&self, token: &'t FencingToken) -> Result<&'t Resource, Forged> {
        if token.key.is_none() && token.mac.is_none() {
            return Err(Forged::Unsigned);
        }
        let mac = token.mac.as_deref().map(<&[u8; MAC_BYTES]>::try_from);
        let (Some(resource), Some(id), Some(Ok(mac))) = (&token.resource, &token.key, mac) else {
            return Err(Forged::Incomplete);
        };
        let keys = self.current();
        let known = keys.iter().find(|key| key.id() == id);
        // An unknown key takes the same time as a known one.
        let key = known.unwrap_or(&keys[0]);
        let verified = hint::black_box(key.verifies(&self.audience, resource, token.token, mac));
        match known {
            None => Err(Forged::UnknownKey(id.clone())),
            Some(_) if verified => Ok(resource),
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
        let first = clone.sign(&sku, token);
        assert_eq!(first.key, Some(KeyId::new("k1").unwrap()));
        keys.replace(&TokenKeys::new([new.clone(), old]).unwrap());
        assert_eq!(clone.verify(&first), Ok(&sku));
        let later = clone.sign(&sku, token);
        assert_eq!(later.key, Some(KeyId::new("k2").unwrap()));
        keys.replace(&TokenKeys::new([new]).unwrap());
        assert_eq!(clone.verify(&later), Ok(&sku));
        let gone = clone.verify(&first);
        assert_eq!(gone, Err(Forged::UnknownKey(first.key.clone().unwrap())));
        let elsewhere = keys.clone().audience("warehouse");
        let refused = elsewhere.verify(&later);
        assert_eq!(refused, Err(Forged::WrongMac(later.key.clone().unwrap())));
    }
}
