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
    /// It was admitted, and `max_token` moved. The row lock is in the hands of the server process,
    /// where there is one.
    Admitted {
        server_process: Option<ServerProcess>,
    },
    /// It is not newer than `max_token`.
    Stale { max_token: i64 },
}

/// A session of the server, as others can find it: until it ends, the process with this number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ServerProcess {
    pub id: i32,
    /// When the number was the session's, in microseconds since 1970 by the server's clock. A session
    /// that began later is another one.
    pub seen_us: i64,
}

impl ServerProcess {
    /// From the two columns, which are null where there is no server.
    pub(super) fn new(id: Option<i32>, seen_us: Option<i64>) -> Option<Self> {
        let (id, seen_us) = (id?, seen_us?);
        Some(Self { id, seen_us })
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

    /// Which server process serves a connection, if there is a server.
    fn server_process(
        conn: &mut Self::Connection,
    ) -> impl Future<Output = sqlx::Result<Option<ServerProcess>>> + Send;

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

    /// Ends a session from outside, where the database can do that.
    fn terminate(
        conn: &mut Self::Connection,
        server_process: ServerProcess,
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

/// The statements that are the same on every database. The macro writes them once per database,
/// since sqlx's types differ.
macro_rules! statements {
    (server_process: $server_process:literal) => {
        async fn admit(
            conn: &mut Self::Connection, tables: &Tables,
            resource: &Resource,
            token: Token,
            floor: i64,
        ) -> sqlx::Result<Admission> {
            // The row stays locked until the transaction ends. At READ COMMITTED the WHERE is
            // evaluated on the newest version of the row, after the wait for its lock.
            const ADMIT: &str = concat!(
                "UPDATE {schema}.fence_resources SET max_token = $3, updated_at = CURRENT_TIMESTAMP \
                 WHERE resource = $1 AND max_token < $2 RETURNING ",
                $server_process
            );
            // A resource that was never seen before; or that somebody else has just written to for
            // the first time. For one that is there, this costs half as much again.
            const ADMIT_FIRST: &str = concat!(
                "INSERT INTO {schema}.fence_resources AS f (resource, max_token, updated_at) \
                 VALUES ($1, $3, CURRENT_TIMESTAMP) \
                 ON CONFLICT (resource) DO UPDATE \
                 SET max_token = excluded.max_token, updated_at = excluded.updated_at \
                 WHERE f.max_token < $2 \
                 RETURNING ",
                $server_process
            );
            for statement in [ADMIT, ADMIT_FIRST] {
                let admitted: Option<(Option<i32>, Option<i64>)> = sqlx::query_as(tables.sql(statement))
                    .bind(resource.as_str())
                    .bind(token.get())
                    .bind(floor)
                    .fetch_optional(&mut *conn)
                    .await?;
                if let Some((id, seen_us)) = admitted {
                    let server_process = ServerProcess::new(id, seen_us);
                    return Ok(Admission::Admitted { server_process });
                }
            }
            let max_token = Self::max_token(conn, tables, resource).await?;
            Ok(Admission::Stale {
                max_token: max_token.unwrap_or(token.get()),
            })
        }

        async fn admit_ahead(
            conn: &mut Self::Connection, tables: &Tables,
            resource: &Resource,
            token: Token,
            floor: i64,
        ) -> sqlx::Result<bool> {
            const ADMIT_AHEAD: &str = "UPDATE {schema}.fence_resources \
                 SET max_token = $3, updated_at = CURRENT_TIMESTAMP \
                 WHERE resource = $1 AND max_token < $2 AND updated_at <= CURRENT_TIMESTAMP";
            let admitted = sqlx::query(tables.sql(ADMIT_AHEAD))
                .bind(resource.as_str())
                .bind(token.get())
                .bind(floor)
                .execute(conn);
            Ok(admitted.await?.rows_affected() == 1)
        }

        async fn raise(
            conn: &mut Self::Connection, tables: &Tables,
            resource: &Resource,
            floor: i64,
        ) -> sqlx::Result<i64> {
            // Where the transaction began ahead, the row may be younger than it.
            const RAISE: &str = "UPDATE {schema}.fence_resources SET max_token = $2, updated_at = CASE \
                 WHEN updated_at > CURRENT_TIMESTAMP THEN updated_at ELSE CURRENT_TIMESTAMP END \
                 WHERE resource = $1 AND max_token < $2 RETURNING max_token";
            const RAISE_FIRST: &str = "INSERT INTO {schema}.fence_resources AS f \
                 (resource, max_token, updated_at) VALUES ($1, $2, CURRENT_TIMESTAMP) \
                 ON CONFLICT (resource) DO UPDATE SET max_token = excluded.max_token \
                 WHERE f.max_token < $2 \
                 RETURNING max_token";
            for statement in [RAISE, RAISE_FIRST] {
                let raised: Option<i64> = sqlx::query_scalar(tables.sql(statement))
                    .bind(resource.as_str())
                    .bind(floor)
                    .fetch_optional(&mut *conn)
                    .await?;
                if let Some(max_token) = raised {
                    return Ok(max_token);
                }
                // Somebody may have inserted a lower one in between.
                match Self::max_token(conn, tables, resource).await? {
                    Some(max_token) if max_token >= floor => return Ok(max_token),
                    _ => {}
                }
            }
            Ok(floor)
        }

        async fn max_token(
            conn: &mut Self::Connection, tables: &Tables,
            resource: &Resource,
        ) -> sqlx::Result<Option<i64>> {
            const MAX_TOKEN: &str =
                "SELECT max_token FROM {schema}.fence_resources WHERE resource = $1";
            sqlx::query_scalar(tables.sql(MAX_TOKEN))
                .bind(resource.as_str())
                .fetch_optional(conn)
                .await
        }

        async fn announced(
            conn: &mut Self::Connection,
            tables: &Tables,
            resource: &Resource,
        ) -> sqlx::Result<Option<i64>> {
            const ANNOUNCED: &str =
                "SELECT announced FROM {schema}.fence_resources WHERE resource = $1";
            sqlx::query_scalar(tables.sql(ANNOUNCED))
                .bind(resource.as_str())
                .fetch_optional(conn)
                .await
        }

        async fn announce(
            conn: &mut Self::Connection, tables: &Tables,
            resource: &Resource,
            token: Token,
            lease: &LeaseDigest,
        ) -> sqlx::Result<Announcement> {
            // The row is younger than the transaction where that began ahead.
            const ANNOUNCE: &str = "INSERT INTO {schema}.fence_resources AS f \
                 (resource, max_token, announced, announced_lease, updated_at) \
                 VALUES ($1, $2 - 1, $2, $3, CURRENT_TIMESTAMP) \
                 ON CONFLICT (resource) DO UPDATE SET \
                     max_token = CASE WHEN f.max_token < $2 - 1 THEN $2 - 1 ELSE f.max_token END, \
                     announced = $2, announced_lease = $3, \
                     updated_at = CASE WHEN f.updated_at > CURRENT_TIMESTAMP THEN f.updated_at \
                         ELSE CURRENT_TIMESTAMP END \
                 WHERE f.max_token < $2 \
                     AND (f.announced < $2 OR (f.announced = $2 AND f.announced_lease = $3))";
            const HIGHEST: &str = "SELECT CASE WHEN max_token < announced THEN announced \
                 ELSE max_token END, \
                 announced = $2 AND announced_lease IS NOT NULL AND announced_lease = $3 FROM {schema}.fence_resources WHERE resource = $1";
            let announced = sqlx::query(tables.sql(ANNOUNCE))
                .bind(resource.as_str())
                .bind(token.get())
                .bind(&lease.as_bytes()[..])
                .execute(&mut *conn);
            if announced.await?.rows_affected() == 1 {
                return Ok(Announcement::Announced);
            }
            let (highest, was_last) = sqlx::query_as(tables.sql(HIGHEST))
                .bind(resource.as_str())
                .bind(token.get())
                .bind(&lease.as_bytes()[..])
                .fetch_one(conn)
                .await?;
            Ok(Announcement::Outranked { highest, was_last })
        }

        async fn handed_out_epoch(
            conn: &mut Self::Connection,
            tables: &Tables,
            partition: u8,
        ) -> sqlx::Result<Option<i64>> {
            const LAST: &str = "SELECT epoch FROM {schema}.fence_epochs WHERE partition = $1";
            sqlx::query_scalar(tables.sql(LAST))
                .bind(i16::from(partition))
                .fetch_optional(conn)
                .await
        }

        async fn reset(
            conn: &mut Self::Connection,
            tables: &Tables,
            resource: &Resource,
            partition: u8,
            token: Token,
        ) -> sqlx::Result<i64> {
            // An update that changes nothing locks the row.
            const LOCK: &str = "UPDATE {schema}.fence_resources SET max_token = max_token \
                 WHERE resource = $1 RETURNING announced";
            const RESET: &str = "UPDATE {schema}.fence_resources SET max_token = $2, \
                 announced_lease = CASE WHEN announced > $2 THEN NULL ELSE announced_lease END, \
                 announced = CASE WHEN announced > $2 THEN $2 ELSE announced END \
                 WHERE resource = $1";
            let announced: Option<i64> = sqlx::query_scalar(tables.sql(LOCK))
                .bind(resource.as_str())
                .fetch_optional(&mut *conn)
                .await?;
            let last_epoch = Self::handed_out_epoch(conn, tables, partition).await?;
            // At the end of the range a grant has outranked what is to be taken back, and there is no
            // other cure.
            let announced = announced.filter(|announced| *announced < Token::MAX.get());
            let begun = last_epoch.map_or(0, |epoch| epoch * Epoch::SIZE);
            let granted = announced.unwrap_or(0).max(begun);
            if granted <= token.get() {
                sqlx::query(tables.sql(RESET))
                    .bind(resource.as_str())
                    .bind(token.get())
                    .execute(conn)
                    .await?;
            }
            Ok(granted)
        }

        async fn source_id(
            conn: &mut Self::Connection,
            tables: &Tables,
        ) -> sqlx::Result<String> {
            sqlx::query_scalar(tables.sql("SELECT id FROM {schema}.fence_epoch_source"))
                .fetch_one(conn)
                .await
        }

        async fn bring_back(
            conn: &mut Self::Connection, tables: &Tables,
            partition: u8,
            seen: i64,
        ) -> sqlx::Result<()> {
            const BRING_BACK: &str = "INSERT INTO {schema}.fence_epochs AS e (partition, epoch) \
                 VALUES ($1, $2) ON CONFLICT (partition) DO UPDATE SET epoch = excluded.epoch \
                 WHERE e.epoch < excluded.epoch";
            sqlx::query(tables.sql(BRING_BACK))
                .bind(i16::from(partition))
                .bind(seen)
                .execute(conn)
                .await?;
            Ok(())
        }

        async fn next_epoch(
            conn: &mut Self::Connection, tables: &Tables,
            partition: u8,
            at_least: i64,
        ) -> sqlx::Result<i64> {
            const NEXT: &str = "INSERT INTO {schema}.fence_epochs AS e (partition, epoch) VALUES ($1, $2) \
                 ON CONFLICT (partition) DO UPDATE SET epoch = \
                 CASE WHEN e.epoch < excluded.epoch THEN excluded.epoch ELSE e.epoch + 1 END \
                 RETURNING epoch";
            sqlx::query_scalar(tables.sql(NEXT))
                .bind(i16::from(partition))
                .bind(at_least)
                .fetch_one(conn)
                .await
        }
    };
}

pub(super) use statements;

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
