//! What the fence asks of a database: its statements, and the two ends of a transaction.

mod admission;
mod migrations;
mod names;
#[cfg(feature = "postgres")]
mod postgres;
mod records;
#[cfg(feature = "sqlite")]
mod sqlite;
mod statement;
mod states;

use std::{sync::OnceLock, time::Duration};

use sqlx::{Connection, Database, migrate::MigrateError, pool::PoolOptions};
// sqlx does not re-export these two: the depth of nested transactions, and the arguments that are
// bound to a statement. This is the only place that names `sqlx-core`.
pub(in crate::fence) use sqlx_core::{arguments::Arguments, transaction::TransactionManager};

pub(crate) use self::{
    admission::{Admission, Admit, Announcement, Dead, Idle, TransactionId},
    records::{RecordId, StoredResponse},
    statement::Statement,
    states::{Rows, StateRow},
};
pub(in crate::fence) use self::{
    names::Names,
    records::{Claim as ClaimOfKey, Claimed, Claiming, Record},
    states::States,
};
use super::settings::TransactionLimits;
use crate::{
    announce::LeaseDigest,
    token::{Resource, Token},
};

/// A database that the fence can live in: `sqlx::Postgres` or `sqlx::Sqlite`. Its methods are
/// private:
///
/// ```compile_fail,E0624
/// fn begin<DB: tower_fence::FenceDatabase>() {
///     let _ = DB::begin;
/// }
/// ```
#[expect(private_bounds, reason = "sealed")]
pub trait FenceDatabase: Backend + States {}

impl<DB: Backend + States> FenceDatabase for DB {}

/// The name of the savepoint that marks a transaction of this process, for COMMIT. It is random, so no
/// statement of the application rolls back behind the admission and is committed.
pub(in crate::fence) fn savepoint() -> &'static str {
    static NAME: OnceLock<String> = OnceLock::new();
    NAME.get_or_init(|| format!("tower_fence_{:032x}", rand::random::<u128>()))
}

/// How a transaction begins.
#[derive(Clone, Copy)]
pub(crate) enum Begin {
    /// BEGIN sets the limits.
    WithLimits(TransactionLimits),
    /// The admission will set them: it is the first statement.
    ForAdmission(TransactionLimits),
}

impl Begin {
    pub(in crate::fence) const fn limits(self) -> TransactionLimits {
        match self {
            Self::WithLimits(limits) | Self::ForAdmission(limits) => limits,
        }
    }
}

/// A transaction whose writes are committed.
#[cfg_attr(
    not(feature = "postgres"),
    expect(dead_code, reason = "only Postgres returns some")
)]
pub(crate) enum Committed {
    /// The connection can go back to the pool.
    Clean,
    /// The connection is in the next transaction, and worth keeping.
    Begun,
    /// The connection failed right after it had confirmed.
    Broken,
}

/// Whether the fence in a database can be used.
pub(crate) enum Fitness {
    Fit,
    /// The tables are missing, or those of another version.
    NotMigrated,
    /// What has to be set up differently.
    Misconfigured(String),
}

/// One database.
pub(crate) trait Backend: Database<Arguments: Clone> {
    /// Where the database is, without any secret.
    fn address(options: &<Self::Connection as Connection>::Options) -> String;

    /// The options of a pool that is the fence's own.
    fn own_pool(
        pool: PoolOptions<Self>,
        _: &<Self::Connection as Connection>::Options,
    ) -> PoolOptions<Self> {
        pool
    }

    /// What stands before each name of the fence, for a schema that the application has chosen.
    fn prefix(schema: Option<&str>) -> String;

    /// Opens a transaction in one round trip.
    fn begin(
        conn: &mut Self::Connection,
        begin: Begin,
    ) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// Reads what [`Backend::begin`] changes on the connection beyond its transaction, if anything:
    /// how long the pool's own statements wait for a lock, in milliseconds.
    fn lock_wait_of_pool(
        _: &mut Self::Connection,
    ) -> impl Future<Output = sqlx::Result<Option<i64>>> + Send {
        async { Ok(None) }
    }

    /// Restores it.
    fn restore_lock_wait(
        _: &mut Self::Connection,
        _: i64,
    ) -> impl Future<Output = sqlx::Result<()>> + Send {
        async { Ok(()) }
    }

    /// Checks that the fence can be used: its tables are there, and open to nobody who should not
    /// have them.
    fn check(
        conn: &mut Self::Connection,
        names: &Names,
    ) -> impl Future<Output = sqlx::Result<Fitness>> + Send;

    /// Makes sure that the connection answers, and is outside of any transaction. sqlx leaves one
    /// open, and does not count it, if a `begin` of the application was dropped: a statement in there
    /// would not commit by itself. Then has the server end what is abandoned on this connection.
    fn leave_transaction(
        conn: &mut Self::Connection,
    ) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// Rolls back a [`Backend::begin`] that did not return.
    fn abandon_begin(conn: &mut Self::Connection) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// Checks that the transaction of [`Backend::begin`] is whole, and commits it. `Ok` means that
    /// the writes are there. The next transaction may be opened in the same round trip, for an
    /// admission.
    fn commit(
        conn: &mut Self::Connection,
        begin_next: bool,
    ) -> impl Future<Output = sqlx::Result<Committed>> + Send;

    /// Whether a server runs the transactions, which go on without their process.
    const HAS_SERVER: bool;

    /// Makes the fence's tables and functions, or brings them up to date. The connection is not to be
    /// used for anything else.
    fn migrate(
        conn: &mut Self::Connection,
        names: &Names,
        failover_detection: bool,
    ) -> impl Future<Output = Result<(), MigrateError>> + Send;

    /// All that it would bring to an empty database, as one script.
    fn schema_sql(names: &Names, failover_detection: bool) -> String;

