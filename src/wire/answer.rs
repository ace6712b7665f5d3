//! Bodies of the responses: a lease for its holder, and the public state of leases.

use std::time::SystemTime;

use serde::{Deserialize, Serialize, Serializer};

#[cfg(feature = "client")]
use crate::{header::FencingToken, lease::LeaseId};
use crate::{
    lease::{Held, Lease, Owner, Page},
    time::{of_ms, whole_ms},
    token::{Resource, Token},
};

/// Response to a successful acquisition or renewal. The response contains the lease id, so only the
/// holder may see it.
#[derive(Serialize, Deserialize)]
pub(crate) struct LeaseBody {
    /// The value of the `Fencing-Token` header for writes under this lease.
    #[serde(default)]
    pub(crate) fencing_token: String,
    lease_id: String,
    pub(crate) resource: Resource,
    token: Token,
    /// The TTL of the lease, in milliseconds. The client counts it from before it sent the request.
    ttl_ms: u64,
}

impl From<&Lease> for LeaseBody {
    fn from(lease: &Lease) -> Self {
        Self {
            fencing_token: lease.fencing_token().to_string(),
            lease_id: lease.id.expose().into(),
            resource: lease.resource.clone(),
            token: lease.token,
            ttl_ms: whole_ms(lease.ttl),
        }
    }
}

#[cfg(feature = "client")]
impl LeaseBody {
    /// Returns the lease, or `None` if it has another resource or another lease id.
    pub(crate) fn into_lease(self, resource: &Resource, id: LeaseId) -> Option<Lease> {
        if self.resource != *resource || self.lease_id != id.expose() {
            return None;
        }
        // Only a service verifies the signature.
        let signed: Option<FencingToken> = self.fencing_token.parse().ok();
        let (token, resource) = (self.token, self.resource);
        Some(Lease {
            signed: signed.filter(|one| {
                (one.key.is_some() || one.mac.is_some())
                    && one.token == token
                    && one.resource.as_ref() == Some(&resource)
            }),
            resource,
            id,
            token,
            ttl: of_ms(self.ttl_ms),
        })
    }
}

/// Public part of a held lease.
#[derive(Serialize, Deserialize)]
pub(super) struct HeldBody {
    /// The owner label, or null if the holder did not set one.
    owner: Option<String>,
    /// The time of the grant, by the clock of the store or the issuer (RFC 3339). Absent if the
    /// store does not record it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    granted_at: Option<String>,
    token: Token,
    /// The remaining time of the lease, in milliseconds.
    ttl_ms: u64,
    /// The number of queued requests.
    waiters: u64,
}

impl From<&Held> for HeldBody {
    fn from(held: &Held) -> Self {
        Self {
            owner: held.owner.as_ref().map(|owner| owner.as_str().into()),
            granted_at: held.granted_at_text(),
            token: held.token,
            ttl_ms: whole_ms(held.ttl),
            waiters: held.waiters,
        }
    }
}

impl Held {
    /// Returns the time of the grant as in RFC 3339, or `None` if it is unknown, before 1970, or
    /// after the year 9999.
    #[doc(hidden)]
    #[must_use]
    pub fn granted_at_text(&self) -> Option<String> {
        /// The beginning of the year 10000, in seconds since 1970.
        const YEAR_10000: u64 = 253_402_300_800;
        let time = self.granted_at?;
        let since_1970 = time.duration_since(SystemTime::UNIX_EPOCH).ok()?;
        let has_text = since_1970.as_secs() < YEAR_10000;
        has_text.then(|| humantime::format_rfc3339_seconds(time).to_string())
    }
}

/// For the program and the console. The JSON is that of the issuer's responses.
#[doc(hidden)]
impl Serialize for Held {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        HeldBody::from(self).serialize(serializer)
    }
}

impl From<HeldBody> for Held {
    fn from(held: HeldBody) -> Self {
        let granted_at = held.granted_at;
        Self {
            token: held.token,
            owner: held.owner.and_then(|owner| Owner::new(owner).ok()),
            ttl: of_ms(held.ttl_ms),
            waiters: held.waiters,
            granted_at: granted_at.and_then(|time| humantime::parse_rfc3339(&time).ok()),
        }
    }
}

/// State of a lock, with the public part of the lease if the lock is held.
#[derive(Serialize, Deserialize)]
pub(crate) struct StateBody {
    held: bool,
    pub(crate) resource: Resource,
    #[serde(flatten)]
    lease: Option<HeldBody>,
}

#[cfg(feature = "issuer")]
impl StateBody {
    pub(crate) fn new(resource: &Resource, held: Option<&Held>) -> Self {
        Self {
            held: held.is_some(),
            resource: resource.clone(),
            lease: held.map(HeldBody::from),
        }
    }
}

#[cfg(feature = "client")]
impl StateBody {
    /// Returns the lease if the lock is held. Returns an error if the lock is held, and the lease
    /// cannot be read.
    pub(crate) fn into_held(self) -> Result<Option<Held>, Unreadable> {
        match (self.held, self.lease) {
            (true, Some(lease)) => Ok(Some(lease.into())),
            (true, None) => Err(Unreadable),
            (false, _) => Ok(None),
        }
    }
}

/// Error for a held lock whose lease cannot be read.
#[cfg(feature = "client")]
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Unreadable;

