//! Held leases: [`Lease`] with its secrets, for its holder, and [`Held`] without them.

use std::time::{Duration, SystemTime};

use super::{LeaseId, Owner};
use crate::{
    header::FencingToken,
    token::{Resource, Token},
    token_keys::TokenKeys,
};

/// Held lease with its secrets, for its holder.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Lease {
    /// The resource.
    pub resource: Resource,
    /// The secret for renewing and releasing the lease.
    pub id: LeaseId,
    /// The token of the grant.
    pub token: Token,
    /// The duration of the lease. A holder must measure it from a moment before the request was
    /// sent.
    pub ttl: Duration,
    /// The token with its signature, if the issuer signs tokens.
    pub(crate) signed: Option<FencingToken>,
}

impl Lease {
    /// Creates a lease that a store has granted.
    #[must_use]
    pub const fn new(resource: Resource, id: LeaseId, token: Token, ttl: Duration) -> Self {
        Self {
            resource,
            id,
            token,
            ttl,
            signed: None,
        }
    }

    /// Signs the token.
    pub(crate) fn sign(mut self, keys: &TokenKeys) -> Self {
        self.signed = Some(keys.sign(&self.resource, self.token));
        self
    }

    /// Returns the value of the `Fencing-Token` header for writes under this lease. The value is
    /// signed if the issuer [signs tokens](crate::token_keys).
    #[must_use]
    pub fn fencing_token(&self) -> FencingToken {
        match &self.signed {
            Some(signed) => signed.clone(),
            None => FencingToken::new(self.token).with_resource(self.resource.clone()),
        }
    }
}

/// Held lease without its secrets.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Held {
    /// The token of the grant.
    pub token: Token,
    /// The owner label of the holder.
    pub owner: Option<Owner>,
    /// The remaining time of the lease.
    pub ttl: Duration,
    /// The number of requests that wait for the lease.
    pub waiters: u64,
    /// When the lease was granted under this lease id, to the second, by the clock of the store or
    /// of the issuer. `None` if the store does not record the time. The time is for display only,
    /// and no decision depends on it.
    pub granted_at: Option<SystemTime>,
}

impl Held {
    /// Creates a held lease with this token and remaining time. It has no owner, no waiters, and no
    /// time of grant.
    #[must_use]
    pub const fn new(token: Token, ttl: Duration) -> Self {
        Self {
            token,
            owner: None,
            ttl,
            waiters: 0,
            granted_at: None,
        }
    }

    /// Sets the owner. An empty label is ignored.
    #[must_use]
    pub fn owner(mut self, owner: Option<Owner>) -> Self {
        self.owner = owner.filter(|owner| !owner.as_str().is_empty());
        self
    }

    /// Sets the number of requests in the queue.
    #[must_use]
    pub const fn waiters(mut self, count: u64) -> Self {
        self.waiters = count;
        self
    }

    /// Sets the time of the grant.
    #[must_use]
    pub const fn granted_at(mut self, time: SystemTime) -> Self {
        self.granted_at = Some(time);
        self
    }
}
