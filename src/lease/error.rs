//! Why a store did not do what it was asked.

use std::{error::Error, sync::Arc, time::Duration};

#[cfg(feature = "_fence")]
use crate::fence::AdmitError;
use crate::token::Resource;

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
    /// Why a store could not do its work: [`Misconfigured`](Self::Misconfigured) where the cause is a fence whose
    /// database is not set up, else [`Unavailable`](Self::Unavailable).
    pub(crate) fn unavailable(cause: impl Error + Send + Sync + 'static) -> Self {
        let misconfigured = is_misconfigured(&cause);
        let cause = Arc::new(cause);
        if misconfigured {
            Self::Misconfigured(cause)
        } else {
            Self::Unavailable(cause)
        }
    }

    #[cfg(any(
        feature = "postgres",
        feature = "redis",
        feature = "etcd",
        feature = "embedded"
    ))]
    pub(super) fn lost(resource: &Resource) -> Self {
        Self::Lost {
            resource: resource.clone(),
        }
    }

    #[cfg(any(
        feature = "postgres",
        feature = "redis",
        feature = "etcd",
        feature = "embedded"
    ))]
    pub(super) fn too_many_waiters(resource: &Resource) -> Self {
        Self::TooManyWaiters {
            resource: resource.clone(),
        }
    }
}

/// Whether an error of a fence stands in the chain of causes that does not pass by itself.
#[cfg(feature = "_fence")]
fn is_misconfigured(error: &(dyn Error + 'static)) -> bool {
    let mut causes = std::iter::successors(Some(error), |&error| error.source());
    causes.any(|cause| {
        cause
            .downcast_ref()
            .is_some_and(AdmitError::is_misconfigured)
    })
}

#[cfg(not(feature = "_fence"))]
const fn is_misconfigured(_: &(dyn Error + 'static)) -> bool {
    false
}
