//! Cache of issued epochs, for detecting tokens that were never granted.
//!
//! 1. The highest epoch of each partition is cached. A higher epoch causes a lookup; see
//!    [`HighMark`].
//! 2. A token whose grant was announced is accepted, whatever its epoch is. If the epoch is
//!    unknown, the highest announced token of the resource is cached in the same way.

use std::{array, sync::Arc};

use quick_cache::sync::Cache;

use super::HighMark;
use crate::{fence::error::AdmitError, token::Resource};

/// Cached issued epochs of all partitions.
pub(in crate::fence) struct HandedOutEpochs {
    pub(in crate::fence) partitions: [HighMark<AdmitError>; 256],
    /// The highest announced tokens of resources for which a token of an unknown epoch was
    /// presented.
    pub(in crate::fence) announced: Cache<Resource, Arc<HighMark<AdmitError>>>,
}

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
