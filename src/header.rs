//! Header field `Fencing-Token`: an [RFC 9651] List of Integers, with one member per resource.
//!
//! 1. All field lines with this name form one list.
//! 2. Each member is an Integer in the range of a [`Token`].
//! 3. The parameter `resource` names the resource for which the token was granted. It is a String,
//!    or a Display String if the name is not ASCII. No two members name the same resource.
//! 4. The parameters `key` (a String, the id of a key) and `mac` (a Byte Sequence) are the
//!    signature of a [signed token](crate::token_keys). This module does not verify the signature.
//! 5. Other parameters are ignored, as RFC 9651 requires.
//! 6. The list has at most 100 members.
//!
//! ```text
//! Fencing-Token: 42
//! Fencing-Token: 42;resource="sku-1", 7;resource="sku-2"
//! ```
//!
//! # Example
//!
//! ```
//! use tower_fence::{Resource, Token, header::{self, FencingToken}};
//!
//! let tokens = header::parse([r#"42;resource="sku-1""#, "7"])?;
//! assert_eq!(tokens[0].token, Token::new(42)?);
//! assert_eq!(tokens[0].resource, Some(Resource::new("sku-1")?));
//! assert_eq!(tokens[1], FencingToken::new(Token::new(7)?));
//! assert_eq!(header::format(&tokens), r#"42;resource="sku-1", 7"#);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! [RFC 9651]: https://www.rfc-editor.org/rfc/rfc9651

use std::{collections::HashSet, fmt, str::FromStr};

use bytes::Bytes;
use http::HeaderName;
use sfv::{
    BareItem, Item, KeyRef, List, ListEntry, ListSerializer, Parser, RefBareItem, StringRef,
    integer, key_ref,
};

use crate::{
    key_id::{InvalidKeyId, KeyId},
    token::{InvalidResource, InvalidToken, Resource, Token},
};

/// Default name of the field, `fencing-token`.
pub const FENCING_TOKEN: HeaderName = HeaderName::from_static("fencing-token");

const RESOURCE: &KeyRef = key_ref("resource");
const KEY: &KeyRef = key_ref("key");
const MAC: &KeyRef = key_ref("mac");

/// Member of a `Fencing-Token` field: a token with its parameters.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct FencingToken {
    /// The token.
    pub token: Token,
    /// The resource for which the token was granted, if the member names it.
    pub resource: Option<Resource>,
    /// The id of the signing key, according to the member.
    pub key: Option<KeyId>,
    /// The message authentication code of the member, if any. It is not verified.
    pub mac: Option<Bytes>,
}

impl FencingToken {
    /// Creates a member without parameters.
    #[must_use]
    pub const fn new(token: Token) -> Self {
        Self {
            token,
            resource: None,
            key: None,
            mac: None,
        }
    }

    /// Sets the resource for which the token was granted.
    #[must_use]
    pub fn with_resource(mut self, resource: Resource) -> Self {
        self.resource = Some(resource);
        self
    }
}

impl fmt::Debug for FencingToken {
    /// Omits the bytes of the MAC.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FencingToken")
            .field("token", &self.token)
            .field("resource", &self.resource)
            .field("key", &self.key)
            .field("mac", &self.mac.as_ref().map(|_| "…"))
            .finish()
    }
}

/// Formats the value of a field with this member, such as `42;resource="sku-1"`.
impl fmt::Display for FencingToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&format(std::slice::from_ref(self)))
    }
}

/// Parses the value of a field with one member, such as `42;resource="sku-1"`.
impl FromStr for FencingToken {
    type Err = MalformedToken;

    fn from_str(value: &str) -> Result<Self, Self::Err> {
        let one = <[Self; 1]>::try_from(parse([value])?);
        let [token] = one.map_err(|members| MalformedToken::Count {
            found: members.len(),
        })?;
        Ok(token)
    }
}

const MAX_MEMBERS: usize = 100;

/// Parses a field from its lines, in order. If there is no line, or one empty line, the result is
/// an empty list. A field has at most 100 members.
///
/// # Errors
///
/// Returns a [`MalformedToken`] for the first rule that the lines violate. This function does not
/// panic for any input.
pub fn parse<L: AsRef<[u8]>>(
    lines: impl IntoIterator<Item = L>,
) -> Result<Vec<FencingToken>, MalformedToken> {
    let combined = combine(lines);
    let list: List = Parser::new(&combined)
        .parse()
        .map_err(|error| MalformedToken::Syntax(error.to_string().into()))?;
    if list.len() > MAX_MEMBERS {
        return Err(MalformedToken::TooMany);
    }
    let mut named = HashSet::new();
    let mut tokens = Vec::with_capacity(list.len());
    for entry in list {
        let ListEntry::Item(item) = entry else {
            return Err(MalformedToken::NotAnInteger);
        };
        let token = member(item)?;
        if let Some(resource) = &token.resource
            && !named.insert(resource.clone())
        {
            return Err(MalformedToken::Duplicate(resource.clone()));
        }
        tokens.push(token);
    }
    Ok(tokens)
}

