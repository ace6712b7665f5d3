//! What the fence asks of a database: the statements, and the two ends of a transaction.

mod admission;
mod capabilities;
mod migrations;
#[cfg(feature = "postgres")]
mod postgres;
mod records;
#[cfg(feature = "sqlite")]
mod sqlite;
mod statement;
mod statements;
mod states;
mod tables;

use std::{sync::OnceLock, time::Duration};

use sqlx::{Connection, Database};
// sqlx does not re-export these two: the depth of nested transactions, and the arguments that are
// bound to a statement. This is the only place that names `sqlx-core`, which is pinned for it.
pub(in crate::fence) use sqlx_core::{arguments::Arguments, transaction::TransactionManager};

pub(crate) use self::{
    admission::{Admission, Admit, AdvisoryLock, Announcement, Dead, Idle, RowVersion},
    records::{RecordId, StoredResponse},
    statement::Statement,
    states::{Rows, StateRow},
};
pub(in crate::fence) use self::{
    capabilities::Capabilities,
    records::{Claimed, Record, Records},
    states::States,
    tables::{Found, Tables, quoted},
};
use super::settings::TransactionLimits;
use crate::{
    announce::LeaseDigest,
    epochs::partition_of,
    token::{Resource, Token},
};

/// A database that the fence can live in: `sqlx::Postgres` or `sqlx::Sqlite`. What the fence asks of
/// it is nobody else's to call:
///
/// ```compile_fail,E0624
/// fn begin<DB: tower_fence::FenceDatabase>() {
///     let _ = DB::begin;
/// }
/// ```
#[expect(private_bounds, reason = "sealed")]
pub trait FenceDatabase: Backend + Records + States {}

impl<DB: Backend + Records + States> FenceDatabase for DB {}

/// The name of the savepoint that marks a transaction of this process, for COMMIT. Nobody can guess
/// it, so no statement of the application's goes back behind the admission and is committed.
pub(in crate::fence) fn savepoint() -> &'static str {
    static NAME: OnceLock<String> = OnceLock::new();
    NAME.get_or_init(|| format!("tower_fence_{:032x}", rand::random::<u128>()))
}

/// A transaction whose writes are there.
#[cfg_attr(
    not(feature = "postgres"),
    expect(dead_code, reason = "only Postgres does some")
)]
pub(crate) enum Committed {
    /// The connection can go back to the pool.
    Clean,
    /// The connection is in the next transaction, and worth keeping.
    Begun,
    /// The connection failed right after it had confirmed.
    Broken,
}

/// One database.
pub(crate) trait Backend: Database {
    /// Where the database is, without any secret.
    fn address(options: &<Self::Connection as Connection>::Options) -> String;

    /// Opens a transaction and sets its time limits, in one round trip.
    fn begin(
        conn: &mut Self::Connection,
        limits: TransactionLimits,
    ) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// Reads what [`Backend::begin`] changes on the connection beyond its transaction, if anything: how long the pool's
    /// own statements wait for a lock, in milliseconds.
    fn lock_wait_of_pool(
        _: &mut Self::Connection,
    ) -> impl Future<Output = sqlx::Result<Option<i64>>> + Send {
        async { Ok(None) }
    }

    /// Puts that back.
    fn restore_lock_wait(
        _: &mut Self::Connection,
        _: i64,
    ) -> impl Future<Output = sqlx::Result<()>> + Send {
        async { Ok(()) }
    }

    /// Finds the fence's tables, in this schema or else in the first one of the search path that has them, and
    /// what the server can do; `None` where there are none.
    fn find_tables(
        conn: &mut Self::Connection,
        schema: Option<&str>,
    ) -> impl Future<Output = sqlx::Result<Option<Found>>> + Send;

    /// Finds a schema with such tables that the role may not use, where no schema was found.
    fn find_denied(
        _: &mut Self::Connection,
        _: Option<&str>,
    ) -> impl Future<Output = sqlx::Result<Option<String>>> + Send {
        async { Ok(None) }
    }

