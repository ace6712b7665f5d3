//! Classification of the database's errors.
//!
//! Each error is classified once, in this module. Other code uses the classification. It inspects
//! the error itself only if one statement needs a finer distinction.

use std::{
    borrow::Cow,
    io::{Error as IoError, ErrorKind},
    sync::Arc,
};

/// Classification of a failed statement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(
    not(feature = "postgres"),
    expect(dead_code, reason = "only Postgres reports some of these")
)]
pub(crate) enum Fault {
    /// A lock was held, or the pool was exhausted. The statement had no effect, and a retry may
    /// succeed.
    Contention,
    /// A deadlock or a serialization failure aborted the transaction. The statement had no effect,
    /// and an immediate retry may succeed.
    Collision,
    /// The database does not run a data-modifying statement inside another one. The statement had
    /// no effect.
    Unsupported,
    /// A table, a column or a function is missing. The statement had no effect.
    Missing,
    /// A privilege is missing, row-level security interferes, or a row that the migrations have
    /// inserted is missing. The statement had no effect, and a retry does not help.
    Misconfigured,
    /// The statement tried to write to a protected table under a resource for which no token was
    /// admitted in the transaction. The statement had no effect.
    Unfenced,
    /// The statement had no effect, for another reason.
    Refused,
    /// The server has ended the session because of a timeout. It never does this after COMMIT, so
    /// the statement had no effect.
    Ended,
    /// The session is lost, out of sync, shutting down or unable to write. Unless it is unable to
    /// write, the statement may have taken effect. Another session may be usable.
    Lost,
    /// No response arrived in time. The statement may have taken effect, or may still take effect.
    Silent,
}

impl Fault {
    pub(crate) fn of(error: &sqlx::Error) -> Self {
        match error {
            sqlx::Error::Database(cause) => {
                #[cfg(feature = "postgres")]
                if let Some(cause) = cause.try_downcast_ref() {
                    return Self::of_postgres(cause);
                }
                #[cfg(feature = "sqlite")]
                if let Some(cause) = cause.try_downcast_ref() {
                    return Self::of_sqlite(cause);
                }
                _ = cause;
                Self::Refused
            }
            sqlx::Error::PoolTimedOut => Self::Contention,
            sqlx::Error::Io(_)
            | sqlx::Error::Tls(_)
            | sqlx::Error::Protocol(_)
            | sqlx::Error::PoolClosed
            // The response to BEGIN does not show an open transaction.
            | sqlx::Error::BeginFailed
            | sqlx::Error::WorkerCrashed => Self::Lost,
            sqlx::Error::Configuration(_) => Self::Misconfigured,
            // The error was detected either before the statement was sent, or while its response
            // was decoded. For example, an argument cannot be encoded, or its type does not exist
            // in the database.
            _ => Self::Refused,
        }
    }

    #[cfg(feature = "postgres")]
    fn of_postgres(error: &sqlx::postgres::PgDatabaseError) -> Self {
        use sqlx::postgres::PgSeverity::{Fatal, Panic};
        match error.code() {
            // query_canceled: the application has dropped a `COPY … FROM STDIN` before its end.
            "57014" if error.routine() == Some("CopyGetData") => Self::Refused,
            // lock_not_available, query_canceled (by statement_timeout)
            "55P03" | "57014" => Self::Contention,
            // deadlock_detected, serialization_failure
            "40P01" | "40001" => Self::Collision,
            // internal_error: Citus reports it while a shard moves, if the function was planned for
            // the shard's previous worker.
            "XX000" if error.message().contains("from a query on a shard") => Self::Collision,
            // feature_not_supported: the functions of a distributed fence are not colocated with
            // its rows, as after `alter_distributed_table`.
            "0A000" if error.message().contains("same colocation group") => Self::Missing,
            // feature_not_supported
            "0A000" => Self::Unsupported,
            // undefined_table, undefined_column, undefined_function, invalid_schema_name
            "42P01" | "42703" | "42883" | "3F000" => Self::Missing,
            // insufficient_privilege: a missing privilege, or row-level security
            "42501" => Self::Misconfigured,
            // object_not_in_prerequisite_state, from `refuse_incomplete` and
            // `commit_in_two_phases`. Aurora shows its timeline only if `wal_level` is `logical`.
            "55000" if is_setup_fault(error.message()) => Self::Misconfigured,
            "TF428" => Self::Unfenced,
            // idle_in_transaction_session_timeout, transaction_timeout
            "25P03" | "25P04" => Self::Ended,
            code if is_unusable(code) || matches!(error.severity(), Fatal | Panic) => Self::Lost,
            _ => Self::Refused,
        }
    }

