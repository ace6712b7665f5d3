//! What holders ask of a store: [`Acquire`] and [`Renew`].

use std::time::Duration;

use super::{LeaseId, Owner};
use crate::token::Token;

/// What is asked of [`Leases::acquire`](super::Leases::acquire).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Acquire {
    /// How long the lease lasts. Stores round it up to whole milliseconds, at least 1.
    pub ttl: Duration,
    /// Who asks, for operators. Default: not said.
    pub owner: Option<Owner>,
    /// The id of the lease. Default: a random one.
    pub lease_id: LeaseId,
    /// How long to wait in line. Default: not at all.
    pub wait: Duration,
    /// How long the resource stays closed when the lease ends by time and not by release. Default:
    /// not at all.
    ///
    /// For services that also protect something that cannot check tokens: it gives a holder that is
    /// late some time to notice. (The lock-delay of Chubby and of Consul.)
    pub lock_delay: Duration,
    pub(crate) chosen_id: bool,
}

impl Acquire {
    /// A lease of this length.
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

    /// Waits in line for up to this long.
    #[must_use]
    pub const fn wait(mut self, limit: Duration) -> Self {
        self.wait = limit;
        self
    }

    /// Keeps the resource closed for this long when the lease ends by time.
    #[must_use]
    pub const fn lock_delay(mut self, delay: Duration) -> Self {
        self.lock_delay = delay;
        self
    }

    /// Says who asks. An empty text says nothing. Of the requests under one lease id, the first one
    /// that names an owner decides.
    #[must_use]
    pub fn owner(mut self, owner: Owner) -> Self {
        self.owner = Some(owner).filter(|owner| !owner.as_str().is_empty());
        self
    }

    /// Chooses the id of the lease, so that the request can be repeated.
    #[must_use]
    pub fn lease_id(mut self, id: LeaseId) -> Self {
        self.lease_id = id;
        self.chosen_id = true;
        self
    }

    /// Whether the caller has chosen the id, and may ask again. A store undoes what a dropped request has
    /// left behind if not; if so, it keeps its position in the queue for a moment.
    #[must_use]
    pub const fn has_chosen_id(&self) -> bool {
        self.chosen_id
    }
}

/// What is asked of [`Leases::renew`](super::Leases::renew).
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Renew {
    /// How long the lease lasts from now. Stores round it up to whole milliseconds, at least 1.
    pub ttl: Duration,
    /// Whether to take a new token, for another single-use write under the same lease. Default: no.
    pub new_token: bool,
    /// The lowest token that the lease may have from now on. Default: any.
    pub at_least: Option<Token>,
}

impl Renew {
    /// A lease of this length from now, with the token it has.
    #[must_use]
    pub const fn new(ttl: Duration) -> Self {
        Self {
            ttl,
            new_token: false,
            at_least: None,
        }
    }

    /// Asks for a new token.
    #[must_use]
    pub const fn with_new_token(mut self) -> Self {
        self.new_token = true;
        self
    }

    /// Asks for this token at least, where the one of the lease is lower: the resource has seen what
    /// is below.
    #[must_use]
    pub const fn at_least(mut self, token: Token) -> Self {
        self.at_least = Some(token);
        self
    }
}
