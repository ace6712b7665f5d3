//! The lease stores.

/// Implements the reads of a store that shows no lease.
macro_rules! shows_no_lease {
    () => {
        async fn inspect(&self, _: &Resource, _: Seen<'_>) -> Result<Option<Held>, LeaseError> {
            Ok(None)
        }

        async fn page(
            &self,
            _: usize,
            _: Option<&str>,
            _: Counters<'_>,
        ) -> Result<Page, LeaseError> {
            Ok(Page::new(vec![], None))
        }
    };
}

mod announced;
mod announced_above;
mod displaced;
mod pages;
mod postgres_functions;
mod postgres_idle;
mod postgres_locks;
mod postgres_queue;
mod postgres_strangers;
mod redis_limits;
mod redis_loss;
mod redis_queue;
mod redis_secrets;
mod sql_store;
mod unheard;
