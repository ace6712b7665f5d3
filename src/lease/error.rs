//! Errors of a lease store.

use std::{error::Error, sync::Arc, time::Duration};

use crate::{announce::AnnounceError, epochs::EpochError, token::Resource};

/// Error of a lease store.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LeaseError {
    /// Another holder has the lease.
    #[error("the lease on {resource} is held by another holder")]
    Held {
        /// The resource.
        resource: Resource,
        /// The remaining time of the lease and of its lock delay, unless the lease is renewed or
        /// released.
        retry_after: Duration,
    },
    /// The lease with this id or token is not held. It was released or broken, has expired, or was
    /// never granted.
    #[error("this lease on {resource} is not held")]
    Lost {
        /// The resource.
        resource: Resource,
    },
    /// Too many requests are already waiting, either for the lease or in total.
    #[error(
        "too many requests are already waiting, either for the lease on {resource} or in total"
    )]
    TooManyWaiters {
        /// The resource.
        resource: Resource,
    },
    /// No token is left above those that the resource has received. Reset the resource with
    /// `Fence::reset`.
    #[error("no token is left above {max_token}, the highest one that {resource} has received")]
    Exhausted {
        /// The resource.
        resource: Resource,
        /// The highest token that the resource has received.
        max_token: i64,
    },
    /// The store does not accept the request, for example because a value is outside of an issuer's
    /// limits.
    #[error("invalid `{field}`: {detail}")]
    Invalid {
        /// The invalid part of the request. An issuer names a member of the body, `body`, `query`,
        /// `limit`, `cursor`, `resource`, or `lease-id`.
        field: String,
        /// The reason.
        detail: String,
    },
    /// The store, or the source of its epochs, is unreachable.
    #[error("the lease store is unavailable")]
    Unavailable(#[source] Arc<dyn Error + Send + Sync>),
    /// The store, or the source of its epochs, is not set up correctly, for example because a table
    /// or a privilege is missing. A retry cannot help.
    #[error("the lease store is misconfigured")]
    Misconfigured(#[source] Arc<dyn Error + Send + Sync>),
}

/// Error for a resource that other requests changed during every attempt. It does not concern other
/// resources.
#[derive(Debug, thiserror::Error)]
#[error("gave up after repeated conflicts with other requests for the same lease")]
pub struct TooMuchChange;

impl LeaseError {
    /// Creates an [`Unavailable`](Self::Unavailable) error, for a store or a required service that
    /// is unreachable.
    pub fn unavailable(cause: impl Error + Send + Sync + 'static) -> Self {
        Self::Unavailable(Arc::new(cause))
    }

    /// Creates a [`Misconfigured`](Self::Misconfigured) error, for a store or a required service
    /// that is not set up correctly.
    pub fn misconfigured(cause: impl Error + Send + Sync + 'static) -> Self {
        Self::Misconfigured(Arc::new(cause))
    }

    /// Creates an [`Invalid`](Self::Invalid) error, for an invalid part of the request.
    pub fn invalid(field: impl Into<String>, detail: impl Into<String>) -> Self {
        Self::Invalid {
            field: field.into(),
            detail: detail.into(),
        }
    }

    /// Creates an [`Invalid`](Self::Invalid) error with the field `cursor`, for a cursor that the
    /// store cannot have returned.
    #[must_use]
    pub fn invalid_cursor() -> Self {
        Self::invalid("cursor", "pass the cursor of the previous page unchanged")
    }

    /// Creates a [`Lost`](Self::Lost) error, for a lease that is not held under the given id.
    #[must_use]
    pub fn lost(resource: &Resource) -> Self {
        Self::Lost {
            resource: resource.clone(),
        }
    }

    /// Returns whether the store may have granted a lease although the acquisition failed: if the
    /// store failed, the outcome is unknown, and if no token is left, the store may have granted
    /// the lease before the announcement failed.
    #[cfg(feature = "client")]
    pub(crate) const fn may_be_granted(&self) -> bool {
        matches!(
            self,
            Self::Unavailable(_) | Self::Misconfigured(_) | Self::Exhausted { .. }
        )
    }

    /// Replaces `Lost` with `Unavailable`, for a caller that has not received the lease yet.
    pub(crate) fn not_yet_held(self) -> Self {
        match self {
            lost @ Self::Lost { .. } => Self::unavailable(lost),
            other => other,
        }
    }

    pub(crate) fn exhausted(resource: &Resource, max_token: i64) -> Self {
        Self::Exhausted {
            resource: resource.clone(),
            max_token,
        }
    }

    /// Creates a [`Held`](Self::Held) error, for a resource that stays blocked for `retry_after`.
    #[must_use]
    pub fn held(resource: &Resource, retry_after: Duration) -> Self {
        Self::Held {
            resource: resource.clone(),
            retry_after,
        }
    }
}

impl From<EpochError> for LeaseError {
    fn from(error: EpochError) -> Self {
        match error {
            EpochError::Misconfigured(_) | EpochError::Exhausted => Self::misconfigured(error),
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
