//! [`SignedToken`]: a token with the MAC of its issuer.

use std::{fmt, str::FromStr};

use super::{error::Forged, key::MAC_BYTES, keys::TokenKeys};
use crate::{
    header::{FencingToken, MalformedToken},
    key_id::KeyId,
    token::{Resource, Token},
};

/// Token with a signature, which [`verify`](Self::verify) checks.
///
/// Parse it from the value of a `Fencing-Token` field with one member, or convert it from a
/// [`FencingToken`]. `Display` formats the value of the field. `Debug` omits the MAC.
///
/// # Example
///
/// A consumer of a queue, without HTTP:
///
/// ```
/// use tower_fence::{Fence, SignedToken, TokenKeys, TokenUse};
///
/// async fn consume(
///     fence: Fence<sqlx::Postgres>,
///     keys: TokenKeys,
///     field: &str,
/// ) -> Result<(), Box<dyn std::error::Error>> {
///     let signed: SignedToken = field.parse()?;
///     signed.verify(&keys)?;
///     let mut tx = fence.begin(signed.resource(), signed.token(), TokenUse::SingleUse).await?;
///     sqlx::query("UPDATE inventory SET stock = stock - 1").execute(&mut *tx).await?;
///     tx.commit().await?;
///     Ok(())
/// }
/// # let _ = consume;
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct SignedToken {
    resource: Resource,
    token: Token,
    key: KeyId,
    mac: [u8; MAC_BYTES],
}

impl TokenKeys {
    /// Signs a token that was granted for this resource.
    ///
    /// Only issuers should call this method. A client that can cause the signing of an arbitrary
    /// token can forge tokens.
    #[must_use]
    pub fn sign(&self, resource: &Resource, token: Token) -> SignedToken {
        let (key, mac) = self.mac(resource, token);
        SignedToken {
            resource: resource.clone(),
            token,
            key,
            mac,
        }
    }
}

impl SignedToken {
    /// Returns the resource.
    #[must_use]
    pub const fn resource(&self) -> &Resource {
        &self.resource
    }

    /// Returns the token.
    #[must_use]
    pub const fn token(&self) -> Token {
        self.token
    }

    /// Returns the id of the key that the signature names.
    #[must_use]
    pub const fn key(&self) -> &KeyId {
        &self.key
    }

    /// Verifies that the issuer granted this token for this resource.
    ///
    /// Verification does not check whether the token is stale, because that is the task of the
    /// fence. The time that verification takes does not depend on the MAC or on the outcome.
    ///
    /// # Errors
    ///
    /// - [`Forged::UnknownKey`] if `keys` does not contain the key.
    /// - [`Forged::WrongMac`] if the key did not sign this token for this resource and audience.
    pub fn verify(&self, keys: &TokenKeys) -> Result<(), Forged> {
        keys.verify(&self.key, &self.resource, self.token, &self.mac)
    }
}

impl TryFrom<FencingToken> for SignedToken {
    type Error = Forged;

    fn try_from(token: FencingToken) -> Result<Self, Self::Error> {
        if token.key.is_none() && token.mac.is_none() {
            return Err(Forged::Unsigned);
        }
        let mac = token.mac.as_deref().map(<[u8; MAC_BYTES]>::try_from);
        match (token.resource, token.key, mac) {
            (Some(resource), Some(key), Some(Ok(mac))) => Ok(Self {
                resource,
                token: token.token,
                key,
                mac,
            }),
            _ => Err(Forged::Incomplete),
        }
    }
}

impl From<SignedToken> for FencingToken {
    fn from(signed: SignedToken) -> Self {
        Self::new(signed.token)
            .with_resource(signed.resource)
            .with_key(signed.key)
            .with_mac(signed.mac.to_vec())
    }
}

impl FromStr for SignedToken {
    type Err = InvalidSignedToken;

    fn from_str(value: &str) -> Result<Self, Self::Err> {
        Ok(value.parse::<FencingToken>()?.try_into()?)
    }
}

/// Formats the value of the `Fencing-Token` field.
impl fmt::Display for SignedToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        FencingToken::from(self.clone()).fmt(f)
    }
}

impl fmt::Debug for SignedToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SignedToken")
            .field("resource", &self.resource.as_str())
            .field("token", &self.token.get())
            .field("key", &self.key.as_str())
            .finish_non_exhaustive()
    }
}

/// Error returned for text that is not a valid [`SignedToken`].
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidSignedToken {
    /// The text is not the value of a field with one member.
    #[error(transparent)]
    Malformed(#[from] MalformedToken),
    /// The token is not signed, or its signature is incomplete.
    #[error("invalid signed token: {0}")]
    Forged(#[from] Forged),
}
