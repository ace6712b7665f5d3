//! Interface between the fence and a database: the statements of the fence, and the beginning and
//! end of its transactions.

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
// sqlx does not re-export `TransactionManager`, which counts nested transactions and queues
// rollbacks. No other code names `sqlx-core`.
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

/// Database that the fence supports: `sqlx::Postgres` or `sqlx::Sqlite`.
///
/// The trait is sealed, and its methods are private:
///
/// ```compile_fail,E0624
/// fn begin<DB: tower_fence::FenceDatabase>() {
///     let _ = DB::begin;
/// }
/// ```
#[expect(private_bounds, reason = "sealed")]
pub trait FenceDatabase: Backend + States {}

impl<DB: Backend + States> FenceDatabase for DB {}

/// Returns the name of the savepoint that marks the transactions of this process. Before COMMIT,
/// the fence checks that the savepoint still exists. The name is random, so that a statement of the
/// application cannot roll back to the savepoint. Such a rollback would undo the admission, and the
/// rest of the transaction could still be committed.
pub(in crate::fence) fn savepoint() -> &'static str {
    static NAME: OnceLock<String> = OnceLock::new();
    NAME.get_or_init(|| format!("tower_fence_{:032x}", rand::random::<u128>()))
}

/// Way in which a transaction begins.
#[derive(Clone, Copy)]
pub(crate) enum Begin {
    /// BEGIN sets the timeouts.
    WithLimits(TransactionLimits),
    /// The first statement is an admission, which sets the timeouts.
    ForAdmission(TransactionLimits),
}

impl Begin {
    pub(in crate::fence) const fn limits(self) -> TransactionLimits {
        match self {
            Self::WithLimits(limits) | Self::ForAdmission(limits) => limits,
        }
    }
}

/// State of the connection after a confirmed COMMIT.
#[cfg_attr(
    not(feature = "postgres"),
    expect(dead_code, reason = "only Postgres returns some")
)]
pub(crate) enum Committed {
    /// The connection can return to the pool.
    Clean,
    /// The next transaction has begun on the connection, so the connection should be kept.
    Begun,
    /// The connection failed right after the confirmation.
    Broken,
}

/// Outcome of the check whether the fence in a database can be used.
pub(crate) enum Fitness {
    Fit,
    /// The tables are missing or have another version.
    NotMigrated,
    /// The database must be set up differently. The text describes how.
    Misconfigured(String),
}

/// Operations of a database that the fence needs.
pub(crate) trait Backend: Database<Arguments: Clone> {
    /// Returns the address of the database, without secrets.
    fn address(options: &<Self::Connection as Connection>::Options) -> String;

    /// Returns the options of a pool that the fence opens itself.
    fn own_pool(
        pool: PoolOptions<Self>,
        _: &<Self::Connection as Connection>::Options,
    ) -> PoolOptions<Self> {
        pool
    }

    /// Returns the prefix of the names of the fence's tables and functions, for the schema that the
    /// application has chosen.
    fn prefix(schema: Option<&str>) -> String;

    /// Opens a transaction in one round trip.
    fn begin(
        conn: &mut Self::Connection,
        begin: Begin,
    ) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// Reads the connection's lock timeout for statements outside of the fence, in milliseconds.
    /// Returns `None` if [`Backend::begin`] does not change this setting beyond its transaction.
    fn lock_wait_of_pool(
        _: &mut Self::Connection,
    ) -> impl Future<Output = sqlx::Result<Option<i64>>> + Send {
        async { Ok(None) }
    }

    /// Restores the connection's lock timeout for statements outside of the fence.
    fn restore_lock_wait(
        _: &mut Self::Connection,
        _: i64,
    ) -> impl Future<Output = sqlx::Result<()>> + Send {
        async { Ok(()) }
    }

    /// Checks that the fence can be used. The tables must exist, `PUBLIC` must not be able to
    /// execute functions that run with the privileges of their owner, and row-level security must
    /// not hide rows.
    fn check(
        conn: &mut Self::Connection,
        names: &Names,
    ) -> impl Future<Output = sqlx::Result<Fitness>> + Send;

