//! Why an issuer could not be asked.

use std::sync::Arc;

use http::StatusCode;
use reqwest::Url;
use serde_json::Value;

use crate::{lease::LeaseError, token::Resource};

/// Why an issuer could not be asked. The cause of a [`LeaseError::Unavailable`], and if it does not pass by
/// itself ([`Refused`](Self::Refused)), of a [`LeaseError::Misconfigured`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HttpError {
    /// This is no URL of HTTP.
    #[error("this is no http or https URL")]
    Url,
    /// No HTTP client could be built.
    #[error("no HTTP client could be built")]
    Client(#[source] reqwest::Error),
    /// A secret has characters that no header can have.
    #[error("the secret has characters that no header can have")]
    Header,
    /// The request failed.
    #[error("the issuer at {address} could not be asked")]
    Request {
        /// The issuer's host and port.
        address: String,
        /// What went wrong. It does not name the URL, which may have a password in it.
        source: reqwest::Error,
    },
    /// No answer came within the limit.
    #[error("the issuer at {address} did not answer in time")]
    NoAnswer {
        /// The issuer's host and port.
        address: String,
    },
    /// The issuer granted or renewed the lease on another resource than the request named. A proxy in
    /// between has decoded or rewritten the path.
    #[error(
        "the issuer answered for the resource {answered}: a proxy in between changes the path of requests"
    )]
    OtherResource {
        /// The resource of the lease in the answer.
        answered: Resource,
    },
    /// The request was refused with 401, 403 or 404: the secret is missing or wrong, or the URL leads
    /// elsewhere. A retry gets the same answer.
    #[error("the issuer refused the request with status {status}{}", detail(.problem.as_ref()))]
    Refused {
        /// The status.
        status: StatusCode,
        /// The problem document, if the answer has one.
        problem: Option<Value>,
    },
    /// The answer is none of an issuer's: another service, a proxy, a store that is unavailable.
    #[error("the issuer answered with status {0}")]
    Unexpected(StatusCode),
}

impl HttpError {
    /// A request to `url` that failed.
    pub(super) fn request(url: &Url, error: reqwest::Error) -> Self {
        Self::Request {
            address: address(url),
            source: error.without_url(),
        }
    }

    /// A request that was refused, with the body of the answer.
    pub(super) fn refused(status: StatusCode, body: &[u8]) -> Self {
        let problem = serde_json::from_slice(body).ok();
        Self::Refused {
            status,
            problem: problem.filter(Value::is_object),
        }
    }

    /// A request to `url` without an answer.
    pub(super) fn no_answer(url: &Url) -> Self {
        Self::NoAnswer {
            address: address(url),
        }
    }
}

/// Host and port, without a user's name and password.
fn address(url: &Url) -> String {
    let host = url.host_str().unwrap_or_default();
    match url.port_or_known_default() {
        Some(port) => format!("{host}:{port}"),
        None => host.into(),
    }
}

/// As many characters of a problem document are in the text of an error.
const LONGEST_DETAIL: usize = 200;

/// What a problem document says, behind a colon.
fn detail(problem: Option<&Value>) -> String {
    let member = |name| problem?.get(name)?.as_str();
    let text = member("detail").or_else(|| member("title"));
    // A peer chooses its length.
    let text = text.map(|text| text.chars().take(LONGEST_DETAIL).collect::<String>());
    text.map(|text| format!(": {text}")).unwrap_or_default()
}

impl From<HttpError> for LeaseError {
    fn from(error: HttpError) -> Self {
        match error {
            HttpError::Refused { .. } => Self::Misconfigured(Arc::new(error)),
            error => Self::unavailable(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_of_a_refusal_is_bounded() {
        let body = serde_json::json!({ "detail": "é".repeat(100_000) }).to_string();
        let refused = HttpError::refused(StatusCode::FORBIDDEN, body.as_bytes()).to_string();
        assert!(refused.ends_with(&"é".repeat(LONGEST_DETAIL)));
        assert!(refused.chars().count() < LONGEST_DETAIL + 100, "{refused}");
    }
}