    /// Admits a token.
    fn admit(
        conn: &mut Self::Connection,
        names: &Names,
        admit: Admit<'_>,
    ) -> impl Future<Output = sqlx::Result<Admission>> + Send;

    /// Admits a token in a transaction that began before its request. `now()` is when it began. So
    /// that time does not seem to go back on a resource, it must not have begun before the last write
    /// there: then, and if the token is not admitted, the outcome is [`Admission::Behind`].
    fn admit_early(
        conn: &mut Self::Connection,
        names: &Names,
        admit: Admit<'_>,
    ) -> impl Future<Output = sqlx::Result<Admission>> + Send;

    /// Claims an idempotency key and admits a token, or finds what is stored under the key; waits for
    /// the transaction of another request that has claimed it.
    fn admit_once(
        conn: &mut Self::Connection,
        names: &Names,
        claim: ClaimOfKey<'_>,
    ) -> impl Future<Output = sqlx::Result<Claiming>> + Send;

    /// Reads a record that has not expired.
    fn find_record(
        conn: &mut Self::Connection,
        names: &Names,
        id: &RecordId,
    ) -> impl Future<Output = sqlx::Result<Option<Record>>> + Send;

    /// Goes on as the role as which the transaction began.
    fn restore_role(
        _: &mut Self::Connection,
        _: &str,
    ) -> impl Future<Output = sqlx::Result<()>> + Send {
        async { Ok(()) }
    }

    /// Adds the response to the record that this transaction has claimed; false if there is none.
    fn store_response(
        conn: &mut Self::Connection,
        names: &Names,
        id: &RecordId,
        response: &StoredResponse,
    ) -> impl Future<Output = sqlx::Result<bool>> + Send;

    /// Removes expired records, at most so many, and returns how many.
    fn remove_expired(
        conn: &mut Self::Connection,
        names: &Names,
        at_most: u32,
    ) -> impl Future<Output = sqlx::Result<u64>> + Send;

    /// Ends a transaction that is out of reach of this process, together with its session.
    fn terminate(
        _: &mut Self::Connection,
        _: TransactionId,
    ) -> impl Future<Output = sqlx::Result<()>> + Send {
        async { Ok(()) }
    }

    /// Brings a resource to the timeline of the database: if the database was promoted or restored
    /// since the resource was used last, tokens that may have been forgotten are stale from then on.
    /// Returns whether it was on another timeline.
    fn catch_up(
        _: &mut Self::Connection,
        _: &Names,
        _: &Resource,
    ) -> impl Future<Output = sqlx::Result<bool>> + Send {
        async { Ok(false) }
    }

    /// Makes all tokens of a partition stale that were granted, or may have been and are forgotten.
    fn after_failover(
        conn: &mut Self::Connection,
        names: &Names,
        partition: u8,
    ) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// Makes every token below `token` stale, and returns the highest stale token, which may be
    /// `token` or above. `None` as [`Admission::Behind`].
    fn raise(
        conn: &mut Self::Connection,
        names: &Names,
        resource: &Resource,
        token: Token,
    ) -> impl Future<Output = sqlx::Result<Option<Dead>>> + Send;

    /// Reads `max_token` of a resource; without a row, the floor of its partition, if there is one.
    fn max_token(
        conn: &mut Self::Connection,
        names: &Names,
        resource: &Resource,
    ) -> impl Future<Output = sqlx::Result<Option<i64>>> + Send;

    /// Removes idle rows of a partition, whose floor is then not below any of them, and returns how
    /// many.
    fn remove_idle(
        conn: &mut Self::Connection,
        names: &Names,
        partition: u8,
        idle: Idle,
    ) -> impl Future<Output = sqlx::Result<u64>> + Send;

    /// Whether it can run a statement together with its admission.
    const AT_ONCE: bool;

    /// Admits `token` and runs the statement, in one statement, outside of any transaction. No row
    /// means that nothing has happened, for whatever reason.
    fn write_at_once(
        conn: &mut Self::Connection,
        names: &Names,
        admit: Admit<'_>,
        lock_timeout: Duration,
        statement: &mut Statement<Self>,
    ) -> impl Future<Output = sqlx::Result<Vec<Self::Row>>> + Send;

    /// Runs such a statement in a transaction in which the token is admitted.
    fn write_admitted(
        conn: &mut Self::Connection,
        statement: &mut Statement<Self>,
    ) -> impl Future<Output = sqlx::Result<Vec<Self::Row>>> + Send;

    /// Records a grant and raises the fence to it, unless a higher token was seen.
    fn announce(
        conn: &mut Self::Connection,
        names: &Names,
        resource: &Resource,
        token: Token,
        lease: &LeaseDigest,
    ) -> impl Future<Output = sqlx::Result<Announcement>> + Send;

    /// Sets `max_token` to `token`, in either direction, but not below what was granted as far as the
    /// database knows: returns that, and has changed nothing if it is above `token`.
    fn reset(
        conn: &mut Self::Connection,
        names: &Names,
        resource: &Resource,
        token: Token,
    ) -> impl Future<Output = sqlx::Result<i64>> + Send;

    /// Begins the next epoch of a partition, at least `at_least`, durably.
    fn next_epoch(
        conn: &mut Self::Connection,
        names: &Names,
        partition: u8,
        at_least: i64,
    ) -> impl Future<Output = sqlx::Result<i64>> + Send;

    /// Makes sure, durably, that the next epoch of a partition is above `seen`, and returns the floor
    /// of the partition.
    fn report_epoch(
        conn: &mut Self::Connection,
        names: &Names,
        partition: u8,
        seen: i64,
    ) -> impl Future<Output = sqlx::Result<i64>> + Send;
}
