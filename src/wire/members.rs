//! Reading of the members of a JSON object one by one, so that a refusal names the invalid member.

use std::{
    fmt::{self, Display},
    str::FromStr,
};

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::{Map, Value, error::Category};

use crate::{lease::LeaseError, token::Token};

/// Members of a JSON object. A member that is null counts as absent.
///
/// The methods return [`LeaseError::Invalid`] for a member that is unknown, that occurs twice, or
/// whose value is invalid. The field is the name of the member, or `body` if the body is not a JSON
/// object.
#[derive(Debug)]
pub(super) struct Members(Map<String, Value>);

/// Members of a JSON object, and the name of a member that occurs twice.
struct Object(Map<String, Value>, Option<String>);

impl<'de> Deserialize<'de> for Object {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct AnObject;

        impl<'de> Visitor<'de> for AnObject {
            type Value = Object;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Object, A::Error> {
                let mut object = Object(Map::new(), None);
                while let Some((name, value)) = map.next_entry::<String, Value>()? {
                    if object.0.contains_key(&name) {
                        object.1 = Some(name.clone());
                    }
                    object.0.insert(name, value);
                }
                Ok(object)
            }
        }

        deserializer.deserialize_map(AnObject)
    }
}

impl Members {
    /// Parses a body. An empty body counts as an empty object.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, LeaseError> {
        if bytes.trim_ascii().is_empty() {
            return Ok(Self(Map::new()));
        }
        match serde_json::from_slice(bytes) {
            Ok(Object(members, None)) => Ok(Self(members)),
            Ok(Object(_, Some(twice))) => Err(LeaseError::invalid(short(&twice), "occurs twice")),
            Err(error) => {
                let expected = match error.classify() {
                    Category::Data => "must be a JSON object",
                    _ => "is not valid JSON",
                };
                // The text of `error` may quote a secret, so only the position is used.
                let (line, column) = (error.line(), error.column());
                let detail = format!("{expected} (line {line}, column {column})");
                Err(LeaseError::invalid("body", detail))
            }
        }
    }

    fn take<T>(
        &mut self,
        name: &'static str,
        read: impl FnOnce(&Value) -> Result<T, String>,
    ) -> Result<Option<T>, LeaseError> {
        match self.0.remove(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => read(&value)
                .map(Some)
                .map_err(|detail| LeaseError::invalid(name, detail)),
        }
    }

    pub(super) fn take_ms(&mut self, name: &'static str) -> Result<Option<u64>, LeaseError> {
        self.take(name, |value| {
            whole(value).ok_or_else(|| "must be a whole number of milliseconds".to_owned())
        })
    }

    pub(super) fn take_token(&mut self, name: &'static str) -> Result<Option<Token>, LeaseError> {
        self.take(name, |value| {
            whole(value)
                .and_then(|number| i64::try_from(number).ok())
                .and_then(|number| Token::new(number).ok())
                .ok_or_else(|| "must be a token, an integer from 1 to 999999999999999".to_owned())
        })
    }

    pub(super) fn take_bool(&mut self, name: &'static str) -> Result<Option<bool>, LeaseError> {
        self.take(name, |value| {
            value
                .as_bool()
                .ok_or_else(|| "must be true or false".to_owned())
        })
    }

    /// Takes a string, and parses it.
    pub(super) fn take_text<T: FromStr<Err: Display>>(
        &mut self,
        name: &'static str,
    ) -> Result<Option<T>, LeaseError> {
        self.take(name, |value| {
            let text = value
                .as_str()
                .ok_or_else(|| "must be a string".to_owned())?;
            text.parse().map_err(|error: T::Err| error.to_string())
        })
    }

    /// Refuses members that were not taken. Otherwise a mistyped name would silently select the
    /// default.
    pub(super) fn finish(self) -> Result<(), LeaseError> {
        match self.0.into_iter().next() {
            None => Ok(()),
            Some((field, _)) => Err(LeaseError::invalid(short(&field), "unknown member")),
        }
    }
}

/// Returns the part of a member's name that a response may repeat, because the client chooses it.
fn short(name: &str) -> String {
    name.chars().filter(|c| !c.is_control()).take(64).collect()
}

/// Converts a number with a fraction or an exponent, such as `1e3`, if its value is whole. A JSON
/// writer may use these forms for whole numbers. Above 2^53, an `f64` is not exact, so such numbers
/// are invalid.
fn whole(value: &Value) -> Option<u64> {
    value.as_u64().or_else(|| {
        let number = value.as_f64()?;
        let exact = 0.0..=9_007_199_254_740_992.0;
        (number.fract() == 0.0 && exact.contains(&number)).then_some(number as u64)
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::lease::{LeaseId, Owner};

    fn field<T: std::fmt::Debug>(refused: Result<T, LeaseError>) -> String {
        match refused.unwrap_err() {
            LeaseError::Invalid { field, .. } => field,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn each_bad_member_is_named() {
        let parse = |body: &str| Members::parse(body.as_bytes());
        for body in ["[]", "1", "{", "\"x\"", "{\"ttl_ms\":1}x"] {
            assert_eq!(field(parse(body)), "body", "{body}");
        }
        for ms in [
            "-1",
            "1.5",
            "-1.0",
            "\"1\"",
            "true",
            "1e-3",
            "1e20",
            "99999999999999999999",
        ] {
            let mut members = parse(&format!("{{\"ttl_ms\":{ms}}}")).unwrap();
            assert_eq!(field(members.take_ms("ttl_ms")), "ttl_ms", "{ms}");
        }
        let mut members = parse(r#"{"lease_id":"short","owner":7}"#).unwrap();
        assert_eq!(field(members.take_text::<LeaseId>("lease_id")), "lease_id");
        assert_eq!(field(members.take_text::<Owner>("owner")), "owner");
        assert_eq!(field(parse(r#"{"ttl":1}"#).unwrap().finish()), "ttl");
        assert_eq!(field(parse(r#"{"token":1,"token":2}"#)), "token");
    }

    #[test]
    fn a_whole_number_may_be_written_in_any_way() {
        for ms in ["1000", "1000.0", "1e3", "1.0E+3", "10000e-1"] {
            let mut members = Members::parse(format!("{{\"ttl_ms\":{ms}}}").as_bytes()).unwrap();
            assert_eq!(members.take_ms("ttl_ms").unwrap(), Some(1_000), "{ms}");
        }
    }

    #[test]
    fn missing_and_null_members_are_absent() {
        for body in ["", " \n", "{}", r#"{"ttl_ms":null}"#] {
            let mut members = Members::parse(body.as_bytes()).unwrap();
            assert_eq!(members.take_ms("ttl_ms").unwrap(), None, "{body}");
            members.finish().unwrap();
        }
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            drop(Members::parse(&bytes));
        }
    }
}
