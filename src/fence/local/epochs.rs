//! Which epochs were handed out: a token of another one was made by nobody.
//!
//! 1. The highest epoch of each partition is remembered; what is above it is looked up, see [`HighMark`].
//! 2. A token that was announced as granted is known, whatever its epoch. The highest announced token of a resource is
//!    remembered in the same way, where the epoch is not known.

use std::{array, sync::Arc};

use quick_cache::sync::Cache;

use super::HighMark;
use crate::{fence::error::AdmitError, token::Resource};

/// What is known of the epochs of all partitions.
pub(in crate::fence) struct HandedOutEpochs {
    pub(in crate::fence) partitions: [HighMark<AdmitError>; 256],
    /// The highest tokens that were announced, of resources for which an unknown one was presented.
    pub(in crate::fence) announced: Cache<Resource, Arc<HighMark<AdmitError>>>,
}

/// How many resources are remembered. The ones that were not asked for lately give way.
const RESOURCES: usize = 1_000;

impl Default for HandedOutEpochs {
    fn default() -> Self {
        Self {
            partitions: array::from_fn(|_| HighMark::default()),
            announced: Cache::new(RESOURCES),
        }
    }
}
