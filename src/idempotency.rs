//! Header field `Idempotency-Key`: one String of [RFC 9651], as in the [draft].
//!
//! ```text
//! Idempotency-Key: "8e03978e-40d5-43dd-bc93-6894a57f9324"
//! ```
//!
//! A client generates a new key for each write, and sends the same key with each repetition of that
//! write. `FenceLayer::idempotent` describes how a service uses the keys.
//!
//! A repetition may carry a new token, but **may then be a new write**: see [the
//! guide](crate::guide::idempotency).
//!
//! [RFC 9651]: https://www.rfc-editor.org/rfc/rfc9651
//! [draft]: https://datatracker.ietf.org/doc/draft-ietf-httpapi-idempotency-key-header/

use std::fmt;

use http::HeaderName;
use sfv::{BareItem, Item, ItemSerializer, Parser, StringRef};

/// Name of the field, `idempotency-key`.
pub const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");

/// Name of the field that marks a response as a replay, `idempotent-replayed`.
///
/// The value of the field is `true`.
pub const IDEMPOTENT_REPLAYED: HeaderName = HeaderName::from_static("idempotent-replayed");

/// Idempotency key: 1 to 255 characters of printable ASCII.
///
/// ```
/// use tower_fence::idempotency::IdempotencyKey;
///
/// let key = IdempotencyKey::parse([r#""order-7""#])?;
/// assert_eq!(key.as_ref().map(IdempotencyKey::as_str), Some("order-7"));
/// // The value to send.
/// assert_eq!(IdempotencyKey::new("order-7")?.to_string(), r#""order-7""#);
/// # Ok::<(), tower_fence::idempotency::InvalidKey>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct IdempotencyKey(String);

impl IdempotencyKey {
    /// Maximum length of a key, in bytes.
    pub const MAX_BYTES: usize = 255;

    /// Creates an idempotency key from text.
    ///
    /// # Errors
    ///
    /// Returns an [`InvalidKey`] if the text is empty, too long, or not printable ASCII.
    pub fn new(key: impl Into<String>) -> Result<Self, InvalidKey> {
        let key = key.into();
        if StringRef::from_str(&key).is_err() {
            return Err(InvalidKey::NotAString);
        }
        if !(1..=Self::MAX_BYTES).contains(&key.len()) {
            return Err(InvalidKey::Length { bytes: key.len() });
        }
        Ok(Self(key))
    }

    /// Parses the field from its lines. Returns `None` if there is no line.
    ///
    /// # Errors
    ///
    /// Returns an [`InvalidKey`] if the lines are not one valid key. This function does not panic
    /// for any input.
    pub fn parse<L: AsRef<[u8]>>(
        lines: impl IntoIterator<Item = L>,
    ) -> Result<Option<Self>, InvalidKey> {
        let mut lines = lines.into_iter();
        let (line, None) = (lines.next(), lines.next()) else {
            return Err(InvalidKey::Several);
        };
        let Some(line) = line else {
            return Ok(None);
        };
        let item: Item = Parser::new(line.as_ref())
            .parse()
            .map_err(|_| InvalidKey::NotAString)?;
        let BareItem::String(key) = item.bare_item else {
            return Err(InvalidKey::NotAString);
        };
        Self::new(String::from(key)).map(Some)
    }

    /// Returns the key, without the quotes of the field.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Formats the value of the field, including the quotes.
impl fmt::Display for IdempotencyKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let key = StringRef::from_str(&self.0).map_err(|_| fmt::Error)?;
        f.write_str(&ItemSerializer::new().bare_item(key).finish())
    }
}

/// Error returned when an `Idempotency-Key` field was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidKey {
    /// The field is not a String.
    #[error("the idempotency key must be an RFC 9651 String: printable ASCII in double quotes")]
    NotAString,
    /// The key is empty, or longer than [`IdempotencyKey::MAX_BYTES`].
    #[error("an idempotency key must have 1 to 255 bytes, not {bytes}")]
    Length {
        /// The length of the key, in bytes.
        bytes: usize,
    },
    /// The field occurs more than once.
    #[error("the idempotency key must occur exactly once")]
    Several,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_key_is_one_string_of_1_to_255_bytes() {
        let parse = |line: &str| IdempotencyKey::parse([line]);
        assert_eq!(IdempotencyKey::parse::<&str>([]), Ok(None));
        assert_eq!(parse(r#""a\"b";x=1"#).unwrap().unwrap().as_str(), "a\"b");
        assert!(parse(&format!("\"{}\"", "x".repeat(255))).is_ok());
        let long = parse(&format!("\"{}\"", "x".repeat(256)));
        assert_eq!(long, Err(InvalidKey::Length { bytes: 256 }));
        assert_eq!(parse("\"\""), Err(InvalidKey::Length { bytes: 0 }));
        for wrong in ["", "abc", "7", "\"a", "\"a\", \"b\"", "%\"c3\"", "\"é\""] {
            assert_eq!(parse(wrong), Err(InvalidKey::NotAString), "{wrong}");
        }
        let two = IdempotencyKey::parse(["\"a\"", "\"a\""]);
        assert_eq!(two, Err(InvalidKey::Several));
    }

    proptest! {
        #[test]
        fn formatted_value_parses_back(text in "\\PC{0,20}|[ -~]{0,300}") {
            if let Ok(key) = IdempotencyKey::new(text) {
                prop_assert_eq!(IdempotencyKey::parse([key.to_string()]).unwrap().unwrap(), key);
            }
        }

        #[test]
        fn any_input_is_a_key_or_an_error(line: Vec<u8>) {
            let _ = IdempotencyKey::parse([line]);
        }
    }
}
