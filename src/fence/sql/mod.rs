//! What the fence asks of a database: the statements, and the two ends of a transaction.

mod migrations;
#[cfg(feature = "postgres")]
mod postgres;
mod records;
#[cfg(feature = "sqlite")]
mod sqlite;
mod statement;
mod statements;
mod tables;

use std::{sync::OnceLock, time::Duration};

use sqlx::{Connection, Database};
// sqlx does not re-export these two: the depth of nested transactions, and the arguments that are
// bound to a statement. This is the only place that names `sqlx-core`, which is pinned for it.
pub(in crate::fence) use sqlx_core::{arguments::Arguments, transaction::TransactionManager};

pub(in crate::fence) use self::{
    records::{Claimed, Record, Records},
    tables::Tables,
};
pub(crate) use self::{
    records::{RecordId, StoredResponse},
    statement::Statement,
};
use super::{claims::Claim, settings::TransactionLimits, token_use::TokenUse};
use crate::{
    announce::LeaseDigest,
    stale::StaleToken,
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
pub trait FenceDatabase: Backend + Records {}

impl<DB: Backend + Records> FenceDatabase for DB {}

/// What an admission is asked for.
#[derive(Clone, Copy)]
pub(crate) struct Admit<'a> {
    pub(in crate::fence) resource: &'a Resource,
    pub(in crate::fence) token: Token,
    /// What `max_token` becomes.
    pub(in crate::fence) dead: i64,
    /// The lock that the transaction takes with it.
    pub(in crate::fence) lock: AdvisoryLock,
}

impl<'a> Admit<'a> {
    pub(in crate::fence) const fn new(
        claim: &'a Claim,
        token_use: TokenUse,
        lock: AdvisoryLock,
    ) -> Self {
        Self {
            resource: &claim.resource,
            token: claim.token,
            dead: token_use.dead(claim.token),
            lock,
        }
    }
}

/// What became of a token that was checked.
pub(crate) enum Admission {
    /// It was admitted, and `max_token` moved.
    Admitted,
    /// It is not newer than `max_token`.
    Stale(Dead),
}

/// What is dead of a resource.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dead {
    /// The highest token that is.
    pub(in crate::fence) max_token: i64,
    /// Whether that is the floor of its partition, since it has no row.
    pub(in crate::fence) by_floor: bool,
}

impl Dead {
    pub(in crate::fence) const fn by_row(max_token: i64) -> Self {
        Self {
            max_token,
            by_floor: false,
        }
    }

    pub(in crate::fence) const fn by_floor(floor: i64) -> Self {
        Self {
            max_token: floor,
            by_floor: true,
        }
    }

    /// The refusal of a token that is dead.
    pub(in crate::fence) fn refuse(self, resource: &Resource, token: Token) -> StaleToken {
        StaleToken::new(resource.clone(), token, self.max_token, self.by_floor)
    }
}

/// Which rows of a partition may be removed, and how many of them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Idle {
    pub(in crate::fence) older_than: Duration,
    pub(in crate::fence) at_most: u32,
    /// The highest token that was surely granted; without that, the last of the last epoch that was
    /// handed out.
    pub(in crate::fence) granted: Option<Token>,
    /// The lowest token of a lease that is held, if any is known.
    pub(in crate::fence) live: Option<Token>,
}

/// The number of an advisory lock by which others find a transaction on the server. An admission
/// takes it, in shared mode, before it waits for the row, and it lasts as long as the transaction.
/// The number is random, so nobody else has it, and it costs no round trip to know it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AdvisoryLock(i64);

impl AdvisoryLock {
    pub(in crate::fence) fn random() -> Self {
        Self(rand::random())
    }
}

/// What became of a grant that was announced.
pub(crate) enum Announcement {
    /// Everyone older is dead.
    Announced,
    /// A token as high as `highest` was seen or announced already; perhaps this very grant was the
    /// last one to be announced. Nothing was changed.
    Outranked { highest: i64, was_last: bool },
}

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

/// A row of the fence as it was before a read.
pub(crate) struct RowVersion {
    pub(in crate::fence) max_token: i64,
    /// What no later version of the row has, or nothing that can be told apart.
    pub(in crate::fence) version: Option<String>,
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

    /// Finds the schema of the fence's tables; `None` where there are none.
    fn find_schema(
        conn: &mut Self::Connection,
    ) -> impl Future<Output = sqlx::Result<Option<String>>> + Send;

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

    /// Brings the tables of a schema up to date, or, where none is named, of the one in which the
    /// connection would make them. The connection is not to be used for anything else.
    fn migrate(
        conn: &mut Self::Connection,
        tables: Option<&Tables>,
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

    /// Makes every token older than `token` dead, and returns what is: `token` too, where that was dead
    /// already.
    fn raise(
        conn: &mut Self::Connection,
        tables: &Tables,
        resource: &Resource,
        token: Token,
    ) -> impl Future<Output = sqlx::Result<Dead>> + Send;

    /// Reads the row of a resource, and what tells it from every later version of it.
    fn row_version(
        conn: &mut Self::Connection,
        tables: &Tables,
        resource: &Resource,
    ) -> impl Future<Output = sqlx::Result<Option<RowVersion>>> + Send;

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

    /// Reads the floor of the resource's partition: what is dead of those without a row; 0 where no row
    /// was ever removed.
    fn floor(
        conn: &mut Self::Connection,
        tables: &Tables,
        resource: &Resource,
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
            let floor = Self::floor(conn, tables, resource).await?;
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