    /// Makes sure that the connection responds and has no open transaction. If a `begin` of the
    /// application was dropped, the connection may have an open transaction that sqlx does not
    /// count. A statement in that transaction would not commit by itself. Also configures the
    /// session so that the server cancels a statement whose client has disconnected.
    fn leave_transaction(
        conn: &mut Self::Connection,
    ) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// Rolls back a [`Backend::begin`] that did not return.
    fn abandon_begin(conn: &mut Self::Connection) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// Checks that the transaction of [`Backend::begin`] is intact, and commits it. `Ok` means that
    /// the COMMIT is confirmed. If `begin_next` is true, the next transaction, which must begin
    /// with an admission, may be opened in the same round trip.
    fn commit(
        conn: &mut Self::Connection,
        begin_next: bool,
    ) -> impl Future<Output = sqlx::Result<Committed>> + Send;

    /// Whether the transactions run on a server, and therefore continue if their process stops.
    const HAS_SERVER: bool;

    /// Creates the fence's tables and functions, or updates them. The connection must not be used
    /// for anything else afterwards.
    fn migrate(
        conn: &mut Self::Connection,
        names: &Names,
        failover_detection: bool,
    ) -> impl Future<Output = Result<(), MigrateError>> + Send;

    /// Returns everything that `migrate` creates in an empty database, as one script.
    fn schema_sql(names: &Names, failover_detection: bool) -> String;

    /// Admits a token, and sets the timeouts of the transaction.
    fn admit(
        conn: &mut Self::Connection,
        names: &Names,
        admit: Admit<'_>,
    ) -> impl Future<Output = sqlx::Result<Admission>> + Send;

    /// Admits a token, and leaves the settings of the transaction unchanged.
    fn admit_only(
        conn: &mut Self::Connection,
        names: &Names,
        admit: Admit<'_>,
    ) -> impl Future<Output = sqlx::Result<Admission>> + Send;

    /// Admits a token in a transaction that began before its request. In such a transaction,
    /// `now()` is the time at which the transaction began. To prevent `now()` from going backwards
    /// from one write to the next, the transaction must not have begun before the last write to the
    /// resource. If the transaction began before that write, or if the token is not admitted, the
    /// outcome is [`Admission::Behind`].
    fn admit_early(
        conn: &mut Self::Connection,
        names: &Names,
        admit: Admit<'_>,
    ) -> impl Future<Output = sqlx::Result<Admission>> + Send;

    /// Claims an idempotency key and admits a token, or finds the record of the key. If a
    /// transaction of another request has claimed the key, waits for the end of that transaction.
    fn admit_once(
        conn: &mut Self::Connection,
        names: &Names,
        claim: ClaimOfKey<'_>,
    ) -> impl Future<Output = sqlx::Result<Claiming>> + Send;

    /// Reads a record, unless it has expired.
    fn find_record(
        conn: &mut Self::Connection,
        names: &Names,
        id: &RecordId,
    ) -> impl Future<Output = sqlx::Result<Option<Record>>> + Send;

    /// Switches back to the role that was active when the transaction began.
    fn restore_role(
        _: &mut Self::Connection,
        _: &str,
    ) -> impl Future<Output = sqlx::Result<()>> + Send {
        async { Ok(()) }
    }

    /// Adds the response to the record that this transaction has claimed. Returns false if the
    /// record does not exist.
    fn store_response(
        conn: &mut Self::Connection,
        names: &Names,
        id: &RecordId,
        response: &StoredResponse,
    ) -> impl Future<Output = sqlx::Result<bool>> + Send;

    /// Removes at most `at_most` expired records, and returns the number of removed records.
    fn remove_expired(
        conn: &mut Self::Connection,
        names: &Names,
        at_most: u32,
    ) -> impl Future<Output = sqlx::Result<u64>> + Send;

