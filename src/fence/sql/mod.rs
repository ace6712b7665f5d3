//! Interface between the fence and a database: its statements, and the begin and end of a
//! transaction.

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

/// Returns the name of the savepoint that marks a transaction of this process, for COMMIT. The name
/// is random. A statement of the application therefore cannot roll back to the savepoint, which
/// would undo the admission, and still be committed.
pub(in crate::fence) fn savepoint() -> &'static str {
    static NAME: OnceLock<String> = OnceLock::new();
    NAME.get_or_init(|| format!("tower_fence_{:032x}", rand::random::<u128>()))
}

/// Way in which a transaction begins.
#[derive(Clone, Copy)]
pub(crate) enum Begin {
    /// BEGIN sets the limits.
    WithLimits(TransactionLimits),
    /// The first statement is an admission, which sets the limits.
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
    /// The next transaction has begun on the connection, so it should be kept.
    Begun,
    /// The connection failed right after the confirmation.
    Broken,
}

/// Usability of the fence in a database.
pub(crate) enum Fitness {
    Fit,
    /// The tables are missing or have another version.
    NotMigrated,
    /// The database must be set up differently, as the text explains.
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

    /// Returns the prefix of each name of the fence, for the schema that the application has
    /// chosen.
    fn prefix(schema: Option<&str>) -> String;

    /// Opens a transaction in one round trip.
    fn begin(
        conn: &mut Self::Connection,
        begin: Begin,
    ) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// Reads the setting that [`Backend::begin`] changes on the connection beyond its transaction,
    /// if there is one. It is the lock timeout of the pool's own statements, in milliseconds.
    fn lock_wait_of_pool(
        _: &mut Self::Connection,
    ) -> impl Future<Output = sqlx::Result<Option<i64>>> + Send {
        async { Ok(None) }
    }

    /// Restores the lock timeout of the pool's own statements.
    fn restore_lock_wait(
        _: &mut Self::Connection,
        _: i64,
    ) -> impl Future<Output = sqlx::Result<()>> + Send {
        async { Ok(()) }
    }

    /// Checks that the fence can be used. Its tables must exist, and no role may have excessive
    /// privileges on them.
    fn check(
        conn: &mut Self::Connection,
        names: &Names,
    ) -> impl Future<Output = sqlx::Result<Fitness>> + Send;

    /// Makes sure that the connection responds and is outside of any transaction. If a `begin` of
    /// the application was dropped, sqlx leaves a transaction open and does not count it. A
    /// statement in that transaction would not commit by itself. This also makes the server end an
    /// abandoned statement on this connection.
    fn leave_transaction(
        conn: &mut Self::Connection,
    ) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// Rolls back a [`Backend::begin`] that did not return.
    fn abandon_begin(conn: &mut Self::Connection) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// Checks that the transaction of [`Backend::begin`] is intact, and commits it. `Ok` means that
    /// the COMMIT is confirmed. The next transaction, for an admission, may be opened in the same
    /// round trip.
    fn commit(
        conn: &mut Self::Connection,
        begin_next: bool,
    ) -> impl Future<Output = sqlx::Result<Committed>> + Send;

    /// Whether the transactions run on a server, and therefore continue without their process.
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

    /// Admits a token.
    fn admit(
        conn: &mut Self::Connection,
        names: &Names,
        admit: Admit<'_>,
    ) -> impl Future<Output = sqlx::Result<Admission>> + Send;

    /// Admits a token in a transaction that began before its request. In such a transaction,
    /// `now()` is the time of its begin. To prevent this time from going backwards on a resource,
    /// the transaction must not have begun before the last write to the resource. If it has, or if
    /// the token is not admitted, the outcome is [`Admission::Behind`].
    fn admit_early(
        conn: &mut Self::Connection,
        names: &Names,
        admit: Admit<'_>,
    ) -> impl Future<Output = sqlx::Result<Admission>> + Send;

    /// Claims an idempotency key and admits a token, or finds the record of the key. Waits for a
    /// transaction of another request that has claimed the key.
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

    /// Removes at most `at_most` expired records, and returns their number.
    fn remove_expired(
        conn: &mut Self::Connection,
        names: &Names,
        at_most: u32,
    ) -> impl Future<Output = sqlx::Result<u64>> + Send;

    /// Ends a transaction that this process can no longer access, together with its session.
    fn terminate(
        _: &mut Self::Connection,
        _: TransactionId,
    ) -> impl Future<Output = sqlx::Result<()>> + Send {
        async { Ok(()) }
    }

    /// Moves a resource to the current timeline of the database. If the database was promoted or
    /// restored since the last use of the resource, tokens that the database may have lost become
    /// stale. Returns whether the resource was on another timeline.
    fn catch_up(
        _: &mut Self::Connection,
        _: &Names,
        _: &Resource,
    ) -> impl Future<Output = sqlx::Result<bool>> + Send {
        async { Ok(false) }
    }

    /// Makes all tokens of a partition stale that were granted, or may have been granted and lost.
    fn after_failover(
        conn: &mut Self::Connection,
        names: &Names,
        partition: u8,
    ) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// Makes every token below `token` stale, and returns the highest stale token, which may be
    /// `token` or above. Returns `None` in the case of [`Admission::Behind`].
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

    /// Removes idle rows of a partition, raises its floor to the highest of their tokens, and
    /// returns the number of rows.
    fn remove_idle(
        conn: &mut Self::Connection,
        names: &Names,
        partition: u8,
        idle: Idle,
    ) -> impl Future<Output = sqlx::Result<u64>> + Send;

    /// Whether the database can run a statement together with its admission.
    const AT_ONCE: bool;

    /// Admits a token and runs the statement, both in one statement, outside of any transaction. If
    /// it returns no row, nothing has happened, whatever the reason.
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

    /// Records a grant and raises the fence to its token, unless the fence has seen a higher token.
    fn announce(
        conn: &mut Self::Connection,
        names: &Names,
        resource: &Resource,
        token: Token,
        lease: &LeaseDigest,
    ) -> impl Future<Output = sqlx::Result<Announcement>> + Send;

    /// Sets `max_token` to `token`, up or down, but not below the granted tokens that the database
    /// knows of. Returns the highest of those tokens. If it is above `token`, nothing was changed.
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

    /// Makes sure, durably, that the next epoch of a partition is above `seen`, and returns the
    /// floor of the partition.
    fn report_epoch(
        conn: &mut Self::Connection,
        names: &Names,
        partition: u8,
        seen: i64,
    ) -> impl Future<Output = sqlx::Result<i64>> + Send;
}