    #[cfg(feature = "sqlite")]
    fn of_sqlite(error: &sqlx::sqlite::SqliteError) -> Self {
        use sqlx::error::DatabaseError;
        let code = error.code().and_then(|code| code.parse::<i32>().ok());
        let message = error.message();
        // The low byte is the primary result code.
        match code.map(|code| code & 0xff) {
            // SQLITE_BUSY, SQLITE_LOCKED
            Some(5 | 6) => Self::Contention,
            // SQLITE_IOERR, SQLITE_CORRUPT, SQLITE_FULL
            Some(10 | 11 | 13) => Self::Lost,
            // SQLITE_READONLY_DBMOVED: the file was replaced
            _ if code == Some(1032) => Self::Lost,
            // SQLite reports a missing table or column as SQLITE_ERROR, without a specific code.
            Some(1) if message.contains("no such table") || message.contains("no such column") => {
                Self::Missing
            }
            _ => Self::Refused,
        }
    }

    /// Returns whether the connection is lost, so that a retry on another connection may succeed.
    /// `Silent` is excluded, because the retry would also wait for its whole timeout.
    pub(super) const fn is_gone(self) -> bool {
        matches!(self, Self::Ended | Self::Lost)
    }
}

#[cfg(feature = "postgres")]
fn is_setup_fault(message: &str) -> bool {
    let starts = [
        "floors has no row",
        "wal_level",
        "this server is the coordinator of a Citus cluster",
    ];
    starts.iter().any(|start| message.starts_with(start))
}

/// Returns whether an error with this SQLSTATE means that the session is unusable. The error has
/// rolled back the transaction.
#[cfg(feature = "postgres")]
fn is_unusable(code: &str) -> bool {
    match code {
        // protocol_violation: the server's response to a statement with too many or too few
        // arguments
        "08P01" => false,
        // read_only_sql_transaction, admin_shutdown, crash_shutdown, cannot_connect_now
        "25006" | "57P01" | "57P02" | "57P03" => true,
        // connection_exception
        _ => code.starts_with("08"),
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub(super) fault: Fault,
    pub(super) cause: Arc<sqlx::Error>,
}

impl Failure {
    pub(super) fn of(cause: &Arc<sqlx::Error>) -> Self {
        Self {
            fault: Fault::of(cause),
            cause: Arc::clone(cause),
        }
    }

    /// Returns the failure for a missing response of the database.
    pub(super) fn silent() -> Self {
        let silent = "the database did not answer in time";
        Self {
            fault: Fault::Silent,
            cause: Arc::new(IoError::new(ErrorKind::TimedOut, silent).into()),
        }
    }

    /// Returns the failure for a request that timed out in a queue of this process.
    pub(super) fn in_use() -> Self {
        Self::contention("another request of this process has not ended in time")
    }

    /// Returns the failure for a request whose resource was behind after each attempt to catch up.
    /// The SQL functions report this with the same words.
    pub(super) fn undecided() -> Self {
        Self::contention("other transactions changed the resource several times during the call")
    }

    /// Returns the failure for a wait within this process, or for repeated conflicts.
    fn contention(why: &str) -> Self {
        Self {
            fault: Fault::Contention,
            // The message of this variant is only `why`. Most other variants report a failed
            // communication.
            cause: Arc::new(sqlx::Error::InvalidArgument(why.to_owned())),
        }
    }

    pub(super) fn not_migrated() -> Self {
        let missing =
            "the tables of the fence are missing or outdated: call `Fence::migrate` first";
        Self {
            fault: Fault::Missing,
            cause: Arc::new(sqlx::Error::Configuration(missing.into())),
        }
    }

    /// Returns whether the session cannot write. In that case, the idle connections of the pool
    /// probably cannot write either.
    pub(super) fn cannot_write(&self) -> bool {
        // read_only_sql_transaction, SQLITE_FULL, SQLITE_READONLY_DBMOVED
        matches!(self.code().as_deref(), Some("25006" | "13" | "1032"))
    }

    /// Returns whether the COMMIT, or the statement that commits by itself, may have taken effect.
    /// If a pooler loses its server, it may report this with an error that is not fatal.
    pub(super) fn may_be_committed(&self) -> bool {
        matches!(self.fault, Fault::Lost | Fault::Silent) && !self.cannot_write()
    }

    /// Returns the SQLSTATE of an error of Postgres, or the result code of an error of SQLite.
    fn code(&self) -> Option<Cow<'_, str>> {
        #[cfg(any(feature = "postgres", feature = "sqlite"))]
        return self.cause.as_database_error()?.code();
        #[cfg(not(any(feature = "postgres", feature = "sqlite")))]
        None
    }

    pub(super) fn with_fault(self, fault: Fault) -> Self {
        Self { fault, ..self }
    }
}

