//! The stale tokens that this process has seen refused, to refuse them without asking the database.
//!
//! `max_token` only grows, so what was refused once stays refused, whatever is written meanwhile. Nothing
//! is ever admitted from here. After ten seconds the database is asked again: where it was restored
//! to an older state, on purpose, no refusal outlives that for long.

use std::time::Duration;

use quick_cache::sync::Cache;
use tokio::time::Instant;

use crate::{
    fence::{TokenUse, error::StaleToken, sql::Dead},
    token::{Resource, Token},
};

/// The highest token that is known to be dead, of the resources that stale writers asked for.
pub(in crate::fence) struct StaleTokens {
    known: Cache<Resource, (Dead, Instant)>,
}

/// How many resources are remembered. The ones that were not asked for lately give way.
const RESOURCES: usize = 10_000;

/// How long a refusal is remembered.
const LIFETIME: Duration = Duration::from_secs(10);

impl StaleTokens {
    /// Remembers a refusal of the database.
    pub(in crate::fence) fn remember(&self, resource: &Resource, dead: Dead) {
        let until = Instant::now() + LIFETIME;
        self.known.insert(resource.clone(), (dead, until));
    }

    /// Forgets what is known of a resource.
    pub(in crate::fence) fn forget(&self, resource: &Resource) {
        self.known.remove(resource);
    }

    /// Refuses a token that is known to be dead.
    pub(in crate::fence) fn check(
        &self,
        resource: &Resource,
        token: Token,
        token_use: TokenUse,
    ) -> Result<(), StaleToken> {
        match self.known.get(resource) {
            Some((dead, until)) if token.get() <= dead.max_token && Instant::now() < until => {
                Err(dead.refuse(resource, token, token_use))
            }
            _ => Ok(()),
        }
    }
}

impl Default for StaleTokens {
    fn default() -> Self {
        Self {
            known: Cache::new(RESOURCES),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEAD: Dead = Dead {
        max_token: 7,
        by_floor: false,
        announced: false,
    };

    #[tokio::test(start_paused = true)]
    async fn what_is_dead_is_refused_until_it_is_forgotten() {
        let memory = StaleTokens::default();
        let [a, b] = ["a", "b"].map(|name| Resource::new(name).unwrap());
        let token = |value| Token::new(value).unwrap();
        let check = |resource, value| memory.check(resource, token(value), TokenUse::SingleUse);
        check(&a, 7).unwrap();
        memory.remember(&a, DEAD);
        assert_eq!(check(&a, 7).unwrap_err().max_token, 7);
        assert_eq!(check(&a, 6).unwrap_err().presented_token, token(6));
        check(&a, 8).unwrap();
        check(&b, 7).unwrap();
        tokio::time::advance(LIFETIME).await;
        check(&a, 7).unwrap();
    }

    #[tokio::test]
    async fn memory_is_bounded() {
        let memory = StaleTokens::default();
        for n in 0..3 * RESOURCES {
            memory.remember(&Resource::new(format!("r-{n}")).unwrap(), DEAD);
        }
        assert!(memory.known.len() <= RESOURCES);
    }
}
