//! A lease that is held: [`Lease`] for its holder, [`Held`] for everybody.

use std::time::{Duration, SystemTime};

use super::{LeaseId, Owner};
use crate::{
    header::FencingToken,
    token::{Resource, Token},
    token_keys::SignedToken,
};

/// A lease that is held, as its holder sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Lease {
    /// The resource.
    pub resource: Resource,
    /// What renews and releases it. A secret.
    pub id: LeaseId,
    /// The token of the grant.
    pub token: Token,
    /// How long the lease lasts. Count from before the store was asked, to be on the safe side.
    pub ttl: Duration,
    /// The token with its signature, where an issuer has signed it.
    pub(crate) signed: Option<SignedToken>,
}

impl Lease {
    /// What a store has granted.
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

    /// The value of the `Fencing-Token` header for writes under this lease, signed where the issuer
    /// [signs](crate::token_keys).
    #[must_use]
    pub fn fencing_token(&self) -> FencingToken {
        match &self.signed {
            Some(signed) => signed.clone().into(),
            None => FencingToken::new(self.token).with_resource(self.resource.clone()),
        }
    }
}

/// A lease that is held, as everybody may see it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Held {
    /// The token of the grant.
    pub token: Token,
    /// Who holds it.
    pub owner: Option<Owner>,
    /// What is left of its time.
    pub ttl: Duration,
    /// How many requests wait for it.
    pub waiters: u64,
    /// When it was granted under this lease id, to the second, by the clock of the store or of the issuer. `None`
    /// if the store does not know. For people: no decision depends on it.
    pub granted_at: Option<SystemTime>,
}

impl Held {
    /// A lease with this token that lasts for so long, with no owner and no waiters, granted at a time that is not known.
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

    /// Sets the owner.
    #[must_use]
    pub fn owner(mut self, owner: Option<Owner>) -> Self {
        self.owner = owner;
        self
    }

    /// Sets how many requests wait in the queue.
    #[must_use]
    pub const fn waiters(mut self, count: u64) -> Self {
        self.waiters = count;
        self
    }

    /// Sets when it was granted.
    #[must_use]
    pub const fn granted_at(mut self, time: SystemTime) -> Self {
        self.granted_at = Some(time);
        self
    }
}
