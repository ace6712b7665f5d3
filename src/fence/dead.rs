//! What this process knows to be dead, to refuse it without asking the database.
//!
//! `max_token` only grows, so what was refused once stays refused, whoever writes meanwhile. Nothing
//! is ever admitted from here. After ten seconds the database is asked again: where it was restored
//! to an older state, on purpose, no refusal outlives that for long.

use std::time::Duration;

use quick_cache::sync::Cache;
use tokio::time::Instant;

use super::Stale;
use crate::token::{Resource, Token};

/// The highest token that is known to be dead, of the resources that stale writers asked for.
pub(super) struct Dead {
    known: Cache<Resource, (i64, Instant)>,
}

/// How many resources are remembered. The ones that were not asked for lately give way.
const RESOURCES: usize = 10_000;

/// How long a refusal is remembered.
const LIFETIME: Duration = Duration::from_secs(10);

impl Dead {
    /// Remembers a refusal of the database.
    pub(super) fn remember(&self, stale: &Stale) {
        let until = Instant::now() + LIFETIME;
        self.known
            .insert(stale.resource.clone(), (stale.max_token, until));
    }

    /// Forgets what is known of a resource.
    pub(super) fn forget(&self, resource: &Resource) {
        self.known.remove(resource);
    }

    /// Refuses a token that is known to be dead.
    pub(super) fn check(&self, resource: &Resource, token: Token) -> Result<(), Stale> {
        match self.known.get(resource) {
            Some((max_token, until)) if token.get() <= max_token && Instant::now() < until => {
                Err(Stale {
                    resource: resource.clone(),
                    presented: token,
                    max_token,
                })
            }
            _ => Ok(()),
        }
    }
}

impl Default for Dead {
    fn default() -> Self {
        Self {
            known: Cache::new(RESOURCES),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stale(resource: &Resource, max_token: i64) -> Stale {
        Stale {
            resource: resource.clone(),
            presented: Token::new(1).unwrap(),
            max_token,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_dead_is_refused_until_it_is_forgotten() {
        let dead = Dead::default();
        let [a, b] = ["a", "b"].map(|name| Resource::new(name).unwrap());
        let token = |value| Token::new(value).unwrap();
        dead.check(&a, token(7)).unwrap();
        dead.remember(&stale(&a, 7));
        assert_eq!(dead.check(&a, token(7)).unwrap_err().max_token, 7);
        assert_eq!(dead.check(&a, token(6)).unwrap_err().presented, token(6));
        dead.check(&a, token(8)).unwrap();
        dead.check(&b, token(7)).unwrap();
        tokio::time::advance(LIFETIME).await;
        dead.check(&a, token(7)).unwrap();
    }

    #[tokio::test]
    async fn memory_is_bounded() {
        let dead = Dead::default();
        for n in 0..3 * RESOURCES {
            dead.remember(&stale(&Resource::new(format!("r-{n}")).unwrap(), 7));
        }
        assert!(dead.known.len() <= RESOURCES);
    }
}
