//! Why an issuer could not be asked.

use http::StatusCode;
use reqwest::Url;

use crate::{lease::LeaseError, token::Resource};

/// Why an issuer could not be asked. The cause of a [`LeaseError::Unavailable`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HttpError {
    /// This is no URL of HTTP.
    #[error("this is no http or https URL")]
    Url,
    /// No HTTP client could be built.
    #[error("no HTTP client could be built")]
    Client(#[source] reqwest::Error),
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

impl From<HttpError> for LeaseError {
    fn from(error: HttpError) -> Self {
        Self::unavailable(error)
    }
}
