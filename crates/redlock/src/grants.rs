//! Grants that this process keeps in memory, so that a renewal or a release need not read them.

use std::{
    collections::HashMap,
    mem,
    sync::{Mutex, MutexGuard, PoisonError},
};

use tower_fence::{Resource, Token};

use super::attempt::Attempt;

/// Maximum number of grants in a generation.
const SIZE: usize = 32_768;

/// Token, and the attempt to which it was granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Grant {
    pub(crate) token: Token,
    pub(crate) attempt: Attempt,
}

/// Latest grants and renewals. A grant that is not in memory is read from the nodes, which takes
/// one more round trip.
#[derive(Default)]
pub(crate) struct Grants {
    generations: Mutex<[Generation; 2]>,
}

/// Grants, by resource and stored lease id.
type Generation = HashMap<(Resource, Box<str>), Grant>;

impl Grants {
    pub(crate) fn get(&self, resource: &Resource, lease: &str) -> Option<Grant> {
        let key = (resource.clone(), lease.into());
        let generations = self.generations();
        let mut found = generations.iter().filter_map(|grants| grants.get(&key));
        found.next().copied()
    }

    /// Records a grant. If the younger generation is full, it replaces the older one.
    pub(crate) fn note(&self, resource: &Resource, lease: &str, grant: Grant) {
        let mut generations = self.generations();
        if generations[0].len() >= SIZE {
            generations[1] = mem::take(&mut generations[0]);
        }
        let key = (resource.clone(), lease.into());
        generations[1].remove(&key);
        generations[0].insert(key, grant);
    }

    pub(crate) fn forget(&self, resource: &Resource, lease: &str) {
        let key = (resource.clone(), lease.into());
        for grants in &mut *self.generations() {
            grants.remove(&key);
        }
    }

    fn generations(&self) -> MutexGuard<'_, [Generation; 2]> {
        // No code panics while it holds the lock.
        self.generations
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_latest_grants_are_kept() {
        let grants = Grants::default();
        let sku = Resource::new("sku-1").unwrap();
        let grant = |n| Grant {
            token: Token::new(n).unwrap(),
            attempt: Attempt {
                number: 1,
                ticket: 1,
            },
        };
        for n in 1..=100_000 {
            grants.note(&sku, &n.to_string(), grant(n));
        }
        assert_eq!(grants.get(&sku, "1"), None);
        assert_eq!(grants.get(&sku, "100000"), Some(grant(100_000)));
        let kept: usize = grants.generations().iter().map(HashMap::len).sum();
        assert!(kept <= 2 * SIZE, "{kept}");
        grants.note(&sku, "100000", grant(7));
        assert_eq!(grants.get(&sku, "100000"), Some(grant(7)));
        grants.forget(&sku, "100000");
        assert_eq!(grants.get(&sku, "100000"), None);
    }
}
