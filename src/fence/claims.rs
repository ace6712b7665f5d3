//! What a request presents, and what a fence has admitted of it.
//!
//! A [`Claim`] is a token for a resource that was not checked yet. Only an admission makes
//! [`Admitted`] of [`Claims`].

use std::{cmp::Reverse, ops::Deref, sync::Arc};

use crate::token::{Resource, Token};

/// A token that is presented for a resource, not checked yet.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Claim {
    /// The resource.
    pub resource: Resource,
    /// The token.
    pub token: Token,
}

impl Claim {
    pub(crate) const fn new(resource: Resource, token: Token) -> Self {
        Self { resource, token }
    }
}

/// All that a request presents, at least one [`Claim`], in the order in which the resources were
/// named. Cheap to clone. Derefs to a slice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claims(Arc<[Claim]>);

impl Claims {
    /// `None` for an empty list.
    pub(crate) fn new(claims: Vec<Claim>) -> Option<Self> {
        (!claims.is_empty()).then(|| Self(claims.into()))
    }

    pub(crate) fn one(resource: Resource, token: Token) -> Self {
        Self([Claim::new(resource, token)].into())
    }

    /// The one that was named first.
    #[must_use]
    pub fn first(&self) -> &Claim {
        // Neither constructor makes an empty list.
        &self.0[0]
    }

    /// In the one order in which all transactions take their row locks, so that no two of them
    /// wait for each other. Of two tokens for the same resource the lower one comes second, and
    /// is stale.
    pub(super) fn in_lock_order(&self) -> Vec<&Claim> {
        let mut ordered: Vec<_> = self.0.iter().collect();
        ordered.sort_unstable_by_key(|claim| (&claim.resource, Reverse(claim.token)));
        ordered
    }
}

impl Deref for Claims {
    type Target = [Claim];

    fn deref(&self) -> &[Claim] {
        &self.0
    }
}

/// The proof that a fence has admitted claims, at least one: each resource once, in the order in which
/// they were named. Cheap to clone. Derefs to a slice of [`Claim`].
///
/// ```
/// use axum::{Router, routing::post};
/// use tower_fence::Admitted;
///
/// async fn write(admitted: Admitted) -> String {
///     format!("{} under token {}", admitted.resource(), admitted.token())
/// }
///
/// let app: Router = Router::new().route("/{sku}", post(write));
/// # let _ = app;
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Admitted(Claims);

impl Admitted {
    /// Claims that were admitted just now.
    pub(super) const fn new(claims: Claims) -> Self {
        Self(claims)
    }

    /// The resource; of several, the one that was named first.
    #[must_use]
    pub fn resource(&self) -> &Resource {
        &self.0.first().resource
    }

    /// The token of that resource.
    #[must_use]
    pub fn token(&self) -> Token {
        self.0.first().token
    }

    pub(super) const fn claims(&self) -> &Claims {
        &self.0
    }
}

impl Deref for Admitted {
    type Target = [Claim];

    fn deref(&self) -> &[Claim] {
        &self.0
    }
}

/// How often a token may write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum TokenUse {
    /// Once. A repeated request cannot apply twice.
    #[default]
    SingleUse,
    /// As often as its holder likes, until a newer token is seen.
    Reusable,
}

impl TokenUse {
    /// The highest stale token once `token` was admitted.
    pub(super) const fn dead(self, token: Token) -> i64 {
        match self {
            Self::SingleUse => token.get(),
            Self::Reusable => token.get() - 1,
        }
    }
}