/// Joins the field lines with commas, as RFC 9651, section 4.2, requires before parsing.
fn combine<L: AsRef<[u8]>>(lines: impl IntoIterator<Item = L>) -> Vec<u8> {
    let mut combined = Vec::new();
    for (position, line) in lines.into_iter().enumerate() {
        if position > 0 {
            combined.extend_from_slice(b", ");
        }
        combined.extend_from_slice(line.as_ref());
    }
    combined
}

fn member(item: Item) -> Result<FencingToken, MalformedToken> {
    let BareItem::Integer(value) = item.bare_item else {
        return Err(MalformedToken::NotAnInteger);
    };
    let mut token = FencingToken::new(Token::new(value.into())?);
    for (name, value) in item.params {
        if *name == *RESOURCE {
            let name = match value {
                BareItem::String(name) => name.into(),
                BareItem::DisplayString(name) => name,
                _ => return Err(MalformedToken::ResourceNotAString),
            };
            token.resource = Some(Resource::new(name)?);
        } else if *name == *KEY {
            let BareItem::String(key) = value else {
                return Err(MalformedToken::KeyNotAString);
            };
            token.key = Some(KeyId::new(key.as_str())?);
        } else if *name == *MAC {
            let BareItem::ByteSequence(mac) = value else {
                return Err(MalformedToken::MacNotBytes);
            };
            token.mac = Some(mac.into());
        }
    }
    Ok(token)
}

/// Formats the value of a field, in the form that [`parse`] reads. For an empty slice, the result
/// is empty. In that case, do not send the field.
#[must_use]
pub fn format(tokens: &[FencingToken]) -> String {
    let mut list = ListSerializer::new();
    for token in tokens {
        let mut member = list.bare_item(integer(token.token.get()));
        if let Some(resource) = &token.resource {
            member = member.parameter(
                RESOURCE,
                // A String can contain only ASCII. A Display String can contain any Unicode text.
                match StringRef::from_str(resource.as_str()) {
                    Ok(ascii) => RefBareItem::String(ascii),
                    Err(_) => RefBareItem::DisplayString(resource.as_str()),
                },
            );
        }
        if let Some(key) = &token.key
            && let Ok(key) = StringRef::from_str(key.as_str())
        {
            member = member.parameter(KEY, RefBareItem::String(key));
        }
        if let Some(mac) = &token.mac {
            _ = member.parameter(MAC, &mac[..]);
        }
    }
    list.finish().unwrap_or_default()
}