    /// Makes sure that the connection answers, and is outside of any transaction. sqlx leaves one open, and does not
    /// count it, where a `begin` of the application was dropped: a statement in there would not commit by itself.
    fn leave_transaction(
        conn: &mut Self::Connection,
    ) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// Rolls back a [`Backend::begin`] that did not return.
    fn abandon_begin(conn: &mut Self::Connection) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// Checks that the transaction of [`Backend::begin`] is whole, and commits it. `Ok` means
    /// that the writes are there. With limits for a next transaction it may be opened as well, where
    /// that saves a round trip.
    fn commit(
        conn: &mut Self::Connection,
        next: Option<TransactionLimits>,
    ) -> impl Future<Output = sqlx::Result<Committed>> + Send;

    /// Whether there is a server, on which a transaction goes on without its process.
    const HAS_SERVER: bool;

    /// Ends the session whose transaction has this lock, if there still is one.
    fn terminate(
        conn: &mut Self::Connection,
        lock: AdvisoryLock,
    ) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// Brings the tables of a schema (an identifier as SQL has it) up to date, or, where none is named, of the one in which the
    /// connection would make them. The connection is not to be used for anything else.
    fn migrate(
        conn: &mut Self::Connection,
        schema: Option<&str>,
    ) -> impl Future<Output = Result<(), sqlx::migrate::MigrateError>> + Send;

    /// All that it would bring to an empty database, as one script.
    fn schema_sql() -> String;

    /// Admits `token` and moves `max_token` to `dead`, in one statement.
    fn admit(
        conn: &mut Self::Connection,
        tables: &Tables,
        admit: Admit<'_>,
    ) -> impl Future<Output = sqlx::Result<Admission>> + Send;

    /// The same in a transaction that began before its request. `now()` is when it began. So that
    /// time does not seem to go back on a resource, it must not have begun before the one that wrote
    /// there last. False where it has, or where the token is not admitted.
    fn admit_early(
        conn: &mut Self::Connection,
        tables: &Tables,
        admit: Admit<'_>,
    ) -> impl Future<Output = sqlx::Result<bool>> + Send;

    /// Brings a resource into the history in which the database writes now: where the database was promoted or
    /// restored since it was used last, for all that it tells, tokens that may have been forgotten are dead from then
    /// on. Whether it was in another one.
    fn catch_up(
        _: &mut Self::Connection,
        _: &Tables,
        _: &Resource,
    ) -> impl Future<Output = sqlx::Result<bool>> + Send {
        async { Ok(false) }
    }

    /// The same for a partition, without its rows.
    fn catch_up_partition(
        _: &mut Self::Connection,
        _: &Tables,
        _: u8,
    ) -> impl Future<Output = sqlx::Result<()>> + Send {
        async { Ok(()) }
    }

    /// Makes all tokens of a partition dead that were handed out, and those that may have been forgotten.
    fn after_failover(
        conn: &mut Self::Connection,
        tables: &Tables,
        partition: u8,
    ) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// Makes every token older than `token` dead, and returns what is: `token` too, where that was dead
    /// already. `None` as [`Admission::Behind`]; or where nothing takes the change.
    fn raise(
        conn: &mut Self::Connection,
        tables: &Tables,
        resource: &Resource,
        token: Token,
    ) -> impl Future<Output = sqlx::Result<Option<Dead>>> + Send;

    /// Reads the row of a resource, and what tells it from every later version of it.
    fn row_version(
        conn: &mut Self::Connection,
        tables: &Tables,
        resource: &Resource,
    ) -> impl Future<Output = sqlx::Result<Option<RowVersion>>> + Send;

    /// Has COMMIT wait until the row of a resource is on the disk as it was seen, whatever the session says. False where
    /// it is no longer there.
    fn outlast_crash(
        _: &mut Self::Connection,
        _: &Tables,
        _: &Resource,
    ) -> impl Future<Output = sqlx::Result<bool>> + Send {
        async { Ok(true) }
    }

    /// Moves `max_token` to `dead` where the row still is of this version, after the wait for
    /// its lock. False where it is not, or where that cannot be told.
    fn raise_if_unwritten(
        conn: &mut Self::Connection,
        tables: &Tables,
        resource: &Resource,
        dead: i64,
        version: &str,
    ) -> impl Future<Output = sqlx::Result<bool>> + Send;

    /// Reads the highest epoch that was handed out for a partition, if any.
    fn handed_out_epoch(
        conn: &mut Self::Connection,
        tables: &Tables,
        partition: u8,
    ) -> impl Future<Output = sqlx::Result<Option<i64>>> + Send;

