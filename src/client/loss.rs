//! Reasons for the loss of a lease.

use crate::{feed, lease::LeaseError, metrics, stale::StaleToken, token::Resource};

/// Why a lease is no longer held.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Loss {
    /// The store reports that the lease is not held: it has expired, or an operator broke it. Or a
    /// renewal returned a different token although no new one was requested: the lease had ended,
    /// and a delayed retry was granted a new one under the same id.
    #[error("lost the lease on {resource}: the store refused to renew it")]
    Refused {
        /// The resource.
        resource: Resource,
    },
    /// The lease has expired, because no renewal succeeded in time. The store may still hold it.
    #[error("the lease on {resource} has expired: no renewal succeeded in time")]
    Expired {
        /// The resource.
        resource: Resource,
        /// The error of the last renewal, if one was tried.
        #[source]
        cause: Option<LeaseError>,
    },
    /// The lease was held for as long as [`Holder::max_hold`](super::Holder::max_hold) allows. The
    /// store may still hold it.
    #[error("the lease on {resource} reached the holder's max_hold")]
    MaxHold {
        /// The resource.
        resource: Resource,
    },
    /// The work reported no progress for
    /// [`Holder::progress_timeout`](super::Holder::progress_timeout). The store may still hold it.
    #[error(
        "the work under the lease on {resource} reported no progress before the progress_timeout"
    )]
    NoProgress {
        /// The resource.
        resource: Resource,
    },
    /// A resource refused the token because it has seen a newer one.
    #[error("lost the lease on {}: token {} is stale, the highest token seen is {}", .0.resource, .0.presented_token, .0.max_token)]
    Outranked(StaleToken),
    /// The guard was released or dropped.
    #[error("the lease on {resource} was given up")]
    GivenUp {
        /// The resource.
        resource: Resource,
    },
}

impl Loss {
    /// Counts the loss in the metrics, once per guard.
    pub(super) fn count(&self) {
        metrics::held(-1.0);
        let (reason, resource) = match self {
            Self::Refused { resource } => ("refused", resource),
            Self::Expired { resource, .. } => ("expired", resource),
            Self::MaxHold { resource } => ("max_hold", resource),
            Self::NoProgress { resource } => ("no_progress", resource),
            Self::Outranked(stale) => ("outranked", &stale.resource),
            Self::GivenUp { .. } => return,
        };
        feed::lost(resource);
        metrics::count_by("tower_fence_leases_lost_total", "reason", reason);
    }
}
