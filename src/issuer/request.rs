//! Reading a request to the issuer. Each part that has no valid value is named in the answer.

use std::time::Duration;

use axum::{
    body::Body,
    extract::{FromRequestParts, Path},
};
use http::{
    HeaderMap,
    header::{CONTENT_TYPE, ORIGIN},
    request::Parts,
};
use serde_json::{Map, Value};

use super::response::Refusal;
use crate::{
    body,
    lease::{LeaseId, Owner},
    token::{InvalidResource, Resource},
};

/// The greatest length of a request's body.
const BODY_LIMIT_BYTES: usize = 16 * 1024;
/// How long to wait for it.
const BODY_WAIT: Duration = Duration::from_secs(10);

/// The name of the header that carries a lease id.
pub(super) const LEASE_ID: &str = "lease-id";

/// A part of the request without a valid value.
pub(super) fn invalid(field: &'static str, why: impl ToString) -> Refusal {
    Refusal::InvalidRequest {
        field: field.into(),
        why: why.to_string(),
    }
}

/// The resource that the path names, in one percent-encoded segment.
pub(super) struct Named(pub(super) Resource);

impl<S: Send + Sync> FromRequestParts<S> for Named {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Refusal> {
        // The router's own routes have this one parameter; what fails is its UTF-8.
        let Path(name) = Path::<String>::from_request_parts(parts, state)
            .await
            .map_err(|_| invalid("resource", InvalidResource::NotUtf8))?;
        let resource = Resource::new(name).map_err(|error| invalid("resource", error))?;
        Ok(Self(resource))
    }
}

/// The lease id of the header.
pub(super) fn lease_id(headers: &HeaderMap) -> Result<LeaseId, Refusal> {
    let mut values = headers.get_all(LEASE_ID).iter();
    let (Some(value), None) = (values.next(), values.next()) else {
        return Err(invalid(
            LEASE_ID,
            "the header `Lease-Id` must stand exactly once",
        ));
    };
    let id = String::from_utf8_lossy(value.as_bytes());
    LeaseId::new(id).map_err(|error| invalid(LEASE_ID, error))
}

/// Whether a body is marked as JSON: `application/json`, or a type on top of it.
fn is_json(headers: &HeaderMap) -> bool {
    let content_type = headers
        .get(CONTENT_TYPE)
        .and_then(|value| value.to_str().ok());
    let essence = content_type.and_then(|value| value.split(';').next());
    let essence = essence.unwrap_or_default().trim().to_ascii_lowercase();
    match essence.strip_prefix("application/") {
        Some(subtype) => subtype == "json" || subtype.ends_with("+json"),
        None => false,
    }
}

/// Refuses what a page of another site could have a browser send without asking here first. Such a
/// request has an `Origin`, and is never marked as JSON.
pub(super) fn refuse_foreign_pages(headers: &HeaderMap) -> Result<(), Refusal> {
    if headers.contains_key(ORIGIN) && !is_json(headers) {
        return Err(Refusal::UnsupportedMediaType);
    }
    Ok(())
}

/// The members of a JSON object, to be taken one by one. A member that is null counts as absent.
#[derive(Debug)]
pub(super) struct Members(Map<String, Value>);

impl Members {
    /// Reads the body, which must be marked as JSON; no body is an empty object.
    pub(super) async fn read(headers: &HeaderMap, body: Body) -> Result<Self, Refusal> {
        refuse_foreign_pages(headers)?;
        let bytes = body::read(body, BODY_LIMIT_BYTES, BODY_WAIT)
            .await?
            .to_bytes();
        if !bytes.trim_ascii().is_empty() && !is_json(headers) {
            return Err(Refusal::UnsupportedMediaType);
        }
        Self::parse(&bytes)
    }