/// Page of the list of held leases.
#[derive(Serialize, Deserialize)]
pub(crate) struct PageBody {
    leases: Vec<PageEntry>,
    /// The cursor of the next page, or null on the last page.
    cursor: Option<String>,
}

/// Held lease and its resource.
#[derive(Serialize, Deserialize)]
struct PageEntry {
    resource: Resource,
    #[serde(flatten)]
    lease: HeldBody,
}

impl From<&Page> for PageBody {
    fn from(page: &Page) -> Self {
        let leases = page.leases.iter().map(|(resource, held)| PageEntry {
            resource: resource.clone(),
            lease: held.into(),
        });
        Self {
            leases: leases.collect(),
            cursor: page.cursor.clone(),
        }
    }
}

impl From<PageBody> for Page {
    fn from(page: PageBody) -> Self {
        let leases = page.leases.into_iter();
        Self {
            leases: leases
                .map(|entry| (entry.resource, entry.lease.into()))
                .collect(),
            cursor: page.cursor,
        }
    }
}

#[cfg(all(test, feature = "issuer", feature = "client"))]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use super::*;
    use crate::token_keys::{TokenKey, TokenKeys};

    fn resend<T: Serialize, U: serde::de::DeserializeOwned>(body: T) -> U {
        serde_json::from_slice(&serde_json::to_vec(&body).unwrap()).unwrap()
    }

    fn held(owner: Option<&str>) -> Held {
        Held {
            token: Token::MAX,
            owner: owner.map(|name| Owner::new(name).unwrap()),
            ttl: Duration::from_millis(250),
            waiters: 3,
            granted_at: owner.map(|_| UNIX_EPOCH + Duration::from_secs(1_792_000_000)),
        }
    }

    #[test]
    fn a_client_reads_each_answer_that_an_issuer_writes() {
        let resource = Resource::new("café").unwrap();
        let lease = Lease {
            resource: resource.clone(),
            id: LeaseId::random(),
            token: Token::MIN,
            ttl: Duration::from_secs(30),
            signed: None,
        };
        let read = |resource: &Resource, id: LeaseId| {
            let body: LeaseBody = resend(LeaseBody::from(&lease));
            body.into_lease(resource, id)
        };
        assert_eq!(read(&resource, lease.id.clone()), Some(lease.clone()));
        let keys = TokenKeys::new([TokenKey::random("k1").unwrap()]).unwrap();
        let signed = lease.clone().sign(&keys);
        let body: LeaseBody = resend(LeaseBody::from(&signed));
        let copied = body.into_lease(&resource, lease.id.clone()).unwrap();
        assert_eq!(copied, signed);
        assert_eq!(
            copied.fencing_token().to_string(),
            signed.fencing_token().to_string()
        );
        // A client does not verify a signature.
        let mut body = LeaseBody::from(&lease);
        body.fencing_token = r#"1;resource=%"caf%c3%a9";mac=:AAAA:"#.into();
        let field = body.fencing_token.clone();
        let copied = body.into_lease(&resource, lease.id.clone()).unwrap();
        assert_eq!(copied.fencing_token().to_string(), field);
        // A signature for another resource or token is ignored.
        let other = Resource::new("sku-2").unwrap();
        for (resource, token) in [(&other, lease.token), (&resource, Token::MAX)] {
            let mut body = LeaseBody::from(&lease);
            body.fencing_token = keys.sign(resource, token).to_string();
            let read = body.into_lease(&lease.resource, lease.id.clone());
            assert_eq!(read, Some(lease.clone()));
        }
        // A lease with another id or another resource is refused.
        assert_eq!(read(&resource, LeaseId::random()), None);
        assert_eq!(read(&other, lease.id.clone()), None);

        for state in [None, Some(held(None)), Some(held(Some("worker-7")))] {
            let body: StateBody = resend(StateBody::new(&resource, state.as_ref()));
            assert_eq!(body.into_held(), Ok(state));
        }
        let body: StateBody = serde_json::from_str(r#"{"held":true,"resource":"a"}"#).unwrap();
        assert_eq!(body.into_held(), Err(Unreadable));
        for cursor in [None, Some("0-7-".to_owned())] {
            let page = Page {
                leases: vec![
                    (resource.clone(), held(None)),
                    (other.clone(), held(Some("w"))),
                ],
                cursor,
            };
            let body: PageBody = resend(PageBody::from(&page));
            assert_eq!(Page::from(body), page);
        }
    }

    #[test]
    fn remaining_time_is_rounded_up() {
        let mut held = held(None);
        held.ttl = Duration::from_micros(1);
        let body: HeldBody = resend(HeldBody::from(&held));
        assert_eq!(body.ttl_ms, 1);
    }

    #[test]
    fn time_of_the_grant_without_a_text_is_unknown() {
        let last = UNIX_EPOCH + Duration::from_secs(253_402_300_799);
        let second = Duration::from_secs(1);
        for (time, text) in [
            (UNIX_EPOCH - second, None),
            (UNIX_EPOCH, Some("1970-01-01T00:00:00Z")),
            (last, Some("9999-12-31T23:59:59Z")),
            (last + second, None),
        ] {
            let held = Held::new(Token::MIN, Duration::ZERO).granted_at(time);
            assert_eq!(held.granted_at_text().as_deref(), text);
        }
    }
}
