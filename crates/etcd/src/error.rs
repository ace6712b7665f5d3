//! Why a call to etcd has failed, and whether a retry can succeed.

use std::sync::Arc;

use reqwest::{StatusCode, Url};
use tower_fence::lease::LeaseError;

use crate::messages::Refusal;

// Codes of gRPC.
pub(crate) const INVALID_ARGUMENT: i64 = 3;
const DEADLINE_EXCEEDED: i64 = 4;
const NOT_FOUND: i64 = 5;
const PERMISSION_DENIED: i64 = 7;
const UNIMPLEMENTED: i64 = 12;
const UNAVAILABLE: i64 = 14;
const UNAUTHENTICATED: i64 = 16;

/// Why an endpoint has not executed a call, as far as is known.
#[derive(Clone, Debug)]
pub(crate) enum Failure {
    Request(Arc<reqwest::Error>),
    Silent,
    Refused(StatusCode, Refusal),
    /// The answer does not come from etcd.
    Meaningless,
}

impl Failure {
    pub(crate) fn request(error: reqwest::Error) -> Self {
        Self::Request(Arc::new(error.without_url()))
    }

    /// Removes a message that may repeat the password that was sent.
    pub(crate) fn without_message(self) -> Self {
        match self {
            Self::Refused(status, refusal) if !refusal.message.starts_with("etcdserver: ") => {
                let message = String::new();
                Self::Refused(status, Refusal { message, ..refusal })
            }
            failure => failure,
        }
    }

    /// Whether etcd has refused the token, and may accept a new one.
    pub(crate) fn refuses_token(&self) -> bool {
        match self {
            // "revision of auth store is old": the users have changed since.
            Self::Refused(_, refusal) => {
                refusal.code == UNAUTHENTICATED || refusal.message.contains("auth store is old")
            }
            _ => false,
        }
    }

    /// Whether another endpoint may execute the call, or the same one later.
    pub(crate) fn may_pass(&self) -> bool {
        match self {
            // An answer without a code does not come from etcd.
            Self::Refused(status, refusal) => {
                matches!(refusal.code, 0 | UNAVAILABLE | DEADLINE_EXCEEDED)
                    || *status == StatusCode::SERVICE_UNAVAILABLE
            }
            _ => true,
        }
    }
}

/// Why etcd has not executed a call: the cause of a [`LeaseError`].
#[derive(Debug, thiserror::Error)]
#[error("etcd at {address} {what}")]
pub(crate) struct EtcdError {
    address: String,
    what: String,
    source: Option<Arc<reqwest::Error>>,
    /// The code of gRPC, 0 if etcd has not answered.
    code: i64,
    refuses_token: bool,
    /// Whether an attempt that got no answer may have been executed.
    pub(crate) may_have_run: bool,
}

impl EtcdError {
    pub(crate) fn new(endpoint: &Url, failure: Failure, may_have_run: bool) -> Self {
        let refuses_token = failure.refuses_token();
        let (what, source, code) = match failure {
            Failure::Request(error) => ("cannot be reached".into(), Some(error), 0),
            Failure::Silent => ("did not answer in time".into(), None, 0),
            Failure::Meaningless => ("returned an answer that is not from etcd".into(), None, 0),
            Failure::Refused(status, refusal) => {
                let message: String = refusal.message.chars().take(200).collect();
                let what = match message.is_empty() {
                    true => format!("answered with status {status}"),
                    false => format!("answered: {message}"),
                };
                (what, None, refusal.code)
            }
        };
        Self {
            address: address(endpoint),
            what,
            source,
            code,
            refuses_token,
            may_have_run,
        }
    }

    /// Each status came from a member other than the one that gave the answer.
    pub(crate) fn another_member() -> Self {
        Self {
            address: "these endpoints".into(),
            what: "answered each call from a different member: use the URLs of the members as endpoints"
                .into(),
            source: None,
            code: 0,
            refuses_token: false,
            may_have_run: true,
        }
    }

    /// Whether the etcd lease does not exist.
    pub(crate) const fn is_not_found(&self) -> bool {
        self.code == NOT_FOUND
    }

    /// Whether this user may not read the status of a member, or the member has none.
    pub(crate) const fn hides_status(&self) -> bool {
        matches!(self.code, PERMISSION_DENIED | UNIMPLEMENTED)
    }

    /// Whether an etcd lease with this id exists already.
    pub(crate) fn is_lease_there(&self) -> bool {
        self.what.contains("lease already exists")
    }

    /// Whether the call fails until the user, its rights or its password are changed.
    fn is_permanent(&self) -> bool {
        !self.refuses_token
            && matches!(
                self.code,
                INVALID_ARGUMENT | PERMISSION_DENIED | UNIMPLEMENTED
            )
            || self.what.contains("authentication is not enabled")
    }
}

impl From<EtcdError> for LeaseError {
    fn from(error: EtcdError) -> Self {
        match error.is_permanent() {
            true => Self::misconfigured(error),
            false => Self::unavailable(error),
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
