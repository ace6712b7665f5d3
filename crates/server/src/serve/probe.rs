//! Checks whether the stores would accept a grant, without granting a lease.
//!
//! The checks of a quorum of Redis nodes and of etcd only read. [`RecentGrants`] reveals what such
//! a check cannot detect.
//!
//! [`RecentGrants`]: super::recent_grants::RecentGrants

use std::{error::Error, time::Duration};

use futures_util::{FutureExt, future::BoxFuture};
use sqlx::{AssertSqlSafe, Postgres, Row, postgres::PgRow};
use tokio::time::timeout;
use tower_fence::{
    Fence, Resource,
    lease::{Leases, RedisLeases},
};

use crate::{database::reach, failure::chain};

/// The reason why a store would not accept a grant.
#[derive(Clone, Debug)]
pub struct Reason {
    /// The complete error, for the log. It may contain addresses and names.
    pub complete: String,
    /// The text that is shown to clients without a secret.
    pub shown: String,
}

impl Reason {
    pub fn of(error: &(dyn Error + 'static)) -> Self {
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
const EXHAUSTED: &str = "no token is left: all epochs of the partition have been assigned";

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

/// Checks that Redis accepts writes. In a cluster, checks only one of the masters.
pub fn redis(leases: RedisLeases) -> Probe {
    Probe::new(ACCEPTS_GRANTS, move || {
        let leases = leases.clone();
        async move { Ok(leases.check_writes(0..=0).await?) }.boxed()
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
    // Without these limits, the database would continue a statement after the timeout of the check,
    // and keep the transaction of a server that vanishes.
    let limits = format!(
        "SET LOCAL statement_timeout = {0}; SET LOCAL lock_timeout = {0}; \
         SET LOCAL idle_in_transaction_session_timeout = {0}",
        LIMIT.as_millis()
    );
    let sql = AssertSqlSafe(format!("{limits}; {sql}"));
    let rows = sqlx::raw_sql(sql).fetch_all(&mut *transaction).await?;
    transaction.rollback().await?;
    Ok(rows)
}
