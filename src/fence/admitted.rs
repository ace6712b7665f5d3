//! What a fence has admitted: [`Admitted`] for one resource, [`AllAdmitted`] for all of a request.

use std::{cmp::Reverse, ops::Deref, sync::Arc};

use crate::token::{Resource, Token};

/// What a fence has admitted: the resource and the token.
///
/// As an extractor it is the first resource that the request names; [`AllAdmitted`] has them all.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Admitted {
    /// The resource.
    pub resource: Resource,
    /// The token.
    pub token: Token,
}

impl Admitted {
    pub(crate) const fn new(resource: Resource, token: Token) -> Self {
        Self { resource, token }
    }
}

/// Everything that a request or a transaction was admitted with, at least one: each resource once,
/// in the order in which they were named. Cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AllAdmitted(Arc<[Admitted]>);

impl AllAdmitted {
    /// `None` for an empty list.
    pub(crate) fn new(admitted: Vec<Admitted>) -> Option<Self> {
        (!admitted.is_empty()).then(|| Self(admitted.into()))
    }

    pub(crate) fn one(resource: Resource, token: Token) -> Self {
        Self([Admitted::new(resource, token)].into())
    }

    /// The one that was named first.
    #[must_use]
    pub fn first(&self) -> &Admitted {
        // Both constructors see to it that there is one.
        &self.0[0]
    }

    /// In the one order in which all transactions take their row locks, so that no two of them
    /// wait for each other. Of two tokens for the same resource the lower one comes second, and
    /// is stale.
    pub(super) fn in_lock_order(&self) -> Vec<&Admitted> {
        let mut ordered: Vec<_> = self.0.iter().collect();
        ordered.sort_unstable_by_key(|admitted| (&admitted.resource, Reverse(admitted.token)));
        ordered
    }
}

impl Deref for AllAdmitted {
    type Target = [Admitted];

    fn deref(&self) -> &[Admitted] {
        &self.0
    }
}