    fn parse(bytes: &[u8]) -> Result<Self, Refusal> {
        if bytes.trim_ascii().is_empty() {
            return Ok(Self(Map::new()));
        }
        let members = serde_json::from_slice::<Map<String, Value>>(bytes);
        members.map(Self).map_err(|error| {
            // Not the error's own text, which may quote a secret.
            let (line, column) = (error.line(), error.column());
            let why = format!("the body is no JSON object (line {line}, column {column})");
            invalid("body", why)
        })
    }

    fn take<T>(
        &mut self,
        name: &'static str,
        read: impl FnOnce(&Value) -> Result<T, String>,
    ) -> Result<Option<T>, Refusal> {
        match self.0.remove(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => read(&value).map(Some).map_err(|why| invalid(name, why)),
        }
    }

    /// A number of milliseconds.
    pub(super) fn take_ms(&mut self, name: &'static str) -> Result<Option<Duration>, Refusal> {
        self.take(name, |value| {
            let ms = value.as_u64();
            ms.map(Duration::from_millis)
                .ok_or_else(|| format!("`{name}` is a whole number of milliseconds"))
        })
    }

    /// A number of milliseconds from 0, which is the default, to `limit`.
    pub(super) fn take_ms_up_to(
        &mut self,
        name: &'static str,
        limit: Duration,
    ) -> Result<Duration, Refusal> {
        let time = self.take_ms(name)?.unwrap_or_default();
        if time > limit {
            let limit = limit.as_millis();
            return Err(invalid(name, format!("`{name}` is from 0 to {limit}")));
        }
        Ok(time)
    }

    /// Yes or no.
    pub(super) fn take_bool(&mut self, name: &'static str) -> Result<Option<bool>, Refusal> {
        self.take(name, |value| {
            value
                .as_bool()
                .ok_or_else(|| format!("`{name}` is true or false"))
        })
    }

    /// The lease id that the client chose.
    pub(super) fn take_lease_id(&mut self) -> Result<Option<LeaseId>, Refusal> {
        self.take("lease_id", |value| {
            let id = value.as_str().ok_or("`lease_id` is a text")?;
            LeaseId::new(id).map_err(|error| error.to_string())
        })
    }

    /// Who asks.
    pub(super) fn take_owner(&mut self) -> Result<Option<Owner>, Refusal> {
        self.take("owner", |value| {
            let owner = value.as_str().ok_or("`owner` is a text")?;
            Owner::new(owner).map_err(|error| error.to_string())
        })
    }

    /// Refuses members that nobody took: a mistyped name must not pass for a default.
    pub(super) fn finish(self) -> Result<(), Refusal> {
        match self.0.into_iter().next() {
            None => Ok(()),
            Some((field, _)) => Err(Refusal::InvalidRequest {
                // A name of any length may come in; a part of it is enough to find it.
                field: field.chars().filter(|c| !c.is_control()).take(64).collect(),
                why: "there is no such member".into(),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn field(refusal: Refusal) -> String {
        match refusal {
            Refusal::InvalidRequest { field, .. } => field,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn each_bad_member_is_named() {
        let parse = |body: &str| Members::parse(body.as_bytes());
        for body in ["[]", "1", "{", "\"x\"", "{\"ttl_ms\":1}x"] {
            assert_eq!(field(parse(body).unwrap_err()), "body", "{body}");
        }
        for ms in ["-1", "1.5", "\"1\"", "true", "1e3", "99999999999999999999"] {
            let mut members = parse(&format!("{{\"ttl_ms\":{ms}}}")).unwrap();
            assert_eq!(
                field(members.take_ms("ttl_ms").unwrap_err()),
                "ttl_ms",
                "{ms}"
            );
        }
        let mut members = parse(r#"{"lease_id":"short","owner":7}"#).unwrap();
        assert_eq!(field(members.take_lease_id().unwrap_err()), "lease_id");
        assert_eq!(field(members.take_owner().unwrap_err()), "owner");
        assert_eq!(
            field(parse(r#"{"ttl":1}"#).unwrap().finish().unwrap_err()),
            "ttl"
        );
    }

    #[test]
    fn nothing_and_null_are_absent() {
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
