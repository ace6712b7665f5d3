//! What the fence asks of a database: the statements, and the two ends of a transaction.

use std::{sync::OnceLock, time::Duration};

use sqlx::Database;

use super::{fenced_read::RowVersion, records::Records, tables::Tables, write::Statement};
use crate::{
    announce::LeaseDigest,
    token::{Resource, Token},
};

/// A database that the fence can live in: `sqlx::Postgres` or `sqlx::Sqlite`.
pub trait FenceDatabase: Backend + Records {}

impl<DB: Backend + Records> FenceDatabase for DB {}

/// What became of a token that was checked.
pub enum Admission {
    /// It was admitted, and `max_token` moved.
    Admitted,
    /// It is not newer than `max_token`.
    Stale { max_token: i64 },
}

/// The number of an advisory lock by which others find a transaction on the server. An admission
/// takes it, in shared mode, before it waits for the row, and it lasts as long as the transaction.
/// The number is random, so nobody else has it, and it costs no round trip to know it.
#[derive(Clone, Copy, Debug)]
pub struct AdvisoryLock(pub i64);

impl AdvisoryLock {
    pub(super) fn random() -> Self {
        Self(rand::random())
    }
}

/// What became of a grant that was announced.
pub enum Announcement {
    /// Everyone older is dead.
    Announced,
    /// A token as high as `highest` was seen or announced already; perhaps this very grant was the
    /// last one to be announced. Nothing was changed.
    Outranked { highest: i64, was_last: bool },
}

/// Whether a failed statement is worth another try.
pub enum Fault {
    /// A lock, a deadlock or a collision: another try may find the way free.
    Contention,
    /// The outcome of the statement is certain: it had no effect.
    Refused,
    /// The connection is gone or confused; the statement may have had its effect.
    Lost,
}

/// What the failure of a statement says, on whichever database.
pub(crate) fn fault_of(error: &sqlx::Error) -> Fault {
    match error {
        #[cfg(feature = "postgres")]
        sqlx::Error::Database(cause)
            if cause
                .try_downcast_ref::<sqlx::postgres::PgDatabaseError>()
                .is_some() =>
        {
            sqlx::Postgres::fault(error)
        }
        #[cfg(feature = "sqlite")]
        sqlx::Error::Database(cause)
            if cause
                .try_downcast_ref::<sqlx::sqlite::SqliteError>()
                .is_some() =>
        {
            sqlx::Sqlite::fault(error)
        }
        error => fault_without_answer(error),
    }
}

/// What an error says that is not the database's own.
pub(super) fn fault_without_answer(error: &sqlx::Error) -> Fault {
    match error {
        sqlx::Error::PoolTimedOut => Fault::Contention,
        sqlx::Error::Io(_)
        | sqlx::Error::Tls(_)
        | sqlx::Error::Protocol(_)
        | sqlx::Error::PoolClosed
        | sqlx::Error::WorkerCrashed => Fault::Lost,
        // Noticed before the statement was sent: a type that the database does not know, an
        // argument that cannot be encoded, tables that are missing. Or behind its answer.
        _ => Fault::Refused,
    }
}

/// The name of the savepoint that marks a transaction of this process, for COMMIT. Nobody can guess
/// it, so no statement of the application's goes back behind the admission and is committed.
pub(super) fn savepoint() -> &'static str {
    static NAME: OnceLock<String> = OnceLock::new();
    NAME.get_or_init(|| format!("tower_fence_{:032x}", rand::random::<u128>()))
}

/// A transaction whose writes are there.
pub enum Committed {
    /// The connection can go back to the pool.
    Clean,
    /// The connection is in the next transaction, and worth keeping.
    Begun,
    /// The connection failed right after it had confirmed.
    Broken,
}

/// The time limits of a transaction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TransactionLimits {
    pub lock_wait: Duration,
    pub hold: Duration,
    /// How long to wait for the first lock, where that is one of an idempotency key.
    pub key_wait: Option<Duration>,
}

