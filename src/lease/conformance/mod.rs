//! Suite of checks that every lease store must pass (feature `testing`).
//!
//! 1. Implement [`Subject`], which opens an empty store for two issuers.
//! 2. [`run`] runs all checks, and prints the name of each. It panics at the first failure. Each
//!    check gets an empty store. [`checks`] lists the checks, so that each can be a separate test.
//! 3. Checks wait for leases to expire. Set [`Subject::SHORT`] to a TTL that suits the store.
//!
//! # Example
//!
//! ```
//! # #[cfg(feature = "memory")]
//! # tokio::runtime::Runtime::new()?.block_on(async {
//! use std::sync::Arc;
//! use tower_fence::lease::{MemoryLeases, conformance::{self, CountedEpochs, Subject}};
//!
//! struct InMemory;
//!
//! impl Subject for InMemory {
//!     type Leases = MemoryLeases;
//!
//!     async fn fresh(&self) -> (MemoryLeases, MemoryLeases) {
//!         let leases = MemoryLeases::new(CountedEpochs::default());
//!         (leases.clone(), leases)
//!     }
//! }
//!
//! conformance::run(&InMemory).await;
//! # });
//! # Ok::<(), std::io::Error>(())
//! ```

mod cancelled;
mod grants;
mod listing;
mod queue;
mod steps;

use std::{
    pin::Pin,
    sync::atomic::{AtomicI64, Ordering::SeqCst},
    time::Duration,
};

use super::LeaseAdmin;
use crate::epochs::{Epoch, EpochFuture, Epochs, SourceId};

/// Store under test.
pub trait Subject: Send + Sync {
    /// The type of the store.
    type Leases: LeaseAdmin + Clone;

    /// Whether requests wait in a queue of the store, which serves them in order. If this is false,
    /// the checks of the queue are skipped. Default: true.
    const QUEUE: bool = true;

    /// The shortest TTL that can be distinguished from a longer one in this store. It must be below
    /// 3 s. Default: 200 ms.
    const SHORT: Duration = Duration::from_millis(200);

    /// Returns two handles of one empty store, one for each of two issuers. If possible, the store
    /// treats them as two processes.
    fn fresh(&self) -> impl Future<Output = (Self::Leases, Self::Leases)> + Send;

    /// Makes the store lose some or all of its data, as a crash or an operator would. Returns false
    /// (default) if the store never loses confirmed data.
    fn lose_data(&self, leases: &Self::Leases) -> impl Future<Output = bool> + Send {
        let _ = leases;
        async { false }
    }
}

/// Check of one property.
pub struct Check<S> {
    name: &'static str,
    needs_queue: bool,
    run: for<'a> fn(&'a S) -> Pin<Box<dyn Future<Output = ()> + 'a>>,
}

impl<S: Subject> Check<S> {
    /// Returns the name of the check, which states the checked property.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        self.name
    }

    /// Runs the check.
    ///
    /// # Panics
    ///
    /// Panics if the store does not conform.
    pub async fn run(&self, subject: &S) {
        if S::QUEUE || !self.needs_queue {
            (self.run)(subject).await;
        }
    }
}

impl<S> std::fmt::Debug for Check<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

macro_rules! checks {
    ($($module:ident: $($name:ident $(($queue:ident))?),+;)+) => {
        /// Returns all checks.
        #[must_use]
        pub fn checks<S: Subject>() -> Vec<Check<S>> {
            vec![$($(Check {
                name: stringify!($name),
                needs_queue: checks!(@queue $($queue)?),
                run: |subject| Box::pin($module::$name(subject)),
            }),+),+]
        }
    };
    (@queue queue) => { true };
    (@queue) => { false };
}

checks! {
    grants:
        grant_excludes_others_until_it_is_released,
        expired_lease_is_followed_by_a_higher_token,
        request_is_idempotent_by_lease_id,
        only_the_lease_id_renews_and_releases,
        late_release_or_renewal_spares_the_successor,
        renewal_starts_the_time_anew_and_keeps_the_token,
        renewal_may_take_a_new_token,
        renewal_may_ask_for_a_lowest_token,
        names_that_differ_are_different_resources,
        owner_that_was_named_first_stays,
        time_of_the_grant_stays,
        one_of_many_requests_is_granted,
        lock_delay_follows_expiry_and_not_release,
        lock_delay_outlasts_renewal_and_blocks_its_own_lease_id,
        break_ends_the_lease_that_was_seen,
        tokens_increase_after_data_loss;
    queue:
        waiter_is_granted_on_release,
        waiter_is_granted_on_expiry,
        waiter_is_granted_when_the_lease_is_broken,
        wait_ends_at_its_timeout,
        waiters_are_served_in_order (queue),
        newcomer_does_not_overtake (queue),
        repeated_request_has_the_position_of_the_first (queue),
        position_survives_a_gap (queue),
        shorter_renewal_reaches_the_waiters;
    cancelled:
        request_dropped_at_any_point_leaves_nothing,
        dropped_repetition_spares_the_lease,
        dropped_request_spares_the_lease_of_its_repetition,
        waiter_that_goes_away_is_passed_over;
    listing:
        every_held_lease_is_on_a_page,
        expired_lease_is_on_no_page,
        held_lease_is_listed_while_others_end,
        cursor_of_no_page_is_refused;
}

/// Runs all checks.
///
/// # Panics
///
/// Panics if the store fails a check. The last line on standard error before the panic contains the
/// name of the check.
pub async fn run<S: Subject>(subject: &S) {
    for check in checks::<S>() {
        eprintln!("check: {}", check.name());
        check.run(subject).await;
    }
}

/// Source of epochs in memory, for tests. If it is dropped, its count is lost.
#[derive(Debug, Default)]
pub struct CountedEpochs(AtomicI64);

impl Epochs for CountedEpochs {
    fn next_epoch(&self, _: u8, at_least: Epoch) -> EpochFuture<'_> {
        Box::pin(async move {
            self.0.fetch_max(at_least.get() - 1, SeqCst);
            Epoch::new(self.0.fetch_add(1, SeqCst) + 1)
        })
    }

    fn report_epoch(&self, _: u8, seen: Epoch) -> EpochFuture<'_> {
        Box::pin(async move {
            self.0.fetch_max(seen.get(), SeqCst);
            Ok(seen)
        })
    }

    fn source_id(&self) -> EpochFuture<'_, SourceId> {
        Box::pin(async { Ok(SourceId::new("counted").unwrap_or_else(|_| unreachable!())) })
    }
}
