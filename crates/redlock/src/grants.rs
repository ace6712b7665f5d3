//! Grants that this process keeps in memory, so that a renewal or a release need not read them.

use quick_cache::sync::Cache;
use tower_fence::{Resource, Token};

use super::attempt::Attempt;

/// Maximum number of grants in memory.
const SIZE: usize = 65_536;

/// Token, and the attempt to which it was granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Grant {
    pub(crate) token: Token,
    pub(crate) attempt: Attempt,
}

/// Recent grants and renewals, by resource and stored lease id. A grant that is not in memory is
/// read from the nodes, which takes one more round trip.
pub(crate) struct Grants(Cache<(Resource, Box<str>), Grant>);

impl Grants {
    pub(crate) fn get(&self, resource: &Resource, lease: &str) -> Option<Grant> {
        self.0.get(&(resource.clone(), lease.into()))
    }

    pub(crate) fn note(&self, resource: &Resource, lease: &str, grant: Grant) {
        self.0.insert((resource.clone(), lease.into()), grant);
    }

    pub(crate) fn forget(&self, resource: &Resource, lease: &str) {
        self.0.remove(&(resource.clone(), lease.into()));
    }
}

impl Default for Grants {
    fn default() -> Self {
        Self(Cache::new(SIZE))
    }
}
