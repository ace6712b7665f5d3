//! [`Loss`]: the reasons for the loss of a lease.

use crate::{events, lease::LeaseError, metrics, stale::StaleToken, token::Resource};

/// Reason for the loss of a lease.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Loss {
    /// The store reports that the lease is not held, because it has expired or an operator broke
    /// it.
    ///
    /// This is also the reason if a renewal returned a different token although none was requested.
    /// In that case a delayed retry of the acquisition got a new token, usually because the store
    /// no longer held the lease.
    #[error("lost the lease on {resource}: the store refused to renew it")]
    Refused {
        /// The resource.
        resource: Resource,
    },
    /// The lease has expired, because no renewal succeeded in time. In the store, the lease may
    /// still be held.
    #[error("the lease on {resource} has expired: no renewal succeeded in time")]
    Expired {
        /// The resource.
        resource: Resource,
        /// The error of the last renewal, if a renewal was attempted.
        #[source]
        cause: Option<LeaseError>,
    },
    /// The holder has had the lease for the maximum time
    /// ([`Holder::max_hold`](super::Holder::max_hold)). In the store, the lease may still be held.
    #[error("the lease on {resource} reached the holder's max_hold")]
    MaxHold {
        /// The resource.
        resource: Resource,
    },
    /// The work reported no progress within
    /// [`Holder::progress_timeout`](super::Holder::progress_timeout). In the store, the lease may
    /// still be held.
    #[error(
        "the work under the lease on {resource} reported no progress before the progress_timeout"
    )]
    NoProgress {
        /// The resource.
        resource: Resource,
    },
    /// A fence refused the token because the resource has received a newer one.
    #[error("lost the lease on {}: token {} is stale, the highest stale token is {}", .0.resource, .0.presented_token, .0.max_token)]
    Superseded(StaleToken),
    /// The guard was released or dropped.
    #[error("the guard of the lease on {resource} was released or dropped")]
    GivenUp {
        /// The resource.
        resource: Resource,
    },
}

impl Loss {
    /// Records the end of the hold in the metrics, and reports the loss unless the guard was
    /// released or dropped. Each guard calls this method once, without a lock, because a subscriber
    /// of the events or a recorder of the metrics may use the guard.
    pub(super) fn count(&self) {
        metrics::held(-1.0);
        let (reason, resource) = match self {
            Self::Refused { resource } => ("refused", resource),
            Self::Expired { resource, .. } => ("expired", resource),
            Self::MaxHold { resource } => ("max_hold", resource),
            Self::NoProgress { resource } => ("no_progress", resource),
            Self::Superseded(stale) => ("superseded", &stale.resource),
            Self::GivenUp { .. } => return,
        };
        events::lost(resource);
        metrics::count_by("tower_fence_leases_lost_total", "reason", reason);
    }
}
