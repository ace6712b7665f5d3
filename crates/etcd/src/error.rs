//! Failures of calls to etcd, and whether a retry can succeed.

use std::sync::Arc;

use reqwest::{StatusCode, Url};
use serde::Deserialize;
use tower_fence::lease::LeaseError;

// Status codes of gRPC.
const CANCELED: i64 = 1;
const UNKNOWN: i64 = 2;
const INVALID_ARGUMENT: i64 = 3;
const DEADLINE_EXCEEDED: i64 = 4;
const NOT_FOUND: i64 = 5;
const PERMISSION_DENIED: i64 = 7;
const UNIMPLEMENTED: i64 = 12;
const UNAVAILABLE: i64 = 14;
const UNAUTHENTICATED: i64 = 16;

/// Error of the gateway.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Refusal {
    pub(crate) code: i64,
    pub(crate) message: String,
}

/// Beginning of the only refusal that etcd sends as plain text.
const COMMON_NAME: &[u8] = b"CommonName of client";

impl Refusal {
    /// Reads the body of a response whose status is not 200. Returns an empty refusal if the body
    /// is not from etcd.
    pub(crate) fn read(body: &[u8]) -> Self {
        if body.starts_with(COMMON_NAME) {
            let message = "etcdserver: the client certificate has a common name, which etcd does not accept \
                           from its gateway while authentication is enabled: use a certificate without one";
            return Self {
                code: INVALID_ARGUMENT,
                message: message.into(),
            };
        }
        serde_json::from_slice(body).unwrap_or_default()
    }
}

/// Reason why a call to etcd has failed. Its text does not contain an address.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum Failure {
    #[error("the request failed")]
    Request(#[source] Arc<reqwest::Error>),
    #[error("no answer in time")]
    Silent,
    #[error("it answered{}", match &*.1.message {
        "" => format!(" with status {}", .0),
        message => format!(": {message}"),
    })]
    Refused(StatusCode, Refusal),
    #[error("the answer is not from etcd")]
    Meaningless,
    #[error(
        "the member that executed the call did not report its status: if a load balancer is in between, \
         use the URLs of the members as endpoints"
    )]
    OtherMembers,
    /// No call has succeeded yet, and each endpoint has answered 404 without a gRPC code.
    #[error(
        "its HTTP gateway is disabled, or the URL is wrong: set `enable-grpc-gateway: true`, because etcd 3.4 \
         disables the gateway if it reads a configuration file"
    )]
    NoGateway,
}

impl Failure {
    pub(crate) fn request(error: reqwest::Error) -> Self {
        Self::Request(Arc::new(error.without_url()))
    }

    /// Creates the failure of a refused call, with the beginning of etcd's message.
    pub(crate) fn refused(status: StatusCode, refusal: Refusal) -> Self {
        let message = refusal.message.chars().take(200).collect();
        Self::Refused(status, Refusal { message, ..refusal })
    }

    /// Removes the message if it may contain the password that was sent.
    pub(crate) fn without_message(self) -> Self {
        match self {
            Self::Refused(status, refusal) if !refusal.message.starts_with("etcdserver: ") => {
                let message = String::new();
                Self::Refused(status, Refusal { message, ..refusal })
            }
            failure => failure,
        }
    }

    /// Returns whether etcd has refused the token and may accept a new one.
    pub(crate) fn refuses_token(&self) -> bool {
        match self {
            // "revision of auth store is old" means that the users have changed since.
            Self::Refused(_, refusal) => {
                refusal.code == UNAUTHENTICATED || refusal.message.contains("auth store is old")
            }
            _ => false,
        }
    }

    /// Returns whether the endpoint does not know the path of the call.
    pub(crate) fn lacks_gateway(&self) -> bool {
        matches!(self, Self::Refused(StatusCode::NOT_FOUND, refusal) if refusal.code == 0)
    }

    /// Returns whether another endpoint may execute the call, or the same endpoint may do so later.
    pub(crate) fn may_pass(&self) -> bool {
        match self {
            // A response without a code does not come from etcd. A member that is stopping returns
            // CANCELED. A member whose leader is transferring its leadership returns UNKNOWN.
            Self::Refused(status, refusal) => {
                matches!(
                    refusal.code,
                    0 | CANCELED | UNKNOWN | UNAVAILABLE | DEADLINE_EXCEEDED
                ) || *status == StatusCode::SERVICE_UNAVAILABLE
            }
            _ => true,
        }
    }
}

/// Error for a failed call to etcd. It is the source of a [`LeaseError`].
#[derive(Debug, thiserror::Error)]
#[error("etcd at {address} cannot be used")]
pub(crate) struct EtcdError {
    address: String,
    source: Failure,
    /// Whether an attempt without a response may have been executed.
    pub(crate) may_have_run: bool,
}

impl EtcdError {
    pub(crate) fn new(endpoint: &Url, source: Failure, may_have_run: bool) -> Self {
        Self {
            address: address(endpoint),
            source,
            may_have_run,
        }
    }

    /// Returns the error for Status calls that never reached the member that gave the response.
    pub(crate) fn another_member() -> Self {
        Self {
            address: "these endpoints".into(),
            source: Failure::OtherMembers,
            may_have_run: true,
        }
    }

    /// Returns the gRPC code, or 0 if etcd has not responded.
    const fn code(&self) -> i64 {
        match &self.source {
            Failure::Refused(_, refusal) => refusal.code,
            _ => 0,
        }
    }

    /// Returns whether etcd's message contains this text.
    fn message_has(&self, text: &str) -> bool {
        matches!(&self.source, Failure::Refused(_, refusal) if refusal.message.contains(text))
    }

    /// Returns whether the etcd lease does not exist.
    pub(crate) const fn is_not_found(&self) -> bool {
        self.code() == NOT_FOUND
    }

    /// Returns whether the status of a member is unavailable, because this user is not allowed to
    /// read it or the member does not support the call.
    pub(crate) const fn hides_status(&self) -> bool {
        matches!(self.code(), PERMISSION_DENIED | UNIMPLEMENTED)
    }

    /// Returns whether an etcd lease with this id already exists.
    pub(crate) fn is_lease_there(&self) -> bool {
        self.message_has("lease already exists")
    }

    /// Returns whether the call fails until the user, its permissions, its password or the
    /// configuration of etcd change.
    fn is_permanent(&self) -> bool {
        !self.source.refuses_token()
            && matches!(
                self.code(),
                INVALID_ARGUMENT | PERMISSION_DENIED | UNIMPLEMENTED
            )
            || self.message_has("authentication is not enabled")
            || matches!(self.source, Failure::NoGateway)
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

/// Returns the host and the port of a URL, without the user name or the password.
fn address(url: &Url) -> String {
    let host = url.host_str().unwrap_or_default();
    match url.port_or_known_default() {
        Some(port) => format!("{host}:{port}"),
        None => host.into(),
    }
}
