//! The outcome of recent grants. It reveals problems that no check of a store detects, such as an
//! unreachable synchronous standby, or a missing permission to write in etcd.

use std::{
    error::Error,
    iter::successors,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use sqlx::error::DatabaseError;
use tower_fence::{AdmitError, announce::AnnounceError, lease::TooMuchChange};

use super::probe::Reason;

/// How long a failed grant is taken into account after its end. The time that the grant took is
/// added, so that the failures of one client are consecutive even if each of them is a timeout.
const RECENT: Duration = Duration::from_secs(10);
/// The maximum time that is added, because a grant may have waited in the queue.
const LONGEST: Duration = Duration::from_secs(20);
/// The number of consecutive failed grants that indicates a problem.
const FAILURES: u32 = 3;

/// The outcome of recent grants.
#[derive(Default)]
pub struct RecentGrants(Mutex<Option<Failures>>);

struct Failures {
    count: u32,
    until: Instant,
    reason: Reason,
}

impl RecentGrants {
    /// Records that the store answered a request for a lease, even if it granted none.
    pub fn answered(&self) {
        *self.failures() = None;
    }

    /// Records a failed grant, with the reason and the time that the grant took.
    pub fn failed(&self, reason: &(dyn Error + 'static), took: Duration) {
        self.failed_at(Instant::now(), reason, took);
    }

    fn failed_at(&self, now: Instant, reason: &(dyn Error + 'static), took: Duration) {
        let took = took.min(LONGEST);
        let mut failures = self.failures();
        // The earlier failure must be recent at the start of this grant.
        let recent = failures
            .take()
            .filter(|failures| now < failures.until + took);
        let until = now + RECENT + took;
        *failures = match recent {
            // The resource may be busy because of the grant that failed earlier. Such a failure
            // does not prolong the time, because a client can keep a resource busy.
            Some(recent) if is_busy(reason) => Some(Failures {
                count: recent.count.saturating_add(1),
                ..recent
            }),
            Some(recent) => Some(Failures {
                count: recent.count.saturating_add(1),
                until: until.max(recent.until),
                reason: Reason::of(reason),
            }),
            None if is_busy(reason) => None,
            None => Some(Failures {
                count: 1,
                until,
                reason: Reason::of(reason),
            }),
        };
    }

    /// Returns an error if at least the last [`FAILURES`] grants have failed.
    pub fn outcome(&self) -> Result<(), Reason> {
        self.outcome_at(Instant::now())
    }

    fn outcome_at(&self, now: Instant) -> Result<(), Reason> {
        match &*self.failures() {
            Some(Failures {
                count,
                until,
                reason,
            }) if *count >= FAILURES && now < *until => {
                let text = |reason: &str| format!("the last {count} grants have failed: {reason}");
                Err(Reason {
                    complete: text(&reason.complete),
                    shown: text(&reason.shown),
                })
            }
            _ => Ok(()),
        }
    }

    fn failures(&self) -> MutexGuard<'_, Option<Failures>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns whether a grant failed because it waited too long for a transaction on the same
/// resource, in the database or in the queue of this process, because of repeated conflicts with
/// other requests on that resource, or because that resource has received newer tokens. Unless
/// another failure precedes it, such a failure does not concern other resources.
fn is_busy(error: &(dyn Error + 'static)) -> bool {
    let mut causes = successors(Some(error), |error| (*error).source());
    causes.any(|cause| {
        // This is the source of `sqlx::Error::Database`. The code is lock_not_available.
        let refused: Option<&Box<dyn DatabaseError>> = cause.downcast_ref();
        refused.is_some_and(|refused| refused.code().as_deref() == Some("55P03"))
            || matches!(cause.downcast_ref(), Some(AdmitError::Busy(_)))
            || matches!(cause.downcast_ref(), Some(AnnounceError::Superseded { .. }))
            || cause.is::<TooMuchChange>()
    })
}

#[cfg(test)]
mod tests {
    use std::{io, sync::Arc};

    use super::*;

    /// Grants whose times are given, in seconds since the start of the test.
    struct Grants {
        recent: RecentGrants,
        start: Instant,
    }

    impl Grants {
        fn new() -> Self {
            let (recent, start) = (RecentGrants::default(), Instant::now());
            Self { recent, start }
        }

        fn at(&self, seconds: u64) -> Instant {
            self.start + Duration::from_secs(seconds)
        }

        /// Records a failure at this time, of a grant that took `took` seconds.
        fn fail(&self, at: u64, took: u64, reason: &(dyn Error + 'static)) {
            let took = Duration::from_secs(took);
            self.recent.failed_at(self.at(at), reason, took);
        }

        fn is_ready(&self, at: u64) -> bool {
            self.recent.outcome_at(self.at(at)).is_ok()
        }
    }

    fn silent() -> io::Error {
        io::Error::other("no answer in time")
    }

    fn busy() -> AdmitError {
        AdmitError::Busy(Arc::new(sqlx::Error::PoolTimedOut))
    }

    #[test]
    fn failed_grants_count_until_one_succeeds() {
        let (recent, error) = (RecentGrants::default(), io::Error::other("disk full"));
        for _ in 1..FAILURES {
            recent.failed(&error, Duration::ZERO);
            assert!(recent.outcome().is_ok());
        }
        recent.failed(&error, Duration::ZERO);
        let reason = recent.outcome().unwrap_err();
        assert!(reason.complete.contains("disk full"), "{reason:?}");
        recent.answered();
        assert!(recent.outcome().is_ok());
    }

    #[test]
    fn fast_failures_expire_after_ten_seconds() {
        let grants = Grants::new();
        (0..3).for_each(|at| grants.fail(at, 0, &silent()));
        assert!(!grants.is_ready(11) && grants.is_ready(12));
        // These failures are not consecutive with the earlier ones.
        (30..32).for_each(|at| grants.fail(at, 0, &silent()));
        assert!(grants.is_ready(32));
        grants.fail(32, 0, &silent());
        assert!(!grants.is_ready(33));
    }

    /// Each grant waits for an unreachable standby until its timeout.
    #[test]
    fn slow_failures_are_consecutive() {
        let grants = Grants::new();
        (1..3).for_each(|nth| grants.fail(21 * nth, 20, &silent()));
        assert!(grants.is_ready(62));
        (3..6).for_each(|nth| grants.fail(21 * nth, 20, &silent()));
        // No failure is added during the next grant.
        assert!(!grants.is_ready(105) && !grants.is_ready(134));
        assert!(grants.is_ready(135));
    }

    #[test]
    fn grant_that_waited_in_the_queue_counts_for_a_limited_time() {
        let grants = Grants::new();
        (0..3).for_each(|nth| grants.fail(100 + nth, 60, &silent()));
        assert!(!grants.is_ready(131) && grants.is_ready(132));
    }

    /// The first grant holds the row of the resource while it waits for the standby, so later
    /// grants on the resource find it busy. They do not prolong the state.
    #[test]
    fn grants_that_a_failed_grant_blocks_count_as_failed() {
        let grants = Grants::new();
        grants.fail(20, 20, &silent());
        grants.fail(25, 5, &busy());
        assert!(grants.is_ready(26));
        (6..10).for_each(|nth| grants.fail(5 * nth, 5, &busy()));
        let reason = grants.recent.outcome_at(grants.at(49)).unwrap_err();
        assert!(reason.complete.contains("no answer in time"), "{reason:?}");
        assert!(grants.is_ready(50));
        (10..20).for_each(|nth| grants.fail(5 * nth, 5, &busy()));
        assert!((50..110).all(|at| grants.is_ready(at)));
    }

    #[test]
    fn busy_resources_alone_do_not_concern_the_store() {
        let superseded = AnnounceError::Superseded {
            max_token: 1,
            was_last: false,
        };
        for reason in [
            &busy() as &(dyn Error + 'static),
            &superseded,
            &TooMuchChange,
        ] {
            let grants = Grants::new();
            (0..20).for_each(|nth| grants.fail(5 * nth, 5, reason));
            assert!((0..120).all(|at| grants.is_ready(at)));
        }
    }
}
