//! Requests of holders to a store: [`Acquire`] and [`Renew`].

use std::time::Duration;

use super::{LeaseId, Owner};
use crate::token::Token;

/// Request to acquire a lease, for [`Leases::acquire`](super::Leases::acquire).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Acquire {
    /// The TTL of the lease. Stores round it up to whole milliseconds, at least 1.
    pub ttl: Duration,
    /// The owner label, which operators see. Default: none.
    pub owner: Option<Owner>,
    /// The maximum time in the queue. Default: zero.
    pub wait: Duration,
    /// How long the resource stays blocked after the lease has expired. Default: zero.
    ///
    /// A release does not block the resource. Use a lock delay if the lease also protects something
    /// that cannot check tokens. The delay gives the holder time to detect the loss of the lease.
    /// (Chubby and Consul call this lock-delay.)
    pub lock_delay: Duration,
    pub(crate) lease_id: LeaseId,
    /// Whether the caller has chosen the id, and may retry.
    pub(crate) chosen_id: bool,
}

impl Acquire {
    /// Creates a request for a lease with this TTL.
    #[must_use]
    pub fn new(ttl: Duration) -> Self {
        Self {
            ttl,
            owner: None,
            lease_id: LeaseId::random(),
            wait: Duration::ZERO,
            lock_delay: Duration::ZERO,
            chosen_id: false,
        }
    }

    /// Sets the maximum time in the queue.
    #[must_use]
    pub const fn wait(mut self, limit: Duration) -> Self {
        self.wait = limit;
        self
    }

    /// Sets how long the resource stays blocked after the lease has expired.
    #[must_use]
    pub const fn lock_delay(mut self, delay: Duration) -> Self {
        self.lock_delay = delay;
        self
    }

    /// Sets the owner label, which operators see. An empty label is ignored. If several requests
    /// share a lease id, the lease keeps the first owner that one of them names.
    #[must_use]
    pub fn owner(mut self, owner: Owner) -> Self {
        self.owner = Some(owner).filter(|owner| !owner.as_str().is_empty());
        self
    }

    /// Sets the id of the lease, so that the caller can retry the request. Default: a random id.
    #[must_use]
    pub fn lease_id(mut self, id: LeaseId) -> Self {
        self.lease_id = id;
        self.chosen_id = true;
        self
    }

    /// Returns the id of the lease.
    #[must_use]
    pub const fn id(&self) -> &LeaseId {
        &self.lease_id
    }

    /// Returns whether the caller has chosen the id and may retry.
    ///
    /// If so, a store of this crate keeps the request's position in the queue for three seconds
    /// after the request is dropped. Otherwise the store removes all traces of the request.
    #[must_use]
    pub const fn has_chosen_id(&self) -> bool {
        self.chosen_id
    }
}

/// Request to renew a lease, for [`Leases::renew`](super::Leases::renew).
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Renew {
    /// The TTL of the lease from now. Stores round it up to whole milliseconds, at least 1.
    pub ttl: Duration,
    /// Whether the lease gets a new token, for another single-use write under the same lease.
    /// Default: false.
    pub new_token: bool,
    /// The lowest token that the lease may have after the renewal. Default: any token.
    pub at_least: Option<Token>,
}

impl Renew {
    /// Creates a request that extends the lease to this TTL from now and keeps its token.
    #[must_use]
    pub const fn new(ttl: Duration) -> Self {
        Self {
            ttl,
            new_token: false,
            at_least: None,
        }
    }

    /// Requests a new token.
    #[must_use]
    pub const fn with_new_token(mut self) -> Self {
        self.new_token = true;
        self
    }

    /// Sets the lowest token that the lease may have after the renewal, for example because the
    /// resource has received a higher token than the lease's. If the lease's token is lower than
    /// this minimum, the lease gets a new token.
    #[must_use]
    pub const fn at_least(mut self, token: Token) -> Self {
        self.at_least = Some(token);
        self
    }
}