/// Returns whether a prepared statement can no longer be executed on its connection: its columns
/// have changed, for example after `ALTER TABLE … ADD COLUMN`, or the session no longer has the
/// statement, for example after `DEALLOCATE ALL`. On another connection, it is prepared again.
pub(super) fn is_unprepared(error: &sqlx::Error) -> bool {
    #[cfg(feature = "postgres")]
    return as_postgres(error).is_some_and(|error| {
        // invalid_sql_statement_name
        error.code() == "26000" || error.routine() == Some("RevalidateCachedQuery")
    });
    #[cfg(not(feature = "postgres"))]
    {
        _ = error;
        false
    }
}

#[cfg(feature = "postgres")]
fn as_postgres(error: &sqlx::Error) -> Option<&sqlx::postgres::PgDatabaseError> {
    match error {
        sqlx::Error::Database(error) => error.try_downcast_ref(),
        _ => None,
    }
}

/// Returns whether the session has ended, so that no further response follows this error.
#[cfg(feature = "postgres")]
pub(super) fn ends_session(error: &sqlx::Error) -> bool {
    use sqlx::postgres::PgSeverity::{Fatal, Panic};
    match as_postgres(error) {
        Some(error) => matches!(error.severity(), Fatal | Panic),
        None => Fault::of(error).is_gone(),
    }
}

/// Classes of SQLSTATE after which nothing is committed: an invalid value, a violated constraint, a
/// transaction that is not open or has failed, a collision, or an error of a trigger.
const NOT_COMMITTED: [&str; 6] = ["22", "23", "25", "3B", "40", "P0"];

impl Failure {
    /// Classifies the failure of a COMMIT on a distributed fence. If a transaction writes on one
    /// worker, Citus commits it without a second phase. If an error follows (a lost connection, a
    /// cancellation, a shutdown), the outcome is unknown.
    pub(super) fn at_distributed_commit(self) -> Self {
        let is_certain = self.code().is_some_and(|code| {
            self.fault == Fault::Unfenced
                || NOT_COMMITTED.iter().any(|class| code.starts_with(class))
        });
        if is_certain {
            return self;
        }
        self.with_fault(Fault::Lost)
    }
}

impl From<sqlx::Error> for Failure {
    fn from(error: sqlx::Error) -> Self {
        Self::of(&Arc::new(error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unreachable_database_is_distinguished_from_a_refusal() {
        let broken = || std::io::Error::from(std::io::ErrorKind::BrokenPipe);
        for (error, fault) in [
            (sqlx::Error::PoolTimedOut, Fault::Contention),
            (sqlx::Error::Io(broken()), Fault::Lost),
            (sqlx::Error::Tls(Box::new(broken())), Fault::Lost),
            (sqlx::Error::Protocol("odd".into()), Fault::Lost),
            (sqlx::Error::PoolClosed, Fault::Lost),
            (sqlx::Error::BeginFailed, Fault::Lost),
            (sqlx::Error::WorkerCrashed, Fault::Lost),
            (sqlx::Error::RowNotFound, Fault::Refused),
            (
                sqlx::Error::Configuration("odd".into()),
                Fault::Misconfigured,
            ),
        ] {
            assert_eq!(Fault::of(&error), fault, "{error}");
        }
        for fault in [Fault::Ended, Fault::Lost] {
            assert!(fault.is_gone());
        }
        for fault in [Fault::Silent, Fault::Contention, Fault::Refused] {
            assert!(!fault.is_gone());
        }
    }

    #[cfg(feature = "postgres")]
    #[test]
    fn a_statement_with_wrong_arguments_keeps_its_session() {
        for code in ["25006", "57P01", "57P02", "57P03", "08000", "08006"] {
            assert!(is_unusable(code), "{code}");
        }
        for code in ["08P01", "57014", "57P04", "25001", "42501"] {
            assert!(!is_unusable(code), "{code}");
        }
    }
}
