//! Errors of requests to an issuer.

use std::sync::Arc;

use http::StatusCode;
use reqwest::Url;
use serde_json::Value;

use crate::{lease::LeaseError, token::Resource, wire::refusal::limited};

/// Error of a request to an issuer.
///
/// In a [`LeaseError`], this error is the cause of a [`Misconfigured`](LeaseError::Misconfigured)
/// if a retry cannot help ([`Url`](Self::Url), [`Client`](Self::Client), [`Header`](Self::Header),
/// [`Refused`](Self::Refused)), and otherwise of an [`Unavailable`](LeaseError::Unavailable).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HttpError {
    /// The URL is not a valid http or https URL.
    #[error(
        "invalid URL of the issuer: expected an http or https URL such as http://127.0.0.1:3000/locks"
    )]
    Url,
    /// The HTTP client could not be built.
    #[error("the HTTP client could not be built")]
    Client(#[source] reqwest::Error),
    /// The secret contains characters that a header cannot contain.
    #[error("the secret contains characters that are not allowed in a header")]
    Header,
    /// The request could not be sent, or its response could not be read.
    #[error("the request to the issuer at {address} failed")]
    Request {
        /// The issuer's host and port.
        address: String,
        /// The cause. It does not contain the URL, which may include a password.
        source: reqwest::Error,
    },
    /// The issuer did not respond before the timeout.
    #[error("the issuer at {address} did not answer in time")]
    NoAnswer {
        /// The issuer's host and port.
        address: String,
    },
    /// The issuer granted or renewed a lease on a resource other than the requested one. The usual
    /// cause is a proxy that decodes or rewrites the path.
    #[error(
        "the issuer answered for the resource {answered}: check whether a proxy rewrites the request path"
    )]
    OtherResource {
        /// The resource of the lease in the response.
        answered: Resource,
    },
    /// The response has the status 401, 403, 404, 405, 407 or 410, or is a redirection, because the
    /// secret is missing or wrong, the URL does not lead to an issuer, or an HTTP proxy requires
    /// credentials for an `http` URL (for an `https` URL, the error is
    /// [`Request`](Self::Request)). A client from `HttpLeases::new` does not follow redirections,
    /// because the request contains a lease id. A retry gets the same response.
    #[error("the issuer refused the request with status {status}{}", detail(.status, .problem.as_ref()))]
    Refused {
        /// The status of the response.
        status: StatusCode,
        /// The problem document, if the response contains one.
        problem: Option<Value>,
    },
    /// The response has a status or a body that is invalid for this request. It comes from another
    /// service or a proxy, or from an issuer whose store is unavailable.
    #[error("unexpected answer from the issuer with status {status}{}", detail(.status, .problem.as_ref()))]
    Unexpected {
        /// The status of the response.
        status: StatusCode,
        /// The problem document, if the response contains one and is not a success.
        problem: Option<Value>,
    },
}

impl HttpError {
    /// Returns the error for a request to `url` that failed.
    pub(super) fn request(url: &Url, error: reqwest::Error) -> Self {
        Self::Request {
            address: address(url),
            source: error.without_url(),
        }
    }

    /// Returns the error for a refused request, given the body of the response.
    pub(super) fn refused(status: StatusCode, body: &[u8]) -> Self {
        let problem = document(body);
        Self::Refused { status, problem }
    }

    /// Returns the error for an unexpected response with this body. The body of a success may be a
    /// lease, with its secrets.
    pub(super) fn unexpected(status: StatusCode, body: &[u8]) -> Self {
        let problem = match status.is_success() {
            true => None,
            false => document(body),
        };
        Self::Unexpected { status, problem }
    }

    /// Returns the error for a request to `url` without a response.
    pub(super) fn no_answer(url: &Url) -> Self {
        Self::NoAnswer {
            address: address(url),
        }
    }
}

fn document(body: &[u8]) -> Option<Value> {
    serde_json::from_slice(body).ok().filter(Value::is_object)
}

/// Returns the host and the port of a URL, without the user name or the password.
fn address(url: &Url) -> String {
    let host = url.host_str().unwrap_or_default();
    match url.port_or_known_default() {
        Some(port) => format!("{host}:{port}"),
        None => host.into(),
    }
}

/// Returns the detail or the title of a problem document, preceded by a colon. Without a document,
/// returns a hint for a status that other servers send for an unknown path.
fn detail(status: &StatusCode, problem: Option<&Value>) -> String {
    let member = |name| problem?.get(name)?.as_str();
    match member("detail").or_else(|| member("title")) {
        Some(text) => format!(": {}", limited(text)),
        None if matches!(status.as_u16(), 404 | 405) => {
            ": no issuer serves this path, or only without the routes for operators".to_owned()
        }
        None => String::new(),
    }
}

impl From<HttpError> for LeaseError {
    fn from(error: HttpError) -> Self {
        match error {
            HttpError::Refused { .. }
            | HttpError::Url
            | HttpError::Client(_)
            | HttpError::Header => Self::Misconfigured(Arc::new(error)),
            error => Self::unavailable(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_of_a_refusal_is_limited() {
        let body = serde_json::json!({ "detail": "é".repeat(100_000) }).to_string();
        let refused = HttpError::refused(StatusCode::FORBIDDEN, body.as_bytes()).to_string();
        assert!(
            refused.contains('é') && refused.chars().count() < 500,
            "{refused}"
        );
    }

    #[test]
    fn an_invalid_setting_is_not_temporary() {
        for error in [HttpError::Url, HttpError::Header] {
            let error = LeaseError::from(error);
            assert!(matches!(error, LeaseError::Misconfigured(_)), "{error:?}");
        }
    }

    #[test]
    fn body_of_a_success_is_not_kept() {
        let body = br#"{"lease_id": "a secret", "detail": "a secret"}"#;
        let unexpected = |status| format!("{:?}", HttpError::unexpected(status, body));
        assert!(!unexpected(StatusCode::OK).contains("secret"));
        assert!(unexpected(StatusCode::BAD_GATEWAY).contains("secret"));
    }

    #[test]
    fn a_missing_route_has_a_hint() {
        let text = |status| HttpError::refused(status, b"").to_string();
        let missing = text(StatusCode::NOT_FOUND);
        assert!(missing.contains("no issuer serves this path"), "{missing}");
        let forbidden = text(StatusCode::FORBIDDEN);
        assert!(forbidden.ends_with("403 Forbidden"), "{forbidden}");
    }
}
