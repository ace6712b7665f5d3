//! Why an issuer could not be asked.

use http::StatusCode;

use crate::lease::LeaseError;

/// Why an issuer could not be asked. The cause of a [`LeaseError::Unavailable`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HttpError {
    /// This is no URL of HTTP.
    #[error("this is no http or https URL")]
    Url,
    /// The request failed.
    #[error("the issuer could not be asked")]
    Request(#[source] reqwest::Error),
    /// No answer came within the limit.
    #[error("the issuer did not answer in time")]
    NoAnswer,
    /// The answer is none of an issuer's: another service, a proxy, a store that is unavailable.
    #[error("the issuer answered with status {0}")]
    Unexpected(StatusCode),
}

impl HttpError {
    /// Without the URL, which may have a password in it.
    pub(super) fn request(error: reqwest::Error) -> Self {
        Self::Request(error.without_url())
    }
}

impl From<HttpError> for LeaseError {
    fn from(error: HttpError) -> Self {
        Self::unavailable(error)
    }
}
