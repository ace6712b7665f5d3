//! [`Token`] and [`Resource`]: the number that the fence compares, and the name that it belongs to.
//!
//! A value of either type is validated when it is created, and cannot become invalid afterwards.

use std::{fmt, str::FromStr, sync::Arc};

use serde::{Deserialize, Serialize};

/// Fencing token: an integer from 1 to [`Token::MAX`].
///
/// Each grant of a lease on a resource has a higher token than all earlier grants on that resource.
/// The upper bound, 999 999 999 999 999, is that of an [RFC 9651] Integer. It also fits an `i64`
/// and a JavaScript number. Any issuer of increasing integers can produce tokens: this crate's
/// issuers, etcd revisions, ZooKeeper zxids, and [others](crate::guide::other_lock_servers).
///
/// ```
/// use tower_fence::Token;
///
/// let token = Token::new(42)?;
/// assert_eq!(token.get(), 42);
/// assert!(Token::new(0).is_err());
/// # Ok::<(), tower_fence::InvalidToken>(())
/// ```
///
/// [RFC 9651]: https://www.rfc-editor.org/rfc/rfc9651#section-3.3.1
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "i64", into = "i64")]
pub struct Token(i64);

impl Token {
    /// Lowest token.
    pub const MIN: Self = Self(1);
    /// Highest token.
    pub const MAX: Self = Self(999_999_999_999_999);

    /// Creates a token from an integer.
    ///
    /// # Errors
    ///
    /// Returns [`InvalidToken`] if `value` is below 1 or above [`Token::MAX`].
    pub const fn new(value: i64) -> Result<Self, InvalidToken> {
        if value < Self::MIN.0 || value > Self::MAX.0 {
            return Err(InvalidToken { value });
        }
        Ok(Self(value))
    }

    /// Returns the integer.
    #[must_use]
    pub const fn get(self) -> i64 {
        self.0
    }
}

impl TryFrom<i64> for Token {
    type Error = InvalidToken;

    fn try_from(value: i64) -> Result<Self, Self::Error> {
        Self::new(value)
    }
}

impl From<Token> for i64 {
    fn from(token: Token) -> Self {
        token.0
    }
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Error returned for an integer that is not a valid [`Token`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a fencing token must be an integer from 1 to 999999999999999, not {value}")]
#[non_exhaustive]
pub struct InvalidToken {
    /// The refused integer.
    pub value: i64,
}

/// Name of a protected resource: 1 to 255 bytes of UTF-8 without control characters.
///
/// A resource is cheap to clone.
///
/// ```
/// use tower_fence::Resource;
///
/// let sku: Resource = "sku-1".parse()?;
/// assert_eq!(sku.as_str(), "sku-1");
/// assert!(Resource::new("two\nlines").is_err());
/// # Ok::<(), tower_fence::InvalidResource>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String")]
pub struct Resource(Arc<str>);

impl Resource {
    /// Maximum length of a name, in bytes.
    pub const MAX_BYTES: usize = 255;

    /// Creates a resource from its name.
    ///
    /// # Errors
    ///
    /// Returns an [`InvalidResource`] if the name is empty, is longer than 255 bytes, or contains a
    /// control character.
    pub fn new(name: impl AsRef<str>) -> Result<Self, InvalidResource> {
        let name = name.as_ref();
        if name.is_empty() {
            return Err(InvalidResource::Empty);
        }
        if name.len() > Self::MAX_BYTES {
            return Err(InvalidResource::TooLong { bytes: name.len() });
        }
        if name.chars().any(char::is_control) {
            return Err(InvalidResource::ControlCharacter);
        }
        Ok(Self(name.into()))
    }

    /// Returns the name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Resource {
    type Err = InvalidResource;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Self::new(name)
    }
}

impl TryFrom<String> for Resource {
    type Error = InvalidResource;

    fn try_from(name: String) -> Result<Self, Self::Error> {
        Self::new(name)
    }
}

impl AsRef<str> for Resource {
    fn as_ref(&self) -> &str {
        self.as_str()
    }
}

impl fmt::Display for Resource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Error returned for text that is not a valid [`Resource`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidResource {
    /// The text is empty.
    #[error("a resource name cannot be empty")]
    Empty,
    /// The text is longer than [`Resource::MAX_BYTES`].
    #[error("a resource name must have at most 255 bytes, not {bytes}")]
    TooLong {
        /// The length of the text, in bytes.
        bytes: usize,
    },
    /// The text contains a control character.
    #[error("a resource name must not contain control characters")]
    ControlCharacter,
    /// The bytes are not UTF-8.
    #[error("a resource name must be UTF-8")]
    NotUtf8,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_bounds_are_inclusive() {
        assert!(Token::new(1).is_ok() && Token::new(999_999_999_999_999).is_ok());
        for value in [i64::MIN, -1, 0, 1_000_000_000_000_000, i64::MAX] {
            assert_eq!(Token::new(value), Err(InvalidToken { value }));
        }
    }

    #[test]
    fn the_bounds_of_a_resource_are_in_bytes() {
        assert!(Resource::new("x").is_ok() && Resource::new("x".repeat(255)).is_ok());
        assert_eq!(Resource::new(""), Err(InvalidResource::Empty));
        // 128 two-byte characters.
        assert_eq!(
            Resource::new("é".repeat(128)),
            Err(InvalidResource::TooLong { bytes: 256 })
        );
        for text in ["\0", "a\tb", "a\u{7f}", "a\u{85}"] {
            assert_eq!(Resource::new(text), Err(InvalidResource::ControlCharacter));
        }
    }

    #[test]
    fn deserializing_validates() {
        assert!(serde_json::from_str::<Token>("0").is_err());
        assert!(serde_json::from_str::<Token>("1.5").is_err());
        assert_eq!(
            serde_json::to_string(&Token::MAX).unwrap(),
            "999999999999999"
        );
        assert!(serde_json::from_str::<Resource>(r#""""#).is_err());
        assert_eq!(
            serde_json::from_str::<Resource>(r#""sku-1""#)
                .unwrap()
                .as_str(),
            "sku-1"
        );
    }
}
