//! Bodies of requests to acquire, renew and break leases. A client omits each member that has its
//! default value, because an older issuer refuses a member that it does not know.

use serde::{Serialize, Serializer};

#[cfg(feature = "issuer")]
use super::members::Members;
#[cfg(feature = "issuer")]
use crate::lease::LeaseError;
use crate::{
    lease::{Acquire, LeaseId, Owner, Renew},
    time::{at_least_1_ms, whole_ms},
    token::Token,
};

/// Body of a request for a lease. All members are optional, and null counts as absent.
#[derive(Debug, PartialEq, Serialize)]
pub(crate) struct AcquireBody {
    /// The TTL of the lease, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) ttl_ms: Option<u64>,
    /// The maximum time in the queue, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) wait_ms: Option<u64>,
    /// How long the resource stays blocked after the lease expires, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) lock_delay_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "owner_text")]
    pub(crate) owner: Option<Owner>,
    /// A lease id that the holder has chosen. A repeated request with the same id gets the same
    /// lease.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "exposed_id")]
    pub(crate) lease_id: Option<LeaseId>,
}

/// Body of a renewal. All members are optional, and null counts as absent.
#[derive(Debug, PartialEq, Serialize)]
pub(crate) struct RenewBody {
    /// The TTL of the lease from now on, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) ttl_ms: Option<u64>,
    /// Whether the lease gets a new, higher token, for another single-use write.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) new_token: Option<bool>,
}

/// Body of a request to break a lease. The member is optional, and null counts as absent.
#[derive(Debug, PartialEq, Serialize)]
pub(crate) struct BreakBody {
    /// The token of the lease to break. A lease with another token is left unchanged.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) token: Option<Token>,
}

#[cfg(feature = "issuer")]
impl BreakBody {
    /// Reads a body. An empty body counts as an empty object.
    pub(crate) fn read(bytes: &[u8]) -> Result<Self, LeaseError> {
        let mut members = Members::parse(bytes)?;
        let body = Self {
            token: members.take_token("token")?,
        };
        members.finish()?;
        Ok(body)
    }
}

/// Reads the body of a request that takes no members.
#[cfg(feature = "issuer")]
pub(crate) fn read_nothing(bytes: &[u8]) -> Result<(), LeaseError> {
    Members::parse(bytes)?.finish()
}

#[cfg(feature = "issuer")]
impl AcquireBody {
    /// Reads a body. An empty body counts as an empty object. The error names the first unknown or
    /// invalid member.
    pub(crate) fn read(bytes: &[u8]) -> Result<Self, LeaseError> {
        let mut members = Members::parse(bytes)?;
        let body = Self {
            ttl_ms: members.take_ms("ttl_ms")?,
            wait_ms: members.take_ms("wait_ms")?,
            lock_delay_ms: members.take_ms("lock_delay_ms")?,
            owner: members.take_text("owner")?,
            lease_id: members.take_text("lease_id")?,
        };
        members.finish()?;
        Ok(body)
    }
}

#[cfg(feature = "issuer")]
impl RenewBody {
    /// Reads a body. An empty body counts as an empty object.
    pub(crate) fn read(bytes: &[u8]) -> Result<Self, LeaseError> {
        let mut members = Members::parse(bytes)?;
        let body = Self {
            ttl_ms: members.take_ms("ttl_ms")?,
            new_token: members.take_bool("new_token")?,
        };
        members.finish()?;
        Ok(body)
    }
}

impl From<&Acquire> for AcquireBody {
    fn from(request: &Acquire) -> Self {
        Self {
            ttl_ms: Some(at_least_1_ms(request.ttl)),
            wait_ms: Some(whole_ms(request.wait)).filter(|ms| *ms > 0),
            lock_delay_ms: Some(whole_ms(request.lock_delay)).filter(|ms| *ms > 0),
            owner: request.owner.clone(),
            lease_id: Some(request.lease_id.clone()),
        }
    }
}

impl From<&Renew> for RenewBody {
    fn from(request: &Renew) -> Self {
        Self {
            ttl_ms: Some(at_least_1_ms(request.ttl)),
            new_token: request.new_token.then_some(true),
        }
    }
}

fn owner_text<S: Serializer>(owner: &Option<Owner>, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_some(&owner.as_ref().map(Owner::as_str))
}

fn exposed_id<S: Serializer>(id: &Option<LeaseId>, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_some(&id.as_ref().map(LeaseId::expose))
}

#[cfg(all(test, feature = "issuer", feature = "client"))]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_member_with_its_default_value_is_not_sent() {
        let acquire =
            Acquire::new(Duration::from_secs(1)).lease_id("a".repeat(22).parse().unwrap());
        let renew = RenewBody::from(&Renew::new(Duration::from_secs(1)));
        let end = BreakBody { token: None };
        for (sent, expected) in [
            (
                serde_json::to_string(&AcquireBody::from(&acquire)),
                r#"{"ttl_ms":1000,"lease_id":"aaaaaaaaaaaaaaaaaaaaaa"}"#,
            ),
            (serde_json::to_string(&renew), r#"{"ttl_ms":1000}"#),
            (serde_json::to_string(&end), "{}"),
        ] {
            assert_eq!(sent.unwrap(), expected);
        }
    }

    #[test]
    fn an_issuer_reads_what_a_client_writes() {
        for owner in [None, Some(Owner::new("worker-7").unwrap())] {
            let mut request = Acquire::new(Duration::from_micros(1))
                .wait(Duration::from_micros(1_001))
                .lease_id(LeaseId::random());
            request.owner = owner;
            let sent = AcquireBody::from(&request);
            assert_eq!((sent.ttl_ms, sent.wait_ms), (Some(1), Some(2)));
            assert_eq!(sent.lock_delay_ms, None);
            let read = AcquireBody::read(&serde_json::to_vec(&sent).unwrap());
            assert_eq!(read.ok().unwrap(), sent);
        }
        for request in [
            Renew::new(Duration::ZERO),
            Renew::new(Duration::MAX).with_new_token(),
        ] {
            let sent = RenewBody::from(&request);
            let read = RenewBody::read(&serde_json::to_vec(&sent).unwrap());
            assert_eq!(read.ok().unwrap(), sent);
        }
        for token in [None, Some(Token::MAX)] {
            let sent = BreakBody { token };
            let read = BreakBody::read(&serde_json::to_vec(&sent).unwrap());
            assert_eq!(read.ok().unwrap(), sent);
        }
    }
}
