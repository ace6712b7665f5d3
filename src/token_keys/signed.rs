//! [`SignedToken`]: a token with the MAC of whoever has issued it.

use std::{fmt, str::FromStr};

use super::{
    key::MAC_BYTES,
    keys::{TokenKeys, Unverified},
};
use crate::{
    header::{FencingToken, MalformedToken},
    key_id::KeyId,
    token::{Resource, Token},
};

/// A token that somebody has signed; whether that was the issuer, [`verify`](Self::verify) tells.
///
/// It is read from the value of a `Fencing-Token` field with one member, or made of a [`FencingToken`], and written
/// the same way. `Debug` leaves out the MAC.
///
/// # Example
///
/// A consumer of a queue, without HTTP:
///
/// ```
/// use tower_fence::{Fence, SignedToken, TokenKeys, TokenUse};
///
/// async fn consume(fence: Fence<sqlx::Postgres>, keys: TokenKeys, field: &str) -> Result<(), Box<dyn std::error::Error>> {
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
    /// Signs that this token was granted for this resource. For issuers alone: whoever can have a token signed can make
    /// one up.
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
    /// The resource.
    #[must_use]
    pub const fn resource(&self) -> &Resource {
        &self.resource
    }

    /// The token.
    #[must_use]
    pub const fn token(&self) -> Token {
        self.token
    }

    /// The key that it names.
    #[must_use]
    pub const fn key(&self) -> &KeyId {
        &self.key
    }

    /// Verifies that the issuer has signed it: that resource and token are what was granted. Whether the token still counts
    /// is for the fence to say.
    ///
    /// # Errors
    ///
    /// [`Forged`]. It takes as long for each reason, and for each MAC.
    pub fn verify(&self, keys: &TokenKeys) -> Result<(), Forged> {
        keys.verify(&self.key, &self.resource, self.token, &self.mac)
            .map_err(|reason| match reason {
                Unverified::UnknownKey => Forged::UnknownKey(self.key.clone()),
                Unverified::WrongMac => Forged::WrongMac(self.key.clone()),
            })
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

/// Writes the field's value.
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

/// Why a token does not count as one of the issuer's. For logs: a client is told none of these.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Forged {
    /// It has no signature.
    #[error("it is not signed")]
    Unsigned,
    /// A part is missing: the resource, the key id or the MAC; or the MAC has not 16 bytes.
    #[error("a part of its signature is missing")]
    Incomplete,
    /// Nobody here knows the key: it is invented, or a rotation went wrong.
    #[error("the key {0} is not known")]
    UnknownKey(KeyId),
    /// The key has not signed this token, for this resource and this audience.
    #[error("the key {0} has not signed it")]
    WrongMac(KeyId),
}

/// A text that is no [`SignedToken`].
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidSignedToken {
    /// It is no field with one member.
    #[error(transparent)]
    Malformed(#[from] MalformedToken),
    /// It is not signed.
    #[error("the fencing token is not signed: {0}")]
    Forged(#[from] Forged),
}
