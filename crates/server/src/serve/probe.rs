//! Checks whether the stores would accept a grant, without granting a lease.
//!
//! The checks of a quorum of Redis nodes and of etcd only read. Failed grants ([`Recent`]) reveal
//! what such a check cannot detect.

use std::{
    error::Error,
    iter::successors,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use futures_util::{FutureExt, future::BoxFuture};
use sqlx::{
    AssertSqlSafe, Postgres, Row,
    postgres::{PgDatabaseError, PgRow},
};
use tokio::time::timeout;
use tower_fence::{
    AdmitError, Fence, Resource,
    announce::AnnounceError,
    lease::{Leases, RedisLeases, TooMuchChange},
};

use crate::{
    database::reach,
    failure::{chain, database_error},
};

/// The reason why a store would not accept a grant.
#[derive(Clone, Debug)]
pub struct Reason {
    /// The complete error, for the log. It may contain addresses and names.
    pub complete: String,
    /// The text that is shown to clients without a secret.
    pub shown: String,
}

impl Reason {
    fn of(error: &(dyn Error + 'static)) -> Self {
        Self {
            complete: chain(error),
            shown: "see the log of the server".into(),
        }
    }

    /// Creates a reason without addresses or names.
    fn text(text: &str) -> Self {
        Self {
            complete: text.into(),
            shown: text.into(),
        }
    }
}

impl<E: Error + 'static> From<E> for Reason {
    fn from(error: E) -> Self {
        Self::of(&error)
    }
}

type Outcome = BoxFuture<'static, Result<(), Reason>>;

/// A check of a store.
pub struct Probe {
    check: Box<dyn Fn() -> Outcome + Send + Sync>,
    /// A description of a successful check, for messages. Its subject is the store.
    pub shows: &'static str,
}

impl Probe {
    fn new(shows: &'static str, check: impl Fn() -> Outcome + Send + Sync + 'static) -> Self {
        let check = Box::new(check);
        Self { check, shows }
    }

    /// Checks the store. A check without a result after the timeout has failed.
    pub async fn check(&self) -> Result<(), Reason> {
        let checked = timeout(LIMIT + WHY, (self.check)()).await;
        checked.unwrap_or_else(|_| Err(Reason::text("no answer in time")))
    }
}

const ANSWERS: &str = "answers";
const ACCEPTS_GRANTS: &str = "would accept a grant";
pub const ANSWERS_READS: &str = "answers reads; its writes are not checked";
pub const NODES_WRITE: &str = "answers reads; its writes are checked by a test write to each node";
const EXHAUSTED: &str = "no token is left: all epochs of the partition have been issued";

/// The timeout of a check.
const LIMIT: Duration = Duration::from_secs(2);
/// The timeout for determining why the database does not answer.
const WHY: Duration = Duration::from_secs(1);

/// SQL that checks leases in Postgres. It calls the function that grants, in a transaction that is
/// rolled back. The resource has a random name, so that no existing lease conflicts.
const GRANT: &str = "SELECT a.outcome FROM tower_fence.lease_ask('readyz:' || pg_catalog.gen_random_uuid(), pg_catalog.decode('00', 'hex'), 1000, 0, NULL, 0, false, NULL) AS a";
/// SQL that checks the epochs of leases in another store, in a transaction that is rolled back.
const EPOCHS: &str = "SELECT FROM tower_fence.report_epoch(0::smallint, 0)";
/// SQL that is added to [`EPOCHS`] if the grants of these leases are announced.
const ANNOUNCEMENTS: &str = "; SELECT FROM tower_fence.announce('readyz:' || pg_catalog.gen_random_uuid(), 1, pg_catalog.decode('00', 'hex'))";

/// Checks that the database answers.
pub fn answers(fence: Fence<Postgres>) -> Probe {
    in_database(ANSWERS, fence, "SELECT".into())
}

/// Checks that the database accepts grants of leases that are stored in it.
pub fn grants(fence: Fence<Postgres>, leases: impl Leases + Clone, schema: &str) -> Probe {
    // The error of this read contains the remedy for missing tables.
    let reads = reads(leases, ANSWERS_READS);
    let grants = in_database(ACCEPTS_GRANTS, fence, in_schema(GRANT, schema));
    Probe::new(ACCEPTS_GRANTS, move || {
        let (reads, grants) = ((reads.check)(), (grants.check)());
        async move {
            reads.await?;
            grants.await
        }
        .boxed()
    })
}

/// Checks that the database accepts the epochs of leases in another store, and their announcements.
pub fn epochs(fence: Fence<Postgres>, schema: &str, announced: bool) -> Probe {
    let announcements = if announced { ANNOUNCEMENTS } else { "" };
    in_database(
        ACCEPTS_GRANTS,
        fence,
        in_schema(&format!("{EPOCHS}{announcements}"), schema),
    )
}

/// Checks that Redis accepts writes.
pub fn redis(leases: RedisLeases) -> Probe {
    Probe::new(ACCEPTS_GRANTS, move || {
        let leases = leases.clone();
        async move { Ok(leases.check_writes().await?) }.boxed()
    })
}

/// Checks that the store answers a read. Does not detect a missing permission to write.
pub fn reads<L: Leases + Clone>(leases: L, shows: &'static str) -> Probe {
    Probe::new(shows, move || {
        let leases = leases.clone();
        async move {
            leases.inspect(&Resource::new("readyz")?).await?;
            Ok(())
        }
        .boxed()
    })
}

fn in_schema(sql: &str, schema: &str) -> String {
    let sql = format!("SET LOCAL tower_fence.is_probe = on; {sql}");
    sql.replace("tower_fence.", &format!("{schema}."))
}

fn in_database(shows: &'static str, fence: Fence<Postgres>, sql: String) -> Probe {
    Probe::new(shows, move || {
        let (fence, sql) = (fence.clone(), sql.clone());
        async move {
            match timeout(LIMIT, rolled_back(&fence, &sql)).await {
                // No client can cause this for a resource with a random name.
                Ok(rows) => match is_exhausted(&rows?) {
                    true => Err(Reason::text(EXHAUSTED)),
                    false => Ok(()),
                },
                Err(_) => {
                    let reached = reach(&fence, WHY).await;
                    reached.map_err(|error| Reason::of(&*error))?;
                    let slow = "the database is slow, or all connections are in use";
                    Err(Reason::text(slow))
                }
            }
        }
        .boxed()
    })
}

/// Returns whether [`GRANT`] found no token that it could grant.
fn is_exhausted(rows: &[PgRow]) -> bool {
    let outcomes = rows.iter().map(|row| row.try_get("outcome"));
    outcomes
        .flatten()
        .any(|outcome: &str| outcome == "exhausted")
}

async fn rolled_back(fence: &Fence<Postgres>, sql: &str) -> sqlx::Result<Vec<PgRow>> {
    let begin = "BEGIN ISOLATION LEVEL READ COMMITTED";
    let mut transaction = fence.pool().begin_with(begin).await?;
    // Without these limits, the database would continue a statement after the timeout of the check.
    let limits = format!(
        "SET LOCAL statement_timeout = {0}; SET LOCAL lock_timeout = {0}",
        LIMIT.as_millis()
    );
    let sql = AssertSqlSafe(format!("{limits}; {sql}"));
    let rows = sqlx::raw_sql(sql).fetch_all(&mut *transaction).await?;
    transaction.rollback().await?;
    Ok(rows)
}

/// How long a failed grant is taken into account after its end. The time that the grant took is
/// added, so that the failures of one client are consecutive even if each of them is a timeout.
const RECENT: Duration = Duration::from_secs(10);
/// The maximum time that is added, because a grant may have waited in the queue.
const LONGEST: Duration = Duration::from_secs(20);
/// The number of consecutive failed grants that indicates a problem.
const FAILURES: u32 = 3;

/// The outcome of recent grants. It reveals problems that no check detects, such as an unreachable
/// synchronous standby, or a missing permission to write in etcd.
#[derive(Default)]
pub struct Recent(Mutex<Option<Failures>>);

struct Failures {
    count: u32,
    until: Instant,
    reason: Reason,
}

impl Recent {
    /// Records that the store answered a request for a lease, even if it granted none.
    pub fn answered(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Records that a grant failed, the reason, and the time that the grant took.
    pub fn failed(&self, reason: &(dyn Error + 'static), took: Duration) {
        self.failed_at(Instant::now(), reason, took);
    }

    fn failed_at(&self, now: Instant, reason: &(dyn Error + 'static), took: Duration) {
        let took = took.min(LONGEST);
        let mut failures = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // The earlier failure must be recent at the start of this grant.
        let recent = failures
            .take()
            .filter(|failures| now < failures.until + took);
        let until = now + RECENT + took;
        *failures = match recent {
            // The resource may be busy because of the grant that has failed earlier. Such a failure
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
        let failures = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match &*failures {
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
}

/// Returns whether a grant failed because it waited too long for a transaction on the same
/// resource, in the database or in the queue of this process, because of repeated conflicts with
/// other requests on that resource, or because that resource has received newer tokens. Unless
/// another failure precedes it, such a failure does not concern other resources.
fn is_busy(error: &(dyn Error + 'static)) -> bool {
    causes(error).any(|cause| {
        // lock_not_available
        postgres(cause).is_some_and(|refused| refused.code() == "55P03")
            || matches!(cause.downcast_ref(), Some(AdmitError::Busy(_)))
            || matches!(cause.downcast_ref(), Some(AnnounceError::Superseded { .. }))
            || cause.is::<TooMuchChange>()
    })
}

/// Returns an error and its causes, the innermost one last.
fn causes<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    successors(Some(error), |error| (*error).source())
}

fn postgres<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a PgDatabaseError> {
    match database_error(error) {
        Some(refused) => refused.try_downcast_ref(),
        None => error.downcast_ref(),
    }
}

#[cfg(test)]
mod tests {
    use std::{io, sync::Arc};

    use tower_fence::Token;

    use super::*;

    /// Grants whose times are given, in seconds since the start of the test.
    struct Grants {
        recent: Recent,
        start: Instant,
    }

    impl Grants {
        fn new() -> Self {
            let (recent, start) = (Recent::default(), Instant::now());
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
        let (recent, error) = (Recent::default(), io::Error::other("disk full"));
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
            next: Token::new(2).unwrap(),
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
