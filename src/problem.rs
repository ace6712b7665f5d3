#![doc = include_str!("problem.md")]

use std::{borrow::Cow, time::Duration};

#[cfg(feature = "_axum")]
use axum::response::{IntoResponse, Response};
use http::StatusCode;
#[cfg(feature = "_axum")]
use http::{HeaderValue, header};
use serde::{Serialize, Serializer, ser::SerializeMap};
use serde_json::Value;

#[cfg(feature = "_axum")]
use crate::time::whole_ms;

macro_rules! table {
    ($($variant:ident = $status:ident, $name:literal, $title:literal;)*) => {
        /// Type of a problem, with its name, status and title.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum ProblemType {
            $(
                #[doc = concat!("`", stringify!($status), "`: [", $title, "](self#", $name, ").")]
                $variant,
            )*
        }

        impl ProblemType {
            /// All problem types.
            pub const ALL: &[Self] = &[$(Self::$variant,)*];

            /// Returns the last part of the `type` URI, such as `stale-token`.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            /// Returns the whole `type` URI, which is the address of the explanation of the
            /// problem.
            #[must_use]
            pub const fn uri(self) -> &'static str {
                match self {
                    $(Self::$variant => concat!(
                        "https://docs.rs/tower-fence/latest/tower_fence/problem/#", $name
                    ),)*
                }
            }

            /// Returns the status of the response.
            #[must_use]
            pub const fn status(self) -> StatusCode {
                match self { $(Self::$variant => StatusCode::$status,)* }
            }

            /// Returns a short text for people to read.
            #[must_use]
            pub const fn title(self) -> &'static str {
                match self { $(Self::$variant => $title,)* }
            }
        }
    };
}

table! {
    TokenRequired = PRECONDITION_REQUIRED, "token-required", "A fencing token is required";
    MalformedToken = BAD_REQUEST, "malformed-token", "The fencing token is malformed";
    WrongResource = FORBIDDEN, "wrong-resource", "The fencing token is for another resource";
    ForgedToken = FORBIDDEN, "forged-token", "The issuer has not signed the fencing token";
    UnknownEpoch = FORBIDDEN, "unknown-epoch", "The epoch of the fencing token was never assigned";
    StaleToken = PRECONDITION_FAILED, "stale-token", "The fencing token is stale";
    LockHeld = CONFLICT, "lock-held", "The lock is held";
    LeaseLost = CONFLICT, "lease-lost", "The lease is not held";
    FenceExhausted = CONFLICT, "fence-exhausted", "No higher token is left";
    TooManyWaiters = SERVICE_UNAVAILABLE, "too-many-waiters", "Too many requests are waiting";
    InvalidRequest = UNPROCESSABLE_ENTITY, "invalid-request", "The request is invalid";
    Unauthorized = UNAUTHORIZED, "unauthorized", "A secret is required";
    OperatorsOnly = FORBIDDEN, "operators-only", "Only operators may make this request";
    ServerBusy = SERVICE_UNAVAILABLE, "server-busy", "The server is busy or stopping";
    UnsupportedMediaType = UNSUPPORTED_MEDIA_TYPE, "unsupported-media-type", "The content type is not JSON";
    IdempotencyKeyRequired = BAD_REQUEST, "idempotency-key-required", "An idempotency key is required";
    MalformedIdempotencyKey = BAD_REQUEST, "malformed-idempotency-key", "The idempotency key is malformed";
    IdempotencyPrincipalRequired = BAD_REQUEST, "idempotency-principal-required", "The idempotency key needs a principal";
    IdempotencyMismatch = UNPROCESSABLE_ENTITY, "idempotency-mismatch", "The idempotency key belongs to another request";
    IdempotencyInFlight = CONFLICT, "idempotency-in-flight", "The request is in progress";
    ResponseMissing = INTERNAL_SERVER_ERROR, "response-missing", "The response was not stored";
    ResponseNotStored = INTERNAL_SERVER_ERROR, "response-not-stored", "The response could not be stored";
    UnknownRoute = NOT_FOUND, "unknown-route", "No such route";
    BodyTooLarge = PAYLOAD_TOO_LARGE, "body-too-large", "The body is too large";
    BodyTimeout = REQUEST_TIMEOUT, "body-timeout", "The body did not arrive in time";
    MalformedBody = BAD_REQUEST, "malformed-body", "The body could not be read";
    FenceBusy = SERVICE_UNAVAILABLE, "fence-busy", "The resource is busy";
    StoreUnavailable = SERVICE_UNAVAILABLE, "store-unavailable", "A store is unavailable";
    HandlerTimeout = SERVICE_UNAVAILABLE, "handler-timeout", "The request took too long";
    OutcomeUnknown = SERVICE_UNAVAILABLE, "outcome-unknown", "The outcome is unknown";
    TransactionAborted = INTERNAL_SERVER_ERROR, "transaction-aborted", "The transaction was aborted";
    UnfencedWrite = INTERNAL_SERVER_ERROR, "unfenced-write", "A protected table was written without an admission";
    RowsUnreadable = INTERNAL_SERVER_ERROR, "rows-unreadable", "The rows of a write could not be read";
    TransactionEscaped = INTERNAL_SERVER_ERROR, "transaction-escaped", "The transaction escaped";
    Misconfigured = INTERNAL_SERVER_ERROR, "misconfigured", "The service is misconfigured";
}

