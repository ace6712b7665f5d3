//! Cache of issued epochs, for detecting tokens that were never granted.
//!
//! 1. The highest epoch of each partition is cached. A higher epoch causes a lookup; see
//!    [`HighMark`].
//! 2. A token whose grant was announced is accepted, whatever its epoch is. If the epoch is
//!    unknown, the highest announced token of the resource is cached in the same way, but only for
//!    ten seconds, because a reset can lower it.

use std::{array, sync::Arc, time::Duration};

use quick_cache::sync::Cache;
use tokio::time::Instant;

use super::HighMark;
use crate::{fence::error::AdmitError, token::Resource};

/// Cached issued epochs of all partitions.
pub(in crate::fence) struct HandedOutEpochs {
    pub(in crate::fence) partitions: [HighMark<AdmitError>; 256],
    /// The highest announced tokens of resources for which a token of an unknown epoch was
    /// presented.
    announced: Cache<Resource, (Arc<HighMark<AdmitError>>, Instant)>,
}

impl HandedOutEpochs {
    /// Returns the cached bound of the announced tokens of a resource.
    pub(in crate::fence) fn announced(&self, resource: &Resource) -> Arc<HighMark<AdmitError>> {
        match self.announced.get(resource) {
            Some((announced, until)) if Instant::now() < until => announced,
            _ => {
                let announced = Arc::default();
                let until = Instant::now() + LIFETIME;
                let cached = (Arc::clone(&announced), until);
                self.announced.insert(resource.clone(), cached);
                announced
            }
        }
    }

    /// Removes the announced tokens of a resource from the cache, after a reset.
    pub(in crate::fence) fn forget(&self, resource: &Resource) {
        self.announced.remove(resource);
    }
}

/// Time for which the announced tokens of a resource are cached.
const LIFETIME: Duration = Duration::from_secs(10);

/// Maximum number of cached resources.
const RESOURCES: usize = 1_000;

impl Default for HandedOutEpochs {
    fn default() -> Self {
        Self {
            partitions: array::from_fn(|_| HighMark::default()),
            announced: Cache::new(RESOURCES),
        }
    }
}
