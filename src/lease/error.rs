//! Errors of a lease store.

use std::{error::Error, sync::Arc, time::Duration};

use crate::{announce::AnnounceError, epochs::EpochError, token::Resource};

/// An error of a lease store.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LeaseError {
    /// Another holder has the lease.
    #[error("the lease on {resource} is held by another holder")]
    Held {
        /// The resource.
        resource: Resource,
        /// The remaining time of the lease and of its lock delay, unless it is renewed or released.
        retry_after: Duration,
    },
    /// The lease is not held under this id: it was released, it has expired, or it was never
    /// granted.
    #[error("the lease on {resource} is not held under this id")]
    Lost {
        /// The resource.
        resource: Resource,
    },
    /// Too many requests are already waiting for the lease, or for leases in general.
    #[error(
        "too many requests are already waiting for the lease on {resource}, or for leases in general"
    )]
    TooManyWaiters {
        /// The resource.
        resource: Resource,
    },
    /// No token is left above those that the resource has seen. Reset the resource with
    /// `Fence::reset`.
    #[error("no token is left above {max_token}, the highest one that {resource} has seen")]
    Exhausted {
        /// The resource.
        resource: Resource,
        /// The highest token that was seen.
        max_token: i64,
    },
    /// The store does not accept the request. For example, a value is outside an issuer's limits.
    #[error("invalid `{field}`: {detail}")]
    Invalid {
        /// The part of the request.
        field: String,
        /// The reason.
        detail: String,
    },
    /// The store, or the source of its epochs, cannot be reached.
    #[error("the lease store is unavailable")]
    Unavailable(#[source] Arc<dyn Error + Send + Sync>),
    /// The store, or the source of its epochs, is not set up correctly. For example, a table or a
    /// privilege is missing. A retry cannot help.
    #[error("the lease store is misconfigured")]
    Misconfigured(#[source] Arc<dyn Error + Send + Sync>),
}

impl LeaseError {
    /// Creates an [`Unavailable`](Self::Unavailable): the store, or a service that it needs, cannot
    /// be reached.
    pub fn unavailable(cause: impl Error + Send + Sync + 'static) -> Self {
        Self::Unavailable(Arc::new(cause))
    }

    /// Creates a [`Misconfigured`](Self::Misconfigured): the store, or a service that it needs, is
    /// not set up correctly.
    pub fn misconfigured(cause: impl Error + Send + Sync + 'static) -> Self {
        Self::Misconfigured(Arc::new(cause))
    }

    /// Creates a [`Lost`](Self::Lost): the lease is not held under the given id.
    #[must_use]
    pub fn lost(resource: &Resource) -> Self {
        Self::Lost {
            resource: resource.clone(),
        }
    }

    /// Creates a [`Held`](Self::Held): another holder has the lease, for `retry_after`.
    #[must_use]
    pub fn held(resource: &Resource, retry_after: Duration) -> Self {
        Self::Held {
            resource: resource.clone(),
            retry_after,
        }
    }

    pub(crate) fn too_many_waiters(resource: &Resource) -> Self {
        Self::TooManyWaiters {
            resource: resource.clone(),
        }
    }
}

impl From<EpochError> for LeaseError {
    fn from(error: EpochError) -> Self {
        match error {
            EpochError::Misconfigured(_) => Self::misconfigured(error),
            _ => Self::unavailable(error),
        }
    }
}

impl From<AnnounceError> for LeaseError {
    fn from(error: AnnounceError) -> Self {
        match error {
            AnnounceError::Misconfigured(_) => Self::misconfigured(error),
            _ => Self::unavailable(error),
        }
    }
}
