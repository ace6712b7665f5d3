//! Cache of stale tokens, which are refused without a query.
//!
//! No write lowers `max_token`, so a stale token stays stale. The cache never admits a token. A
//! refusal is cached for ten seconds, and then the database is queried again. If a reset or a
//! restore of the database has lowered `max_token`, outdated refusals therefore last at most ten
//! seconds.

use std::time::Duration;

use quick_cache::sync::Cache;
use tokio::time::Instant;

use crate::{
    fence::{Claim, TokenUse, error::StaleToken, sql::HighestStale},
    token::Resource,
};

/// Highest known stale tokens of the resources for which tokens were refused.
pub(in crate::fence) struct StaleTokens {
    known: Cache<Resource, (HighestStale, Instant)>,
}

/// Maximum number of cached resources.
const RESOURCES: usize = 10_000;

/// Time for which a refusal is cached.
const LIFETIME: Duration = Duration::from_secs(10);

impl StaleTokens {
    /// Caches the highest stale token of a resource, which the database has returned with a
    /// refusal.
    pub(in crate::fence) fn insert(&self, resource: &Resource, stale: HighestStale) {
        let until = Instant::now() + LIFETIME;
        self.known.insert(resource.clone(), (stale, until));
    }

    pub(in crate::fence) fn remove(&self, resource: &Resource) {
        self.known.remove(resource);
    }

    pub(in crate::fence) fn check(
        &self,
        claim: &Claim,
        token_use: TokenUse,
    ) -> Result<(), StaleToken> {
        match self.known.get(&claim.resource) {
            Some((stale, until))
                if claim.token.get() <= stale.max_token && Instant::now() < until =>
            {
                Err(stale.refuse(claim, token_use))
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
    use crate::token::Token;

    const STALE: HighestStale = HighestStale {
        max_token: 7,
        by_floor: false,
        announced: false,
    };

    #[tokio::test(start_paused = true)]
    async fn stale_token_is_refused_until_it_is_evicted() {
        let cache = StaleTokens::default();
        let [a, b] = ["a", "b"].map(|name| Resource::new(name).unwrap());
        let token = |value| Token::new(value).unwrap();
        let check = |resource: &Resource, value| {
            let claim = Claim::new(resource.clone(), token(value));
            cache.check(&claim, TokenUse::SingleUse)
        };
        check(&a, 7).unwrap();
        cache.insert(&a, STALE);
        assert_eq!(check(&a, 7).unwrap_err().max_token, 7);
        assert_eq!(check(&a, 6).unwrap_err().presented_token, token(6));
        check(&a, 8).unwrap();
        check(&b, 7).unwrap();
        tokio::time::advance(LIFETIME).await;
        check(&a, 7).unwrap();
    }

    #[tokio::test]
    async fn memory_is_bounded() {
        let cache = StaleTokens::default();
        for n in 0..3 * RESOURCES {
            cache.insert(&Resource::new(format!("r-{n}")).unwrap(), STALE);
        }
        assert!(cache.known.len() <= RESOURCES);
    }
}