    /// Terminates a transaction that this process can no longer access, together with its session.
    fn terminate(
        _: &mut Self::Connection,
        _: TransactionId,
    ) -> impl Future<Output = sqlx::Result<()>> + Send {
        async { Ok(()) }
    }

    /// Moves a resource to the current timeline of the database. If the database was promoted or
    /// restored since the last use of the resource, makes all tokens stale that were granted before
    /// the promotion or the restore, even if the database has lost the record of their grants.
    /// Returns whether the resource was on another timeline.
    fn catch_up(
        _: &mut Self::Connection,
        _: &Names,
        _: &Resource,
    ) -> impl Future<Output = sqlx::Result<bool>> + Send {
        async { Ok(false) }
    }

    /// Makes all tokens of a partition stale that have been granted, even if the database has lost
    /// the record of their grants.
    fn after_failover(
        conn: &mut Self::Connection,
        names: &Names,
        partition: u8,
    ) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// Makes every token below `token` stale, and returns the highest stale token, which may be
    /// `token` or higher. Returns `None` in the case of [`Admission::Behind`].
    fn raise(
        conn: &mut Self::Connection,
        names: &Names,
        resource: &Resource,
        token: Token,
    ) -> impl Future<Output = sqlx::Result<Option<Dead>>> + Send;

    /// Reads `max_token` of a resource. If the resource has no row, reads the floor of its
    /// partition. Returns `None` if no token is stale.
    fn max_token(
        conn: &mut Self::Connection,
        names: &Names,
        resource: &Resource,
    ) -> impl Future<Output = sqlx::Result<Option<i64>>> + Send;

    /// Removes idle rows of a partition, raises the floor of the partition to the highest token of
    /// the removed rows, and returns the number of removed rows.
    fn remove_idle(
        conn: &mut Self::Connection,
        names: &Names,
        partition: u8,
        idle: Idle,
    ) -> impl Future<Output = sqlx::Result<u64>> + Send;

    /// Whether the database can combine a write and its admission into one statement.
    const AT_ONCE: bool;

    /// Admits a token and runs the given statement, both in one statement that commits by itself.
    /// If no row is returned, nothing was changed, whatever the reason is.
    fn write_at_once(
        conn: &mut Self::Connection,
        names: &Names,
        admit: Admit<'_>,
        lock_timeout: Duration,
        statement: &mut Statement<Self>,
    ) -> impl Future<Output = sqlx::Result<Vec<Self::Row>>> + Send;

    /// Runs a single-statement write in a transaction in which the token is already admitted.
    fn write_admitted(
        conn: &mut Self::Connection,
        statement: &mut Statement<Self>,
    ) -> impl Future<Output = sqlx::Result<Vec<Self::Row>>> + Send;

    /// Records a grant and raises the fence to the granted token, unless the fence has seen a
    /// higher token.
    fn announce(
        conn: &mut Self::Connection,
        names: &Names,
        resource: &Resource,
        token: Token,
        lease: &LeaseDigest,
    ) -> impl Future<Output = sqlx::Result<Announcement>> + Send;

    /// Sets `max_token` to `token`, unless the database has recorded grants of higher tokens.
    /// Returns the highest granted token that the database has recorded. If that token is above
    /// `token`, nothing was changed.
    fn reset(
        conn: &mut Self::Connection,
        names: &Names,
        resource: &Resource,
        token: Token,
    ) -> impl Future<Output = sqlx::Result<i64>> + Send;

    /// Begins the next epoch of a partition, durably, and returns the epoch, which is not below
    /// `at_least`.
    fn next_epoch(
        conn: &mut Self::Connection,
        names: &Names,
        partition: u8,
        at_least: i64,
    ) -> impl Future<Output = sqlx::Result<i64>> + Send;

    /// Makes sure, durably, that the next epoch of a partition is above `seen`, and returns the
    /// floor of the partition.
    fn report_epoch(
        conn: &mut Self::Connection,
        names: &Names,
        partition: u8,
        seen: i64,
    ) -> impl Future<Output = sqlx::Result<i64>> + Send;
}