    /// Reads the highest token that was announced, if the resource was ever seen.
    fn announced(
        conn: &mut Self::Connection,
        tables: &Tables,
        resource: &Resource,
    ) -> impl Future<Output = sqlx::Result<Option<i64>>> + Send;

    /// Reads `max_token`, if the resource has a row.
    fn max_token(
        conn: &mut Self::Connection,
        tables: &Tables,
        resource: &Resource,
    ) -> impl Future<Output = sqlx::Result<Option<i64>>> + Send;

    /// Reads the floor of a partition: what is dead of resources without a row; 0 where no row was ever
    /// removed.
    fn floor(
        conn: &mut Self::Connection,
        tables: &Tables,
        partition: u8,
    ) -> impl Future<Output = sqlx::Result<i64>> + Send;

    /// Reads what is dead of a resource, if anything is.
    fn dead(
        conn: &mut Self::Connection,
        tables: &Tables,
        resource: &Resource,
    ) -> impl Future<Output = sqlx::Result<Option<Dead>>> + Send {
        async move {
            if let Some(max_token) = Self::max_token(conn, tables, resource).await? {
                return Ok(Some(Dead::by_row(max_token)));
            }
            let floor = Self::floor(conn, tables, partition_of(resource)).await?;
            Ok((floor > 0).then_some(Dead::by_floor(floor)))
        }
    }

    /// Writes down the partition of idle rows that are older than that column, and says how many there
    /// were.
    fn find_partitions(
        conn: &mut Self::Connection,
        tables: &Tables,
        older_than: Duration,
    ) -> impl Future<Output = sqlx::Result<u64>> + Send;

    /// Removes idle rows of a partition, whose floor is then not below any of them, and says how many.
    fn remove_idle(
        conn: &mut Self::Connection,
        tables: &Tables,
        partition: u8,
        idle: Idle,
    ) -> impl Future<Output = sqlx::Result<u64>> + Send;

    /// Whether it can run a statement together with its admission.
    const AT_ONCE: bool;

    /// Admits `token`, runs the statement, and moves `max_token` to `dead`: in one statement,
    /// outside of any transaction. No row means that nothing has happened, for whatever reason.
    fn write_at_once(
        conn: &mut Self::Connection,
        tables: &Tables,
        admit: Admit<'_>,
        lock_wait: Duration,
        statement: &mut Statement<Self>,
    ) -> impl Future<Output = sqlx::Result<Vec<Self::Row>>> + Send;

    /// Runs such a statement in a transaction in which the token is admitted.
    fn write_admitted(
        conn: &mut Self::Connection,
        statement: &mut Statement<Self>,
    ) -> impl Future<Output = sqlx::Result<Vec<Self::Row>>> + Send;

    /// Raises the fence for a grant, unless it is outranked.
    fn announce(
        conn: &mut Self::Connection,
        tables: &Tables,
        resource: &Resource,
        token: Token,
        lease: &LeaseDigest,
    ) -> impl Future<Output = sqlx::Result<Announcement>> + Send;

    /// Moves `max_token` to `token`, in either direction, but not below what was granted for all
    /// that is known here: returns that, and nothing is to be committed where it is above `token`.
    fn reset(
        conn: &mut Self::Connection,
        tables: &Tables,
        resource: &Resource,
        partition: u8,
        token: Token,
    ) -> impl Future<Output = sqlx::Result<i64>> + Send;

    /// Has the COMMIT of this transaction wait for the disk, whatever the session says.
    fn make_durable(conn: &mut Self::Connection) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// Which source of epochs this database is.
    fn source_id(
        conn: &mut Self::Connection,
        tables: &Tables,
    ) -> impl Future<Output = sqlx::Result<String>> + Send;

    /// Makes sure that epochs of a partition are above `seen`.
    fn bring_back(
        conn: &mut Self::Connection,
        tables: &Tables,
        partition: u8,
        seen: i64,
    ) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// Takes the next epoch of a partition, at least `at_least`.
    fn next_epoch(
        conn: &mut Self::Connection,
        tables: &Tables,
        partition: u8,
        at_least: i64,
    ) -> impl Future<Output = sqlx::Result<i64>> + Send;
}
