//! Why a store did not do what it was asked.

use std::{error::Error, sync::Arc, time::Duration};

use crate::{announce::AnnounceError, epochs::EpochError, token::Resource};

/// Why a store did not do what it was asked.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LeaseError {
    /// Another holder has the lease.
    #[error("the lease on {resource} is held by another")]
    Held {
        /// The resource.
        resource: Resource,
        /// What is left of the lease's time and of its lock delay, unless it is renewed or
        /// released.
        retry_after: Duration,
    },
    /// The lease is not held under this id: it was released, it ran out, or it never was.
    #[error("the lease on {resource} is not held under this id")]
    Lost {
        /// The resource.
        resource: Resource,
    },
    /// Too many wait for the lease, or for any lease.
    #[error("too many wait for the lease on {resource}, or for any lease")]
    TooManyWaiters {
        /// The resource.
        resource: Resource,
    },
    /// There is no token above those that the resource has seen. `Fence::reset` is the cure.
    #[error("{resource} has seen token {max_token}, above which none is left")]
    Exhausted {
        /// The resource.
        resource: Resource,
        /// The highest token that was seen.
        max_token: i64,
    },
    /// The store does not take such a request: a limit of an issuer, for example.
    #[error("the request is invalid, `{field}`: {detail}")]
    Invalid {
        /// The part of the request.
        field: String,
        /// What is wrong with it.
        detail: String,
    },
    /// The store, or the source of its epochs, cannot be reached.
    #[error("the lease store is unavailable")]
    Unavailable(#[source] Arc<dyn Error + Send + Sync>),
    /// The store, or the source of its epochs, is not set up: a table or a right is missing, for example. It does
    /// not pass by itself.
    #[error("the lease store is misconfigured")]
    Misconfigured(#[source] Arc<dyn Error + Send + Sync>),
}

impl LeaseError {
    /// The store, or something that it needs, cannot be reached.
    pub fn unavailable(cause: impl Error + Send + Sync + 'static) -> Self {
        Self::Unavailable(Arc::new(cause))
    }

    /// The store, or something that it needs, is not set up.
    pub fn misconfigured(cause: impl Error + Send + Sync + 'static) -> Self {
        Self::Misconfigured(Arc::new(cause))
    }

    /// The lease is not held under the id that was given.
    #[must_use]
    pub fn lost(resource: &Resource) -> Self {
        Self::Lost {
            resource: resource.clone(),
        }
    }

    /// Another holder has the lease, for so long.
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
