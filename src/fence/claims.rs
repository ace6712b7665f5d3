//! Tokens that a request presents, and the proof that they were admitted.
//!
//! A [`Claim`] is an unchecked token for a resource. Only an admission turns [`Claims`] into
//! [`Admitted`].

use std::{cmp::Reverse, ops::Deref, sync::Arc};

use crate::token::{Resource, Token};

/// Unchecked token that a request presents for a resource.
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

/// Claims of a request: at least one [`Claim`], in the order in which the request names the
/// resources.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Claims(Arc<[Claim]>);

impl Claims {
    pub(crate) fn new(claims: Vec<Claim>) -> Option<Self> {
        (!claims.is_empty()).then(|| Self(claims.into()))
    }

    pub(crate) fn one(resource: Resource, token: Token) -> Self {
        Self([Claim::new(resource, token)].into())
    }

    pub(crate) fn first(&self) -> &Claim {
        // No constructor creates an empty list.
        &self.0[0]
    }

    /// Returns the claims in the order in which all transactions take their row locks, so that no
    /// two transactions deadlock. If a resource has two tokens, the lower token comes second, and
    /// is therefore stale.
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

/// Proof that a fence has admitted the claims of a request.
///
/// It contains at least one [`Claim`], and each resource once, in the order in which the request
/// names the resources. The value is cheap to clone, and derefs to a slice of [`Claim`].
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
    /// Wraps claims that have just been admitted.
    pub(super) const fn new(claims: Claims) -> Self {
        Self(claims)
    }

    /// Returns the resource, or the first one if there are several.
    #[must_use]
    pub fn resource(&self) -> &Resource {
        &self.0.first().resource
    }

    /// Returns the token of the resource that [`resource`](Self::resource) returns.
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

/// Number of writes that the fence admits with one token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum TokenUse {
    /// One write. A repeated request cannot be applied twice.
    #[default]
    SingleUse,
    /// Any number of writes, until a newer token makes this token stale.
    Reusable,
}

impl TokenUse {
    /// Returns the highest stale token after the admission of `token`.
    pub(super) const fn highest_stale(self, token: Token) -> i64 {
        match self {
            Self::SingleUse => token.get(),
            Self::Reusable => token.get() - 1,
        }
    }
}