/// One database. Public in name only: nobody outside can implement it.
pub trait Backend: Database {
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

    /// What an error says about the statement it answers.
    fn fault(error: &sqlx::Error) -> Fault;

    /// Whether the database does not run a data-modifying statement inside another one.
    fn is_unsupported(error: &sqlx::Error) -> bool;

    /// Whether there is a server, on which a transaction goes on without its process.
    const HAS_SERVER: bool;

    /// Ends the session whose transaction has this lock, if there still is one.
    fn terminate(
        conn: &mut Self::Connection,
        lock: AdvisoryLock,
    ) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// Brings the tables up to date.
    fn migrate(
        pool: &sqlx::Pool<Self>,
    ) -> impl Future<Output = Result<(), sqlx::migrate::MigrateError>> + Send;

    /// Admits `token` and moves `max_token` to `floor`, in one statement.
    fn admit(
        conn: &mut Self::Connection,
        tables: &Tables,
        resource: &Resource,
        token: Token,
        floor: i64,
        lock: AdvisoryLock,
    ) -> impl Future<Output = sqlx::Result<Admission>> + Send;

    /// The same in a transaction that began ahead of its request. `now()` is when it began. So that
    /// time does not seem to go back on a resource, it must not have begun before the one that wrote
    /// there last. False where it has, or where the token is not admitted.
    fn admit_ahead(
        conn: &mut Self::Connection,
        tables: &Tables,
        resource: &Resource,
        token: Token,
        floor: i64,
        lock: AdvisoryLock,
    ) -> impl Future<Output = sqlx::Result<bool>> + Send;

    /// Moves `max_token` to at least `floor`, and returns it.
    fn raise(
        conn: &mut Self::Connection,
        tables: &Tables,
        resource: &Resource,
        floor: i64,
    ) -> impl Future<Output = sqlx::Result<i64>> + Send;

    /// Reads the row of a resource, and what tells it from every later version of it.
    fn row_version(
        conn: &mut Self::Connection,
        tables: &Tables,
        resource: &Resource,
    ) -> impl Future<Output = sqlx::Result<Option<RowVersion>>> + Send;

    /// Moves `max_token` to `floor` where the row still is of this version, after the wait for
    /// its lock. False where it is not, or where that cannot be told.
    fn raise_if_unwritten(
        conn: &mut Self::Connection,
        tables: &Tables,
        resource: &Resource,
        floor: i64,
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

    /// Reads `max_token`, if the resource was ever seen.
    fn max_token(
        conn: &mut Self::Connection,
        tables: &Tables,
        resource: &Resource,
    ) -> impl Future<Output = sqlx::Result<Option<i64>>> + Send;

    /// Whether it can run a statement together with its admission.
    const AT_ONCE: bool;

    /// Admits `token`, runs the statement, and moves `max_token` to `floor`: in one statement,
    /// outside of any transaction. No row means that nothing has happened, for whatever reason.
    fn write_at_once(
        conn: &mut Self::Connection,
        tables: &Tables,
        resource: &Resource,
        token: Token,
        floor: i64,
        lock: AdvisoryLock,
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
    /// that is known here: returns that, and has changed nothing where it is above `token`.
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

/// The crate's own migrations, with a history table of their own beside the application's.
pub(super) fn migrator(
    migrations: impl IntoIterator<Item = (i64, &'static str, &'static str)>,
) -> sqlx::migrate::Migrator {
    use sqlx::{
        SqlSafeStr,
        migrate::{Migration, MigrationType, Migrator},
    };
    let migrations = migrations.into_iter().map(|(version, name, sql)| {
        let sql = sql.into_sql_str();
        Migration::new(version, name.into(), MigrationType::Simple, sql, false)
    });
    let mut migrator = Migrator::with_migrations(migrations.collect());
    migrator.dangerous_set_table_name("_tower_fence_migrations");
    migrator
}