/// Error returned when a `Fencing-Token` field was refused.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MalformedToken {
    /// The field is not an RFC 9651 List.
    #[error("the field is not an RFC 9651 List: {0}")]
    Syntax(Box<str>),
    /// A member is not an Integer.
    #[error("a member of the field is not an Integer")]
    NotAnInteger,
    /// A member is not a valid token.
    #[error(transparent)]
    Token(#[from] InvalidToken),
    /// The parameter `resource` is not a String.
    #[error("the parameter `resource` is not a String")]
    ResourceNotAString,
    /// The parameter `resource` is not a valid resource name.
    #[error(transparent)]
    Resource(#[from] InvalidResource),
    /// The parameter `key` is not a String.
    #[error("the parameter `key` is not a String")]
    KeyNotAString,
    /// The parameter `key` is not a valid key id.
    #[error(transparent)]
    Key(#[from] InvalidKeyId),
    /// The parameter `mac` is not a Byte Sequence.
    #[error("the parameter `mac` is not a Byte Sequence")]
    MacNotBytes,
    /// Two members name the same resource.
    #[error("two members of the field name the resource {0}")]
    Duplicate(Resource),
    /// The field has more than 100 members.
    #[error("the field has more than {MAX_MEMBERS} members")]
    TooMany,
    /// The request is for several resources, and a member does not name its resource.
    #[error("a request for several resources needs the parameter `resource` on each member")]
    Unnamed,
    /// The field must have exactly one member, but has none or several.
    #[error("the field has {found} members, but one is expected")]
    Count {
        /// The number of members.
        found: usize,
    },
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, option, prelude::*};

    use super::*;

    fn token(value: i64) -> FencingToken {
        FencingToken::new(Token::new(value).unwrap())
    }

    #[test]
    fn debug_output_hides_the_mac() {
        let mut signed = token(42);
        signed.mac = Some(vec![1, 2].into());
        assert!(!format!("{signed:?}").contains("[1, 2]"));
    }

    #[test]
    fn text_must_contain_exactly_one_member() {
        assert_eq!("42".parse::<FencingToken>().unwrap(), token(42));
        for (value, members) in [("", 0), ("1, 2", 2), ("1, 2, 3", 3)] {
            let refused = value.parse::<FencingToken>().unwrap_err();
            assert!(
                matches!(refused, MalformedToken::Count { found } if found == members),
                "{value}"
            );
        }
    }

    #[test]
    fn each_broken_rule_has_its_error() {
        use MalformedToken as E;
        let refused = |field: &str| parse([field]).unwrap_err();
        for field in [
            "4 2",
            "42,",
            "42;",
            "é",
            "1000000000000000",
            "42;resource=\"a\u{7f}\"",
        ] {
            assert!(matches!(refused(field), E::Syntax(_)), "{field}");
        }
        for field in ["4.2", "\"42\"", "abc", "?1", "@42", "(42)"] {
            assert!(matches!(refused(field), E::NotAnInteger), "{field}");
        }
        for field in ["0", "-1", "-999999999999999"] {
            assert!(matches!(refused(field), E::Token(_)), "{field}");
        }
        assert!(matches!(refused("1;resource=sku"), E::ResourceNotAString));
        assert!(matches!(refused("1;resource"), E::ResourceNotAString));
        assert!(matches!(
            refused("1;resource=\"\""),
            E::Resource(InvalidResource::Empty)
        ));
        assert!(matches!(refused("1;mac=\"AQI=\""), E::MacNotBytes));
        for key in ["k1", ":AQI=:", "%\"k1\"", "1"] {
            let field = format!("1;key={key}");
            assert!(matches!(refused(&field), E::KeyNotAString), "{field}");
        }
        for key in ["", "a b", &"k".repeat(10_000)] {
            let field = format!("1;key=\"{key}\"");
            assert!(matches!(refused(&field), E::Key(_)), "{field}");
        }
        assert!(matches!(
            refused("1;resource=\"a\", 2;resource=\"a\""),
            E::Duplicate(_)
        ));
        parse(["1"; MAX_MEMBERS]).unwrap();
        assert!(matches!(parse(["1"; MAX_MEMBERS + 1]), Err(E::TooMany)));
    }

    prop_compose! {
        fn any_token()(
            value in 1..=Token::MAX.get(),
            resource in option::of("\\PC{1,60}"),
            key in option::of("[A-Za-z0-9._-]{1,64}"),
            mac in option::of(vec(any::<u8>(), 0..40)),
        ) -> FencingToken {
            let mut token = token(value);
            token.resource = resource.map(|name| Resource::new(name).unwrap());
            token.key = key.map(|id| KeyId::new(id).unwrap());
            token.mac = mac.map(Bytes::from);
            token
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2_000))]

        #[test]
        fn any_input_is_a_list_or_one_error(lines in vec(vec(any::<u8>(), 0..60), 0..4)) {
            if let Ok(tokens) = parse(&lines) {
                prop_assert_eq!(parse([format(&tokens)]).unwrap(), tokens);
            }
        }

        #[test]
        fn near_misses_are_a_list_or_one_error(
            line in r#"[0-9]{1,16}(\.[0-9])?(;(resource|key|mac|x)=("[a-c]{0,3}"|%"[a-f%0-9]{0,6}"|:[A-D=]{0,5}:|[0-9]))?(, ?[0-9]{1,3})?"#
        ) {
            if let Ok(tokens) = parse([line]) {
                prop_assert_eq!(parse([format(&tokens)]).unwrap(), tokens);
            }
        }

        #[test]
        fn formatted_value_parses_back(tokens in vec(any_token(), 0..5)) {
            let names: HashSet<_> = tokens.iter().filter_map(|t| t.resource.clone()).collect();
            let named = tokens.iter().filter(|t| t.resource.is_some()).count();
            prop_assume!(names.len() == named);
            prop_assert_eq!(parse([format(&tokens)]).unwrap(), tokens);
        }
    }
}
