//! How a lease is lost.

use crate::{feed, lease::LeaseError, metrics, stale::StaleToken, token::Resource};

/// Why a lease is not held any more.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Loss {
    /// The store says that it is not held: it ran out, or was ended by force. Or it has another token,
    /// though none was asked for: it was over, and was granted once more under its id, to a repeated
    /// request that came late.
    #[error("the lease on {resource} is held no more: the store refused to renew it")]
    Refused {
        /// The resource.
        resource: Resource,
    },
    /// Its time is up, and no renewal got through. The store may still hold it.
    #[error("the lease on {resource} has run out: no renewal got through")]
    Expired {
        /// The resource.
        resource: Resource,
        /// What the last renewal met, if one was tried.
        #[source]
        cause: Option<LeaseError>,
    },
    /// It was held for as long as [`Holder::max_hold`](super::Holder::max_hold) allows. The store may still
    /// hold it.
    #[error("the lease on {resource} was held for the longest time that its holder allows")]
    MaxHold {
        /// The resource.
        resource: Resource,
    },
    /// The work reported no progress for [`Holder::progress_timeout`](super::Holder::progress_timeout). The
    /// store may still hold it.
    #[error("the work under the lease on {resource} makes no progress")]
    NoProgress {
        /// The resource.
        resource: Resource,
    },
    /// A resource refused its token, because it has seen a newer one.
    #[error("the lease on {} is outranked: token {} is dead, up to {} are", .0.resource, .0.presented_token, .0.max_token)]
    Outranked(StaleToken),
    /// The guard was released or dropped.
    #[error("the lease on {resource} was given up")]
    GivenUp {
        /// The resource.
        resource: Resource,
    },
}

impl Loss {
    /// Counts it, once per guard.
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