/// Problem document that a handler can return as a response.
///
/// Its content type is `application/problem+json`, with `Cache-Control: no-store`.
///
/// ```
/// use tower_fence::problem::{Problem, ProblemType};
///
/// let problem = Problem::new(ProblemType::StaleToken)
///     .detail("token 41 is not newer than 42")
///     .member("max_token", 42);
/// assert_eq!(problem.status_code(), 412);
/// assert_eq!(
///     serde_json::to_value(&problem)?,
///     serde_json::json!({
///         "type": "https://docs.rs/tower-fence/latest/tower_fence/problem/#stale-token",
///         "title": "The fencing token is stale",
///         "status": 412,
///         "detail": "token 41 is not newer than 42",
///         "max_token": 42,
///     })
/// );
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Problem {
    uri: Cow<'static, str>,
    title: Cow<'static, str>,
    status: StatusCode,
    detail: Option<String>,
    members: Vec<(Cow<'static, str>, Value)>,
    retry_after: Option<Duration>,
}

impl Serialize for Problem {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let mut document = to.serialize_map(None)?;
        document.serialize_entry("type", &self.uri)?;
        document.serialize_entry("title", &self.title)?;
        document.serialize_entry("status", &self.status.as_u16())?;
        if let Some(detail) = &self.detail {
            document.serialize_entry("detail", detail)?;
        }
        for (name, value) in &self.members {
            document.serialize_entry(name, value)?;
        }
        document.end()
    }
}

impl Problem {
    /// Creates a problem with one of this crate's types.
    #[must_use]
    pub fn new(kind: ProblemType) -> Self {
        Self::custom(kind.uri(), kind.status(), kind.title())
    }

    /// Creates a problem with a type of the application. `uri` is the address of the explanation of
    /// the type, or `about:blank`.
    #[must_use]
    pub fn custom(
        uri: impl Into<Cow<'static, str>>,
        status: StatusCode,
        title: impl Into<Cow<'static, str>>,
    ) -> Self {
        Self {
            uri: uri.into(),
            title: title.into(),
            status,
            detail: None,
            members: Vec::new(),
            retry_after: None,
        }
    }

    /// Sets the `detail`, which explains this occurrence of the problem to people.
    #[must_use]
    pub fn detail(mut self, detail: impl Into<String>) -> Self {
        self.detail = Some(detail.into());
        self
    }

    /// Adds a member after the standard members, or replaces an added member with the same name.
    /// `name` must not be that of a standard member, such as `detail`.
    #[must_use]
    pub fn member(mut self, name: impl Into<Cow<'static, str>>, value: impl Into<Value>) -> Self {
        let (name, value) = (name.into(), value.into());
        self.members.retain(|(other, _)| *other != name);
        self.members.push((name, value));
        self
    }

    /// Adds a `Retry-After` header, in whole seconds, rounded up, with a minimum of 1.
    #[must_use]
    pub const fn retry_after(mut self, wait: Duration) -> Self {
        self.retry_after = Some(wait);
        self
    }

    /// Returns the status of the response.
    #[must_use]
    pub const fn status_code(&self) -> StatusCode {
        self.status
    }
}

#[cfg(feature = "_axum")]
impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let headers = [
            (
                header::CONTENT_TYPE,
                HeaderValue::from_static("application/problem+json"),
            ),
            (header::CACHE_CONTROL, HeaderValue::from_static("no-store")),
        ];
        // Most documents fit this capacity.
        let mut body = Vec::with_capacity(384);
        // Serializing a map with text keys and plain values always succeeds, and writing to memory
        // never fails.
        _ = serde_json::to_writer(&mut body, &self);
        let mut response = (self.status, headers, body).into_response();
        if let Some(wait) = self.retry_after {
            let seconds = whole_ms(wait).div_ceil(1_000).max(1);
            response
                .headers_mut()
                .insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retry_after_is_rounded_up_to_whole_seconds() {
        for (micros, seconds) in [(0, "1"), (1, "1"), (1_000_000, "1"), (1_000_001, "2")] {
            let response = Problem::new(ProblemType::FenceBusy)
                .retry_after(Duration::from_micros(micros))
                .into_response();
            assert_eq!(response.headers()[header::RETRY_AFTER], seconds);
            assert_eq!(response.headers()[header::CACHE_CONTROL], "no-store");
        }
    }
}
