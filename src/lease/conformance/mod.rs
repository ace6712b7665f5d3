//! What every lease store keeps, as a suite of checks (feature `testing`).
//!
//! 1. Implement [`Subject`]: it opens a fresh store, seen from two issuers.
//! 2. [`run`] runs every check and panics at the first that fails, with its name. Each check has a fresh
//!    store, and [`checks`] lists them, for a test of its own each.
//! 3. A check takes as long as leases take to expire: choose [`Subject::SHORT`] for the store.
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

/// A store that is checked.
pub trait Subject: Send + Sync {
    /// The store.
    type Leases: LeaseAdmin + Clone;

    /// Whether requests wait in a queue, and are served in its order. Default: yes.
    const QUEUE: bool = true;

    /// The shortest time that a lease of this store may last and be told from a longer one. Default: 200
    /// ms.
    const SHORT: Duration = Duration::from_millis(200);

    /// An empty store, seen from two issuers: two processes, as far as the store knows, if that is
    /// possible.
    fn fresh(&self) -> impl Future<Output = (Self::Leases, Self::Leases)> + Send;

    /// Has the store lose what it has, all of it or a part, as a crash or an operator may do. Returns false
    /// (default) if it never loses what it has confirmed.
    fn lose_data(&self, leases: &Self::Leases) -> impl Future<Output = bool> + Send {
        let _ = leases;
        async { false }
    }
}

/// A check of one property.
pub struct Check<S> {
    name: &'static str,
    needs_queue: bool,
    run: for<'a> fn(&'a S) -> Pin<Box<dyn Future<Output = ()> + 'a>>,
}

impl<S: Subject> Check<S> {
    /// What is checked, as a sentence.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        self.name
    }

    /// Runs it.
    ///
    /// # Panics
    ///
    /// If the store does not conform.
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
        /// All checks.
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
        owner_that_was_named_first_stays,
        time_of_the_grant_stays,
        one_of_many_requests_is_granted,
        lock_delay_follows_expiry_and_not_release,
        break_ends_the_lease_that_was_seen,
        tokens_increase_after_data_loss;
    queue:
        waiter_is_granted_on_release,
        waiter_is_granted_on_expiry,
        wait_ends_at_its_timeout,
        waiters_are_served_in_order (queue),
        newcomer_does_not_overtake (queue),
        repeated_request_has_the_position_of_the_first (queue),
        position_survives_a_gap (queue),
        shorter_renewal_reaches_the_waiters;
    cancelled:
        request_dropped_at_any_point_leaves_nothing,
        waiter_that_goes_away_is_passed_over;
    listing:
        every_held_lease_is_on_a_page,
        held_lease_is_listed_while_others_end,
        cursor_of_no_page_is_refused;
}

/// Runs every check.
///
/// # Panics
///
/// If the store does not conform. The panic follows a line with the name of the check on standard error.
pub async fn run<S: Subject>(subject: &S) {
    for check in checks::<S>() {
        let name = check.name();
        let failed = Named(name);
        check.run(subject).await;
        std::mem::forget(failed);
    }
}

/// Names a check that panics.
struct Named(&'static str);

impl Drop for Named {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("this check has failed: {}", self.0);
        }
    }
}

/// A source of epochs in memory, for tests: it counts, and loses all when it is dropped.
#[derive(Debug, Default)]
pub struct CountedEpochs(AtomicI64);

impl Epochs for CountedEpochs {
    fn next_epoch(&self, _: u8, at_least: Epoch) -> EpochFuture<'_> {
        Box::pin(async move {
            let before = self.0.fetch_max(at_least.get() - 1, SeqCst);
            let _ = before;
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
